"""Encode the planes of a table: the codec and the initial value of each, and whole planes read and written."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import wait_until_filled
from speedtransfer.dtypes import FLOAT8_DTYPES, bits_of
from speedtransfer.encoding import (
    SCALE,
    BlocksFloat8,
    Codec,
    Keys,
    Part,
    codec_for,
    codec_of_planes,
    decode_rows,
    encode_rows,
    write_key,
)
from speedtransfer.tables import Placement, Table, check_room, row_chunks


class StoredPlanes:
    """The part of :class:`~speedtransfer.rows.Rows` that handles whole planes and their codecs.

    Parameters
    ----------
    table : Table
        Its dtype is the one stored.
    storage_dtype : torch.dtype, optional
        The dtype of `table`; rows are computed in float32, and for int8 and float8 a plane of scales is added, unless the
        table has one. None: rows are computed in the dtype of the table.
    state_dtype : torch.dtype, optional
        The dtype that optimizer state of the width and dtype of the weights is stored in: float32, bfloat16, or uint8 for
        8-bit blocks. None: as the optimizer makes it.
    scale_block : int, optional
        How many columns, at most, of float8 rows share a scale; None: 128, or as the table has it.
    dtype : torch.dtype, optional
        What encoded rows of a table that is only read become; None: float32.
    """

    def __init__(
        self,
        table: Table,
        storage_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | None = None,
        scale_block: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.table = table
        self.storage_dtype, self.state_dtype, self.scale_block = storage_dtype, state_dtype, scale_block
        # The dtype that the weights are computed in.
        self.dtype = table.dtype if storage_dtype is None else dtype or torch.float32
        self._tails: dict[str, tuple[int, ...]] = {}
        self._codecs: dict[str, Codec] = {}
        # What rows of a plane start from, by the suffix of the planes that store it; None: from the weights.
        self._initial: dict[str, dict[str, float] | None] = {}
        self._keep_layout("weight", self._codec_of_weights(), (table.dim,))
        for suffix, part in self._codecs["weight"].parts.items():
            if suffix and "weight" + suffix not in table.planes:
                table.add_plane("weight" + suffix, part.width, part.dtype)
        # Read, not drawn: the numbers drawn for the weights must be those of torch.nn.
        self._seed, self._count = torch.initial_seed(), 0
        # What rows are called where they draw random numbers, if not by their number here.
        self.name_rows: Callable[[Tensor], Tensor] | None = None
        # Which rows those of a state are that was loaded last, where rows belong to ids; None: there was a step since.
        self.placement: Placement | None = None

    def _codec_of_weights(self) -> Codec:
        """Return the codec that `scale_block` asks for, or the one of the scales that the table has."""
        table = self.table
        codec, scales = codec_for(table.dim, self.dtype, table.dtype, self.scale_block), "weight" + SCALE
        if self.storage_dtype in FLOAT8_DTYPES and scales in table.planes:
            plane = table.stored(scales)
            if (plane.shape[1], plane.dtype) != codec.parts[SCALE]:
                codec = codec_of_planes(table.dim, table.dtype, plane.shape[1], plane.dtype)
                # For what is made of this table.
                self.scale_block = max(table.dim // plane.shape[1], 1)
        return codec

    def _keep_layout(self, name: str, codec: Codec | None, tail: tuple[int, ...] = ()) -> None:
        """Set the codec of a plane; None: the plane was dropped."""
        if codec is None:
            self._codecs.pop(name, None)
            self._tails.pop(name, None)
            self._initial.pop(name, None)
        else:
            self._codecs[name], self._tails[name] = codec, tail
        # Whether every plane is a 2-D plane of the table without a codec: then rows need no decoding.
        self._as_stored = all(codec.name == "plain" and len(self._tails[n]) == 1 for n, codec in self._codecs.items())

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._seed

    @property
    def as_stored(self) -> bool:
        """Whether rows of every plane need no decoding, and none is anything but a vector."""
        return self._as_stored

    @property
    def rounds(self) -> bool:
        """Whether a step rounds what it writes, with new random numbers each time."""
        return any(codec.name != "plain" for codec in self._codecs.values())

    @property
    def plain(self) -> bool:
        """Whether the weights are stored without a codec."""
        return self.encoding("weight") == "plain"

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
        self.table.add_planes(parts)
        for name, codec in codecs.items():
            self._keep_layout(name, codec, planes[name][0])
            self._initial[name] = None if planes[name][2] is None else fills[name]
        try:
            for name, (_, _, initial) in planes.items():
                if initial is None:
                    self._fill(name, lambda rows: self._chunk("weight", rows))
        except BaseException:
            self.drop(*planes)
            raise

    def drop(self, *names: str) -> None:
        """Remove planes."""
        for plane in self._stored_names(names):
            self.table.drop_plane(plane)
        for name in names:
            self._keep_layout(name, None)

    def whole(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a whole plane, ``(num_rows, *tail)``, as a state dict shows it, on the device of the memory.

        A view of the table if `is_viewable`; else (int8, float8, 8-bit planes) a float32 copy, decoded in chunks. Or its rows
        from `start` to `stop`. HostMemoryError: a copy of a table in files does not fit into memory.
        """
        stop = self.table.num_rows if stop is None else stop
        shape = (stop - start, *self._tails[name])
        if self.is_viewable(name):
            return self.table.plane(name)[start:stop].view(shape)
        stored = self.table.stored(name)
        dtype = (
            stored.dtype if self._codecs[name].name == "plain" else self.dtype if name == "weight" else torch.float32
        )
        if not self.table.writable:
            check_room(math.prod(shape) * dtype.itemsize, f"{stop - start} rows")
        values = torch.empty(shape, dtype=dtype, device="cpu" if stored.is_meta else stored.device)
        for rows in self._chunks(name, start, stop):
            values[rows.start - start : rows.stop - start] = self._chunk(name, rows)
        return values

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a plane, ``(num_rows, *tail)``."""
        return self.table.num_rows, *self._tails[name]

    def is_viewable(self, name: str) -> bool:
        """Tell whether a whole plane can be a view of the table: its codec stores one number for each value, in one tensor."""
        return self._codecs[name].viewable and not self.table.stored(name).is_meta

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

    def _initial_parts(self, weights: Tensor) -> dict[str, Tensor]:
        """Return rows of each plane of the table as they start from `weights`, ``(n, dim)``: encoded to nearest."""
        encoded = self.encode("weight", weights)
        found = {"weight" + suffix: part for suffix, part in encoded.items()}
        for name, fills in self._initial.items():
            if fills is None:
                # Of the weights as they are stored.
                parts = self.encode(name, self.decode("weight", encoded).reshape(len(weights), *self._tails[name]))
            else:
                specs = self._codecs[name].parts
                parts = {
                    suffix: torch.full(
                        (len(weights), part.width), fills[suffix], dtype=part.dtype, device=weights.device
                    )
                    for suffix, part in specs.items()
                }
            found.update({name + suffix: part for suffix, part in parts.items()})
        return found

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
            self._fill("weight", lambda rows: empty.new_empty(rows.stop - rows.start, dim).normal_(), start, stop)

    # --- codecs --------------------------------------------------------------------------------------

    def encoding(self, name: str) -> str:
        """Return the name of a plane's codec: "plain", or a name with its dtype and block."""
        return self._codecs[name].name

    def part_specs(self, name: str) -> dict[str, Part]:
        """Return width and dtype of the planes that store a plane, by the suffix of their names."""
        return self._codecs[name].parts

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the planes of the table that store a plane, by the suffix of their names: "" and ".scale"."""
        return {suffix: self.table.plane(name + suffix) for suffix in self._codecs[name].parts}

    def decode(self, name: str, parts: dict[str, Tensor]) -> Tensor:
        """Decode rows, each part ``(n, width)``, to ``(n, *tail)`` values."""
        codec, tail = self._codecs[name], self._tails[name]
        rows = parts[""] if codec.name == "plain" else decode_rows(codec, parts)
        if name == "weight" and rows.dtype != self.dtype:
            rows = rows.to(self.dtype)
        # No view where none is needed: see `buffers.empty`.
        return rows if rows.shape[1:] == tail else rows.view(len(rows), *tail)

    def encode(self, name: str, values: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        """Encode ``(n, *tail)`` values, each part ``(n, width)``.

        Rounded to nearest, so that loading a state dict again gives the same; with `ids` (n,), as in a step, stochastically.
        Values in the float8 that rows are stored in become codes as they are.
        """
        codec, width = self._codecs[name], math.prod(self._tails[name])
        if ids is None and isinstance(codec, BlocksFloat8) and values.dtype == codec.parts[""].dtype:
            return codec.adopt(values.reshape(len(values), width).contiguous())
        if ids is None:
            values = values.to(codec.parts[""].dtype if codec.name == "plain" else torch.float32)
        flat = values.reshape(len(values), width).contiguous()
        if codec.name == "plain":
            return {"": flat}
        if ids is None:
            return encode_rows(codec, flat, None)
        # A copy of rows that were read as another dtype.
        flat = flat if flat.dtype == torch.float32 else flat.float()
        ids = ids if self.name_rows is None else self.name_rows(ids)
        return encode_rows(codec, flat, Keys(write_key(self._seed, self._count, name), ids.to(flat.device)))

    def state_dict(self) -> dict[str, int]:
        """Return the state of stochastic rounding: the seed and the number of writes."""
        return {"seed": self._seed, "writes": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue rounding from `state`; an empty one changes nothing."""
        self._seed, self._count = int(state.get("seed", self._seed)), int(state.get("writes", self._count))

    @torch.no_grad()
    def _fill(
        self,
        name: str,
        values: Callable[[slice], Tensor],
        start: int = 0,
        stop: int | None = None,
        keep: bool = False,
    ) -> None:
        """Set rows to what `values` returns for each chunk; `keep`: but not those that have the values already."""
        self.table.check_writable()
        planes = self.parts(name)
        for rows in self._chunks(name, start, stop):
            given = values(rows)
            same = self._same(name, rows, given) if keep else None
            for suffix, part in self.encode(name, given).items():
                part = part.to(planes[suffix].device)
                if same is not None:
                    part = torch.where(same, bits_of(planes[suffix][rows]), bits_of(part)).view(part.dtype)
                planes[suffix][rows] = part
        wait_until_filled(planes[""])

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

    def _stored_names(self, planes: Sequence[str]) -> list[str]:
        return [name + suffix for name in planes for suffix in self._codecs[name].parts]

    def _parts_of(self, name: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {suffix: rows[name + suffix] for suffix in self._codecs[name].parts}

    # --- copies -------------------------------------------------------------------------------------------------------

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
        return not self.table.writable and not self.plain and dtype.is_floating_point

    def copy(self) -> Self:
        """Return rows of a copy of the table with the same codecs, without state."""
        if self.table.writable:
            table = self.table.astype(self.table.dtype)
            _add_parts(table, self.parts("weight"))
        else:
            table = copy.deepcopy(self.table)
        made = type(self)(table, self.storage_dtype, self.state_dtype, self.scale_block, self.dtype)
        made.load_state_dict(self.state_dict())
        return made

    def pickled(self) -> dict[str, Any]:
        """Return what `unpickled` needs besides a table with the weight plane."""
        beside = {suffix: plane for suffix, plane in self.parts("weight").items() if suffix}
        return {
            "stored": self.table.dtype,
            "beside_dtypes": {suffix: plane.dtype for suffix, plane in beside.items()},
            "dtypes": (self.storage_dtype, self.state_dtype, self.scale_block),
            "dtype": self.dtype,
            "beside": {suffix: bits_of(plane) for suffix, plane in beside.items()},
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


def _add_parts(table: Table, parts: Mapping[str, Tensor]) -> None:
    """Add copies of the planes beside the weights to a table that has none."""
    for suffix, plane in parts.items():
        if suffix:
            table.add_plane("weight" + suffix, plane.shape[1], plane.dtype, plane)
