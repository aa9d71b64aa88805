"""A kernel's launch with another CuPy; what needs a device is in tests/gpu/test_cuda.py."""

import contextlib
import ctypes
import struct
import threading
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
        self.calls, self.asked = [], []
        driver = types.SimpleNamespace(launchKernel=lambda *given: self.calls.append(given))
        runtime = types.SimpleNamespace(memGetInfo=lambda: self.asked.append(threading.get_ident()))
        cuda = types.SimpleNamespace(driver=driver, runtime=runtime, Device=self.entered)
        for module in (status, streams, launch):
            monkeypatch.setattr(module, "load_cupy", lambda: types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(launch, "_thread", launch._Thread())
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
        """Return the stream that the driver gets."""
        argument = launch.KernelArgument("2qd").pack(4, -7, 0.5)
        launch.launch_kernel(types.SimpleNamespace(ptr=9), 3, 64, argument, stream, 128)
        *how, pointer, parameters, extra = self.calls.pop()
        assert (how, extra) == ([9, 3, 1, 1, 64, 1, 1, 128], 0)
        # The address of the address of each argument: of one.
        at = ctypes.c_int64.from_address(parameters).value
        assert struct.unpack("2qd", ctypes.string_at(at, 24)) == (4, -7, 0.5)
        return pointer

    def test_one_device_needs_no_switching(self, cupy):
        assert self.launch(Stream(5)) == 5
        assert self.launch(Stream(6)) == 6
        assert self.inside == []

    def test_several_devices(self, cupy, devices):
        devices.devices = ("A Device", "Another")
        stream = Stream(5)
        stream.device_index = 1
        assert self.launch(stream) == 5
        assert self.inside == [1, 1]  # torch's and CuPy's

    def test_each_thread_gets_the_context_once(self, cupy):
        other = threading.Thread(target=lambda: [self.launch(Stream(5)) for _ in range(2)])
        other.start()
        other.join()
        self.launch(Stream(5))
        self.launch(Stream(5))
        assert self.asked == [other.ident, threading.get_ident()]

    def test_streams_of_cupy(self, cupy):
        class CupyStream:
            @classmethod
            def from_external(cls, handle):
                stream = cls()
                stream.version, stream.ptr = handle.__cuda_stream__()
                return stream

        cupy.Stream = CupyStream
        stream = streams.cupy_stream(5, 0)
        assert (stream.version, stream.ptr) == (0, 5)
        assert streams.cupy_stream(5, 0) is stream
        streams.cupy_stream.cache_clear()
        del CupyStream.from_external
        cupy.ExternalStream = lambda pointer, index: ("external", pointer, index)
        assert streams.cupy_stream(5, 0) == ("external", 5, 0)

    @pytest.fixture
    def attributes(self, monkeypatch):
        """What a driver knows of a kernel, by attribute; it refuses more than 200,000 bytes."""

        def change(pointer, name, value):
            if value > 200_000:
                raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
            known[name] = value

        known = {8: 49152}
        driver = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcGetAttribute=lambda name, pointer: known[name],
            funcSetAttribute=change,
        )
        cuda = types.SimpleNamespace(driver=driver, Device=self.entered)
        for module in (status, launch):
            monkeypatch.setattr(module, "load_cupy", lambda: types.SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(torch.cuda, "device", self.entered)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
        monkeypatch.setattr(launch, "require_cuda", lambda what: None)
        monkeypatch.setattr(launch, "_compiled", lambda *names: types.SimpleNamespace(ptr=1))
        return known

    @pytest.mark.parametrize(("wanted", "after"), [(0, 49152), (66560, 66560), (50, 49152)])
    def test_shared_memory_only_grows(self, attributes, wanted, after):
        assert launch.load_kernel("a.cu", "a", torch.device("cuda", 0), wanted).ptr == 1
        assert attributes == {8: after}

    def test_too_much_shared_memory(self, attributes):
        with pytest.raises(
            DeviceError, match=r"^a asks for 600000 bytes of shared memory .+ A Device refuses .+; pass "
        ):
            launch.load_kernel("a.cu", "a", torch.device("cuda", 0), 600000)


class TestBinaries:
    """Kernels are compiled once a machine, without flush-to-zero."""

    @pytest.fixture
    def compiled(self, monkeypatch, tmp_path):
        """The options of each compilation."""
        found = []

        def compile_using_nvrtc(source, options):
            found.append(options)
            return b"the binary", None

        cuda = types.SimpleNamespace(
            compiler=types.SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
            nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
            Device=lambda: types.SimpleNamespace(compute_capability="90"),
        )
        monkeypatch.setattr(launch, "load_cupy", lambda: types.SimpleNamespace(cuda=cuda, __version__="14"))
        monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "cache"))
        return found

    def test_it_is_kept(self, compiled):
        assert launch._binary("source", "a.cu") == launch._binary("source", "a.cu") == b"the binary"
        assert compiled == [("-std=c++17",)]
        launch._binary("another", "a.cu")
        assert len(compiled) == 2

    def test_where_nothing_can_be_kept(self, compiled, monkeypatch, tmp_path):
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "file"))
        assert launch._binary("source", "a.cu") == launch._binary("source", "a.cu") == b"the binary"
        assert len(compiled) == 2
