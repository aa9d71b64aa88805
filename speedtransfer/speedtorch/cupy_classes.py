"""The classes whose rows are CuPy's: on the GPU or page-locked."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.speedtorch.common import view_of
from speedtransfer.speedtorch.data import Gadgets, Matrices
from speedtransfer.speedtorch.memories import ARRAY, Cupy
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers


class ModelFactory(Models, Cupy):
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
        self.CPUPinn = CPUPinn
        self._setup(model_variable, total_classes, embed_dimension, datatype)


class OptimizerFactory(Optimizers, Cupy):
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
        self.CPUPinn = CPUPinn
        self._setup(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)

    CUPYcorpi = view_of("getCupyVar", ARRAY)


class COM(Matrices, Cupy):
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
        self.CPUPinn = CPUPinn
        self._setup(total_classes, datatype)

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, of zeros; with `CPUPinn` in page-locked memory whatever the constructor was told."""
        self.CPUPinn = self.CPUPinn or CPUPinn
        self._init()

    CUPYCom = view_of("getCupyVar", ARRAY)


class DataGadget(Gadgets, Cupy):
    """Data of which any part is quickly on the compute device.

    Parameters
    ----------
    fileName : path-like or array
        A ``.npy`` file, or a tensor, NumPy or CuPy array, of any number of dimensions, which is copied.
    CPUPinn : bool
        Keep the data in page-locked memory and not on the GPU.
    """
