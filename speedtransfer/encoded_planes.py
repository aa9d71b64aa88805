"""Encode the planes of a table: the codec and the initial value of each, and rows encoded and decoded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.encoding import (
    SCALE,
    SPLIT24,
    BlocksFloat8,
    Codec,
    Keys,
    Part,
    StorageDtype,
    codec_for,
    codec_of_planes,
    decode_rows,
    encode_rows,
    write_key,
)
from speedtransfer.tables import Placement, Table


class EncodedPlanes:
    """The part of :class:`~speedtransfer.rows.Rows` that knows how each plane is stored.

    Parameters
    ----------
    table : Table
        Its dtype is the one stored.
    storage_dtype : torch.dtype or "split24", optional
        The dtype of `table`; rows are computed in float32, and for int8 and float8 a plane of scales is added, unless the
        table has one. "split24": the table is bfloat16, and a plane of 8 bits more is added. None: rows are computed in the
        dtype of the table.
    state_dtype : torch.dtype, optional
        The dtype that optimizer state of the width and dtype of the weights is stored in: float32, bfloat16, or uint8 for
        8-bit blocks. None: as the optimizer makes it.
    scale_block : int, optional
        How many columns, at most, of float8 rows share a scale; None: 128, or as the table has it.
    dtype : torch.dtype, optional
        What encoded rows of a table that is only read become; None: float32. Of rows of 24 bits that are read as bfloat16
        the other plane is not read.
    """

    def __init__(
        self,
        table: Table,
        storage_dtype: StorageDtype | None = None,
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
        codec, scales = codec_for(table.dim, self.dtype, self.stored, self.scale_block), "weight" + SCALE
        if self.storage_dtype in FLOAT8_DTYPES and scales in table.planes:
            plane = table.stored(scales)
            if (plane.shape[1], plane.dtype) != codec.parts[SCALE]:
                codec = codec_of_planes(table.dim, table.dtype, plane.shape[1], plane.dtype)
                # For what is made of this table.
                self.scale_block = max(table.dim // plane.shape[1], 1)
        return codec

    def _keep_layout(self, name: str, codec: Codec | None, tail: tuple[int, ...] = ()) -> None:
        """Set the codec of a plane; None: the plane was dropped."""
        # New dicts: other threads may be reading.
        if codec is None:
            self._codecs = {other: codec for other, codec in self._codecs.items() if other != name}
            self._tails = {other: tail for other, tail in self._tails.items() if other != name}
            self._initial.pop(name, None)
        else:
            self._tails = {**self._tails, name: tail}
            self._codecs = {**self._codecs, name: codec}
        # Whether every plane is a 2-D plane of the table without a codec: then rows need no decoding.
        self._as_stored = all(codec.name == "plain" and len(self._tails[n]) == 1 for n, codec in self._codecs.items())

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return self._seed

    @property
    def stored(self) -> StorageDtype:
        """What the weights are stored in."""
        return SPLIT24 if self.storage_dtype == SPLIT24 else self.table.dtype

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

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a plane, ``(num_rows, *tail)``."""
        return self.table.num_rows, *self._tails[name]

    def is_viewable(self, name: str) -> bool:
        """Tell whether a whole plane can be a view of the table: its codec stores one number for each value, in one tensor.

        Weights that are in records are shown as copies: what is saved of a view would have the records.
        """
        apart = name != "weight" or not self.table.in_records
        return apart and self._codecs[name].viewable and not self.table.stored(name).is_meta

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

    def encoding(self, name: str) -> str:
        """Return the name of a plane's codec: "plain", or a name with its dtype and block."""
        return self._codecs[name].name

    def part_specs(self, name: str) -> dict[str, Part]:
        """Return width and dtype of the planes that store a plane, by the suffix of their names."""
        return self._codecs[name].parts

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the planes of the table that store a plane, by the suffix of their names: "", and ".scale" or ".low"."""
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

    def _stored_names(self, planes: Sequence[str]) -> list[str]:
        return [name + suffix for name in planes for suffix in self._codecs[name].parts]

    def _parts_of(self, name: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {suffix: rows[name + suffix] for suffix in self._codecs[name].parts}
