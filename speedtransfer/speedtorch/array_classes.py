"""The classes that show rows as arrays: on the GPU, page-locked, or in a file mapped into memory."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.speedtorch.data import Gadgets, MappedGadgets, Matrices
from speedtransfer.speedtorch.held import Held, view_of
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers
from speedtransfer.speedtorch.place import Place, in_file, on_cuda
from speedtransfer.tables import PathLike

_ARRAY = "All rows over their memory, as `getCupyVar` returns them; assign an array to load it."


class Cupy(Held):
    """Rows on the GPU, or in page-locked memory where `CPUPinn` is True."""

    CPUPinn: bool

    def _place(self) -> Place:
        return on_cuda("pinned" if self.CPUPinn else "device")

    CUPYcorpus = view_of("getCupyVar", _ARRAY)


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
        super().__init__(model_variable, total_classes, embed_dimension, datatype)
        self.CPUPinn = CPUPinn


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
        super().__init__(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self.CPUPinn = CPUPinn

    CUPYcorpi = view_of("getCupyVar", _ARRAY)


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
        super().__init__(total_classes, datatype)
        self.CPUPinn = CPUPinn

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, of zeros; with `CPUPinn` in page-locked memory, whatever the constructor was given."""
        self.CPUPinn = self.CPUPinn or CPUPinn
        super().comInit()

    CUPYCom = view_of("getCupyVar", _ARRAY)


class DataGadget(Gadgets, Cupy):
    """Data of which any part is quickly on the compute device.

    Parameters
    ----------
    fileName : path-like or array
        A ``.npy`` file, or a tensor, NumPy or CuPy array, of any number of dimensions, which is copied.
    CPUPinn : bool
        Keep the data in page-locked memory and not on the GPU.
    """


class InFile(Held):
    """Rows in a file mapped into memory: the new file `path`, or one without a name in `_folder`."""

    path: PathLike | None = None
    _folder: PathLike = ""

    def _place(self) -> Place:
        return in_file(self.path, self._folder)

    def _keep_in(self, diskname: str, CPUPinn: bool, path: PathLike | None) -> None:
        self.diskname, self.CPUPinn, self.path, self._folder = diskname, CPUPinn, path, os.path.dirname(diskname)

    CUPYmemmap = view_of("getCupyMM", _ARRAY)


class ModelFactoryMM(Models, InFile):
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


class OptimizerFactoryMM(Optimizers, InFile):
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


class COMMM(Matrices, InFile):
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


class DataGadgetMM(MappedGadgets, InFile):
    """A :class:`~speedtransfer.speedtorch.DataGadget` over the file itself, which insertData writes to.

    Parameters
    ----------
    fileName : path-like
        A ``.npy`` file in C order.
    CPUPinn : bool
        Ignored.
    """
