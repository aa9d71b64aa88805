"""Page-locked memory with a runtime of NumPy in the part of CUDA; what needs a device is in tests/gpu/test_cuda.py."""

import contextlib
import gc
import os
import types

import numpy as np
import pytest
import torch

from speedtransfer.cuda import cuda_status, load_kernel, mapped_view, memory, pinned_empty, to_cupy
from speedtransfer.errors import DeviceError, HostMemoryError, InvalidValueError


@pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")
@pytest.mark.parametrize(
    "call",
    [
        lambda: pinned_empty(10, "cpu"),
        lambda: mapped_view(torch.zeros(3), "cuda"),
        lambda: load_kernel("rows.cu", "gather_rows", torch.device("cuda", 0)),
    ],
    ids=["pinned_empty", "mapped_view", "load_kernel"],
)
def test_what_needs_cuda(call):
    with pytest.raises(DeviceError, match="needs CUDA, but "):
        call()


def test_a_cupy_array_of_a_cpu_tensor():
    with pytest.raises(InvalidValueError, match=r"on 'cpu' but CuPy needs a CUDA device; use .numpy\(\)"):
        to_cupy(torch.zeros(3))


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

    def test_exact_size_portable_and_mapped(self, runtime):
        block = pinned_empty(199)
        assert (block.shape, block.dtype, block.device.type) == ((199,), torch.uint8, "cpu")
        assert runtime.flags == [3]
        assert block.data_ptr() in runtime.blocks
        block.fill_(7)
        assert runtime.blocks[block.data_ptr()].tolist() == [7] * 199

    def test_freed_when_the_last_tensor_has_died(self, runtime):
        block = pinned_empty(64)
        plane = block[16:48].view(torch.float32).view(2, 4)
        array = plane.numpy()
        del block, plane
        gc.collect()
        assert runtime.calls == []
        array[:] = 1  # still there
        del array
        gc.collect()
        assert runtime.calls == ["synchronize", "free"]
        assert runtime.blocks == {}

    def test_no_bytes(self, runtime):
        assert pinned_empty(0).shape == (0,)
        assert runtime.flags == []

    def test_refused(self, runtime):
        with pytest.raises(HostMemoryError) as error:
            pinned_empty(1 << 41)
        assert isinstance(error.value, MemoryError)
        for part in ("2.2 TB", str(1 << 41), "cudaErrorMemoryAllocation", "likely limit", "'pageable'", "'mmap'"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)

    def test_a_forked_child_frees_nothing(self, runtime):
        memory._free_host(lambda: runtime.freeHost(1234), 0, os.getpid() + 1)
        assert runtime.calls == []

    def test_errors_while_freeing_are_silent(self, runtime):
        memory._free_host(lambda: runtime.freeHost(1234), 0, os.getpid())  # no such block
        assert runtime.calls == ["synchronize", "free"]

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

    def test_a_segment_that_cannot_be_locked(self, runtime, monkeypatch):
        monkeypatch.setenv("SPEEDTRANSFER_PINNED", "register")
        monkeypatch.setattr(memory, "_SEGMENT_BYTES", 1 << 20)
        monkeypatch.setattr(runtime, "most", 2)
        with pytest.raises(
            HostMemoryError, match=r"cannot page-lock 3.15 MB \(3145728 bytes\): cudaErrorMemoryAllocation"
        ):
            pinned_empty(3 << 20)
        assert runtime.calls == ["unregister"] * 2
        with pytest.raises(HostMemoryError, match=r"cannot page-lock .* \(1152921504606846976 bytes\)"):
            pinned_empty(1 << 60)  # the system has not so many addresses

    def test_another_way(self, runtime, monkeypatch):
        monkeypatch.setenv("SPEEDTRANSFER_PINNED", "huge")
        with pytest.raises(
            InvalidValueError, match="SPEEDTRANSFER_PINNED is 'huge' in the environment; set it to 'alloc' or"
        ):
            pinned_empty(64)


@pytest.mark.parametrize(
    ("way", "asked", "remedy"),
    [
        ("alloc", "cudaDevAttrUnifiedAddressing", "use memory='pageable'"),
        (
            "register",
            "cudaDevAttrCanUseHostPointerForRegisteredMem",
            "use SPEEDTRANSFER_PINNED=alloc or memory='pageable'",
        ),
    ],
)
def test_which_devices_can_use_host_pointers(monkeypatch, way, asked, remedy):
    names = ["cudaDevAttrUnifiedAddressing", "cudaDevAttrCanUseHostPointerForRegisteredMem"]
    missing = types.SimpleNamespace(
        **{name: name for name in names}, deviceGetAttribute=lambda name, index: name != asked
    )
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=missing))
    monkeypatch.setattr(memory, "load_cupy", lambda: cupy)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Device")
    monkeypatch.setenv("SPEEDTRANSFER_PINNED", way)
    require = memory.require_mapped.__wrapped__
    with pytest.raises(DeviceError) as error:
        require(torch.device("cuda", 0))
    assert str(error.value) == (
        f"A Device cannot address page-locked memory by its host pointer ({asked} is 0); {remedy}"
    )
    monkeypatch.setenv("SPEEDTRANSFER_PINNED", "alloc" if way == "register" else "register")
    require(torch.device("cuda", 0))
