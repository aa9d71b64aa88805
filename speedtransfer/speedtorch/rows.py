"""Arrays of rows over one table, as NumPy sees them: any number of dimensions, any integer dtype, repeats in an index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import mapped_view, to_cupy, wait_until_filled
from speedtransfer.errors import InvalidValueError, RowIndexError
from speedtransfer.speedtorch.arrays import (
    for_numpy,
    numpy_dtype,
    row_numbers,
    stored_as,
    tensor_from,
    unreadable,
    wait_for,
)
from speedtransfer.tables import Table, as_index, copy_plane, overlap, unique_rows


class Column(NamedTuple):
    """What a row has in one plane: `tail` is its shape, `dtype` what its values are."""

    tail: tuple[int, ...]
    dtype: torch.dtype


class Index(NamedTuple):
    """Rows that are named: ``(n,)`` int64, the shape they were named in, and whether all are known to be in range."""

    flat: Tensor
    shape: tuple[int, ...]
    checked: bool


class Rows:
    """Planes of `table` with the shapes and dtypes of `columns`, which names them; `path` is the file that they are in."""

    def __init__(self, table: Table, columns: Mapping[str, Column], path: Path | None = None) -> None:
        self.table = table
        self.columns = dict(columns)
        self.path = path or table.path
        # Whether there are views of all rows, by which others may set them.
        self.lent = False
        self._is_mapped = table.memory == "pinned" and table.device.type == "cuda"
        self._array: Any = None

    def settle(self) -> None:
        """Wait until page-locked rows are as those with a view left them: engines and CuPy's kernels wait for no one."""
        if self.lent and self._is_mapped:
            torch.cuda.current_stream(self.table.device).synchronize()
            if self._array is not None:
                wait_for(self._array)
            self.table.wait()

    def index(self, index: Any) -> Index:
        """Return the rows that a slice, a mask of all rows, or a table's index names; negative numbers count from the end."""
        num_rows = self.table.num_rows
        return Index(*as_index(row_numbers(index, num_rows), num_rows, self.table.device))

    def batch(self, positive: Any, negative: Any = None) -> Index:
        """Return the rows of a batch, flat: those that `positive` names, then those that `negative` names if it is there."""
        found = [self.index(positive), *([] if negative is None else [self.index(negative)])]
        flat = torch.cat([one.flat.to(found[0].flat.device) for one in found])
        return Index(flat, tuple(flat.shape), all(one.checked for one in found))

    def read(self, index: Index, names: list[str]) -> dict[str, Tensor]:
        """Return rows of planes, ``(*index.shape, *tail)`` on the compute device: a copy for each time one is named."""
        rows = self.table.gather(index.flat, names, check=not index.checked)
        self.settle()
        return {name: self._shown(name, rows[name], index.shape) for name in names}

    def write(self, index: Index, values: Mapping[str, Any]) -> None:
        """Set rows of planes to ``(*index.shape, *tail)`` values. Of a row that is named twice the last value stays."""
        flat = index.flat
        rows = {name: self._given(name, value, index.shape) for name, value in values.items()}
        found = unique_rows(flat, None if index.checked else self.table.num_rows, flat)
        if len(found.ids) < len(flat):
            last = last_places(found.inverse, len(found.ids))
            flat, rows = found.ids, {name: value[last.to(value.device)] for name, value in rows.items()}
        # Somebody may copy rows from one place of a table to another.
        own = [self.table.stored(name) for name in self.columns]
        rows = {n: v.clone() if any(overlap(v, plane) for plane in own) else v for n, v in rows.items()}
        self.table.scatter(flat, rows, check=False)
        self.settle()

    def whole(self, name: str) -> Tensor:
        """Return all rows of a plane, ``(num_rows, *tail)``, over its memory."""
        return self._shown(name, self.table.plane(name), (self.table.num_rows,))

    def array(self, name: str) -> Any:
        """Return all rows over their memory: a CuPy array where CUDA reaches it, else a NumPy array."""
        self.lent, plane = True, self.table.plane(name)
        if not self._is_mapped:
            return self._as_array(name, plane)
        self._array = self._as_array(name, mapped_view(plane, self.table.device))
        return self._array

    def numpy(self, name: str) -> np.ndarray:
        """Return a copy of all rows on the host."""
        array: np.ndarray = self._as_array(name, self.table.plane(name).to("cpu", copy=True))
        return array

    def fill(self, name: str, values: Tensor) -> None:
        """Copy `values`, of all rows and as `to_copy` returns them, into a plane."""
        self.table.check_writable()
        plane = self.table.plane(name)
        copy_plane(plane, values.reshape(plane.shape))
        wait_until_filled(plane)

    def pick(self, name: str, index: Any) -> Tensor:
        """Return a copy of the values that any index of NumPy's names, tuples of slices among them, on the compute device."""
        plane, places = self.table.plane(name).view(-1), self._places(name, index)
        # As they are stored: there is no indexing of unsigned integers on CUDA.
        return plane[places.to(plane.device)].to(self.table.device).view(self.columns[name].dtype)

    def put(self, name: str, index: Any, value: Any) -> None:
        """Set the values that any index of NumPy's names; of one named twice the last value stays."""
        self.table.check_writable()
        plane, places = self.table.plane(name).view(-1), self._places(name, index)
        values = stored_as(self.columns[name].dtype, broadcast(value, tuple(places.shape)), "dataObject")
        found = unique_rows(places.reshape(-1))
        values = values.reshape(-1)[last_places(found.inverse, len(found.ids)).to(values.device)]
        plane.index_copy_(0, found.ids.to(plane.device), values.to(plane.device))
        wait_until_filled(plane)

    def _given(self, name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
        what, column = f"rows for {name!r}", self.columns[name]
        tensor = stored_as(column.dtype, tensor_from(value, what), what).to(self.table.device)
        if tuple(tensor.shape) != (*shape, *column.tail):
            raise InvalidValueError(
                f"{what} have shape {tuple(tensor.shape)} but the indexes ask for {(*shape, *column.tail)}; pass the same "
                "indexes to beforeForwardPass and afterOptimizerStep"
            )
        return tensor.reshape(math.prod(shape), math.prod(column.tail)).contiguous()

    def _as_array(self, name: str, plane: Tensor) -> Any:
        tail, dtype = self.columns[name]
        kind = numpy_dtype(dtype)
        return (to_cupy(plane) if plane.is_cuda else plane.numpy()).view(kind).reshape(self.table.num_rows, *tail)

    def _shown(self, name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        tail, dtype = self.columns[name]
        return values.view(dtype).view((*shape, *tail))

    def _places(self, name: str, index: Any) -> Tensor:
        """Return where in the flat plane the values are that `index` names, in the shape that NumPy gives them."""
        shape = (self.table.num_rows, *self.columns[name].tail)
        index = tuple(map(for_numpy, index)) if isinstance(index, tuple) else for_numpy(index)
        places, stride = np.zeros((), dtype=np.int64), math.prod(shape)
        try:
            for axis, size in enumerate(shape):  # of views that take no memory: what is named costs, not what there is
                stride //= max(size, 1)
                along = np.arange(size).reshape([-1 if other == axis else 1 for other in range(len(shape))])
                places = places + stride * np.broadcast_to(along, shape)[index]
        except IndexError as error:
            raise RowIndexError(f"indexes do not fit data of shape {shape}: {error}; pass others") from None
        except TypeError as error:
            raise unreadable(error) from None
        return torch.from_numpy(np.ascontiguousarray(places, dtype=np.int64)).view(np.shape(places))


def last_places(inverse: Tensor, count: int) -> Tensor:
    """Return where each of `count` values stands last in an index, by the places that `inverse` (n,) gives its entries."""
    order = torch.arange(len(inverse), device=inverse.device)
    return order.new_zeros(count).scatter_reduce_(0, inverse, order, "amax", include_self=False)


def broadcast(value: Any, shape: tuple[int, ...]) -> Tensor:
    """Return `value` in a shape."""
    tensor = tensor_from(value, "dataObject")
    try:
        return tensor.broadcast_to(shape)
    except RuntimeError:
        raise InvalidValueError(
            f"dataObject has shape {tuple(tensor.shape)} but indexes name values of shape {shape}; reshape it"
        ) from None
