"""This machine as a plan sees it; what it cannot find out is a note."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from speedtransfer.cuda import cuda_status
from speedtransfer.cuda.status import CudaStatus
from speedtransfer.engines.calibration import Calibration
from speedtransfer.errors import DeviceError
from speedtransfer.page_cache import PagesStayError
from speedtransfer.planning import this_machine as module
from speedtransfer.planning.this_machine import this_machine

no_cuda = pytest.mark.skipif(cuda_status().available, reason="CUDA works here")


@pytest.fixture
def small(monkeypatch):
    """Measurements of a few megabytes and milliseconds."""
    monkeypatch.setattr(module, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(module, "_FILE_BYTES", 8 << 20)
    monkeypatch.setattr(module, "_PIECE_BYTES", 4 << 20)
    monkeypatch.setattr(module, "_BUDGET_S", 0.01)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of which the driver tells these figures; nothing can run on it."""
    status = CudaStatus(True, "", "14.2", "13.0", "13.0", ("GPU A", "GPU B"))
    monkeypatch.setattr(module, "cuda_status", lambda: status)
    monkeypatch.setattr(module, "load", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5_000_000_000)
    return status


class TestWithoutMeasuring:
    @no_cuda
    def test_what_is_free_now(self, tmp_path, monkeypatch):
        for name in ("host_bytes_per_s", "device_bytes_per_s", "link_bytes_per_s", "disk_bytes_per_s"):
            monkeypatch.setattr(module, name, lambda *args: pytest.fail("nobody has asked"))
        machine = this_machine(tmp_path)
        assert 0 < machine.host_bytes <= module.physical_bytes()
        assert machine.disk_bytes > 0
        assert (machine.device, machine.device_bytes, machine.devices) == (None, None, 1)
        assert (machine.host_bytes_per_s, machine.disk_bytes_per_s, machine.link_up_bytes_per_s) == (None, None, None)
        assert machine.sources == {"host_bytes": "measured", "disk_bytes": "measured"}
        assert any(note.startswith("no GPU is used: ") for note in machine.notes)
        assert not list(tmp_path.iterdir())

    def test_the_current_folder_is_the_default(self, monkeypatch, tmp_path):
        asked = []
        monkeypatch.setattr(
            module.shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=7_000)
        )
        monkeypatch.chdir(tmp_path)
        assert this_machine().disk_bytes == 7_000
        assert asked == [tmp_path]

    def test_a_folder_that_is_not_there(self, tmp_path):
        machine = this_machine(tmp_path / "missing", rates=["disk"])
        assert (machine.disk_bytes, machine.disk_bytes_per_s) == (None, None)
        assert sum("missing' is not known: No such file or directory" in note for note in machine.notes) == 2

    def test_a_system_that_says_nothing(self, monkeypatch):
        monkeypatch.setattr(module, "physical_bytes", lambda: 0)
        machine = this_machine()
        assert machine.host_bytes is None
        assert "host memory is not known: the system does not say" in machine.notes


class TestGpu:
    def test_memory(self, gpu):
        machine = this_machine()
        assert (machine.device, machine.devices, machine.device_bytes) == ("GPU A", 2, 64e9)
        note = next(note for note in machine.notes if "cuda:0" in note)
        assert note == (
            "64 GB of 80 GB of cuda:0 are free; torch holds 5 GB in this process, and others and CUDA itself 11 GB"
        )

    def test_rates(self, gpu, monkeypatch):
        monkeypatch.setattr(module, "device_bytes_per_s", lambda device: 3e12)
        monkeypatch.setattr(module, "link_bytes_per_s", lambda device: (5e10, 6e10))
        machine = this_machine(rates=["device", "link"])
        assert machine.device_bytes_per_s == 3e12
        assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (5e10, 6e10)
        assert machine.sources["link_down_bytes_per_s"] == "measured"

    def test_a_calibration_is_known_without_measuring(self, gpu, monkeypatch):
        monkeypatch.setattr(module, "load", lambda device: Calibration({}, [], 5.5e10))
        machine = this_machine()
        assert (machine.link_up_bytes_per_s, machine.link_down_bytes_per_s) == (5.5e10, None)
        assert machine.sources["link_up_bytes_per_s"] == "measured by `speedtransfer calibrate`"

    def test_what_fails_is_a_note(self, gpu, monkeypatch):
        def fail(*args):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nMore lines")

        def broken(*args):
            raise DeviceError("the device is lost")

        monkeypatch.setattr(module, "device_bytes_per_s", fail)
        monkeypatch.setattr(module, "link_bytes_per_s", broken)
        machine = this_machine(rates=["device", "link"])
        assert machine.device_bytes_per_s is machine.link_up_bytes_per_s is None
        assert "the bandwidth of cuda:0 is not known: CUDA out of memory." in machine.notes
        assert "the link to cuda:0 is not known: the device is lost" in machine.notes


class TestMeasured:
    def test_host(self, small):
        machine = this_machine(rates=["host"])
        assert 1e8 < machine.host_bytes_per_s < 1e13
        assert machine.sources["host_bytes_per_s"] == "measured"

    def test_host_without_room(self, small, monkeypatch):
        monkeypatch.setattr(module, "available_bytes", lambda: 1000)
        machine = this_machine(rates=["host"])
        assert machine.host_bytes_per_s is None
        assert any("1 kB of memory are left, too few" in note for note in machine.notes)

    @pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux")
    def test_disk(self, small, tmp_path):
        try:
            rate = module.disk_bytes_per_s(tmp_path)
        except PagesStayError:
            pytest.skip("the folder of tests lives in memory")
        assert 1e3 < rate < 1e13
        assert not list(tmp_path.iterdir()), "the file had no name"

    @pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a file system in memory")
    def test_a_file_system_in_memory_is_no_disk(self, small):
        machine = this_machine("/dev/shm", rates=["disk"])
        assert machine.disk_bytes_per_s is None
        assert any("stay in memory after they were dropped" in note for note in machine.notes)

    def test_another_system(self, small, monkeypatch, tmp_path):
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
        with pytest.raises(PagesStayError, match="this needs Linux"):
            module.disk_bytes_per_s(tmp_path)

    def test_a_disk_that_is_full(self, small, monkeypatch, tmp_path):
        def full(descriptor, data):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module.os, "write", full)
        machine = this_machine(tmp_path, rates=["disk"])
        assert machine.disk_bytes_per_s is None
        assert any("is not known: No space left on device" in note for note in machine.notes)

    def test_link_and_gpu_memory_of_a_device(self, small, monkeypatch):
        """On the CPU: that bytes are counted as they should."""
        monkeypatch.setattr(module, "pinned_empty", lambda size, device: torch.empty(size, dtype=torch.uint8))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(module, "_best_seconds", lambda call, device=None: (call(), 0.5)[1])
        device = torch.device("cpu")
        assert module.link_bytes_per_s(device) == (2 << 20, 2 << 20)
        assert module.device_bytes_per_s(device) == 4 << 20
        assert module.host_bytes_per_s() == 4 << 20
