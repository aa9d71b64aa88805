"""Turn the ids of several features into rows of the one table that has the rows of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import to_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError, suggest
from speedtransfer.nn.ticket import FoundRows, Ticket
from speedtransfer.nn.tracing import in_transform
from speedtransfer.tables import as_index
from speedtransfer.vocabulary import FeatureKeys, as_ids

Shapes = dict[str, torch.Size]


class FeatureRows(NamedTuple):
    """The rows of ids of features.

    Attributes
    ----------
    index : FoundRows, Tensor or Ticket
        In the table; of columns in their shape, of parts ``(n,)``. With a vocabulary their keys. Or the ticket that was made
        for them.
    padded : Tensor, optional
        Which are padding, in the same shape; None: no feature has padding.
    shapes : dict of str to torch.Size, optional
        Of the parts, by feature; None: there are columns, or one feature.
    by_name : bool
        Whether the parts were given by name.
    number : int, optional
        Of the one feature that they are of.
    bags : Bags, optional
        Those of a `MultiEmbeddingBag`.
    """

    index: Any
    padded: Tensor | None
    shapes: Shapes | None = None
    by_name: bool = False
    number: int | None = None
    bags: Any = None


class FeatureIds:
    """Find the rows of ids, given in columns or in parts.

    Parameters
    ----------
    features : dict of str to Feature
        In the order of their columns; several may look up in the rows of one.
    keys : FeatureKeys, optional
        Has the ids of a vocabulary that are found in the place of rows.
    """

    def __init__(self, features: dict[str, Any], keys: FeatureKeys | None = None) -> None:
        self._features, self._keys = features, keys
        # By feature: its first row, how many it has, its padding row or -1. Or the key of its id 0, nothing, and padding.
        none = -1 if keys is None else min(keys.limit, (1 << 63) - 1)
        layout = [
            (f.start, f.num_embeddings, none if f.padding_idx is None else f.padding_idx) for f in features.values()
        ]
        self._layout = torch.tensor(layout, dtype=torch.int64, device="cpu").view(-1, 3).t().contiguous()
        self._padded = any(padding != none for _, _, padding in layout)
        # The layout of each id, by device and number of ids of each feature.
        self._spread: dict[Any, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Without tensors of a device that may be missing where this is unpickled.
        return {**vars(self), "_spread": {}}

    def rows(self, ids: Any, device: torch.device) -> FeatureRows:
        """Return the rows of `ids` in the table, or their keys; of a ticket those that it was made for.

        Raises
        ------
        RowIndexError
            An id on the CPU is not below the rows of its feature; or one anywhere has no key.
        """
        if isinstance(ids, Ticket):
            return found_by(ids)
        if isinstance(ids, Mapping | list | tuple):
            flat, shapes = self._joined(ids, device)
        else:
            index, shape = self.read(ids, device)
            flat, shapes = index.view(shape), None
            self._check_columns(shape)
        names = tuple(ids) if isinstance(ids, Mapping) else ()
        given = tuple(ids.values() if isinstance(ids, Mapping) else ids if shapes is not None else [ids])
        return self.found(flat, shapes, (names, given), isinstance(ids, Mapping))

    def found(self, flat: Tensor, shapes: Shapes | None, source: Any, by_name: bool) -> FeatureRows:
        """Return the rows of ids of columns, or (n,) of the parts of `shapes`; a ticket knows them by their `source`."""
        start, num_rows, padding = self._layout_of(flat.device, shapes)
        bad = first_beyond(flat, num_rows) if self._keys is None else self._keys.first_beyond(flat)
        if bad is not None:
            self._raise(int(flat.reshape(-1)[bad]), bad, flat.shape, shapes)
        padding = padding if self._padded else None
        if self._keys is not None:
            return FeatureRows(keys_of(flat, start, padding), None, shapes, by_name)
        index, padded = in_table(flat, start, num_rows, padding)
        return FeatureRows(FoundRows(index, source=source), padded, shapes, by_name)

    def check_form(self, ids: Any) -> None:
        """Raise unless features that look up by themselves, one after the other, can take `ids`."""
        if isinstance(ids, Ticket):
            raise InvalidTypeError(
                "a ticket has the rows of all features, one of which was replaced or has hooks, so that it looks up by "
                "itself; pass the ids"
            )
        if isinstance(ids, Mapping | list | tuple):
            by_feature(ids, self._features, "ids")
        else:
            self._check_columns(tuple(ids.shape))

    def _check_columns(self, shape: tuple[int, ...]) -> None:
        if not shape or shape[-1] != len(self._features):
            raise InvalidValueError(
                f"ids has shape {shape} but must be (..., {len(self._features)}), a column for each feature; pass a list of "
                "tensors for other shapes"
            )

    def _joined(self, ids: Any, device: torch.device) -> tuple[Tensor, Shapes]:
        ids = by_feature(ids, self._features, "ids")
        if self._keys is None and ids and all(map(_is_read, ids.values())):
            return torch.cat(tuple(ids.values())), {name: part.shape for name, part in ids.items()}
        parts, shapes = [torch.empty(0, dtype=torch.int64, device=device)][: not ids], Shapes()
        for name, part in ids.items():
            flat, shape = self.read(part, device)
            parts.append(flat)
            shapes[name] = torch.Size(shape)
        if any(part.device != parts[0].device for part in parts):
            parts = [to_device(part, device) for part in parts]
        return torch.cat(parts), shapes

    def read(self, ids: Any, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
        """Return ids as a 1-D int64 tensor, not checked, and their shape."""
        if self._keys is None:
            return read_ids(ids, device)
        given = as_ids(ids)
        return given.reshape(-1), tuple(given.shape)

    def _layout_of(self, device: torch.device, shapes: Shapes | None) -> Tensor:
        """Return the layout, ``(3, features)`` for columns, ``(3, n)`` for parts; those used last are kept."""
        key = device, None if shapes is None else tuple((name, shape.numel()) for name, shape in shapes.items())
        if key not in self._spread:
            layout = self._layout
            if shapes is not None:
                places = {name: place for place, name in enumerate(self._features)}
                pairs = [(places[name], shape.numel()) for name, shape in shapes.items()]
                columns, counts = torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
                layout = layout[:, columns.repeat_interleave(counts)]
            if len(self._spread) > 3:
                self._spread.clear()
            self._spread[key] = to_device(layout, device)
        return self._spread[key]

    def _raise(self, value: int, position: int, shape: torch.Size, shapes: Shapes | None) -> None:
        """Raise the error for an id at a flat `position`."""
        name = list(self._features)[position % len(self._features)] if shapes is None else ""
        for name, shape in (shapes or {}).items():  # noqa: B007 - the one that `position` is in
            if position < shape.numel():
                break
            position -= shape.numel()
        raise self._features[name].out_of_range(value, position, shape, name)


def by_feature(given: Any, features: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """Return what is given as a mapping, or as a sequence of one for each feature; raise for other names."""
    if not isinstance(given, Mapping):
        if len(given) != len(features):
            raise InvalidValueError(
                f"{what} is a {type(given).__name__} of {len(given)} but there are {len(features)} features; pass one for each"
            )
        return dict(zip(features, given, strict=True))
    for name in given:
        if name not in features:
            raise InvalidValueError(f"{what} has {name!r}, which is not a feature{suggest(str(name), features)}")
    return given


def found_by(ticket: Ticket, number: int | None = None) -> FeatureRows:
    """Return what the ticket was made for, to be looked up by all features together, or by that with a number."""
    if ticket.found is None or ticket.found.number != number:
        raise InvalidValueError(
            "this ticket was made by another module, for the ids of other features; pass it to the module whose prefetch() "
            "made it"
        )
    found: FeatureRows = ticket.found
    return found._replace(index=ticket)


def read_ids(ids: Any, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Return ids for rows on `device` as a 1-D int64 tensor, not checked, and their shape."""
    if device.type == "meta" and isinstance(ids, Tensor) and ids.is_meta:
        # As torch.nn does to find shapes.
        return ids.reshape(-1).to(torch.int64), tuple(ids.shape)
    return as_index(ids, 0, device, check=False)[:2]


