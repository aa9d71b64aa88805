"""The 17 classes of SpeedTorch: a role (a variable, the state of an optimizer, data) in a memory, with its defaults."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from speedtransfer.speedtorch.data import Gadgets, MappedGadgets, Matrices
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers
from speedtransfer.speedtorch.storage import ARRAY_DOC, AnyDevice, Cuda, CudaOrPinned, MemoryMapped, Pinned, view_of
from speedtransfer.tables import PathLike

# --- shown as arrays: on the GPU, page-locked, or in a file mapped into memory -------------------------------------------


class ModelFactory(Models, CudaOrPinned):
    """Switches the rows of a model's variable between all of them and those of a batch.

    Parameters
    ----------
    model_variable : nn.Module
        With a `weight`, such as ``nn.Embedding``; its number of rows does not matter.
    total_classes, embed_dimension : int
        All rows, and the values of one.
    datatype : str or dtype
    CPUPinn : bool
        Keep all rows in page-locked memory and not on the GPU.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        No module with a weight, or a drop-in Embedding; a size or dtype that breaks a rule.
    """

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        datatype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype)
        self.CPUPinn = CPUPinn


class OptimizerFactory(Optimizers, CudaOrPinned):
    """Switches the state that an optimizer keeps for a variable between that of all rows and that of a batch's.

    Parameters
    ----------
    given_optimizer : torch.optim.Optimizer
        Any that updates row by row; SparseAdam with ``sparse=True`` in the model, all others without.
    total_classes, embed_dimension : int
    model : nn.Module
    variable_name : str
        Name of the module or parameter within `model`: "u_embeddings" or "u_embeddings.weight".
    dtype : str or dtype
        Of the state that is as wide as the weights.
    CPUPinn : bool
        Keep the state in page-locked memory and not on the GPU.

    Attributes
    ----------
    optVarList : list of str
        What the optimizer keeps for a row.

    Raises
    ------
    OptimizerError
        The optimizer does not update row by row.
    InvalidTypeError, InvalidValueError
        No such variable in the model, or not trained by the optimizer; a size or dtype that breaks a rule.
    """

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
    ) -> None:
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self.CPUPinn = CPUPinn

    CUPYcorpi = view_of("getCupyVar", ARRAY_DOC)


class COM(Matrices, CudaOrPinned):
    """A square matrix of co-occurrences, read and written as a data gadget.

    Parameters
    ----------
    total_classes : int
        Its rows and columns.
    datatype : str or dtype
    CPUPinn : bool
        Keep it in page-locked memory and not on the GPU.
    """

    def __init__(self, total_classes: int, datatype: Any = "uint32", CPUPinn: bool = False) -> None:
        super().__init__(total_classes, datatype)
        self.CPUPinn = CPUPinn

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, of zeros; with `CPUPinn` in page-locked memory, whatever the constructor was given."""
        self.CPUPinn = self.CPUPinn or CPUPinn
        super().comInit()

    CUPYCom = view_of("getCupyVar", ARRAY_DOC)


class DataGadget(Gadgets, CudaOrPinned):
    """Data of which any part is quickly on the compute device.

    Parameters
    ----------
    fileName : path-like or array
        A ``.npy`` file, or a tensor, NumPy or CuPy array, of any number of dimensions, which is copied.
    CPUPinn : bool
        Keep the data in page-locked memory and not on the GPU.
    """


class ModelFactoryMM(Models, MemoryMapped):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` whose rows live in a file, by default one that vanishes with it.

    Parameters
    ----------
    model_variable, total_classes, embed_dimension, datatype
        As those of :class:`~speedtransfer.speedtorch.ModelFactory`.
    diskname : str
        The nameless file is in the folder of this path; by default in the working directory.
    CPUPinn : bool
        Ignored: the rows pass through page-locked memory anyway.
    path : path-like, optional
        A new ``.npy`` or ``.safetensors`` file to keep the rows in.
    """

    def __init__(
        self,
        model_variable: nn.Module,
        total_classes: int,
        embed_dimension: int,
        diskname: str = "variable",
        datatype: Any = "float32",
        CPUPinn: bool = False,
        *,
        path: PathLike | None = None,
    ) -> None:
        super().__init__(model_variable, total_classes, embed_dimension, datatype)
        self._keep_in(diskname, CPUPinn, path)


class OptimizerFactoryMM(Optimizers, MemoryMapped):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` whose state lives in files without a name, which go with it.

    Parameters
    ----------
    given_optimizer, total_classes, embed_dimension, model, variable_name, dtype
        As those of :class:`~speedtransfer.speedtorch.OptimizerFactory`.
    CPUPinn : bool
        Ignored, as in :class:`ModelFactoryMM`.
    folder : path-like
        Where the files are; by default the working directory.
    """

    def __init__(
        self,
        given_optimizer: Optimizer,
        total_classes: int,
        embed_dimension: int,
        model: nn.Module,
        variable_name: str,
        dtype: Any = "float32",
        CPUPinn: bool = False,
        *,
        folder: PathLike = "",
    ) -> None:
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self._keep_in(f"{variable_name}{type(given_optimizer).__name__}", CPUPinn, None)
        self._folder = folder


class COMMM(Matrices, MemoryMapped):
    """A :class:`~speedtransfer.speedtorch.COM` that lives in a file, as the rows of a :class:`ModelFactoryMM` do.

    Parameters
    ----------
    total_classes : int
    diskname : str
        The nameless file is in the folder of this path; by default in the working directory.
    datatype : str or dtype
    CPUPinn : bool
        Ignored.
    path : path-like, optional
        A new file to keep the matrix in; unsigned integers are in it as signed ones of the same bits.
    """

    def __init__(
        self,
        total_classes: int,
        diskname: str = "COM",
        datatype: Any = "uint32",
        CPUPinn: bool = False,
        *,
        path: PathLike | None = None,
    ) -> None:
        super().__init__(total_classes, datatype)
        self._keep_in(diskname, CPUPinn, path)

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, of zeros."""
        super().comInit()


class DataGadgetMM(MappedGadgets, MemoryMapped):
    """A :class:`~speedtransfer.speedtorch.DataGadget` over the file itself, which insertData writes to.

    Parameters
    ----------
    fileName : path-like
        A ``.npy`` file in C order.
    CPUPinn : bool
        Ignored.
    """


# --- shown as tensors: on the GPU, page-locked, or on any device --------------------------------------------------------


class GPUPytorchModelFactory(Models, Cuda):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` on the GPU, with tensors for arrays."""


class GPUPytorchOptimizerFactory(Optimizers, Cuda):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` on the GPU, with tensors for arrays."""


class GPUPytorchCOM(Matrices, Cuda):
    """A :class:`~speedtransfer.speedtorch.COM` on the GPU, with a tensor for an array."""


class CPUPytorchModelFactory(Models, Pinned):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` in page-locked memory, with tensors for arrays."""


class CPUPytorchOptimizerFactory(Optimizers, Pinned):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` in page-locked memory, with tensors for arrays."""


class CPUPytorchCOM(Matrices, Pinned):
    """A :class:`~speedtransfer.speedtorch.COM` in page-locked memory, with a tensor for an array."""


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
