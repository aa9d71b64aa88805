"""A kernel's launch with another CuPy; what needs a device is in tests/gpu/test_cuda.py."""

import contextlib
import types

import pytest
import torch
from test_engines import Stream

from speedtransfer.cuda import launch, status, streams
from speedtransfer.errors import DeviceError


class TestLaunch:
    """A launch with another CuPy."""

    @pytest.fixture
    def cupy(self, monkeypatch):
        class CupyStream:
            @classmethod
            def from_external(cls, handle):
                stream = cls()
                stream.version, stream.ptr = handle.__cuda_stream__()
                return stream

        cuda = types.SimpleNamespace(Stream=CupyStream, Device=self.entered)
        for module in (status, streams):
            monkeypatch.setattr(module, "load_cupy", lambda: types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(torch.cuda, "device", self.entered)
        streams.cupy_stream.cache_clear()
        yield cuda
        streams.cupy_stream.cache_clear()

    @pytest.fixture(autouse=True)
    def devices(self, monkeypatch):
        self.inside = []
        found = types.SimpleNamespace(devices=("A Device",))
        monkeypatch.setattr(launch, "cuda_status", lambda: found)
        return found

    @contextlib.contextmanager
    def entered(self, index):
        self.inside.append(index)
        yield

    def launch(self, stream):
        calls = []
        launch.launch_kernel(lambda *args, **kwargs: calls.append((*args, kwargs)), 3, 64, "move", stream, 128)
        ((grid, block, arguments, keywords),) = calls
        assert (grid, block, arguments, keywords["shared_mem"]) == ((3,), (64,), ("move",), 128)
        return keywords["stream"]

    def test_one_device_needs_no_switching(self, cupy):
        stream = self.launch(Stream(5))
        assert (stream.version, stream.ptr) == (0, 5)
        assert self.inside == []
        assert self.launch(Stream(5)) is stream
        assert self.launch(Stream(6)).ptr == 6

    def test_several_devices(self, cupy, devices):
        devices.devices = ("A Device", "Another")
        stream = Stream(5)
        stream.device_index = 1
        assert self.launch(stream).ptr == 5
        assert self.inside == [1, 1]  # torch's and CuPy's

    def test_cupy_13(self, cupy):
        del cupy.Stream.from_external
        cupy.ExternalStream = lambda pointer, index: ("external", pointer, index)
        assert self.launch(Stream(5)) == ("external", 5, 0)

    @pytest.mark.parametrize(("before", "wanted", "after"), [(49152, 0, 49152), (49152, 66560, 66560), (99, 50, 99)])
    def test_shared_memory_only_grows(self, cupy, monkeypatch, before, wanted, after):
        kernel = types.SimpleNamespace(max_dynamic_shared_size_bytes=before)
        monkeypatch.setattr(launch, "require_cuda", lambda what: None)
        monkeypatch.setattr(launch, "_compiled", lambda *names: kernel)
        assert launch.load_kernel("a.cu", "a", torch.device("cuda", 0), wanted) is kernel
        assert kernel.max_dynamic_shared_size_bytes == after

    def test_too_much_shared_memory(self, cupy, monkeypatch):
        class Kernel:
            @property
            def max_dynamic_shared_size_bytes(self):
                return 49152

            @max_dynamic_shared_size_bytes.setter
            def max_dynamic_shared_size_bytes(self, size):
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

        monkeypatch.setattr(launch, "require_cuda", lambda what: None)
        monkeypatch.setattr(launch, "_compiled", lambda *names: Kernel())
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
        with pytest.raises(
            DeviceError, match=r"^a asks for 600000 bytes of shared memory .+ A Device refuses .+; pass "
        ):
            launch.load_kernel("a.cu", "a", torch.device("cuda", 0), 600000)