def _is_read(ids: Any) -> bool:
    """Tell whether `read_ids` would return `ids` themselves: most are, and there may be many."""
    return type(ids) is Tensor and ids.dtype is torch.int64 and ids.is_cpu and ids.dim() == 1 and not ids.is_sparse


def first_beyond(ids: Tensor, num_rows: int | Tensor) -> int | None:
    """Return the first flat position of ids on the CPU that are not below `num_rows`, a number or one for each.

    Ids on another device cannot be looked at without waiting for it, those in a transform of torch.func not at all.
    """
    if ids.device.type != "cpu" or in_transform():
        return None
    limit = num_rows.numpy().view(np.uint64) if isinstance(num_rows, Tensor) else np.uint64(num_rows)
    # Negative ids are the largest unsigned ones.
    beyond = ids.numpy().view(np.uint64) >= limit
    return int(beyond.argmax()) if beyond.any() else None


def keys_of(ids: Tensor, start: Any, padding: Any) -> Tensor:
    """Return the keys of ids that have one, `start` that of id 0; those that are `padding`, if it is not None, share one."""
    keys = ids + start
    return keys if padding is None else keys.masked_fill_(ids == padding, FeatureKeys.PADDING)


def in_table(ids: Tensor, start: Any, num_rows: Any, padding: Any) -> tuple[Tensor, Tensor | None]:
    """Return the rows of `ids` in the table, and which ids are `padding`, if that is not None.

    Where `first_beyond` cannot look, ids beyond their feature become -1, which is not a row of the table either.
    """
    index = ids + start
    if ids.device.type != "cpu" or in_transform():
        index = index.masked_fill((ids | (num_rows - 1 - ids)) < 0, -1)
    return index, None if padding is None else ids == padding
