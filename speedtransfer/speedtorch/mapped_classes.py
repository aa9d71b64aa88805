"""The classes whose rows live in a file mapped into memory."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.speedtorch.data import MappedGadgets, Matrices
from speedtransfer.speedtorch.memories import InFile
from speedtransfer.speedtorch.models import Models
from speedtransfer.speedtorch.optimizers import Optimizers
from speedtransfer.tables import PathLike


class ModelFactoryMM(Models, InFile):
    """A :class:`~speedtransfer.speedtorch.ModelFactory` whose rows live in a file, by default one that vanishes with it.

    Parameters
    ----------
    model_variable, total_classes, embed_dimension, datatype
        As those of :class:`~speedtransfer.speedtorch.ModelFactory`.
    diskname : str
        Its folder is where the nameless file lies; by default the working directory.
    CPUPinn : bool
        Without a meaning: the rows pass through page-locked memory anyway.
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
        self.diskname, self.CPUPinn, self.path = diskname, CPUPinn, path
        self._folder = os.path.dirname(diskname)
        self._setup(model_variable, total_classes, embed_dimension, datatype)


class OptimizerFactoryMM(Optimizers, InFile):
    """An :class:`~speedtransfer.speedtorch.OptimizerFactory` whose state lives in files without a name, which go with it.

    Parameters
    ----------
    given_optimizer, total_classes, embed_dimension, model, variable_name, dtype
        As those of :class:`~speedtransfer.speedtorch.OptimizerFactory`.
    CPUPinn : bool
        Without a meaning, as in :class:`ModelFactoryMM`.
    folder : path-like
        Where the files lie; by default the working directory.
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
        self.CPUPinn, self._folder = CPUPinn, folder
        self._setup(given_optimizer, total_classes, embed_dimension, model, variable_name, dtype)
        self.diskname = f"{variable_name}{type(given_optimizer).__name__}"


class COMMM(Matrices, InFile):
    """A :class:`~speedtransfer.speedtorch.COM` that lives in a file, as the rows of a :class:`ModelFactoryMM` do.

    Parameters
    ----------
    total_classes : int
    diskname : str
        Its folder is where the nameless file lies; by default the working directory.
    datatype : str or dtype
    CPUPinn : bool
        Without a meaning.
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
        self.diskname, self.CPUPinn, self.path = diskname, CPUPinn, path
        self._folder = os.path.dirname(diskname)
        self._setup(total_classes, datatype)

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, of zeros."""
        self._init()


class DataGadgetMM(MappedGadgets, InFile):
    """A :class:`~speedtransfer.speedtorch.DataGadget` over the file itself, where also goes what is inserted.

    Parameters
    ----------
    fileName : path-like
        A ``.npy`` file in C order.
    CPUPinn : bool
        Without a meaning.
    """
