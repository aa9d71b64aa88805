"""The memory of the compute device itself: nothing crosses a bus. The fastest table, if it fits."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtransfer.errors import HostMemoryError, format_bytes
from speedtransfer.tables.memories import PageableMemory
from speedtransfer.tables.memory import Memory


class DeviceMemory(Memory):
    """Memory of the GPU, from torch's allocator; without CUDA the compute device is the CPU, and so is this."""

    name = "device"

    def allocate(self, plane: str, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:  # noqa: D102
        if self.device.type == "cpu":
            return PageableMemory(self.device).allocate(plane, num_rows, width, dtype)
        try:
            return torch.zeros(num_rows, width, dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise HostMemoryError(
                f"plane {plane!r} asks for {format_bytes(num_rows * width * dtype.itemsize)} of {self.device} "
                f"({str(error).splitlines()[0]}); pass memory='pinned', 'pageable' or 'mmap'"
            ) from error

    def move_to(self, device: torch.device, planes: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: D102
        self.device = device
        return {name: plane.to(device) for name, plane in planes.items()}
