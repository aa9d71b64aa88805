"""What all SpeedTorch classes share: their rows, views and copies of them, files, and the memories that rows live in."""

# ruff: noqa: N802, N803 - the names are SpeedTorch's

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.speedtorch.arrays import dtype_of, stored_dtype, tensor_from, to_copy
from speedtransfer.speedtorch.files import npy_path, read_npy, read_torch, write_npy, write_torch
from speedtransfer.speedtorch.place import Place, cpu_or_cuda, in_file, on_cuda
from speedtransfer.speedtorch.rows import Column, Rows
from speedtransfer.tables import PathLike


class NoRowsError(InvalidValueError, AttributeError):
    """The rows have not been made yet. An AttributeError too, so that hasattr() of a view says False until then."""


class Storage(ABC):
    """Rows in one memory.

    A memory below says where they are (`_place`); a role how they are made and how arrays are loaded (`_take`).
    """

    _several: ClassVar[bool] = False  # arrays, one for each state of an optimizer
    _begin_by: ClassVar[str] = ""
    _held: Rows | None = None

    @abstractmethod
    def _place(self) -> Place:
        """Return where to make the rows."""

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

    def _lent(self, views: list[Any]) -> Any:
        """Return what a call that shows rows over their memory returns."""
        return views[0]

    def _set(self, value: Any) -> None:
        self._take([tensor_from(one, "the array") for one in (value if self._several else [value])])

    def getCupyVar(self) -> Any:
        """Return all rows over their memory: a CuPy array where CUDA reaches it, else a NumPy array, which is used alike.

        An optimizer's switcher returns a list, one array for each name in `optVarList`; an item that is set is loaded.
        """
        return self._lent([self._rows.array(name) for name in self._rows.columns])

    getCupyMM = getCupyVar  # noqa: N815

    def getTorchVar(self) -> Any:
        """Return all rows as a tensor over their memory, on the CPU unless that is the device's; a list as `getCupyVar`."""
        self._rows.lend()
        return self._lent(self._whole())

    def getNumpyVersion(self) -> Any:
        """Return a copy of all rows as a NumPy array; of an optimizer's switcher a tuple of them."""
        copies = [self._rows.numpy(name) for name in self._rows.columns]
        return tuple(copies) if self._several else copies[0]

    def saveCupy(self, saveFileName: PathLike) -> None:
        """Write all rows to a ``.npy`` file, chunk by chunk; the states of an optimizer as one array of all.

        A file that rows are mapped from stays what it is, and has every change.

        Raises
        ------
        StorageError, InvalidTypeError
            The file cannot be written; NumPy has no such dtype.
        """
        rows, target = self._rows, npy_path(saveFileName)
        own = rows.path
        if own is not None and own.exists() and target.exists() and target.samefile(own):
            rows.table.flush()  # it has every change, and a new file in its place would get no more of them
            return
        write_npy(target, self._whole(), self._several)

    def loadCupy(self, loadFileName: PathLike) -> None:
        """Read all rows from a ``.npy`` file of `saveCupy`, cupy.save or numpy.save.

        Raises
        ------
        StorageError, InvalidValueError, InvalidTypeError
            The file cannot be read, or holds what these rows cannot be. They stay as they are then.
        """
        self._set(read_npy(loadFileName))

    def saveTorch(self, saveFileName: PathLike) -> None:
        """Write all rows as a tensor by torch.save, on the CPU; the states of an optimizer as a list of them."""
        write_torch(saveFileName, self._whole() if self._several else self._whole()[0])

    def loadTorch(self, loadFileName: PathLike) -> None:
        """Read all rows from a file of `saveTorch` or torch.save, tensors only: nothing pickled is run.

        Raises
        ------
        StorageError, InvalidValueError, InvalidTypeError
            As `loadCupy`.
        """
        found = read_torch(loadFileName)
        tensors = list(found) if isinstance(found, list | tuple) else [found]
        if not all(isinstance(tensor, Tensor) for tensor in tensors) or isinstance(found, Tensor) is self._several:
            what = "a list of tensors, one for each state" if self._several else "a tensor"
            raise StorageError(
                f"{str(loadFileName)!r} holds a {type(found).__name__} but must hold {what}; save one with torch.save"
            )
        self._take([tensor.detach() for tensor in tensors])


