"""CUDA as this package sees it: what is there, page-locked memory, views of it, streams and compiled kernels.

The only file that imports cupy, and only inside functions: importing it starts nothing. CUDA needs a driver, a CUDA
build of torch and CuPy; :func:`cuda_status` says which of them is missing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.resources
import importlib.util
import os
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import DeviceError, HostMemoryError, InvalidTypeError, InvalidValueError, format_bytes

# Rows move as bits, under these dtypes by size: torch and CuPy lack operations and names for many small floats and
# unsigned integers, but not for these.
INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_CUPY_DTYPES = frozenset({torch.bfloat16, torch.complex32}) | {
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and "float8" in str(dtype)
}


@dataclass(frozen=True)
class CudaStatus:
    """What :func:`cuda_status` found.

    Attributes
    ----------
    available : bool
        Everything that this package needs for CUDA is there and sees a device.
    reason : str
        One sentence: what is missing and what to do. Empty where CUDA is available.
    cupy, torch_cuda, driver : str or None
        The version of CuPy, the CUDA version that torch is built for, and the newest that the driver supports.
    devices : tuple of str
        The names of the devices, by index.
    """

    available: bool
    reason: str
    cupy: str | None
    torch_cuda: str | None
    driver: str | None
    devices: tuple[str, ...]


@functools.cache
def cuda_status() -> CudaStatus:
    """Look for a driver, a CUDA build of torch and CuPy, once a process; never raises and never warns."""
    driver, cupy_version = None, None
    devices: tuple[str, ...] = ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and CuPy warn about what `reason` says
        try:
            driver, cupy_version = _driver_version(), _cupy_version()
            reason, devices = _missing(driver, cupy_version)
        except Exception as error:  # whatever a broken installation throws
            reason = f"looking for it failed ({type(error).__name__}: {_first_line(error)}); reinstall torch and CuPy"
    return CudaStatus(not reason, reason, cupy_version, torch.version.cuda, driver, devices)


def require_cuda(what: str) -> None:
    """Raise :class:`~speedtransfer.errors.DeviceError` "<what> needs CUDA, but <reason>" where there is no CUDA."""
    reason = cuda_status().reason
    if reason:
        raise DeviceError(f"{what} needs CUDA, but {reason}")


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the compute device that `device` names: the CPU, or a CUDA device with its index.

    Parameters
    ----------
    device : torch.device or str or int or None
        As in torch: an int is the index of a CUDA device. None: the current CUDA device, or the CPU without one.

    Raises
    ------
    DeviceError
        There is no CUDA, or no CUDA device of that index.
    InvalidValueError
        The device is neither a CPU nor a CUDA device.
    InvalidTypeError
        `device` has another type.
    """
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if cuda_status().available else torch.device("cpu")
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise InvalidTypeError(f"device is {device!r} but must be a torch.device, str or int; pass 'cpu' or 'cuda:0'")
    rule = "the compute device must be a CPU or CUDA device; pass device='cpu' or device='cuda:0'"
    if isinstance(device, int):
        if device < 0:
            raise InvalidValueError(f"device is {device} but {rule}")
        device = torch.device("cuda", device)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InvalidValueError(f"device is {device!r} but {rule}") from None
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise InvalidValueError(f"device is {str(found)!r} but {rule}")
    require_cuda(f"device={str(found)!r}")
    index = torch.cuda.current_device() if found.index is None else found.index
    count = len(cuda_status().devices)
    if index >= count:
        raise DeviceError(
            f"device is 'cuda:{index}' but this process sees {count} CUDA devices; pass 'cuda:{count - 1}'"
        )
    return torch.device("cuda", index)


def resolve_cuda(device: torch.device | str | int | None, what: str) -> torch.device:
    """Return the CUDA device that `device` names; DeviceError "<what> needs CUDA, but ..." where that is none."""
    require_cuda(what)
    found = resolve_device(device)
    if found.type != "cuda":
        raise DeviceError(f"{what} needs CUDA, but the compute device is {str(found)!r}; pass device='cuda'")
    return found


