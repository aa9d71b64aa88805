"""Data that are read and written by any index: the data gadget and the matrix of co-occurrences."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.speedtorch.arrays import dtype_of, names_rows, plain_index, stored_as, tensor_from
from speedtransfer.speedtorch.rows import Column, Rows, broadcast
from speedtransfer.speedtorch.storage import OneArray, Storage, read_npy
from speedtransfer.tables import PathLike, Table


class IndexedData(Storage):
    """What is read and written by any index."""

    def getData(self, indexes: Any) -> Tensor:
        """Return a copy of what `indexes` names, on the compute device, in the shape that NumPy gives.

        `indexes` is an int, slice, list, array or tensor, or a tuple of these, as NumPy takes them, tensors on any device too.
        A number, or integers of any shape, name rows. Raises `RowIndexError` for what is not there.
        """
        rows, indexes = self._rows, plain_index(indexes)
        if not names_rows(indexes):
            return rows.pick("weight", indexes)
        return rows.read(rows.index(indexes), ["weight"])["weight"]

    def insertData(self, dataObject: Any, indexes: Any) -> None:
        """Set what `indexes` names, as `getData` takes it, to a tensor or array; of what is named twice the last value stays.

        `dataObject` is on any device, of a shape that broadcasts to that of ``getData(indexes)``. Floats are rounded to the
        data's dtype, and integers have to fit it. Where it raises nothing has been written.
        """
        rows, indexes = self._rows, plain_index(indexes)
        if not names_rows(indexes):
            rows.put("weight", indexes, dataObject)
            return
        index = rows.index(indexes)
        rows.write(index, {"weight": broadcast(dataObject, (*index.shape, *rows.columns["weight"].tail))})


class Gadgets(IndexedData):
    """What the data gadgets share."""

    _role = ("fileName",)
    _begin_by = "gadgetInit()"

    fileName: Any  # noqa: N815

    def gadgetInit(self) -> None:
        """Load the data."""
        if isinstance(self.fileName, (str, os.PathLike)):
            self.loadCupy(self.fileName)
        else:
            self._take([tensor_from(self.fileName, "fileName")])

    def _take(self, tensors: list[Tensor]) -> None:
        (tensor,) = tensors
        column, plane = _as_plane(tensor)
        memory, device = self._place()
        self._held = Rows(Table.from_array(plane, memory, device=device), {"weight": column})


class MappedGadgets(Gadgets):
    """What the memory-mapped data gadget is."""

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Map a ``.npy`` file: it is not read at once, and what is inserted goes to the file."""
        array = read_npy(loadFileName, writable=True)
        if not (array.flags.c_contiguous and array.dtype.isnative):
            raise InvalidValueError(
                f"{os.fspath(loadFileName)!r} is in Fortran order or of foreign byte order and cannot be used in its place; "
                "save a copy by numpy.save(path, numpy.array(data, order='C')), or use DataGadget"
            )
        column, plane = _as_plane(tensor_from(array, "the file"))
        _, device = self._place()
        if array.ndim == 2 and plane.dtype == column.dtype and array.size:
            table = Table.load(loadFileName, "mmap", device, writable=True)
        else:
            table = Table.from_array(plane, "pageable", device=device, copy=False)
        self._held = Rows(table, {"weight": column}, Path(loadFileName))

    def _take(self, tensors: list[Tensor]) -> None:
        raise InvalidTypeError(
            "a memory-mapped gadget takes no array but a .npy file; pass fileName or loadCupy() its path, or use DataGadget"
        )


class Matrices(OneArray, IndexedData):
    """What the matrices of co-occurrences share."""

    _role = ("total_classes",)
    _begin_by = "comInit()"

    def comInit(self) -> None:
        """Make the matrix, of zeros."""
        self._begin(lambda rows: rows.table.zero_())


class ArrayMatrices(Matrices):
    """Those that are shown as arrays."""

    CPUPinn: bool

    def comInit(self, CPUPinn: bool = False) -> None:
        """Make the matrix, of zeros; with `CPUPinn` in page-locked memory, whatever the constructor was given."""
        self.CPUPinn = self.CPUPinn or CPUPinn
        super().comInit()


def _as_plane(tensor: Tensor) -> tuple[Column, Tensor]:
    """Return what a row of `tensor` is, and its values as a table has them, ``(n, width)``."""
    if tensor.dim() == 0:
        raise InvalidValueError("the data are a single number but need rows; pass an array of one dimension or more")
    column = Column(tuple(tensor.shape[1:]), dtype_of(tensor.dtype, "the dtype of the data"))
    return column, stored_as(column.dtype, tensor, "the data").reshape(len(tensor), math.prod(column.tail))
