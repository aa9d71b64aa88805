"""The memories of SpeedTorch's classes, and the name that each shows its rows under."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from speedtransfer.speedtorch.common import Held, view_of
from speedtransfer.speedtorch.place import Place, cpu_or_cuda, in_file, on_cuda
from speedtransfer.tables import PathLike

ARRAY = "All rows over their memory, as `getCupyVar` returns them; assign an array to load it."
TENSOR = "All rows over their memory, as `getTorchVar` returns them; assign a tensor to load it."


class Cupy(Held):
    """Rows on the GPU, or in page-locked memory where `CPUPinn` is True."""

    CPUPinn: bool

    def _place(self) -> Place:
        return on_cuda("pinned" if self.CPUPinn else "device")

    CUPYcorpus = view_of("getCupyVar", ARRAY)


class InFile(Held):
    """Rows in a file mapped into memory."""

    path: PathLike | None = None
    _folder: PathLike = ""

    def _place(self) -> Place:
        return in_file(self.path, self._folder)

    CUPYmemmap = view_of("getCupyMM", ARRAY)


class Gpu(Held):
    """Rows on the GPU."""

    def _place(self) -> Place:
        return on_cuda("device")

    pytorchGPUVar = view_of("getTorchVar", TENSOR)  # noqa: N815


class Cpu(Held):
    """Rows in page-locked memory."""

    def _place(self) -> Place:
        return on_cuda("pinned")

    pytorchCPUVar = view_of("getTorchVar", TENSOR)  # noqa: N815


class Either(Held):
    """Rows on the GPU, or in ordinary or page-locked memory."""

    deviceType: Any  # noqa: N815
    pinType: bool  # noqa: N815

    def _variable(self) -> Tensor | None:
        return None

    def _place(self) -> Place:
        return cpu_or_cuda(self.deviceType, self.pinType, self._variable())

    pytorchGPUVar = view_of("getTorchVar", TENSOR)  # noqa: N815
