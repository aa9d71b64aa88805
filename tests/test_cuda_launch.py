"""Kernels launched, and pages locked, with others in the parts of CuPy and CUDA; with a device: tests/gpu/test_cuda.py."""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import re
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import raising, refused
from test_engines import Stream

from speedtransfer.cuda import launch, memory, pinned_empty, status, streams
from speedtransfer.cuda import status as cuda
from speedtransfer.errors import DeviceError, HostMemoryError, InvalidTypeError, InvalidValueError


class TestLaunch:
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

    def test_only_several_devices_need_switching(self, cupy, devices):
        assert [self.launch(Stream(number)) for number in (5, 6)] == [5, 6]
        assert self.inside == []
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


class TestBinaries:
    """Kernels are compiled once a machine, without flush-to-zero."""

    @pytest.fixture
    def compiled(self, monkeypatch, tmp_path):
        found = []

        def compile_using_nvrtc(source, options):
            found.append(threading.current_thread() is not threading.main_thread() and options)
            return b"the binary", None

        cuda = types.SimpleNamespace(
            compiler=types.SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
            nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
            Device=type("Device", (contextlib.nullcontext,), {"compute_capability": "90"}),
        )
        monkeypatch.setattr(launch, "load_cupy", lambda: types.SimpleNamespace(cuda=cuda, __version__="14"))
        monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "cache"))
        return found

    def test_it_is_kept_where_it_can_be(self, compiled, monkeypatch, tmp_path):
        assert launch._binary("source", "a.cu") == launch._binary("source", "a.cu") == b"the binary"
        assert compiled == [("-std=c++17",)]
        launch._binary("another", "a.cu")
        assert len(compiled) == 2
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPEEDTRANSFER_CACHE", str(tmp_path / "file"))
        assert launch._binary("source", "a.cu") == launch._binary("source", "a.cu") == b"the binary"
        assert len(compiled) == 4


# --- page-locked memory, with a runtime of NumPy in the part of CUDA ---------------------------------------------------


class CUDARuntimeError(RuntimeError):
    pass


class Runtime:
    """Just enough of cupy.cuda.runtime to see who frees what, and when."""

    hostAllocPortable, hostAllocMapped = 1, 2  # noqa: N815
    CUDARuntimeError = CUDARuntimeError
    most = 10  # segments that can be locked

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

    def hostRegister(self, pointer, num_bytes, flags):  # noqa: N802
        if len(self.blocks) == self.most:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.blocks[pointer] = num_bytes
        self.flags.append(flags)

    def hostUnregister(self, pointer):  # noqa: N802
        self.calls.append("unregister")
        del self.blocks[pointer]


class TestPinnedEmpty:
    @pytest.fixture
    def runtime(self, monkeypatch):
        runtime = Runtime()
        cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
        monkeypatch.setattr(memory, "load_cupy", lambda: cupy)
        monkeypatch.setattr(memory, "on_device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(memory, "resolve_cuda", lambda value, what: torch.device("cuda", 0))
        return runtime

    def test_freed_when_the_last_tensor_has_died(self, runtime):
        block = pinned_empty(64)
        plane = block[16:48].view(torch.float32).view(2, 4)
        array = plane.numpy()
        del block, plane
        gc.collect()
        assert runtime.calls == []
        array[:] = 1  # still there
        assert runtime.flags == [3]  # portable and mapped
        del array
        gc.collect()
        assert runtime.calls == ["synchronize", "free"]
        assert runtime.blocks == {}

    def test_refused(self, runtime):
        with refused(HostMemoryError, "likely limit") as error:
            pinned_empty(1 << 41)
        assert isinstance(error.value, MemoryError)
        for part in ("2.2 TB", str(1 << 41), "cudaErrorMemoryAllocation", "'pageable'", "'mmap'"):
            assert part in str(error.value)

    def test_a_forked_child_frees_nothing(self, runtime):
        memory._free_host(lambda: runtime.freeHost(1234), 0, os.getpid() + 1)
        assert runtime.calls == []

    def test_what_is_waited_for(self, runtime):
        block = pinned_empty(64, wait=lambda: runtime.calls.append("wait"))
        del block
        assert runtime.calls == ["wait", "free"]

    def test_locked_in_segments(self, runtime, monkeypatch):
        monkeypatch.setenv("SPEEDTRANSFER_PINNED", "register")
        monkeypatch.setattr(memory, "_SEGMENT_BYTES", 1 << 20)
        block = pinned_empty((5 << 19) + 7).fill_(3)
        start = block.data_ptr()
        assert runtime.blocks == {start: 1 << 20, start + (1 << 20): 1 << 20, start + (2 << 20): (1 << 19) + 7}
        assert runtime.flags == [3] * 3
        assert block.eq(3).all()
        del block
        gc.collect()
        assert runtime.calls == ["synchronize", *["unregister"] * 3]
        assert runtime.blocks == {}
        # One that cannot be locked.
        monkeypatch.setattr(runtime, "most", 2)
        runtime.calls.clear()
        with pytest.raises(
            HostMemoryError, match=r"cannot page-lock 3.15 MB \(3145728 bytes\): cudaErrorMemoryAllocation"
        ):
            pinned_empty(3 << 20)
        assert runtime.calls == ["unregister"] * 2
        with pytest.raises(HostMemoryError, match=r"cannot page-lock .* \(1152921504606846976 bytes\)"):
            pinned_empty(1 << 60)  # the system has not so many addresses


@pytest.mark.parametrize(
    ("way", "asked"),
    [("alloc", "cudaDevAttrUnifiedAddressing"), ("register", "cudaDevAttrCanUseHostPointerForRegisteredMem")],
)
def test_which_devices_can_use_host_pointers(monkeypatch, way, asked):
    names = ["cudaDevAttrUnifiedAddressing", "cudaDevAttrCanUseHostPointerForRegisteredMem"]
    attributes = {name: name for name in names} | {"deviceGetAttribute": lambda name, index: name != asked}
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(**attributes)))
    monkeypatch.setattr(memory, "load_cupy", lambda: cupy)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
    require = memory.require_mapped.__wrapped__
    monkeypatch.setenv("SPEEDTRANSFER_PINNED", way)
    with pytest.raises(DeviceError, match=rf"A Device cannot address .* \({asked} is 0\); use .*memory='pageable'"):
        require(torch.device("cuda", 0))
    monkeypatch.setenv("SPEEDTRANSFER_PINNED", "alloc" if way == "register" else "register")
    require(torch.device("cuda", 0))