def view_of(get: str, doc: str) -> property:
    """Return a property: reading calls the method `get`, assigning loads an array, and del frees the rows."""

    def read(self: Storage) -> Any:
        return getattr(self, get)()

    def write(self: Storage, value: Any) -> None:
        if value is None:
            delete(self)
        else:
            self._set(value)

    def delete(self: Storage) -> None:
        self._held = None

    return property(read, write, delete, doc)


class OneArray(Storage):
    """Rows of one array, whose shape the constructor fixes."""

    _fixed_by: ClassVar[str]  # says which arguments name the shape; formatted with its two sizes

    def _set_shape(self, shape: tuple[int, int], datatype: Any) -> None:
        self._shape = shape
        self.datatype = self.dtype = datatype
        self._column = Column(shape[1:], dtype_of(datatype))

    def _begin(self, fill: Callable[[Rows], Any]) -> None:
        """Have `fill` set the rows, which are made if there are none."""
        rows = self._rows if self._held is not None else self._new_rows()
        fill(rows)
        self._held = rows

    def _new_rows(self) -> Rows:
        table = self._place().table(*self._shape, stored_dtype(self._column.dtype))
        return Rows(table, {"weight": self._column})

    def _take(self, tensors: list[Tensor]) -> None:
        (tensor,) = tensors
        if tuple(tensor.shape) != self._shape:
            raise InvalidValueError(
                f"the array has shape {tuple(tensor.shape)} but {self._fixed_by.format(*self._shape)}; load one of shape "
                f"{self._shape}, or make a {type(self).__name__} for this one"
            )
        source = to_copy(self._column.dtype, tensor, "the array")
        self._begin(lambda rows: rows.fill("weight", source))


# --- memories -----------------------------------------------------------------------------------------------------------


ARRAY_DOC = "All rows over their memory, as `getCupyVar` returns them; assign an array to load it."
TENSOR_DOC = "All rows over their memory, as `getTorchVar` returns them; assign a tensor to load it."


class CudaOrPinned(Storage):
    """Rows on the GPU, or in page-locked memory where `CPUPinn` is True."""

    CPUPinn: bool

    def _place(self) -> Place:
        return on_cuda("pinned" if self.CPUPinn else "device")

    CUPYcorpus = view_of("getCupyVar", ARRAY_DOC)


class MemoryMapped(Storage):
    """Rows in a file mapped into memory: the new file `path`, or one without a name in `_folder`."""

    path: PathLike | None = None
    _folder: PathLike = ""

    def _place(self) -> Place:
        return in_file(self.path, self._folder)

    def _keep_in(self, diskname: str, CPUPinn: bool, path: PathLike | None) -> None:
        self.diskname, self.CPUPinn, self.path, self._folder = diskname, CPUPinn, path, os.path.dirname(diskname)

    CUPYmemmap = view_of("getCupyMM", ARRAY_DOC)


class Cuda(Storage):
    """Rows on the GPU."""

    def _place(self) -> Place:
        return on_cuda("device")

    pytorchGPUVar = view_of("getTorchVar", TENSOR_DOC)  # noqa: N815


class Pinned(Storage):
    """Rows in page-locked memory."""

    def _place(self) -> Place:
        return on_cuda("pinned")

    pytorchCPUVar = view_of("getTorchVar", TENSOR_DOC)  # noqa: N815


class AnyDevice(Storage):
    """Rows on the GPU, or in ordinary or page-locked memory."""

    deviceType: Any  # noqa: N815
    pinType: bool  # noqa: N815

    def _variable(self) -> Tensor | None:
        return None

    def _place(self) -> Place:
        return cpu_or_cuda(self.deviceType, self.pinType, self._variable())

    pytorchGPUVar = view_of("getTorchVar", TENSOR_DOC)  # noqa: N815
