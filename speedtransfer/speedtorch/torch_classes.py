"""The classes that show rows as tensors: on the GPU, on the CPU, or on either."""

# ruff: noqa: N803 - the names are SpeedTorch's

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from speedtransfer.speedtorch.data import Matrices
from speedtransfer.speedtorch.held import Held, view_of
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers
from speedtransfer.speedtorch.place import Place, cpu_or_cuda, on_cuda

_TENSOR = "All rows over their memory, as `getTorchVar` returns them; assign a tensor to load it."


class Gpu(Held):
    """Rows on the GPU."""

    def _place(self) -> Place:
        return on_cuda("device")

    pytorchGPUVar = view_of("getTorchVar", _TENSOR)  # noqa: N815


class GPUPytorchModelFactory(Models, Gpu):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` on the GPU, with tensors for arrays."""


class GPUPytorchOptimizerFactory(Optimizers, Gpu):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` on the GPU, with tensors for arrays."""


class GPUPytorchCOM(Matrices, Gpu):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU, with a tensor for an array."""


class Cpu(Held):
    """Rows in page-locked memory."""

    def _place(self) -> Place:
        return on_cuda("pinned")

    pytorchCPUVar = view_of("getTorchVar", _TENSOR)  # noqa: N815


class CPUPytorchModelFactory(Models, Cpu):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` in page-locked memory, with tensors for arrays."""


class CPUPytorchOptimizerFactory(Optimizers, Cpu):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` in page-locked memory, with tensors for arrays."""


class CPUPytorchCOM(Matrices, Cpu):
    """A :class:`~speedtransfer.speedtorch.COM` in page-locked memory, with a tensor for an array."""


class AnyDevice(Held):
    """Rows on the GPU, or in ordinary or page-locked memory."""

    deviceType: Any  # noqa: N815
    pinType: bool  # noqa: N815

    def _variable(self) -> Tensor | None:
        return None

    def _place(self) -> Place:
        return cpu_or_cuda(self.deviceType, self.pinType, self._variable())

    pytorchGPUVar = view_of("getTorchVar", _TENSOR)  # noqa: N815


class PytorchModelFactory(Models, AnyDevice):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` on the GPU or on the CPU, with tensors for arrays.

    Parameters
    ----------
    model_variable, total_classes, embed_dimension, datatype
        As those of :class:`~speedtransfer.speedtorch.ModelFactory`.
    deviceType : {"cuda", "cpu"}
        Where all rows are. With "cpu" those of a batch come to where the variable is when the rows are initialised.
    pinType : bool
        With "cpu": in page-locked memory.
    """

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = torch.float,
        deviceType: str = "cuda",
        pinType: bool = False,
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype)
        self.deviceType, self.pinType = deviceType, pinType


class PytorchOptimizerFactory(Optimizers, AnyDevice):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` on the GPU or on the CPU, with tensors for arrays.

    Parameters
    ----------
    given_optimizer, total_classes, embed_dimension, model, variable_name, dtype
        As those of :class:`~speedtransfer.speedtorch.OptimizerFactory`.
    deviceType, pinType
        As those of :class:`PytorchModelFactory`.
    """

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
        deviceType: str = "cuda",
        pinType: bool = False,
    ) -> None:
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self.deviceType, self.pinType = deviceType, pinType


class PytorchCOM(Matrices, AnyDevice):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU or on the CPU, with a tensor for an array."""

    def __init__(
        self, total_classes: int, datatype: Any = torch.int32, deviceType: str = "cuda", pinType: bool = False
    ) -> None:
        super().__init__(total_classes, datatype)
        self.deviceType, self.pinType = deviceType, pinType