# --- whether CUDA works, and why not ----------------------------------------------------------------------------------


without_cuda = pytest.mark.skipif(cuda.cuda_status().available, reason="there is a CUDA device")


class TestStatus:
    @pytest.mark.parametrize(
        ("driver", "expected"),
        [("12.2", "the driver supports 12.2 only; update"), ("13.0", "the driver shows no device")],
    )
    def test_torch_sees_no_device(self, monkeypatch, driver, expected):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        reason = cuda._missing(driver, "14.2")[0]
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
        reason, devices = cuda._missing(driver, None)
        assert reason == f"CuPy is not installed; pip install 'cupy-{extra}[ctk]'"
        assert devices == ("A Device",)

    @pytest.fixture
    def cupy(self, monkeypatch, torch_with_cuda):
        """CuPy that works, on torch's part as well."""
        runtime = types.SimpleNamespace(getDeviceCount=lambda: 1)
        functions = types.SimpleNamespace(get_function=lambda name: name)
        device = lambda index: contextlib.nullcontext()  # noqa: E731
        cupy = types.SimpleNamespace(
            cuda=types.SimpleNamespace(runtime=runtime, Device=device), RawModule=lambda code, options: functions
        )
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(cuda, "load_cupy", lambda: cupy)
        return cupy

    def test_available_is_said_when_a_kernel_has_been_compiled(self, monkeypatch, cupy):
        assert cuda._missing("13.0", "14.2") == ("", ("A Device",))
        cupy.RawModule = raising(RuntimeError("libnvrtc.so.13: cannot open shared object file\nmore lines"))
        monkeypatch.setattr("importlib.metadata.version", raising(importlib.metadata.PackageNotFoundError()))
        assert cuda._missing("13.0", "14.2")[0] == (
            "CuPy 14.2 cannot compile kernels here: libnvrtc.so.13: cannot open shared object file; "
            "pip install 'cupy-cuda13x[ctk]'"
        )

    def test_never_raises(self, monkeypatch):
        monkeypatch.setattr(cuda, "_driver_version", raising(OSError("the disk is on fire")))
        status = cuda.cuda_status.__wrapped__()
        assert not status.available
        assert "OSError: the disk is on fire" in status.reason


@pytest.mark.slow
@without_cuda
def test_a_torch_for_cuda_works_without_a_driver(tmp_path):
    """What most install on Linux, on a machine without a GPU; tests/without_driver.py says what is run."""
    command = [sys.executable, str(Path(__file__).with_name("without_driver.py")), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "(built for CUDA " in result.stdout
    assert "CUDA           not usable: " in result.stdout


NEEDS_CUDA = rf"^device='cuda.* needs CUDA, but {re.escape(cuda.cuda_status().reason)}$"


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        (["meta", "mps", "gpu", -1, torch.device("meta")], InvalidValueError, "CPU or CUDA device; pass device='cpu'"),
        ([1.0, True, ["cpu"]], InvalidTypeError, r"must be a torch.device, str or int"),
        pytest.param(["cuda", "cuda:0", 0, torch.device("cuda", 1)], DeviceError, NEEDS_CUDA, marks=without_cuda),
    ],
)
def test_devices_that_are_none(values, error, words):
    for value in values:
        with pytest.raises(error, match=words):
            cuda.resolve_device(value)
