"""CUDA kernels of this package: compiled at the first use, launched on a stream of torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.resources
import logging
import struct
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from speedtransfer.cuda.graphs import WARM_UP, check_not_capturing
from speedtransfer.cuda.status import cuda_status, cupy_package, first_line, load_cupy, on_device, require_cuda
from speedtransfer.cuda.streams import current_stream
from speedtransfer.errors import DeviceError, StorageError
from speedtransfer.once import once
from speedtransfer.system import cache_folder, replace_file
from speedtransfer.workers import Workers

log = logging.getLogger(__name__)

# enum Type of move.cuh; float64 where no type is meant.
VALUE_TYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_THREADS = 256
# More items than these have threads are taken several by a thread.
_MAX_BLOCKS = 1 << 16


def load_kernel(source_name: str, function_name: str, device: torch.device, shared_bytes: int = 0) -> Any:
    """Return the kernel `function_name` of ``speedtransfer/kernels/<source_name>``, compiled for `device`.

    Call it by :func:`launch_kernel`, with at most `shared_bytes` of dynamic shared memory a block. It is compiled once a
    process and device; the binary is kept below $SPEEDTRANSFER_CACHE, or the user's cache folder.

    Raises
    ------
    DeviceError
        There is no CUDA, the source does not compile there, or the device has less shared memory.
    """
    require_cuda(f"the kernel {function_name}")
    kernel = _compiled(source_name, function_name, device.index)
    with on_device(device.index):
        # Beyond 48 KiB a kernel must ask; engines share it, and the largest wish must stay.
        driver = load_cupy().cuda.driver
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        if shared_bytes > driver.funcGetAttribute(attribute, kernel.ptr):
            try:
                driver.funcSetAttribute(kernel.ptr, attribute, shared_bytes)
            except Exception as error:
                raise DeviceError(
                    f"{function_name} asks for {shared_bytes} bytes of shared memory a block, which "
                    f"{torch.cuda.get_device_name(device)} refuses ({first_line(error)}); pass fewer threads"
                ) from error
    return kernel


def launch_kernel(
    kernel: Any, blocks: int, threads: int, argument: Any, stream: torch.cuda.Stream, shared_bytes: int = 0
) -> None:
    """Queue a kernel from :func:`load_kernel` on `stream`.

    The kernel takes `argument`, which is :func:`argument_memory`, by value: it may be changed as soon as this returns.
    """
    # A single device is the current one in every thread: nothing to switch.
    if len(cuda_status().devices) > 1:
        with on_device(stream.device_index):
            _launch(kernel, blocks, threads, argument, stream, shared_bytes)
    else:
        _launch(kernel, blocks, threads, argument, stream, shared_bytes)


def launch_over(
    num_items: int,
    source_name: str,
    function_name: str,
    device: torch.device,
    packed: np.ndarray,
    on_host: bool = False,
) -> None:
    """Queue a kernel on the current stream of `device`, with the argument that a `KernelArgument` has packed.

    `on_host`: it changes rows in the memory of the host, which a few blocks keep busy.
    """
    if num_items:
        blocks = min(-(-num_items // _THREADS), _host_blocks(device) if on_host else _MAX_BLOCKS)
        launch_kernel(kernel_on(source_name, function_name, device), blocks, _THREADS, packed, current_stream(device))


@once
def _host_blocks(device: torch.device) -> int:
    """Return how many blocks have as many bytes on their way to the host as those of `MappedEngine`.

    More ask for rows of more pages at a time (rows move a fifth slower so in 8 GB on an H200), and leave less of the device to
    the next batch.
    """
    return max(8, torch.cuda.get_device_properties(device).multi_processor_count // 2)


@once
def kernel_on(source_name: str, function_name: str, device: torch.device) -> Any:
    """Return what `load_kernel` does, which makes the device current each time."""
    return load_kernel(source_name, function_name, device)


def _launch(
    kernel: Any, blocks: int, threads: int, argument: Any, stream: torch.cuda.Stream, shared_bytes: int
) -> None:
    cuda = load_cupy().cuda
    if stream.device_index not in _thread.devices:
        # A call of the runtime gives a thread the context of the device, which the driver needs.
        cuda.runtime.memGetInfo()
        _thread.devices.add(stream.device_index)
    # What calling the kernel does, which takes CuPy several times as long.
    size = blocks, 1, 1, threads, 1, 1, shared_bytes
    cuda.driver.launchKernel(kernel.ptr, *size, stream.cuda_stream, ctypes.addressof(argument), 0)


class _Thread(threading.local):
    """The devices, by index, whose context this thread has."""

    def __init__(self) -> None:
        self.devices = set[int]()


_thread = _Thread()


def kernel_source(name: str) -> str:
    """Return the text of ``speedtransfer/kernels/<name>`` with its includes in place.

    Binaries are kept by this text, so that none of an older header is used.
    """
    text = importlib.resources.files("speedtransfer.kernels").joinpath(name).read_text(encoding="utf-8")
    lines = [f'#line 1 "{name}"']  # errors then name the file and its own lines
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith('#include "'):
            lines += [kernel_source(line.split('"')[1]), f'#line {number + 1} "{name}"']
        else:
            lines.append(line)
    return "\n".join(lines)


def get_function(module: Any, name: str) -> Any:
    """Return a function of a compiled module; what emulates a device puts its own in this place."""
    return module.get_function(name)


class KernelArgument:
    """The struct that a kernel takes by value; the driver has copied it when a launch returns.

    Parameters
    ----------
    layout : str
        Of the struct, as in the module `struct`: every field is 8 bytes wide ("q" or "d").
    """

    def __init__(self, layout: str) -> None:
        self._struct = struct.Struct(layout)

    def pack(self, *values: float) -> Any:
        """Return memory that holds `values`; pointers are ints."""
        memory = argument_memory()
        self._struct.pack_into(memory, ARGUMENT_AT, *values)
        return memory


# Where in its memory an argument begins: before it is its address, as the driver wants it.
ARGUMENT_AT = 8
# The largest argument of a kernel here, and more: an emulated driver does not know how much to copy.
_Memory = ctypes.c_int64 * (1 + 1024 // 8)


def argument_memory() -> Any:
    """Return memory for the struct that a kernel takes, of at most 1024 bytes."""
    memory = _Memory()
    memory[0] = ctypes.addressof(memory) + ARGUMENT_AT
    return memory


_trusted: dict[tuple[str, int], bool] = {}


def is_trusted(name: str, device: torch.device, check: Callable[[], bool]) -> bool:
    """Return whether kernels do what torch operations do; asked once a process and device.

    Parameters
    ----------
    name : str
        Of the kernels, for the warning where they do not.
    device : torch.device
    check : callable
        Runs the kernels on a small case and compares; the host waits for it.
    """
    found = _trusted.get((name, device.index))
    if found is None:
        check_not_capturing(f"the first use of the kernels for {name}", WARM_UP)
        reason = "their results differ from those of torch"
        try:
            found = check()
        except DeviceError as error:
            found, reason = False, str(error)
        if not found:
            warnings.warn(
                f"the CUDA kernels for {name} are not used on {torch.cuda.get_device_name(device)}: {reason}; operations of "
                "torch replace them, which take longer",
                stacklevel=2,
            )
        _trusted[name, device.index] = found
    return found


@once
def _compiled(source_name: str, function_name: str, index: int) -> Any:
    check_not_capturing(f"compiling the kernel {function_name}", WARM_UP)
    with on_device(index):
        try:
            module = load_cupy().cuda.function.Module()
            module.load(_binary(kernel_source(source_name), source_name))
            return get_function(module, function_name)
        except Exception as error:  # CuPy has its own for each part: compiler, headers, driver
            raise DeviceError(
                f"cannot compile {function_name} of {source_name} for cuda:{index}: {' '.join(str(error).split())}; "
                f"reinstall CuPy with its CUDA toolkit, pip install '{cupy_package()}[ctk]'"
            ) from error


def _binary(source: str, name: str) -> bytes:
    """Return `source` compiled for the current device, of the cache if it is there.

    ``cupy.RawModule`` would compile it with ``-ftz=true``: numbers below 1.2e-38 would be zero, and on the host are not.
    """
    cupy = load_cupy()
    device = cupy.cuda.Device()
    about = (source, device.compute_capability, cupy.cuda.nvrtc.getVersion(), cupy.__version__, OPTIONS)
    path = cache_folder() / "kernels" / f"{name}-{hashlib.sha256(repr(about).encode()).hexdigest()[:24]}.cubin"
    if path.is_file():
        return path.read_bytes()

    def compiled() -> Any:
        with device:
            return cupy.cuda.compiler.compile_using_nvrtc(source, OPTIONS)[0]

    # The compilers of CUDA up to 12.4 leave the locale of their thread, by which Python decodes, at C.
    with Workers("compile") as thread:
        binary: bytes = thread.submit(compiled).result()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            file.write(binary)
    except (OSError, StorageError) as error:
        log.info("%s is compiled anew by each process: %s", name, error)
    return binary


OPTIONS = ("-std=c++17",)
