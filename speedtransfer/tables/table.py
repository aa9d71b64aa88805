"""The table: named planes over the same rows in one memory, gathered from and scattered to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, overload

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer import buffers
from speedtransfer.dtypes import rows_at
from speedtransfer.eager import uncompiled
from speedtransfer.engines import SELECTED
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.tables import stats
from speedtransfer.tables.growing import Growing
from speedtransfer.tables.index import as_index, check_distinct
from speedtransfer.tables.memories import Memory
from speedtransfer.tables.opened_files import LOW_BITS
from speedtransfer.tables.opening import Opening
from speedtransfer.tables.padded import padded_unique
from speedtransfer.tables.page_advice import FEW_ROWS, read_ahead_of_rows
from speedtransfer.tables.planes import CacheRows, Device, DType, MemoryName, PathLike, check_dtype
from speedtransfer.tables.records import Layout
from speedtransfer.tables.row_cache import check_cache
from speedtransfer.tables.row_values import as_rows, check_conversion, check_rows, overlap
from speedtransfer.tables.saving import Saving, open_memory
from speedtransfer.tables.stats import PaddedStats, TableStats
from speedtransfer.tables.unchecked import UncheckedRows
from speedtransfer.tables.unique import unique_rows
from speedtransfer.tables.whole_planes import WholePlanes

# Dtypes of an index that torch takes as it is.
_INDICES = {torch.int32, torch.int64}


class Table(Opening, Saving, WholePlanes, Growing, UncheckedRows):
    """Rows of one embedding: a weight plane and, once training needs them, planes of optimizer state beside it.

    Parameters
    ----------
    num_rows, dim : int
        Shape of the weight plane, zeroed at first.
    dtype : torch.dtype
        float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2, uint8, int8, int16, int32 or int64.
    memory : {"auto", "pinned", "pageable", "mmap", "device"}
        Where the rows live. "auto" is "pinned" where a CUDA device works and the table fits, else "pageable".
    path : path-like, optional
        The new file of a "mmap" table, ``.safetensors`` or ``.npy``.
    device : torch.device, optional
        The compute device that rows are gathered to: a CUDA device if there is one, else the CPU.
    layout : {"planes", "rows"}
        How planes that are added together lie, as those of an optimizer's state are. "planes": each in an array of its own.
        "rows": side by side in one record a row, which is then read from and written to one page of a file instead of
        several; the whole of such a plane is a strided view. The weights are an array of their own in either.
    cache_rows : int or "auto", optional
        Keep so many rows, those used most, on the compute device: they are gathered and scattered there, and written back to
        the table when others take their place, by `wait` and by whatever shows the table as a whole. "auto": as many as fit
        into a tenth of the free memory of the GPU (without one, a sixteenth of that of the host), with two planes of state
        beside the weights. Where memory for them cannot be had there are fewer. Results do not depend on it. A view of a plane
        is up to date after `wait`, and must not be written to by other means than torch; `numpy`, `cupy` and DLPack end the
        cache. Not for memory "device".
    cache_counts : Tensor, optional
        ``(num_rows,)``, how often each row is used, as far as is known: the cache then has the rows with the largest for good.
        By default it counts what is gathered, of late above all.
    max_rows : int, optional
        How many rows `grow` may give the table; None: it keeps its number of rows. Ordinary memory and files then become
        longer without a copy of the rows; rows that a table does not have yet take nothing.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        A size, dtype, memory, layout or cache that breaks a rule.
    DeviceError
        CUDA is asked for and missing.
    HostMemoryError, StorageError
        No room in memory or on disk, or `path` cannot be created.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: DType = torch.float32,
        memory: MemoryName = "auto",
        path: PathLike | None = None,
        device: Device = None,
        layout: Layout = "planes",
        cache_rows: CacheRows = None,
        cache_counts: Any = None,
        *,
        max_rows: int | None = None,
    ) -> None:
        num_rows, dim = check_size(num_rows, "num_rows"), check_size(dim, "dim")
        check_dtype(dtype)
        cache = check_cache(cache_rows, cache_counts, memory, num_rows)
        place = open_memory(memory, path, device, (num_rows, dim * dtype.itemsize), layout, max_rows)
        self._adopt(place, place.allocate("weight", num_rows, dim, dtype))._start_cache(cache)

    @classmethod
    def over(cls, place: Memory, num_rows: int, dim: int, dtype: DType) -> Self:
        """Make a table in a memory that exists."""
        check_dtype(dtype)
        return cls.__new__(cls)._adopt(place, place.allocate("weight", num_rows, dim, dtype))

    # --- rows in and out ----------------------------------------------------------------------------------------------

    @overload
    def gather(
        self,
        index: Any,
        planes: str = ...,
        out: Tensor | None = ...,
        *,
        dtype: DType | None = ...,
        check: bool = ...,
        catch_up: bool = ...,
    ) -> Tensor: ...
    @overload
    def gather(
        self, index: Any, planes: Sequence[str], *, dtype: DType | None = ..., check: bool = ..., catch_up: bool = ...
    ) -> dict[str, Tensor]: ...
    @uncompiled
    def gather(
        self,
        index: Any,
        planes: str | Sequence[str] = "weight",
        out: Tensor | None = None,
        *,
        dtype: DType | None = None,
        check: bool = True,
        catch_up: bool = True,
    ) -> Tensor | dict[str, Tensor]:
        """Copy rows to the compute device.

        Parameters
        ----------
        index : tensor, ndarray, list or int
            Row numbers: any integer dtype, shape and device; repeats are fine.
        planes : str or sequence of str
            One plane, or several moved in one call.
        out : Tensor, optional
            ``(*index.shape, width)`` on `device`, filled and returned (one plane only).
        dtype : torch.dtype, optional
            Of the rows returned; by default that of their plane. float32, float16 and bfloat16 are converted into each other
            on the way, to the nearest, so that the form stored is what crosses the bus.
        check : bool
            False: `index` is known to be a contiguous 1-D int64 tensor, on `device` or the CPU, with every value in range, and
            rows are wanted as they are stored.
        catch_up : bool
            False: return rows as they are stored, even if they have missed steps (``idle="exact"``).

        Returns
        -------
        Tensor or dict of str to Tensor
            ``(*index.shape, width)`` on `device`; a dict by plane where `planes` is a sequence.

        Raises
        ------
        RowIndexError, InvalidTypeError, InvalidValueError
            A row out of range; an index that holds no integers; an unknown plane; `out` that does not match. An index on a
            CUDA device is checked there, without waiting for it: a row out of range comes back as zeros, and the error is
            raised by the next call of the table that finds it (`wait` does for certain); until then others may come back so.
        """
        flat, shape, checked = as_index(index, self.num_rows, self.device) if check else (index, index.shape, True)
        caught_up = None
        if check and catch_up and self._caught_up is not None and self._place.refuses_writes:
            groups = unique_rows(flat, None if checked else self.num_rows, index)
            caught_up = self._caught_up(groups.ids)
        elif check and catch_up and self._catch_up is not None:
            if flat.is_cuda and self.takes_padding and len(flat):
                groups = padded_unique(flat, self.num_rows)
            else:
                groups = unique_rows(flat, None if checked else self.num_rows, index)
            self._catch_up(groups.ids, groups.known)
        names = [planes] if isinstance(planes, str) or not isinstance(planes, Iterable) else list(planes)
        stored = [self._planes[self._check_plane(name)] for name in names]
        dtypes = [check_conversion(plane.dtype, dtype) for plane in stored]
        if out is not None:
            if not isinstance(planes, str):
                raise InvalidValueError(f"out is one tensor but planes is {names!r}; pass one plane by its name")
            check_rows(out, (*shape, stored[0].shape[1]), dtypes[0], self.device, "out")
            flat_out = out.detach().reshape(flat.numel(), stored[0].shape[1]).contiguous()
            if overlap(flat_out, stored[0]):
                flat_out = torch.empty_like(flat_out)
            rows = [flat_out]
        else:
            # In the final shape: a view made under no_grad could not be changed in place.
            shaped = [
                buffers.empty((*shape, plane.shape[1]), kind, self.device)
                for plane, kind in zip(stored, dtypes, strict=True)
            ]
            rows = [values.view(flat.numel(), values.shape[-1]) for values in shaped]
        if self._cache is None:
            read_ahead_of_rows(stored, flat)
        ended = self._ended
        self._engine.gather(stored, flat, rows, check=not checked, unsorted=True)
        if self._begun != ended:
            with self._turn:
                stored = [self._planes[name] for name in names]
                self._engine.gather(stored, flat, rows, check=not checked, unsorted=True)
        if caught_up is not None:
            for name, values in zip(names, rows, strict=True):
                values.copy_(rows_at(caught_up[name], groups.inverse.view(-1)))
        num_bytes = flat.numel() * sum(plane.shape[1] * plane.element_size() for plane in stored)
        with stats.counting:
            self._stats.gathered_rows += flat.numel()
            self._stats.gathered_bytes += num_bytes
        if out is not None:
            if flat_out.data_ptr() != out.data_ptr() or not out.is_contiguous():
                out.detach().copy_(flat_out.view(out.shape))
            return out
        return shaped[0] if isinstance(planes, str) else dict(zip(names, shaped, strict=True))

    def look_up(self, index: Any) -> Tensor:
        """Return weights as they are stored: what ``gather(index, catch_up=False)`` returns, where it can in fewer calls."""
        rows = self._rows_at(index) if type(index) is Tensor and index.dtype in _INDICES else None
        return self.gather(index, catch_up=False) if rows is None else rows

    def _rows_at(self, index: Tensor) -> Tensor | None:
        """Return the weights at an index where one call of torch or of the engine does; None where `gather` has to."""
        weight, count = self._planes["weight"], index.numel()
        dim = weight.shape[1]
        num_bytes, ended = count * dim * weight.element_size(), self._ended
        if index.is_cuda:
            if index.dtype != torch.int64 or index.device != self._place.device or not index.is_contiguous():
                return None
            rows = torch.empty((*index.shape, dim), dtype=weight.dtype, device=index.device)
            self._engine.gather((weight,), index.view(count), (rows.view(count, dim),), check=True, unsorted=True)
        else:
            few = count < FEW_ROWS and num_bytes < buffers.SMALL_BYTES and weight.dtype in SELECTED
            if not (few and self._selects and index.device.type == "cpu"):
                return None
            try:
                rows = torch.embedding(weight, index)
            except IndexError:
                # `gather` raises the error that names the value and its place.
                return None
        if self._begun != ended:
            # Another thread writes.
            return None
        with stats.counting:
            self._stats.gathered_rows += count
            self._stats.gathered_bytes += num_bytes
        return rows

    @uncompiled
    def scatter(self, index: Any, rows: Any, *, convert: bool = False, check: bool = True) -> None:
        """Write rows into the table. A row named twice is an error: nothing is written.

        Parameters
        ----------
        index : tensor, ndarray, list or int
            Row numbers, none twice.
        rows : tensor, array, or dict of str to these
            ``(*index.shape, width)`` of the plane's dtype on `device`; a dict writes several planes in one call. Where rows
            have 24 bits, those beside the bfloat16 ("weight.low") become zero unless they are written too.
        convert : bool
            Take rows of another one of float32, float16 and bfloat16 than the plane's, and round them to the nearest.
        check : bool
            False: `index` is known to be as in `gather` and without repeats, `rows` to be contiguous and to match.

        Raises
        ------
        RowIndexError, InvalidTypeError, InvalidValueError
            As `gather`; also a repeated row, and rows whose shape, dtype or device do not match.
        """
        by_plane: Mapping[str, Any] = rows if isinstance(rows, Mapping) else {"weight": rows}
        stored = [self._planes[self._check_plane(name)] for name in by_plane]
        if check:
            flat, shape, checked = as_index(index, self.num_rows, self.device, own=True)
            check_distinct(flat, self.num_rows, index, checked)
            index = flat
            values = []
            for (name, value), plane in zip(by_plane.items(), stored, strict=True):
                given = value.dtype if convert and isinstance(value, Tensor) else plane.dtype
                dtype = check_conversion(plane.dtype, given)
                values.append(as_rows(value, (*shape, plane.shape[1]), dtype, self.device, f"rows for plane {name!r}"))
            values = [v.clone() if any(overlap(v, plane) for plane in stored) else v for v in values]
            if self._catch_up is not None:
                self._catch_up(flat)
            read_ahead_of_rows(stored, flat)
        else:
            values = [value.detach() for value in by_plane.values()]
        written = dict(zip(by_plane, values, strict=True))
        if LOW_BITS in self._planes and "weight" in written and LOW_BITS not in written:
            # Rows of 24 bits become these bfloat16 ones.
            written[LOW_BITS] = torch.zeros_like(written["weight"], dtype=torch.int8)
        self.write(index, written, unsorted=True)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: a table is one of this process."""
        raise InvalidTypeError("a table cannot be pickled; pickle the module that has it, or save it (table.save)")

    def __getitem__(self, index: Any) -> Tensor:
        return self.gather(self._expand(index))

    def __setitem__(self, index: Any, rows: Any) -> None:
        self.scatter(self._expand(index), rows)

    def _expand(self, index: Any) -> Any:
        if isinstance(index, tuple):
            raise InvalidTypeError(
                f"the index of the table is {index!r} but must be of rows; pass a list, as table[[1, 2]]"
            )
        return np.arange(*index.indices(self.num_rows)) if isinstance(index, slice) else index

    # --- what was moved -------------------------------------------------------------------------------------------------

    def stats(self) -> TableStats:
        """Return what has been moved so far (a copy)."""
        found = dataclasses.replace(self._stats)
        found.add(self._padded_stats.total())
        if self._cache is not None:
            found.add(self._cache.counts())
        return found

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._stats, self._padded_stats = TableStats(), PaddedStats()
        if self._cache is not None:
            self._cache.reset_counts()
