"""What all SpeedTorch classes share: their arguments, their rows, views and copies of these, and files."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError, check_size
from speedtransfer.speedtorch.arrays import dtype_of, numpy_dtype, stored_dtype, tensor_from, to_copy
from speedtransfer.speedtorch.rows import Column, Rows
from speedtransfer.system import replace_file
from speedtransfer.tables import PathLike, Table, plane_chunks
from speedtransfer.untrusted import check_file, only_storage_errors, open_file

Memory: TypeAlias = Literal["device", "pinned", "pageable", "mmap"]


class NoRowsError(InvalidValueError, AttributeError):
    """The rows have not been made yet. An AttributeError too, so that hasattr() of a view says False until then."""


class Storage(ABC):
    """Rows in one memory.

    A memory says where they are (`_place`); a role how they are made and how arrays are loaded (`_take`). A class of both has
    the arguments of its role, which have no defaults, and those of its bases' line with theirs.
    """

    _role: ClassVar[tuple[str, ...]]
    __signature__: ClassVar[Signature]
    _several: ClassVar[bool] = False  # arrays, one for each state of an optimizer
    _begin_by: ClassVar[str] = ""
    _held: Rows | None = None

    def __init_subclass__(cls, **defaults: Any) -> None:
        super().__init_subclass__()
        if defaults:
            names = dict.fromkeys(cls._role, Parameter.empty) | defaults
            kind = Parameter.POSITIONAL_OR_KEYWORD
            cls.__signature__ = Signature([Parameter(name, kind, default=value) for name, value in names.items()])

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = self.__signature__.bind(*arguments, **named)
        given.apply_defaults()
        vars(self).update(given.arguments)
        self._check()

    def _check(self) -> None:
        """Raise unless the arguments, which are attributes, are right."""
        for name in ("total_classes", "embed_dimension"):
            if hasattr(self, name):
                setattr(self, name, check_size(getattr(self, name), name))

    @abstractmethod
    def _place(self) -> tuple[Memory, torch.device]:
        """Return the memory of the rows and the device that they are gathered to."""

    def _variable(self) -> Tensor | None:
        """Return what holds the rows of a batch during a step."""
        return None

    def _new_table(self, num_rows: int, dim: int, dtype: torch.dtype) -> Table:
        """Return a table of zeros."""
        memory, device = self._place()
        return Table(num_rows, dim, dtype, memory, device=device)

    @abstractmethod
    def _take(self, tensors: list[Tensor]) -> None:
        """Make `tensors` the rows."""

    @property
    def _rows(self) -> Rows:
        if self._held is None:
            raise NoRowsError(f"{type(self).__name__} has no rows yet; call {self._begin_by} first")
        self._held.settle()
        return self._held

    def _whole(self) -> list[Tensor]:
        return [self._rows.whole(name) for name in self._rows.columns]

    def _one_or_all(self, arrays: list[Any]) -> Any:
        """Return what a call that shows rows returns."""
        return tuple(arrays) if self._several else arrays[0]

    def _set(self, value: Any) -> None:
        self._take([tensor_from(one, "the array") for one in (value if self._several else [value])])

    def getCupyVar(self) -> Any:
        """Return all rows over their memory: a CuPy array where CUDA reaches it, else a NumPy array, which is used alike.

        An optimizer's switcher returns a tuple, one array for each name in `optVarList`.
        """
        return self._one_or_all([self._rows.array(name) for name in self._rows.columns])

    getCupyMM = getCupyVar  # noqa: N815

    def getTorchVar(self) -> Any:
        """Return all rows as a tensor over their memory, on the CPU unless that is the device's; a tuple as `getCupyVar`."""
        self._rows.lent = True
        return self._one_or_all(self._whole())

    def getNumpyVersion(self) -> Any:
        """Return a copy of all rows as a NumPy array; of an optimizer's switcher a tuple of them."""
        return self._one_or_all([self._rows.numpy(name) for name in self._rows.columns])

    def saveCupy(self, saveFileName: PathLike) -> None:
        """Write all rows to a ``.npy`` file, chunk by chunk; the states of an optimizer as one array of all.

        A file that rows are mapped from stays what it is, and has every change.
        """
        # NumPy adds the suffix.
        rows, name = self._rows, os.fspath(saveFileName)
        target = Path(name if name.endswith(".npy") else f"{name}.npy")
        own = rows.path
        if own is not None and own.exists() and target.exists() and target.samefile(own):
            rows.table.flush()  # it has every change, and a new file in its place would get no more of them
            return
        write_npy(target, self._whole(), self._several)

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Read all rows from a ``.npy`` file of `saveCupy`, cupy.save or numpy.save; where it raises they stay as they are."""
        self._set(read_npy(loadFileName))

    def saveTorch(self, saveFileName: PathLike) -> None:
        """Write all rows as a tensor by torch.save, on the CPU; the states of an optimizer as a list of them."""
        on_host = [tensor.cpu() for tensor in self._whole()]
        with replace_file(Path(saveFileName)) as file:
            torch.save(on_host if self._several else on_host[0], file)

    def loadTorch(self, loadFileName: PathLike) -> None:
        """Read all rows from a file of `saveTorch` or torch.save, tensors only: nothing pickled is run."""
        found = read_torch(loadFileName)
        tensors = list(found) if isinstance(found, list | tuple) else [found]
        if not all(isinstance(tensor, Tensor) for tensor in tensors) or isinstance(found, Tensor) is self._several:
            what = "a list of tensors, one for each state" if self._several else "a tensor"
            raise StorageError(
                f"{str(loadFileName)!r} holds a {type(found).__name__} but must hold {what}; save one with torch.save"
            )
        self._take([tensor.detach() for tensor in tensors])


class Shaped(Storage):
    """Rows of arrays whose shapes are known before: one for each of `_columns`, by name."""

    total_classes: int
    _columns: dict[str, Column]

    @abstractmethod
    def _make(self) -> Rows:
        """Return new rows."""

    def _begin(self, fill: Callable[[Rows], Any]) -> None:
        """Have `fill` set the rows, which are made if there are none."""
        rows = self._held or self._make()
        rows.settle()
        fill(rows)
        self._held = rows

    def _take(self, tensors: list[Tensor]) -> None:
        names = list(self._columns)
        if len(tensors) != len(names):
            raise InvalidValueError(f"there are {len(tensors)} arrays but those of {names} are kept; pass one for each")
        sources = {}
        for (name, column), tensor in zip(self._columns.items(), tensors, strict=True):
            shape = (self.total_classes, *column.tail)
            if tuple(tensor.shape) != shape:
                raise InvalidValueError(
                    f"the array of {name!r} has shape {tuple(tensor.shape)} but must be {shape}; load another one, or make a "
                    f"{type(self).__name__} for this shape"
                )
            sources[name] = to_copy(column.dtype, tensor, f"the array of {name!r}")

        def fill(rows: Rows) -> None:
            for name, source in sources.items():
                rows.fill(name, source)

        self._begin(fill)


class OneArray(Shaped):
    """Rows of one array."""

    datatype: Any

    def _check(self) -> None:
        super()._check()
        self.dtype = self.datatype
        # A matrix is square.
        tail = (getattr(self, "embed_dimension", self.total_classes),)
        self._columns = {"weight": Column(tail, dtype_of(self.datatype))}

    def _make(self) -> Rows:
        (dim,), dtype = self._columns["weight"]
        return Rows(self._new_table(self.total_classes, dim, stored_dtype(dtype)), self._columns)


# --- files: .npy as cupy.save and numpy.save write them, and tensors of torch.save ----------------------------------------


def write_npy(path: Path, tensors: list[Tensor], stacked: bool) -> None:
    """Write a tensor, or several as one array with a dimension more, chunk by chunk; an old file stays whole until the end.

    Raises `InvalidTypeError` where NumPy has no such dtype, or the tensors differ in shape or dtype.
    """
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) != 1:
        raise InvalidTypeError(f"a .npy file has one shape and dtype but there are {len(kinds)} kinds; use saveTorch")
    (shape, dtype) = kinds.pop()
    kind = numpy_dtype(dtype)
    fields = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False}
    with replace_file(path) as file:
        np.lib.format.write_array_header_1_0(file, {**fields, "shape": (len(tensors), *shape) if stacked else shape})
        for tensor in tensors:
            for rows in plane_chunks(tensor):
                if tensor[rows].numel():
                    file.write(tensor[rows].cpu().contiguous().view(torch.uint8).numpy().data.cast("B"))


def read_npy(path: PathLike, writable: bool = False) -> np.ndarray:
    """Return the array of a ``.npy`` file, mapped, no Python objects; `writable`: what is written to it goes to the file."""
    with only_storage_errors(path, "a .npy file of numbers"):
        check_file(path)
        array = np.load(path, mmap_mode="r+" if writable else "c", allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise StorageError(f"{os.fspath(path)!r} is an archive of arrays, not a .npy file; save one array by itself")
    return array


def read_torch(path: PathLike) -> Any:
    """Return what torch.save wrote, on the CPU. No pickled object is run: tensors, and lists and dicts of them, are read."""
    with only_storage_errors(path, "a file of tensors by torch.save"), open_file(path) as file:
        return torch.load(file, map_location="cpu", weights_only=True)
