"""The classes whose rows are tensors of torch: on the GPU, on the CPU, or on either."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedtransfer.speedtorch.data import Matrices
from speedtransfer.speedtorch.memories import Cpu, Either, Gpu
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers


class GPUPytorchModelFactory(Models, Gpu):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` on the GPU, with tensors for arrays."""

    def __init__(
        self, model_variable: nn.Module, total_classes: int, embed_dimension: int, datatype: Any = torch.float
    ) -> None:
        self._setup(model_variable, total_classes, embed_dimension, datatype)


class GPUPytorchOptimizerFactory(Optimizers, Gpu):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` on the GPU, with tensors for arrays."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
    ) -> None:
        self._setup(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)


class GPUPytorchCOM(Matrices, Gpu):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU, with a tensor for an array."""

    def __init__(self, total_classes: int, datatype: Any = torch.int32) -> None:
        self._setup(total_classes, datatype)

    def comInit(self) -> None:
        """Make the matrix, of zeros."""
        self._init()


class CPUPytorchModelFactory(Models, Cpu):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` in page-locked memory, with tensors for arrays."""

    def __init__(
        self, model_variable: nn.Module, total_classes: int, embed_dimension: int, datatype: Any = torch.float
    ) -> None:
        self._setup(model_variable, total_classes, embed_dimension, datatype)


class CPUPytorchOptimizerFactory(Optimizers, Cpu):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` in page-locked memory, with tensors for arrays."""

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = torch.float,
    ) -> None:
        self._setup(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)


class CPUPytorchCOM(Matrices, Cpu):
    """A :class:`~speedtransfer.speedtorch.COM` in page-locked memory, with a tensor for an array."""

    def __init__(self, total_classes: int, datatype: Any = torch.int32) -> None:
        self._setup(total_classes, datatype)

    def comInit(self) -> None:
        """Make the matrix, of zeros."""
        self._init()


class PytorchModelFactory(Models, Either):
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
        self.deviceType, self.pinType = deviceType, pinType
        self._setup(model_variable, total_classes, embed_dimension, datatype)


class PytorchOptimizerFactory(Optimizers, Either):
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
        self.deviceType, self.pinType = deviceType, pinType
        self._setup(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)


class PytorchCOM(Matrices, Either):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU or on the CPU, with a tensor for an array."""

    def __init__(
        self, total_classes: int, datatype: Any = torch.int32, deviceType: str = "cuda", pinType: bool = False
    ) -> None:
        self.deviceType, self.pinType = deviceType, pinType
        self._setup(total_classes, datatype)

    def comInit(self) -> None:
        """Make the matrix, of zeros."""
        self._init()
