"""The planes of a table as they are computed with: which codec stores each, how they start, whole planes in and out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer.cuda import wait_until_filled
from speedtransfer.encoding import Codec, Keys, codec_for, column_keys, decode_rows, encode_rows, row_keys
from speedtransfer.tables import Table, read_ahead, row_chunks


class StoredPlanes:
    """The part of :class:`~speedtransfer.rows.Rows` that handles whole planes and how they are stored.

    Parameters
    ----------
    table : Table
        Its dtype is the one stored.
    storage_dtype : torch.dtype, optional
        That of `table`, where rows are computed in float32 whatever it is; None: they are computed as they are stored. With
        int8 a plane of scales is added.
    state_dtype : torch.dtype, optional
        Of optimizer state that has the width and dtype of the weights: float32, bfloat16, or uint8 for 8-bit blocks. None: as
        the optimizer makes it.
    """

    def __init__(
        self, table: Table, storage_dtype: torch.dtype | None = None, state_dtype: torch.dtype | None = None
    ) -> None:
        self.table = table
        self.storage_dtype, self.state_dtype = storage_dtype, state_dtype
        self.dtype = table.dtype if storage_dtype is None else torch.float32  # that the weights are computed with
        self._tails: dict[str, tuple[int, ...]] = {}
        self._codecs: dict[str, Codec] = {}
        self._keep_layout("weight", codec_for(table.dim, self.dtype, table.dtype), (table.dim,))
        for suffix, part in self._codecs["weight"].parts.items():
            if suffix and "weight" + suffix not in table.planes:
                table.add_plane("weight" + suffix, part.width, part.dtype)
        self._seed, self._count = torch.initial_seed(), 0  # asked for, not drawn: weights must be those of torch.nn

    def _keep_layout(self, name: str, codec: Codec | None, tail: tuple[int, ...] = ()) -> None:
        """Note how a plane is stored; None: it is no more."""
        if codec is None:
            self._codecs.pop(name, None)
            self._tails.pop(name, None)
        else:
            self._codecs[name], self._tails[name] = codec, tail
        # Whether every plane is one of the table, two-dimensional and not encoded: then rows move without a look at them.
        self._as_stored = all(codec.name == "plain" and len(self._tails[n]) == 1 for n, codec in self._codecs.items())

    @property
    def plain(self) -> bool:
        """Whether the weights are stored as they are computed with."""
        return self.encoding("weight") == "plain"

    def add(self, name: str, tail: tuple[int, ...], dtype: torch.dtype, start: float | None) -> None:
        """Add a plane of `tail` values a row, each `start`; None: a copy of the weights."""
        width = math.prod(tail)
        small = self.state_dtype is not None and dtype == self.dtype and width > 1
        codec = codec_for(width, dtype, self.state_dtype if small and self.state_dtype else dtype)
        first = encode_rows(codec, torch.full((1, width), start or 0.0, dtype=dtype, device="cpu"), None)
        added: list[str] = []
        try:
            for suffix, part in codec.parts.items():
                fill = float(first[suffix][0, 0]) if first[suffix].numel() else 0
                self.table.add_plane(name + suffix, part.width, part.dtype, fill=fill)
                added.append(name + suffix)
            self._keep_layout(name, codec, tail)
            if start is None:
                self._fill(name, lambda rows: self._chunk("weight", rows))
        except BaseException:
            for plane in added:
                self.table.drop_plane(plane)
            self._keep_layout(name, None)
            raise

    def drop(self, name: str) -> None:
        """Forget a plane."""
        for plane in self._stored_names([name]):
            self.table.drop_plane(plane)
        self._keep_layout(name, None)

    def whole(self, name: str) -> Tensor:
        """Return the whole of a plane, ``(num_rows, *tail)``: what a state dict shows. It lives where the memory is.

        A view of the raw plane where that has a value in each place, of its dtype; a decoded copy, made in chunks but of
        four bytes a value, of int8 and 8-bit planes.
        """
        shape = self.shape_of(name)
        if self.is_viewable(name):
            return self.table.plane(name).view(shape)
        values = torch.empty(shape, dtype=torch.float32, device=self.table.plane(name).device)
        for rows in self._chunks(name):
            values[rows] = self._chunk(name, rows)
        return values

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a plane, ``(num_rows, *tail)``."""
        return self.table.num_rows, *self._tails[name]

    def is_viewable(self, name: str) -> bool:
        """Tell whether the whole of a plane is a view of the table."""
        return self._codecs[name].viewable

    def load(self, name: str, values: Tensor) -> None:
        """Set the whole of a plane to ``(num_rows, *tail)`` values of any dtype and device, rounded to the nearest."""
        if values.layout != torch.strided:  # the momentum of torch's SGD for sparse gradients
            values = values.to_dense()
        self._fill(name, lambda rows: values[rows])

    @torch.no_grad()
    def normal_(self) -> None:
        """Draw the weights from N(0, 1): with one seed the numbers of ``torch.nn``, whatever they are stored as."""
        if self.plain:
            self.table.normal_()
        else:
            dim = self.table.dim
            empty = torch.empty(0, dtype=self.dtype, device="cpu")  # whatever the defaults are
            self._fill("weight", lambda rows: empty.new_empty(rows.stop - rows.start, dim).normal_())

    # --- rows as they are stored --------------------------------------------------------------------------------------

    def encoding(self, name: str) -> str:
        """Return how a plane is stored: "plain", or a name of the form with its dtype and block."""
        return self._codecs[name].name

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the raw planes of a logical one by what follows its name: "" for the first, and ".scale"."""
        return {suffix: self.table.plane(name + suffix) for suffix in self._codecs[name].parts}

    def decode(self, name: str, parts: dict[str, Tensor]) -> Tensor:
        """Return the values, ``(n, *tail)``, of raw rows, each part ``(n, width)``."""
        codec, tail = self._codecs[name], self._tails[name]
        rows = parts[""] if codec.name == "plain" else decode_rows(codec, parts)
        # No view where none is needed: see `buffers.empty`.
        return rows if rows.shape[1:] == tail else rows.view(len(rows), *tail)

    def encode(self, name: str, values: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``(n, *tail)`` values as they are stored, each part ``(n, width)``.

        To the nearest, so that to load the same again gives the same; with `ids` (n,), as a step writes them, stochastically.
        """
        codec, width = self._codecs[name], math.prod(self._tails[name])
        if ids is None:
            values = values.to(codec.parts[""].dtype if codec.name == "plain" else self.dtype)
        flat = values.reshape(len(values), width).contiguous()
        if codec.name == "plain":
            return {"": flat}
        if ids is None:
            return encode_rows(codec, flat, None)
        keys = row_keys(self._seed, self._count, name, ids.to(flat.device))
        return encode_rows(codec, flat, Keys(keys, column_keys(width, flat.device)))

    def state_dict(self) -> dict[str, int]:
        """Return what rounding goes on from: the seed and the number of writes."""
        return {"seed": self._seed, "writes": self._count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on rounding as the store that `state` was saved from; one that is empty changes nothing."""
        self._seed, self._count = int(state.get("seed", self._seed)), int(state.get("writes", self._count))

    @torch.no_grad()
    def _fill(self, name: str, values: Callable[[slice], Tensor]) -> None:
        planes = self.parts(name)
        for rows in self._chunks(name):
            for suffix, part in self.encode(name, values(rows)).items():
                planes[suffix][rows] = part.to(planes[suffix].device)
        wait_until_filled(planes[""])

    def _chunk(self, name: str, rows: slice) -> Tensor:
        parts = {suffix: plane[rows] for suffix, plane in self.parts(name).items()}
        for part in parts.values():
            read_ahead(part)
        return self.decode(name, parts)

    def _chunks(self, name: str) -> Iterator[slice]:
        return row_chunks(self.table.num_rows, 4 * math.prod(self._tails[name]))

    def _stored_names(self, planes: Sequence[str]) -> list[str]:
        return [name + suffix for name in planes for suffix in self._codecs[name].parts]

    def _parts_of(self, name: str, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return {suffix: rows[name + suffix] for suffix in self._codecs[name].parts}

    # --- copies -------------------------------------------------------------------------------------------------------

    def astype(self, dtype: torch.dtype) -> Self:
        """Return a store over a table of the same kind with the weights as plain `dtype`, and without state."""
        made = type(self)(self.table.astype(dtype))
        if not self._codecs["weight"].viewable:
            made._fill("weight", lambda rows: self._chunk("weight", rows))
        return made

    def copy(self) -> Self:
        """Return a store over a copy of the weights as they are stored, without state."""
        made = type(self)(self.table.astype(self.table.dtype), self.storage_dtype, self.state_dtype)
        for suffix, plane in self.parts("weight").items():
            if suffix:
                made.table.plane("weight" + suffix).copy_(plane)
        made.load_state_dict(self.state_dict())
        return made

    def pickled(self) -> dict[str, Any]:
        """Return what `unpickled` needs, beside a table with the plane of weights."""
        beside = {suffix: plane for suffix, plane in self.parts("weight").items() if suffix}
        return {
            "dtypes": (self.storage_dtype, self.state_dtype),
            "beside": beside,
            "rounding": self.state_dict(),
        }

    @classmethod
    def unpickled(cls, table: Table, pickled: dict[str, Any]) -> Self:
        """Return the store that `pickled` tells of."""
        made = cls(table, *pickled["dtypes"])
        for suffix, plane in pickled["beside"].items():
            made.table.plane("weight" + suffix).copy_(plane)
        made.load_state_dict(pickled["rounding"])
        return made
