"""Arrays of rows over one table, as NumPy sees them: any number of dimensions, any integer dtype, repeats in an index."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.device import mapped_view, to_cupy
from speedtransfer.errors import InvalidValueError, RowIndexError
from speedtransfer.speedtorch.values import BITS, filled, host_array, stored_as, tensor_from
from speedtransfer.tables import Table, as_index, unique_rows
from speedtransfer.tables.rows import as_rows, overlap


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
    """Planes of `table` with the shapes and dtypes of `columns`, which names them."""

    def __init__(self, table: Table, columns: Mapping[str, Column]) -> None:
        self.table = table
        self.columns = dict(columns)
        self._planes = {name: table.plane(name) for name in columns}

    def index(self, *parts: Any) -> Index:
        """Return the rows that the `parts` name, one after the other: in the shape of a single one, flat where there are more.

        A part is a slice or what a table takes; a negative number counts from the end.

        Raises
        ------
        RowIndexError, InvalidTypeError, InvalidValueError
            As :meth:`speedtransfer.Table.gather`.
        """
        num_rows, device = self.table.num_rows, self.table.device
        found = [Index(*as_index(_from_the_end(part, num_rows), num_rows, device)) for part in parts]
        if len(found) == 1:
            return found[0]
        where = found[0].flat.device if len({one.flat.device for one in found}) == 1 else device
        flat = torch.cat([one.flat.to(where) for one in found])
        return Index(flat, tuple(flat.shape), all(one.checked for one in found))

    def read(self, index: Index, names: list[str]) -> dict[str, Tensor]:
        """Return rows of planes, ``(*index.shape, *tail)`` on the compute device: a copy for each time one is named."""
        rows = self.table.gather(index.flat, names, check=not index.checked)
        return {name: self._shown(name, rows[name], index.shape) for name in names}

    def write(self, index: Index, values: Mapping[str, Any]) -> None:
        """Set rows of planes to ``(*index.shape, *tail)`` values. Of a row that is named twice the last value stays.

        Raises
        ------
        InvalidValueError, InvalidTypeError
            Another shape, or a dtype that would lose what the numbers mean; nothing has been written then.
        """
        flat = index.flat
        rows = {name: self._given(name, value, index.shape) for name, value in values.items()}
        found = unique_rows(flat, None if index.checked else self.table.num_rows, flat)
        if len(found.ids) < len(flat):
            last = last_places(found.inverse, len(found.ids))
            flat, rows = found.ids, {name: value[last.to(value.device)] for name, value in rows.items()}
        own = self._planes.values()  # somebody may copy rows from one place of a table to another
        rows = {n: v.clone() if any(overlap(v, plane) for plane in own) else v for n, v in rows.items()}
        self.table.scatter(flat, rows, check=False)

    def whole(self, name: str) -> Tensor:
        """Return all rows of a plane, ``(num_rows, *tail)``, over its memory."""
        return self._shown(name, self.table.plane(name), (self.table.num_rows,))

    def array(self, name: str) -> Any:
        """Return all rows over their memory: a CuPy array where CUDA reaches it, else a NumPy array."""
        plane, column = self.table.plane(name), self.columns[name]
        if plane.is_cuda:
            array = to_cupy(plane)
        elif self.table.memory == "pinned" and self.table.device.type == "cuda":
            array = to_cupy(mapped_view(plane, self.table.device))
        else:
            array = host_array(plane)
        if column.dtype in BITS:
            array = array.view(str(column.dtype).removeprefix("torch."))
        return array.reshape(len(plane), *column.tail)

    def numpy(self, name: str) -> np.ndarray:
        """Return a copy of all rows on the host."""
        column = self.columns[name]
        array = host_array(self.table.plane(name).cpu()).copy()
        if column.dtype in BITS:
            array = array.view(str(column.dtype).removeprefix("torch."))
        return array.reshape(len(array), *column.tail)

    def pick(self, name: str, index: Any) -> Tensor:
        """Return the values that any index of NumPy's names, tuples of slices among them, on the compute device."""
        places = torch.from_numpy(self._places(name, index))
        plane = self.whole(name).reshape(-1)
        return plane[places.to(plane.device)].to(self.table.device)

    def put(self, name: str, index: Any, value: Any) -> None:
        """Set the values that any index of NumPy's names; of one named twice the last value stays."""
        places = torch.from_numpy(self._places(name, index))
        values = stored_as(self.columns[name].dtype, _broadcast(value, tuple(places.shape)), "dataObject")
        found = unique_rows(places.reshape(-1))
        values = values.reshape(-1)[last_places(found.inverse, len(found.ids)).to(values.device)]
        plane = self.table.plane(name).view(-1)
        plane.index_copy_(0, found.ids.to(plane.device), values.to(plane.device))
        filled(plane)

    def broadcast(self, name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
        """Return `value` in the shape of the rows of an index of `shape`."""
        return _broadcast(value, (*shape, *self.columns[name].tail))

    def _given(self, name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
        what, column = f"rows for {name!r}", self.columns[name]
        tensor = stored_as(column.dtype, tensor_from(value, what), what).to(self.table.device)
        if tuple(tensor.shape) != (*shape, *column.tail):
            raise InvalidValueError(
                f"{what} have shape {tuple(tensor.shape)} but the indexes ask for {(*shape, *column.tail)}; pass the same "
                "indexes to beforeForwardPass and afterOptimizerStep"
            )
        width = math.prod(column.tail)
        flat = tensor.reshape(math.prod(shape), width)
        return as_rows(flat, (len(flat), width), tensor.dtype, self.table.device, what)

    def _shown(self, name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        column = self.columns[name]
        bits = values.view(column.dtype) if column.dtype in BITS else values
        return bits.view((*shape, *column.tail))

    def _places(self, name: str, index: Any) -> np.ndarray:
        """Return where in the flat plane the values are that `index` names, in the shape that NumPy gives them."""
        shape = (self.table.num_rows, *self.columns[name].tail)
        index = tuple(map(_for_numpy, index)) if isinstance(index, tuple) else _for_numpy(index)
        places, stride = np.zeros((), dtype=np.int64), math.prod(shape)
        try:
            for axis, size in enumerate(shape):  # of views that take no memory: what is named costs, not what there is
                stride //= max(size, 1)
                along = np.arange(size).reshape([-1 if other == axis else 1 for other in range(len(shape))])
                places = places + stride * np.broadcast_to(along, shape)[index]
        except IndexError as error:
            raise RowIndexError(f"indexes do not fit data of shape {shape}: {error}; pass others") from None
        return np.ascontiguousarray(places, dtype=np.int64).reshape(np.shape(places))


def last_places(inverse: Tensor, count: int) -> Tensor:
    """Return where each of `count` values stands last in an index, by the places that `inverse` (n,) gives its entries."""
    order = torch.arange(len(inverse), device=inverse.device)
    return order.new_zeros(count).scatter_reduce_(0, inverse, order, "amax", include_self=False)


def _broadcast(value: Any, shape: tuple[int, ...]) -> Tensor:
    tensor = tensor_from(value, "dataObject")
    try:
        return tensor.broadcast_to(shape)
    except RuntimeError:
        raise InvalidValueError(
            f"dataObject has shape {tuple(tensor.shape)} but indexes name values of shape {shape}; reshape it"
        ) from None


def _for_numpy(index: Any) -> Any:
    if hasattr(index, "__cuda_array_interface__") and not isinstance(index, Tensor):
        index = torch.as_tensor(index, device="cuda")
    return index.detach().cpu().numpy() if isinstance(index, Tensor) else index


def _from_the_end(index: Any, num_rows: int) -> Any:
    """Return `index` with its negative numbers counted from the end, as far as that leads to a row."""
    if isinstance(index, slice):
        return np.arange(*index.indices(num_rows))
    if not isinstance(index, Tensor):
        if hasattr(index, "__cuda_array_interface__"):
            index = torch.as_tensor(index, device="cuda")
        else:
            try:
                array = np.asarray(index)
            except ValueError:  # a ragged list, of which the table speaks
                return index
            if array.dtype.kind != "i" or not array.size or array.min() >= 0:
                return index
            index = torch.from_numpy(array.astype(np.int64))
    if not index.dtype.is_signed or index.dtype.is_floating_point or index.dtype.is_complex:
        return index
    if index.device.type == "cpu" and (not index.numel() or int(index.min()) >= 0):
        return index
    index = index.detach().long()
    return torch.where((index < 0) & (index >= -num_rows), index + num_rows, index)