def pinned_empty(
    num_bytes: int,
    device: torch.device | str | int | None = None,
    remedy: str = "use memory='pageable', or memory='mmap' for a table larger than that",
) -> Tensor:
    """Return uninitialised page-locked memory of exactly `num_bytes`, as a (num_bytes,) uint8 CPU tensor.

    It is freed when the last tensor over it has died. Every CUDA device may read and write it (portable, mapped).

    Raises
    ------
    DeviceError
        There is no CUDA.
    HostMemoryError
        The system refuses to lock that much; `remedy` ends its message.
    """
    index = resolve_cuda(device, "page-locked memory (memory='pinned')").index
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    runtime = _cupy().cuda.runtime
    with _on_device(index):
        try:
            pointer = runtime.hostAlloc(num_bytes, runtime.hostAllocPortable | runtime.hostAllocMapped)
        except runtime.CUDARuntimeError as error:
            raise HostMemoryError(
                f"cannot page-lock {format_bytes(num_bytes)} ({num_bytes} bytes): {_first_line(error)}; "
                f"{_memory_limit()}; {remedy}"
            ) from None
    block = _HostBlock(pointer, num_bytes)
    # Not at exit: other threads may still use it then, and the system takes it back anyway.
    weakref.finalize(block, _free_host, pointer, index, os.getpid()).atexit = False
    return torch.from_numpy(np.asarray(block))


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
    cupy = _cupy()
    memory = cupy.cuda.UnownedMemory(host.data_ptr(), span, host, device.index)
    dtype = np.dtype(str(carrier.dtype).removeprefix("torch."))
    strides = tuple(item * stride for stride in host.stride())
    array = cupy.ndarray(tuple(host.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides=strides)
    with torch_stream(device):  # one stream on both sides: the exchange orders nothing
        return torch.utils.dlpack.from_dlpack(array).view(host.dtype)


def require_mapped(device: torch.device) -> None:
    """Raise :class:`~speedtransfer.errors.DeviceError` where kernels on `device` cannot use host pointers."""
    if not _uses_host_pointers(device.index):
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} cannot address page-locked memory by its host pointer "
            "(cudaDevAttrCanUseHostPointerForRegisteredMem is 0); use memory='pageable'"
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
    with _on_device(tensor.device.index):
        return _cupy().from_dlpack(tensor.detach())


@contextlib.contextmanager
def torch_stream(device: torch.device) -> Iterator[None]:
    """Make `device` current, and torch's current stream on it the current stream of CuPy as well."""
    stream = _cupy_stream(torch.cuda.current_stream(device).cuda_stream, device.index)
    with _on_device(device.index), stream:
        yield


def load_kernel(source_name: str, function_name: str, device: torch.device, shared_bytes: int = 0) -> Any:
    """Return the kernel `function_name` of ``speedtransfer/cuda/kernels/<source_name>``, compiled for `device`.

    Call it by :func:`launch`. It is compiled once a process and device; CuPy keeps the binary in its cache folder.

    Parameters
    ----------
    source_name, function_name : str
    device : torch.device
    shared_bytes : int
        The most dynamic shared memory that a block will be launched with.

    Raises
    ------
    DeviceError
        There is no CUDA, the source does not compile there, or the device has less shared memory.
    """
    require_cuda(f"the kernel {function_name}")
    kernel = _compiled(source_name, function_name, device.index)
    with _on_device(device.index):
        # Beyond 48 KiB a kernel must ask; engines share it, and the largest wish must stay.
        if shared_bytes > kernel.max_dynamic_shared_size_bytes:
            try:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            except Exception as error:
                raise DeviceError(
                    f"{function_name} asks for {shared_bytes} bytes of shared memory a block, which "
                    f"{torch.cuda.get_device_name(device)} refuses ({_first_line(error)}); pass fewer threads"
                ) from error
    return kernel


def launch(
    kernel: Any, blocks: int, threads: int, argument: np.ndarray, stream: torch.cuda.Stream, shared_bytes: int = 0
) -> None:
    """Queue a kernel from :func:`load_kernel` on `stream`.

    Parameters
    ----------
    kernel : object
    blocks, threads : int
        The size of the launch.
    argument : ndarray
        Of one element, which the kernel takes by value; it may be changed as soon as this returns.
    stream : torch.cuda.Stream
    shared_bytes : int
        Dynamic shared memory of a block.
    """
    index = stream.device_index
    given = _cupy_stream(stream.cuda_stream, index)
    if len(cuda_status().devices) == 1:  # the current one, in every thread: nothing to switch
        kernel((blocks,), (threads,), (argument,), shared_mem=shared_bytes, stream=given)
        return
    with _on_device(index):
        kernel((blocks,), (threads,), (argument,), shared_mem=shared_bytes, stream=given)


def kernel_source(name: str) -> str:
    """Return the text of ``speedtransfer/cuda/kernels/<name>`` with its includes in place.

    CuPy keys its cache by the text that it is given, and would go on using a binary of an older header.
    """
    text = importlib.resources.files(f"{__package__}.kernels").joinpath(name).read_text(encoding="utf-8")
    lines = [f'#line 1 "{name}"']  # errors then name the file and its own lines
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith('#include "'):
            lines += [kernel_source(line.split('"')[1]), f'#line {number + 1} "{name}"']
        else:
            lines.append(line)
    return "\n".join(lines)


