"""The memories that SpeedTorch's classes keep their rows in, and what shows all rows of a class there."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

from speedtransfer.cuda import cuda_status, resolve_device
from speedtransfer.errors import InvalidValueError, check_choice
from speedtransfer.speedtorch.storage import Memory, Storage
from speedtransfer.tables import Table

ARRAY_DOC = "All rows over their memory, as `getCupyVar` returns them; assign an array to load it."
TENSOR_DOC = "All rows over their memory, as `getTorchVar` returns them; assign a tensor to load it."


def view_of(get: str, doc: str) -> property:
    """Return a property: reading calls the method `get`, assigning loads an array, and del frees the rows."""

    def read(self: Storage) -> Any:
        return getattr(self, get)()

    def write(self: Storage, value: Any) -> None:
        if value is None:
            delete(self)
        else:
            self._set(value)

    def delete(self: Storage) -> None:
        self._held = None

    return property(read, write, delete, doc)


class CudaOrPinned(Storage):
    """Rows on the GPU, or in page-locked memory where `CPUPinn` is True."""

    CPUPinn: bool

    def _place(self) -> tuple[Memory, torch.device]:
        return _on_device("cuda", "pinned" if self.CPUPinn else "device")

    CUPYcorpus = view_of("getCupyVar", ARRAY_DOC)


class MemoryMapped(Storage):
    """Rows in a file mapped into memory, which has no name; it is in the folder of `diskname`."""

    diskname: str = ""

    def _place(self) -> tuple[Memory, torch.device]:
        return _on_device("cuda", "mmap")

    def _new_table(self, num_rows: int, dim: int, dtype: torch.dtype) -> Table:
        memory, device = self._place()
        return Table(num_rows, dim, dtype, memory, os.path.dirname(self.diskname) or ".", device)

    CUPYmemmap = view_of("getCupyMM", ARRAY_DOC)


class Pinned(Storage):
    """Rows in page-locked memory."""

    def _place(self) -> tuple[Memory, torch.device]:
        return _on_device("cuda", "pinned")

    pytorchCPUVar = view_of("getTorchVar", TENSOR_DOC)  # noqa: N815


class AnyDevice(Storage):
    """Rows on the GPU, as by default, or in ordinary or page-locked memory, from where they come to the variable's device."""

    deviceType: str | torch.device = "cuda"  # noqa: N815
    pinType: object = False  # noqa: N815

    def _place(self) -> tuple[Memory, torch.device]:
        check_choice(str(self.deviceType).partition(":")[0], "deviceType", ("cuda", "cpu"))
        device = torch.device(self.deviceType)
        if device.type == "cuda":
            if self.pinType:
                raise InvalidValueError("pinType is True but deviceType is 'cuda'; pass deviceType='cpu'")
            return _on_device(device, "device")
        variable = self._variable()
        return _on_device(device if variable is None else variable.device, "pinned" if self.pinType else "pageable")

    pytorchGPUVar = view_of("getTorchVar", TENSOR_DOC)  # noqa: N815


def _on_device(device: torch.device | str, memory: Memory) -> tuple[Memory, torch.device]:
    """Return `memory` as the compute device `device` has it; where that is CUDA and there is none, as the CPU has it."""
    cuda = cuda_status()
    if cuda.available or (torch.device(device).type != "cuda" and memory != "pinned"):
        return memory, resolve_device(device)
    _warn(cuda.reason)
    return "mmap" if memory == "mmap" else "pageable", torch.device("cpu")


@functools.cache
def _warn(reason: str) -> None:
    """Warn, once."""
    warnings.warn(
        f"SpeedTorch's classes ask for CUDA, but {reason}. Rows live in ordinary memory and are computed with on the CPU",
        RuntimeWarning,
        stacklevel=2,
    )
