"""What device.py says and refuses; everything that needs a device is in tests/gpu/test_device.py."""

import contextlib
import gc
import os
import types

import numpy as np
import pytest
import torch

from speedtransfer.cuda import runtime as device
from speedtransfer.errors import DeviceError, HostMemoryError, InvalidTypeError, InvalidValueError

without_cuda = pytest.mark.skipif(device.cuda_status().available, reason="there is a CUDA device")


class TestStatus:
    def test_says_what_is_missing_or_nothing(self):
        status = device.cuda_status()
        assert status.available == (status.reason == "")
        assert "\n" not in status.reason
        if not status.available:
            assert "; " in status.reason  # what is missing; what to do
        else:
            assert status.devices
            assert status.driver
            assert status.cupy
            assert status.torch_cuda

    def test_is_looked_up_once(self):
        assert device.cuda_status() is device.cuda_status()

    def test_no_driver(self):
        reason, devices = device._missing(None, None)
        assert reason.startswith("this machine has no NVIDIA driver; ")
        assert devices == ()

    def test_torch_without_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", None)
        assert "is built without CUDA; install" in device._missing("13.0", "14.2")[0]

    @pytest.mark.parametrize(
        ("driver", "expected"),
        [("12.2", "the driver supports 12.2 only; update"), ("13.0", "the driver shows no device")],
    )
    def test_torch_sees_no_device(self, monkeypatch, driver, expected):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        reason = device._missing(driver, "14.2")[0]
        assert expected in reason
        assert ("install a torch built for CUDA 12, which" in reason) == (driver == "12.2")

    @pytest.fixture
    def torch_with_cuda(self, monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Device")

    @pytest.mark.parametrize(
        ("built_for", "driver", "extra"),
        [("12.6", "12.8", "cuda12x"), ("12.6", "13.0", "cuda12x"), ("13.0", "13.0", "cuda13x")],
    )
    def test_no_cupy(self, monkeypatch, torch_with_cuda, built_for, driver, extra):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        reason, devices = device._missing(driver, None)
        assert reason == f"CuPy is not installed; pip install cupy-{extra}"
        assert devices == ("A Device",)

    def test_cupy_that_does_not_work(self, monkeypatch, torch_with_cuda):
        def fail():
            raise ImportError("libcudart.so.12: cannot open\nmore lines")

        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(device, "_cupy", fail)
        reason, _ = device._missing("13.0", "13.6")
        assert "CuPy 13.6 does not work with this driver (CUDA 13.0): libcudart.so.12: cannot open; " in reason

    def test_nothing_missing(self, monkeypatch, torch_with_cuda):
        runtime = types.SimpleNamespace(getDeviceCount=lambda: 1)
        cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(device, "_cupy", lambda: cupy)
        assert device._missing("13.0", "14.2") == ("", ("A Device",))

    def test_never_raises(self, monkeypatch):
        def fail(*args):
            raise OSError("the disk is on fire")

        monkeypatch.setattr(device, "_driver_version", fail)
        status = device.cuda_status.__wrapped__()
        assert not status.available
        assert "OSError: the disk is on fire" in status.reason


class TestResolveDevice:
    def test_cpu(self):
        assert device.resolve_device("cpu") == torch.device("cpu")
        assert device.resolve_device(torch.device("cpu", 0)) == torch.device("cpu")

    @without_cuda
    def test_none_is_the_cpu(self):
        assert device.resolve_device(None) == torch.device("cpu")

    @without_cuda
    @pytest.mark.parametrize("value", ["cuda", "cuda:0", 0, torch.device("cuda", 1)])
    def test_cuda_without_cuda(self, value):
        with pytest.raises(DeviceError, match=r"device='cuda.*' needs CUDA, but "):
            device.resolve_device(value)

    @pytest.mark.parametrize("value", ["meta", "mps", "gpu", -1, torch.device("meta")])
    def test_other_devices(self, value):
        with pytest.raises(InvalidValueError, match="must be a CPU or CUDA device; pass device='cpu'"):
            device.resolve_device(value)

    @pytest.mark.parametrize("value", [1.0, True, ["cpu"]])
    def test_other_types(self, value):
        with pytest.raises(InvalidTypeError, match=r"must be a torch.device, str or int"):
            device.resolve_device(value)


@without_cuda
class TestRefusals:
    def test_require_cuda(self):
        with pytest.raises(DeviceError) as error:
            device.require_cuda("flying")
        assert str(error.value) == f"flying needs CUDA, but {device.cuda_status().reason}"

    @pytest.mark.parametrize(
        "call",
        [
            lambda: device.pinned_empty(10, "cpu"),
            lambda: device.mapped_view(torch.zeros(3), "cuda"),
            lambda: device.load_kernel("rows.cu", "gather_rows", torch.device("cuda", 0)),
        ],
        ids=["pinned_empty", "mapped_view", "load_kernel"],
    )
    def test_what_needs_cuda(self, call):
        with pytest.raises(DeviceError, match="needs CUDA, but "):
            call()


def test_a_cupy_array_of_a_cpu_tensor():
    with pytest.raises(InvalidValueError, match=r"on 'cpu' but CuPy needs a CUDA device; use .numpy\(\)"):
        device.to_cupy(torch.zeros(3))


class CUDARuntimeError(RuntimeError):
    pass


class Runtime:
    """Just enough of cupy.cuda.runtime to see who frees what, and when."""

    hostAllocPortable, hostAllocMapped = 1, 2  # noqa: N815
    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.blocks, self.flags, self.calls = {}, [], []

    def hostAlloc(self, num_bytes, flags):  # noqa: N802
        if num_bytes > 1 << 40:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        memory = np.zeros(num_bytes, np.uint8)
        self.blocks[memory.ctypes.data] = memory
        self.flags.append(flags)
        return memory.ctypes.data

    def deviceSynchronize(self):  # noqa: N802
        self.calls.append("synchronize")

    def freeHost(self, pointer):  # noqa: N802
        self.calls.append("free")
        del self.blocks[pointer]


class TestPinnedEmpty:
    @pytest.fixture
    def runtime(self, monkeypatch):
        runtime = Runtime()
        cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
        monkeypatch.setattr(device, "_cupy", lambda: cupy)
        monkeypatch.setattr(device, "_on_device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(device, "resolve_cuda", lambda value, what: torch.device("cuda", 0))
        return runtime

    def test_exact_size_portable_and_mapped(self, runtime):
        memory = device.pinned_empty(199)
        assert (memory.shape, memory.dtype, memory.device.type) == ((199,), torch.uint8, "cpu")
        assert runtime.flags == [3]
        assert memory.data_ptr() in runtime.blocks
        memory.fill_(7)
        assert runtime.blocks[memory.data_ptr()].tolist() == [7] * 199

    def test_freed_when_the_last_tensor_has_died(self, runtime):
        memory = device.pinned_empty(64)
        plane = memory[16:48].view(torch.float32).view(2, 4)
        array = plane.numpy()
        del memory, plane
        gc.collect()
        assert runtime.calls == []
        array[:] = 1  # still there
        del array
        gc.collect()
        assert runtime.calls == ["synchronize", "free"]
        assert runtime.blocks == {}

    def test_no_bytes(self, runtime):
        assert device.pinned_empty(0).shape == (0,)
        assert runtime.flags == []

    def test_refused(self, runtime):
        with pytest.raises(HostMemoryError) as error:
            device.pinned_empty(1 << 41)
        assert isinstance(error.value, MemoryError)
        for part in ("2.2 TB", str(1 << 41), "cudaErrorMemoryAllocation", "likely limit", "'pageable'", "'mmap'"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_forked_child_frees_nothing(self, runtime):
        device._free_host(1234, 0, os.getpid() + 1)
        assert runtime.calls == []

    def test_errors_while_freeing_are_silent(self, runtime):
        device._free_host(1234, 0, os.getpid())  # no such block
        assert runtime.calls == ["synchronize", "free"]