@functools.cache
def _compiled(source_name: str, function_name: str, index: int) -> Any:
    with _on_device(index):
        try:
            module = _cupy().RawModule(code=kernel_source(source_name), options=("-std=c++17",))
            return module.get_function(function_name)
        except Exception as error:  # CuPy has its own for each part: compiler, headers, driver
            raise DeviceError(
                f"cannot compile {function_name} of {source_name} for cuda:{index}: {' '.join(str(error).split())}; "
                f"reinstall CuPy with its CUDA toolkit, pip install '{_cupy_package()}[ctk]'"
            ) from error


class _HostBlock:
    """Page-locked memory as NumPy and torch can adopt it: they keep this object as long as they use the memory."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


@functools.lru_cache(maxsize=256)
def _cupy_stream(pointer: int, index: int) -> Any:
    """Return CuPy's object for a stream of torch; it is nothing but the pointer, so it may outlive the stream."""
    cuda = _cupy().cuda
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_StreamHandle(pointer))
    return cuda.ExternalStream(pointer, index)  # CuPy 13


class _StreamHandle:
    """A stream pointer under CUDA's stream protocol, which not every supported torch speaks itself."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _free_host(pointer: int, index: int, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has the tensors but no CUDA
    # A kernel or copy that was queued before the last tensor died may still use the memory, on any device in use: the only
    # place here that waits for whole devices. Errors mean that CUDA is being shut down.
    with contextlib.suppress(Exception):
        runtime = _cupy().cuda.runtime
        in_use = getattr(torch._C, "_cuda_hasPrimaryContext", lambda number: True)
        others = {number for number in range(len(cuda_status().devices)) if in_use(number)}
        for number in sorted({index} | others):
            with _on_device(number):
                runtime.deviceSynchronize()
        with _on_device(index):
            runtime.freeHost(pointer)


@contextlib.contextmanager
def _on_device(index: int) -> Iterator[None]:
    # Both: torch and CuPy each bring a CUDA runtime that keeps its own current device.
    with torch.cuda.device(index), _cupy().cuda.Device(index):
        yield


@functools.cache
def _uses_host_pointers(index: int) -> bool:
    runtime = _cupy().cuda.runtime
    return bool(runtime.deviceGetAttribute(runtime.cudaDevAttrCanUseHostPointerForRegisteredMem, index))


@functools.cache
def _cupy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cupy
    return cupy


def _cupy_version() -> str | None:
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _cupy_package() -> str:
    """Return the name of the CuPy that fits torch: of the CUDA that torch is built for, which the driver runs."""
    return "cupy-cuda12x" if (torch.version.cuda or "").startswith("12.") else "cupy-cuda13x"


def _driver_version() -> str | None:
    import ctypes

    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _missing(driver: str | None, cupy_version: str | None) -> tuple[str, tuple[str, ...]]:
    """Return why CUDA does not work ("" where it does) and the names of the devices."""
    if driver is None:
        return "this machine has no NVIDIA driver; install one, or stay on the CPU with memory='pageable'", ()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch from pytorch.org", ()
    if not torch.cuda.is_available():
        if tuple(map(int, torch.version.cuda.split("."))) > tuple(map(int, driver.split("."))):
            what = f"torch is built for CUDA {torch.version.cuda} but the driver supports {driver} only"
            older = f"a torch built for CUDA {driver.split('.')[0]}, which pytorch.org's install selector names"
            return f"{what}; update the driver, or install {older}", ()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return f"the driver shows no device (CUDA_VISIBLE_DEVICES is {visible!r}); make one visible to this process", ()
    remedy = f"pip install {_cupy_package()}"
    devices = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed; {remedy}", devices
    try:
        count = _cupy().cuda.runtime.getDeviceCount()
    except Exception as error:
        what = f"CuPy {cupy_version} does not work with this driver (CUDA {driver}): {_first_line(error)}"
        return f"{what}; pip uninstall it, then {remedy}", devices
    if count < len(devices):
        return f"CuPy {cupy_version} sees {count} devices where torch sees {len(devices)}; {remedy}", devices
    return "", devices


def _memory_limit() -> str:
    try:
        page, pages, free = (os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return "the likely limit is the memory of the machine"
    have = f"{format_bytes(page * pages)}, {format_bytes(page * free)} free"
    return f"the likely limit is the memory of this machine ({have}) or of its container"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
