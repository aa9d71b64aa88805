"""CUDA kernels of this package: compiled at the first use, launched on a stream of torch."""

from __future__ import annotations

import contextlib
import importlib.resources
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from speedtransfer.cuda.graphs import WARM_UP, check_not_capturing
from speedtransfer.cuda.status import cuda_status, cupy_package, first_line, load_cupy, on_device, require_cuda
from speedtransfer.cuda.streams import cupy_stream
from speedtransfer.errors import DeviceError
from speedtransfer.once import once


def load_kernel(source_name: str, function_name: str, device: torch.device, shared_bytes: int = 0) -> Any:
    """Return the kernel `function_name` of ``speedtransfer/kernels/<source_name>``, compiled for `device`.

    Call it by :func:`launch_kernel`, with at most `shared_bytes` of dynamic shared memory a block. It is compiled once a
    process and device; CuPy keeps the binary in its cache folder.

    Raises
    ------
    DeviceError
        There is no CUDA, the source does not compile there, or the device has less shared memory.
    """
    require_cuda(f"the kernel {function_name}")
    kernel = _compiled(source_name, function_name, device.index)
    with on_device(device.index):
        # Beyond 48 KiB a kernel must ask; engines share it, and the largest wish must stay.
        if shared_bytes > kernel.max_dynamic_shared_size_bytes:
            try:
                kernel.max_dynamic_shared_size_bytes = shared_bytes
            except Exception as error:
                raise DeviceError(
                    f"{function_name} asks for {shared_bytes} bytes of shared memory a block, which "
                    f"{torch.cuda.get_device_name(device)} refuses ({first_line(error)}); pass fewer threads"
                ) from error
    return kernel


def launch_kernel(
    kernel: Any, blocks: int, threads: int, argument: np.ndarray, stream: torch.cuda.Stream, shared_bytes: int = 0
) -> None:
    """Queue a kernel from :func:`load_kernel` on `stream`.

    The kernel takes `argument`, an array of one element, by value: it may be changed as soon as this returns.
    """
    index = stream.device_index
    given = cupy_stream(stream.cuda_stream, index)
    # A single device is the current one in every thread: nothing to switch.
    with contextlib.nullcontext() if len(cuda_status().devices) == 1 else on_device(index):
        kernel((blocks,), (threads,), (argument,), shared_mem=shared_bytes, stream=given)


def kernel_source(name: str) -> str:
    """Return the text of ``speedtransfer/kernels/<name>`` with its includes in place.

    CuPy keys its cache by the text that it is given, and would go on using a binary of an older header.
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

    # The largest argument of a kernel here, and more: an emulated driver does not know how much to copy.
    _BYTES = 1024

    def __init__(self, layout: str) -> None:
        self._struct = struct.Struct(layout)

    def pack(self, *values: float) -> np.ndarray:
        """Return an array of one element that holds `values`; pointers are ints."""
        memory = bytearray(self._BYTES)
        self._struct.pack_into(memory, 0, *values)
        return np.frombuffer(memory, _ARGUMENT)


_ARGUMENT = np.dtype((np.void, KernelArgument._BYTES))
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
            module = load_cupy().RawModule(code=kernel_source(source_name), options=("-std=c++17",))
            return get_function(module, function_name)
        except Exception as error:  # CuPy has its own for each part: compiler, headers, driver
            raise DeviceError(
                f"cannot compile {function_name} of {source_name} for cuda:{index}: {' '.join(str(error).split())}; "
                f"reinstall CuPy with its CUDA toolkit, pip install '{cupy_package()}[ctk]'"
            ) from error
