"""Page-locked host memory, and views of it and of CUDA memory that copy nothing."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.cuda.graphs import some_thread_captures
from speedtransfer.cuda.status import cuda_status, first_line, load_cupy, on_device, require_cuda, resolve_cuda
from speedtransfer.cuda.streams import torch_stream
from speedtransfer.dtypes import INTEGER_OF_SIZE
from speedtransfer.errors import DeviceError, HostMemoryError, InvalidTypeError, InvalidValueError, format_bytes
from speedtransfer.once import once
from speedtransfer.system import physical_bytes

_NO_CUPY_DTYPES = frozenset({torch.bfloat16, torch.complex32}) | {
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)
}


def pinned_empty(
    num_bytes: int,
    device: torch.device | str | int | None = None,
    remedy: str = "use memory='pageable', or memory='mmap' for a table larger than that",
    wait: Callable[[], object] | None = None,
) -> Tensor:
    """Return uninitialised page-locked memory of exactly `num_bytes`, as a (num_bytes,) uint8 CPU tensor.

    It is freed when the last tensor over it has died, once `wait` has returned: by default once every device is idle. Every
    CUDA device may read and write it (portable, mapped). CUDA allocates it; with SPEEDTRANSFER_PINNED=register in the
    environment it is ordinary memory, in pages of 2 MB where the system has them, that CUDA is asked to lock.

    Raises
    ------
    DeviceError
        There is no CUDA.
    HostMemoryError
        The system refuses to lock that much; `remedy` ends its message.
    InvalidValueError
        SPEEDTRANSFER_PINNED has another value.
    """
    index = resolve_cuda(device, "page-locked memory (memory='pinned')").index
    way = os.environ.get("SPEEDTRANSFER_PINNED", "alloc")
    if way not in _WAYS:
        raise InvalidValueError(f"SPEEDTRANSFER_PINNED is {way!r} in the environment; set it to 'alloc' or 'register'")
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    runtime = load_cupy().cuda.runtime
    with on_device(index):
        try:
            pointer, free = _WAYS[way](runtime, num_bytes)
        except (runtime.CUDARuntimeError, OSError) as error:
            raise HostMemoryError(
                f"cannot page-lock {format_bytes(num_bytes)} ({num_bytes} bytes): {first_line(error)}; the likely limit is "
                f"the memory of this machine or of its container ({format_bytes(physical_bytes())}); {remedy}"
            ) from None
    block = _HostBlock(pointer, num_bytes)
    # Not at exit: other threads may still use it then, and the system takes it back anyway.
    weakref.finalize(block, _free_host, free, index, os.getpid(), wait).atexit = False
    return torch.from_numpy(np.asarray(block))


def _allocated(runtime: Any, num_bytes: int) -> tuple[int, Callable[[], object]]:
    """Return where page-locked memory is, and what frees it."""
    pointer = runtime.hostAlloc(num_bytes, runtime.hostAllocPortable | runtime.hostAllocMapped)
    return pointer, functools.partial(runtime.freeHost, pointer)


def _registered(runtime: Any, num_bytes: int) -> tuple[int, Callable[[], object]]:
    have = physical_bytes()
    if have and num_bytes > have:
        # The system may hand out what it does not have, and end a process for it when the pages are locked.
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    block = buffers.anonymous(num_bytes)
    pointer, locked = np.frombuffer(block, dtype=np.uint8).ctypes.data, list[int]()

    def free() -> None:
        for segment in locked:
            runtime.hostUnregister(segment)
        block.close()

    try:
        for start in range(0, num_bytes, _SEGMENT_BYTES):
            # Flags of the same names and values as those of hostAlloc.
            flags = runtime.hostAllocPortable | runtime.hostAllocMapped
            runtime.hostRegister(pointer + start, min(_SEGMENT_BYTES, num_bytes - start), flags)
            locked.append(pointer + start)
    except runtime.CUDARuntimeError:
        free()
        raise
    return pointer, free


_WAYS = {"alloc": _allocated, "register": _registered}
_SEGMENT_BYTES = 256 << 30  # drivers from 580 on fail to lock 512 GiB at once


def mapped_view(host: Tensor, device: torch.device | str | int | None = None) -> Tensor:
    """Return a CUDA tensor over the memory of `host`, a tensor in memory from :func:`pinned_empty`; nothing is copied.

    It has the shape, strides and dtype of `host` and keeps that memory alive. Kernels that use it reach across the bus.

    Raises
    ------
    DeviceError
        There is no CUDA, or the device cannot address page-locked memory.
    """
    device = resolve_cuda(device, "a CUDA view of host memory")
    require_mapped(device)
    if host.numel() == 0:
        return torch.empty(host.shape, dtype=host.dtype, device=device)
    carrier = host.detach().view(INTEGER_OF_SIZE.get(host.element_size(), host.dtype))
    item = host.element_size()
    span = item * (1 + sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True)))
    cupy = load_cupy()
    memory = cupy.cuda.UnownedMemory(host.data_ptr(), span, host, device.index)
    dtype = np.dtype(str(carrier.dtype).removeprefix("torch."))
    strides = tuple(item * stride for stride in host.stride())
    array = cupy.ndarray(tuple(host.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)
    with torch_stream(device):  # one stream on both sides: the exchange orders nothing
        return torch.utils.dlpack.from_dlpack(array).view(host.dtype)


@once
def require_mapped(device: torch.device) -> None:
    """Raise :class:`~speedtransfer.errors.DeviceError` where kernels on `device` cannot use host pointers."""
    runtime = load_cupy().cuda.runtime
    # What CUDA has allocated has one address everywhere, if host and device share one space of addresses; what it has only
    # locked need not.
    registered = os.environ.get("SPEEDTRANSFER_PINNED") == "register"
    name = "cudaDevAttrCanUseHostPointerForRegisteredMem" if registered else "cudaDevAttrUnifiedAddressing"
    if not runtime.deviceGetAttribute(getattr(runtime, name), device.index):
        remedy = "SPEEDTRANSFER_PINNED=alloc or memory='pageable'" if registered else "memory='pageable'"
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} cannot address page-locked memory by its host pointer ({name} is 0); "
            f"use {remedy}"
        )


def to_cupy(tensor: Tensor) -> Any:
    """Return a cupy.ndarray over the memory of a CUDA tensor; nothing is copied.

    CuPy's current stream is made to wait for torch's once, as in every exchange by DLPack; use :func:`torch_stream` to
    keep the two on one stream.

    Raises
    ------
    InvalidTypeError
        CuPy has no such dtype (bfloat16, float8).
    InvalidValueError
        `tensor` is not on a CUDA device.
    """
    if tensor.device.type != "cuda":
        raise InvalidValueError(
            f"the tensor is on {str(tensor.device)!r} but CuPy needs a CUDA device; use .numpy() instead"
        )
    if tensor.dtype in _NO_CUPY_DTYPES:
        name = str(INTEGER_OF_SIZE.get(tensor.element_size(), torch.uint8))
        raise InvalidTypeError(
            f"the dtype is {tensor.dtype}, which CuPy does not have; use a torch tensor, or its bits with .view({name})"
        )
    require_cuda("a CuPy array")
    with on_device(tensor.device.index):
        return load_cupy().from_dlpack(tensor.detach())


class _HostBlock:
    """Page-locked memory as NumPy and torch can adopt it: they keep this object as long as they use the memory."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _free_host(free: Callable[[], object], index: int, process: int, wait: Callable[[], object] | None = None) -> None:
    if os.getpid() != process:
        return  # a forked child has the tensors but no CUDA
    # A kernel or copy that was queued before the last tensor died may still use the memory. Errors mean that CUDA is being
    # shut down.
    wait = wait or functools.partial(_wait_for_devices, index)
    with contextlib.suppress(Exception):
        # A capture of a CUDA graph would fail of it: whoever frees next does this too.
        _to_free.append((free, index, wait))
        while _to_free and not some_thread_captures():
            free, index, wait = _to_free.pop()
            wait()
            with on_device(index):
                free()


_to_free: list[tuple[Callable[[], object], int, Callable[[], object]]] = []


def _wait_for_devices(index: int) -> None:
    """Block the host until all devices in use are idle, `index` among them: the only place here that waits for so much."""
    in_use = getattr(torch._C, "_cuda_hasPrimaryContext", lambda number: True)
    others = {number for number in range(len(cuda_status().devices)) if in_use(number)}
    for number in sorted({index} | others):
        with on_device(number):
            load_cupy().cuda.runtime.deviceSynchronize()
