"""Read and write whole planes of a table, encoded as they are stored; add, drop and copy them."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import wait_until_filled
from speedtransfer.dtypes import FLOAT8_DTYPES, bits_of
from speedtransfer.encoded_planes import EncodedPlanes
from speedtransfer.encoding import SPLIT24, BlocksFloat8, Codec, codec_for, encode_rows
from speedtransfer.interrupts import to_its_end
from speedtransfer.tables import Placement, Table, check_room, refuse, row_chunks


class StoredPlanes(EncodedPlanes):
    """The part of :class:`~speedtransfer.rows.Rows` that handles whole planes; its parameters are those of its base."""

    def add(self, name: str, tail: tuple[int, ...], dtype: torch.dtype, initial: float | None) -> None:
        """Add a plane of rows of shape `tail` with the value `initial`; None: a copy of the weights."""
        self.add_together({name: (tail, dtype, initial)})

    def add_together(self, planes: Mapping[str, tuple[tuple[int, ...], torch.dtype, float | None]]) -> None:
        """Add several planes, all or none: by name what `add` takes. The layout of the table may have them share records."""
        codecs, parts = dict[str, Codec](), dict[str, tuple[int, torch.dtype, float]]()
        fills = dict[str, dict[str, float]]()
        for name, (tail, dtype, initial) in planes.items():
            width = math.prod(tail)
            small = self.state_dtype is not None and dtype == self.dtype and width > 1
            codec = codec_for(width, dtype, self.state_dtype if small and self.state_dtype else dtype)
            first = encode_rows(codec, torch.full((1, width), initial or 0.0, dtype=dtype, device="cpu"), None)
            fills[name] = {suffix: float(row[0, 0]) if row.numel() else 0.0 for suffix, row in first.items()}
            for suffix, part in codec.parts.items():
                parts[name + suffix] = part.width, part.dtype, fills[name][suffix]
            codecs[name] = codec
        there = set(self.table.planes)
        try:
            self.table.add_planes(parts, beside_weights=True)
            for name, codec in codecs.items():
                self._keep_layout(name, codec, planes[name][0])
                self._initial[name] = None if planes[name][2] is None else fills[name]
            for name, (_, _, initial) in planes.items():
                if initial is None:
                    self._fill(name, lambda rows: self._chunk("weight", rows))
        except BaseException:
            if there.isdisjoint(parts):
                self._drop(codecs, parts)
            raise

    def has(self, name: str) -> bool:
        """Tell whether there is a plane of this name."""
        return name in self._codecs

    def drop(self, *names: str) -> None:
        """Remove planes."""
        parts = self._stored_names(names)
        to_its_end(lambda: self._drop(names, parts))

    def _drop(self, names: Iterable[str], parts: Iterable[str]) -> None:
        for part in parts:
            if part in self.table.planes:
                self.table.drop_plane(part)
        for name in names:
            self._keep_layout(name, None)

    def whole(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a whole plane, ``(num_rows, *tail)``, as a state dict shows it, on the device of the memory.

        A view of the table if `is_viewable`; else a copy, made in chunks, float32 where it is decoded (int8, float8, split24,
        8-bit planes). Or rows from `start` to `stop`. HostMemoryError: a copy of a table in files does not fit into memory.
        """
        stop = self.table.num_rows if stop is None else stop
        shape = (stop - start, *self._tails[name])
        if self.is_viewable(name):
            return self.table.plane(name)[start:stop].view(shape)
        stored = self.table.stored(name)
        dtype = stored.dtype if self._codecs[name].viewable else self.dtype if name == "weight" else torch.float32
        if not self.table.writable or self.table.in_records:
            check_room(math.prod(shape) * dtype.itemsize, f"{stop - start} rows")
        values = torch.empty(shape, dtype=dtype, device="cpu" if stored.is_meta else stored.device)
        for rows in self._chunks(name, start, stop):
            values[rows.start - start : rows.stop - start] = self._chunk(name, rows)
        return values

    @torch.no_grad()
    def first_difference(self, name: str, values: Callable[[slice], Tensor]) -> int | None:
        """Return the first row of a plane that is not what `values` returns for a slice of rows; None: they are equal."""
        for rows in self._chunks(name):
            ours = self._chunk(name, rows)
            theirs = values(rows).to(ours.device, ours.dtype)
            wide = torch.float32 if ours.dtype in FLOAT8_DTYPES else ours.dtype
            ours, theirs = ours.to(wide), theirs.to(wide)
            equal = ours == theirs
            if wide.is_floating_point:
                equal |= ours.isnan() & theirs.isnan()
            if not equal.all():
                return rows.start + int((~equal.flatten(1).all(1)).int().argmax())
        return None

    def load(self, name: str, values: Tensor, start: int = 0) -> None:
        """Set a whole plane, or its rows from `start` on, to ``(n, *tail)`` values of any dtype and device.

        They are rounded to nearest.
        """
        # The momentum of torch's SGD for sparse gradients.
        if values.layout != torch.strided:
            values = values.to_dense()
        stop = start + len(values)
        self._fill(name, lambda rows: values[rows.start - start : rows.stop - start], start, stop, keep=True)

    @torch.no_grad()
    def change(self, function: Callable[[Tensor, slice], object], start: int, stop: int, draws: bool) -> None:
        """Have `function` change the weights of the rows from `start` to `stop`, in chunks.

        It gets rows ``(n, dim)`` on the compute device, to be changed in place, and which they are, counted from `start`. They
        are rounded to nearest, or stochastically, as in a step, if it `draws`.
        """
        begun = -1, torch.empty(0, device="cpu")

        def changed(rows: slice) -> Tensor:
            nonlocal begun
            # After an interrupt a chunk is asked for again, of which a part may have been written.
            if begun[0] != rows.start:
                values = self._chunk("weight", rows).to(self.table.device, self.dtype, copy=True)
                function(values, slice(rows.start - start, rows.stop - start))
                begun = rows.start, values
            return begun[1]

        self._fill("weight", changed, start, stop, keep=True, draws=draws)
        # Else state would be rounded otherwise after this change than where a tensor over the memory makes it.
        self._count += draws and not self.plain

    def place(self, name: str, values: Tensor, placement: Placement) -> None:
        """Set rows of a plane to those of ``(num_saved, *tail)`` values that `placement` gives them, rounded to nearest.

        They must have missed no steps.
        """
        if placement.is_whole:
            self.load(name, values)
            return
        values = values if values.layout == torch.strided else values.to_dense()
        for source, target in placement.pairs(4 * math.prod(self._tails[name])):
            self.put(name, target, values[source.to(values.device)])

    @property
    def num_loadable(self) -> int:
        """How many rows a state has that fits."""
        return self.table.num_rows if self.placement is None else self.placement.num_saved

    def take(self, name: str, source: StoredPlanes) -> None:
        """Set a whole plane to the values of the same plane of `source`, of as many rows."""
        self._fill(name, lambda rows: source._chunk(name, rows))

    @torch.no_grad()
    def put(self, name: str, ids: Tensor, values: Tensor) -> None:
        """Set the rows `ids` (n,), unique, of a plane to ``(n, *tail)`` values of any dtype and device, rounded to nearest.

        They must have missed no steps.
        """
        device = self.table.device
        parts = {name + suffix: part.to(device) for suffix, part in self.encode(name, values).items()}
        self.table.write(ids.to(device), parts, unsorted=True)

    @torch.no_grad()
    def normal_(self, start: int = 0, stop: int | None = None) -> None:
        """Draw the weights, or their rows from `start` to `stop`, from N(0, 1).

        With the same seed they are the numbers of ``torch.nn`` for a weight of these rows, whatever the codec.
        """
        if self.plain and start == 0 and stop is None:
            self.table.normal_()
        else:
            dim = self.table.dim
            # With explicit dtype and device: the defaults of torch may be others.
            empty = torch.empty(0, dtype=self.dtype, device="cpu")
            begun: tuple[int, Tensor] | None = None

            def drawn(rows: slice) -> Tensor:
                nonlocal begun
                if begun is not None and begun[0] == rows.start:
                    # After an interrupt the numbers of a chunk are drawn again: the same ones.
                    torch.set_rng_state(begun[1])
                begun = rows.start, torch.get_rng_state()
                return empty.new_empty(rows.stop - rows.start, dim).normal_()

            self._fill("weight", drawn, start, stop)

    @torch.no_grad()
    def _fill(
        self,
        name: str,
        values: Callable[[slice], Tensor],
        start: int = 0,
        stop: int | None = None,
        keep: bool = False,
        draws: bool = False,
    ) -> None:
        """Set rows to what `values` returns for each chunk; `keep`: but not those that have the values already.

        They are rounded to nearest, or stochastically if it `draws`.
        """
        self.table.check_writable()
        self.table.end_snapshot()
        todo, began = deque(self._chunks(name, start, stop)), list[bool]()

        def fill() -> None:
            while todo:
                rows = todo[0]
                given = values(rows)
                planes = self.parts(name)
                same = self._same(name, rows, given) if keep else None
                ids = torch.arange(rows.start, rows.stop, device=given.device) if draws else None
                encoded = self.encode(name, given, ids)
                parts = {suffix: part.to(planes[suffix].device) for suffix, part in encoded.items()}
                if same is not None:
                    for suffix, part in parts.items():
                        parts[suffix] = torch.where(same, bits_of(planes[suffix][rows]), bits_of(part)).view(part.dtype)
                began.append(True)
                for suffix, part in parts.items():
                    planes[suffix][rows] = part
                todo.popleft()
                # Before the next ones: what is freed while they are there stays with the process.
                del given, same, parts, part

        try:
            fill()
        except BaseException:
            # What has been begun is brought to its end.
            if began:
                try:
                    fill()
                except BaseException:
                    refuse(self.table, f"plane {name!r} of a table", "st.load_checkpoint")
                    raise
            raise
        wait_until_filled(self.parts(name)[""])

    def _same(self, name: str, rows: slice, values: Tensor) -> Tensor | None:
        """Tell which rows have just the values given, (n, 1) bool, and need not be encoded anew; None: that changes none.

        Those of float8 may have scales that this library would not choose, with which others would be rounded again.
        """
        if not isinstance(self._codecs[name], BlocksFloat8):
            return None
        stored = self._chunk(name, rows)
        wanted = values.to(stored.device, stored.dtype).reshape(stored.shape).contiguous()
        return (stored.view(torch.int32) == wanted.view(torch.int32)).all(1, keepdim=True)

    def _chunk(self, name: str, rows: slice) -> Tensor:
        parts = {suffix: self.table.chunk(name + suffix, rows) for suffix in self._codecs[name].parts}
        return self.decode(name, {suffix: part.contiguous() for suffix, part in parts.items()})

    def _chunks(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[slice]:
        stop = self.table.num_rows if stop is None else stop
        for rows in row_chunks(stop - start, 4 * math.prod(self._tails[name])):
            yield slice(rows.start + start, rows.stop + start)

    def astype(self, dtype: torch.dtype) -> Self:
        """Return rows of a new table of the same kind, with the weights in `dtype` without a codec, and without state.

        Encoded rows that are only read become `dtype` when they are read.
        """
        if self.reads_as(dtype):
            return type(self)(self.table, self.storage_dtype, self.state_dtype, self.scale_block, dtype)
        made = type(self)(self.table.astype(dtype))
        if not self._codecs["weight"].viewable:
            made._fill("weight", lambda rows: self._chunk("weight", rows))
        return made

    def reads_as(self, dtype: torch.dtype) -> bool:
        """Tell whether rows can become `dtype` when they are read, as they are encoded and never written."""
        encoded = not self.plain or self.storage_dtype == SPLIT24
        return not self.table.writable and encoded and dtype.is_floating_point

    def copy(self) -> Self:
        """Return rows of a copy of the table with the same codecs, without state."""
        if not self.table.is_read_only:
            table = self.table.astype(self.table.dtype)
            _add_parts(table, self.parts("weight"))
        else:
            table = copy.deepcopy(self.table)
        made = type(self)(table, self.storage_dtype, self.state_dtype, self.scale_block, self.dtype)
        made.load_state_dict(self.state_dict())
        return made

    def pickled(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the weight plane, its bits if it is float8, and what `unpickled` needs besides a table with it."""
        planes = self.parts("weight")
        beside = {suffix: _without_records(plane) for suffix, plane in planes.items()}
        weight = beside.pop("")
        # The bfloat16 of 24 bits that were only read.
        alone = self.plain and self.storage_dtype == SPLIT24
        return weight, {
            "stored": self.table.dtype,
            "beside_dtypes": {suffix: planes[suffix].dtype for suffix in beside},
            "dtypes": (None if alone else self.storage_dtype, self.state_dtype, self.scale_block),
            "dtype": self.dtype,
            "beside": beside,
            "rounding": self.state_dict(),
            "layout": self.table.layout,
            "cache": self.table._cache_options,
            "max_rows": self.table.max_rows,
        }

    @classmethod
    def unpickled(cls, table: Table, pickled: dict[str, Any]) -> Self:
        """Return the rows that `pickled` describes."""
        # An older version named no dtypes.
        dtypes = pickled.get("beside_dtypes", {})
        _add_parts(table, {s: plane.view(dtypes.get(s, plane.dtype)) for s, plane in pickled["beside"].items()})
        storage_dtype, state_dtype, *block = pickled["dtypes"]
        made = cls(table, storage_dtype, state_dtype, block[0] if block else None, pickled.get("dtype"))
        made.load_state_dict(pickled["rounding"])
        # An older version had none.
        table.layout, table._place.max_rows = pickled.get("layout", table.layout), pickled.get("max_rows")
        table._start_cache(pickled.get("cache"))
        return made


def _without_records(plane: Tensor) -> Tensor:
    """Return the bits of a plane to be pickled: of one in records a copy, as all of a tensor's memory is pickled with it."""
    if not plane.is_contiguous():
        check_room(plane.nbytes, f"{len(plane)} rows")
    return bits_of(plane.contiguous())


def _add_parts(table: Table, parts: Mapping[str, Tensor]) -> None:
    """Add copies of the planes beside the weights to a table that has none."""
    for suffix, plane in parts.items():
        if suffix:
            table.add_plane("weight" + suffix, plane.shape[1], plane.dtype, plane)
