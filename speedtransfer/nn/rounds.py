"""Lookups of features one after the other, as a model with a module for each makes them, read at once.

The first of a round reads for those that the round before made by parts of the same tensor of ids, such as its columns. The
others take their rows if their ids are what was expected and no row has changed, and read by themselves if not. The numbers
are those of lookups one by one, and so are the gradients: each feature has its own, and backward may come to each apart.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.cuda import capture_number, current_stream
from speedtransfer.eager import uncompiled
from speedtransfer.nn.active import activate
from speedtransfer.nn.feature_ids import first_beyond, in_table
from speedtransfer.nn.lookup import frozen_lookup, lookup
from speedtransfer.nn.lookup_ops import INTEGERS
from speedtransfer.nn.ticket import open_tickets, place_of
from speedtransfer.nn.tracing import in_transform
from speedtransfer.optim import Handle, UsedFeatures, find_handle
from speedtransfer.optim.anchor import kept
from speedtransfer.optim.graph import TELLS_HOOKS, saving_hooks


class Place(NamedTuple):
    """Where the ids of a feature lie beside those of the first of its round, and how they are laid out.

    `offset` counts elements, or with `in_turn` tensors of ids. Their first dimension is as long as that of the first.
    """

    offset: int
    in_turn: bool
    tail: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, ids: Tensor, first: Tensor) -> Place | None:
        """Return that of `ids`, in the memory of `first`; None: they are of another length."""
        if ids.shape[0] != first.shape[0] or ids.dtype != first.dtype:
            return None
        offset, count = int(ids.storage_offset() - first.storage_offset()), ids.numel()
        in_turn = ids.is_contiguous() and offset % count == 0
        return cls(offset // count if in_turn else offset, in_turn, tuple(ids.shape[1:]), ids.stride())

    def beside(self, first: Tensor) -> Tensor | None:
        """Return the ids beside `first`; None: they would lie outside of its memory."""
        shape = (first.shape[0], *self.tail)
        offset = first.storage_offset() + self.offset * (torch.Size(shape).numel() if self.in_turn else 1)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))
        if offset < 0 or (last + 1) * first.element_size() > first.untyped_storage().nbytes():
            return None
        return first.as_strided(shape, self.strides, offset)


class _Asked(NamedTuple):
    """A feature that was looked up: its rows, and where its ids lay."""

    number: int
    start: int
    num_rows: int
    padding: int
    place: Place


class _Part(NamedTuple):
    """What was read for a feature: the ids expected, or on a device where they lie, and their rows."""

    asked: _Asked
    ids: Any
    rows: Tensor


def _nobody() -> None:
    """Return what a weak reference does whose object is gone; it can be pickled."""


class Rounds(threading.local):
    """The lookups of the features of one table, by each thread; a round ends where a feature is looked up again."""

    def __init__(self, of: list[Callable[[], Any]]) -> None:
        # A weak reference to the module that has the features, which have this.
        self._of = of
        # By the memory of their ids: the first of a round, and the others.
        self._firsts: dict[int, Tensor] = {}
        self._asked: dict[int, list[_Asked]] = {}
        self._numbers: set[int] = set()
        # What is expected after the lookup of a feature; what was read and not taken, and of what.
        self._expected: dict[int, list[_Asked]] = {}
        self._parts: dict[int, _Part] = {}
        self._rows: Any = None
        self._memory = 0
        self._stamp: Any = None
        # The layout of what was read, and of which features.
        self._layout: Any = None

    def __reduce__(self) -> Any:
        # A copy of a module begins with none.
        return Rounds, ([_nobody],)

    def belong_to(self, multi: Any) -> None:
        """Have a module, unless there is one."""
        if self.are_orphaned():
            self._of[0] = weakref.ref(multi)

    def are_orphaned(self) -> bool:
        """Tell whether the module that has all features, and their weight among its parameters, is gone."""
        return self._of[0]() is None

    def take(self, feature: Any, weight: Any, ids: Any) -> Tensor | None:
        """Return the rows of `ids`, as given to a feature, or None: it is to look them up by itself."""
        handle = find_handle(weight)
        if handle is None or not _may_read_ahead(feature, handle, ids):
            return None
        number = feature.number
        if number in self._numbers:
            self._begin()
        self._numbers.add(number)
        part = self._parts.pop(number, None)
        if part is not None:
            if self._rows() is not handle.rows or self._stamp != _stamp(handle):
                self._parts.clear()
            elif _is_as_expected(part.ids, ids):
                # Also where they are a copy.
                self._asked[self._memory].append(part.asked)
                return part.rows
        memory = ids.untyped_storage().data_ptr()
        first = self._firsts.setdefault(memory, ids)
        place = Place.of(ids, first)
        if place is None:
            return None
        padding = -1 if feature.padding_idx is None else feature.padding_idx
        asked = _Asked(number, feature.start, feature.num_embeddings, padding, place)
        self._asked.setdefault(memory, []).append(asked)
        expected = self._expected.get(number) if first is ids else None
        if expected is None:
            return None
        return self._read(
            feature, handle, ids, [asked, *(each for each in expected if each.number not in self._numbers)]
        )

    def _begin(self) -> None:
        """Begin a round, in which what this one was asked is expected."""
        self._expected = {asked[0].number: asked[1:] for asked in self._asked.values() if len(asked) > 1}
        self._firsts, self._asked, self._numbers, self._parts = {}, {}, set(), {}

    def _read(self, feature: Any, handle: Handle, first: Tensor, wanted: list[_Asked]) -> Tensor | None:
        """Read for the features that are `wanted`, and return the rows of the first, whose ids are `first`."""
        pairs = [(asked, asked.place.beside(first)) for asked in wanted]
        found = [(asked, ids) for asked, ids in pairs if ids is not None]
        sizes = [ids.numel() for _, ids in found]
        if len(found) < 2:
            return None
        given = torch.cat([ids.reshape(-1) for _, ids in found])
        flat = given.to(torch.int64)
        start, num_rows, padding = self._layout_of([asked for asked, _ in found], sizes, flat.device)
        if first_beyond(flat, num_rows) is not None:
            # It is told where they are looked up, if they are.
            return None
        has_padding = any(asked.padding >= 0 for asked, _ in found)
        index, padded = in_table(flat, start, num_rows, padding if has_padding else None)
        training = torch.is_grad_enabled() and handle.requires_grad
        self._rows, self._stamp, self._memory = weakref.ref(handle.rows), None, first.untyped_storage().data_ptr()
        if training:
            used = UsedFeatures(0)
            active = activate(handle, index, True, padded=True, features=used)
            rows = lookup(active, feature.scale_grad_by_freq, again=True)
            parts = split(rows, sizes, [1 << asked.number for asked, _ in found], used, padded)
        else:
            parts = torch.unsafe_split_with_sizes(frozen_lookup(handle, index, None, feature.scale_grad_by_freq), sizes)
        self._stamp = _stamp(handle)
        for (asked, ids), values, rows in zip(found, given.split(sizes), parts, strict=True):
            expected = place_of(ids) if ids.is_cuda else values.view(ids.shape)
            self._parts[asked.number] = _Part(asked, expected, rows.view(*ids.shape, rows.shape[-1]))
        return self._parts.pop(wanted[0].number).rows

    def _layout_of(self, asked: list[_Asked], sizes: list[int], device: torch.device) -> Tensor:
        """Return start, rows and padding of the feature of each id, ``(3, n)``; the last is kept."""
        if self._layout is None or self._layout[0] != (asked, sizes, device):
            features = torch.tensor([one[1:4] for one in asked], dtype=torch.int64, device="cpu")
            counts = torch.tensor(sizes, device="cpu")
            self._layout = (asked, sizes, device), features.t().repeat_interleave(counts, 1).to(device)
        return self._layout[1]


def may_have_parts(ids: Any) -> bool:
    """Tell whether `ids` are integers in dense memory, of which others may be a part."""
    if type(ids) is not Tensor or ids.dtype not in INTEGERS or ids.is_nested or ids.layout is not torch.strided:
        return False
    return ids.dim() > 0 and ids.numel() > 0


def _may_read_ahead(feature: Any, handle: Handle, ids: Any) -> bool:
    """Tell whether a lookup of `ids` is as those of other features, and may be made before or after its turn."""
    if not may_have_parts(ids):
        return False
    table, owners = handle.rows.table, handle.owners
    # Where lookups write, or ask others.
    if feature._keys is not None or feature.max_norm is not None or not owners.has_whole:
        return False
    # Where somebody else writes: other processes, or arrays over the memory, unseen; where a step has to be undone first.
    if table.memory == "shared" or table._place.turns is not None or table.sign_of_views() is None:
        return False
    if handle.state is not None and handle.state.running:
        return False
    if ids.is_cuda and (ids.device != table.device or ids.is_inference()):
        return False
    # Backward of what torch has for others comes once.
    on_device = table.device.type == "cuda"
    dtypes = (torch.float32, torch.float64)
    if not (handle.rows.dtype.is_floating_point if on_device else handle.rows.dtype in dtypes):
        return False
    if feature.scale_grad_by_freq and not on_device:
        return False
    # What looks at each lookup: compiled graphs, transforms, checkpoints.
    if kept.joins is not None or in_transform():
        return False
    if torch._C._current_graph_task_id() >= 0 or not TELLS_HOOKS or saving_hooks(True) is not None:
        return False
    return not (handle.reads_ahead and open_tickets(handle))


def _stamp(handle: Handle) -> tuple[Any, ...]:
    """Return what is as it was as long as a lookup finds the same rows, and a graph is made of them in the same way."""
    table = handle.rows.table
    stream = (current_stream(table.device), capture_number()) if table.device.type == "cuda" else None
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), handle.requires_grad
    return table.version, table.sign_of_views(), handle.step.count, modes, stream


def _is_as_expected(expected: Any, ids: Tensor) -> bool:
    """Tell whether `ids` are what was expected: by their values, on a device by their place."""
    if ids.is_cuda:
        return bool(expected == place_of(ids))
    return expected.dtype == ids.dtype and torch.equal(expected, ids)


def split(rows: Tensor, sizes: list[int], features: list[int], used: UsedFeatures, padded: Tensor | None = None) -> Any:
    """Return the rows of each feature, which backward notes in `used`.

    Parameters
    ----------
    rows : Tensor
        ``(n, dim)``; they must not be used any more.
    sizes : list of int
        How many are those of each part.
    features : list of int
        The bit of the feature of each part.
    used : UsedFeatures
    padded : Tensor, optional
        ``(n,)``: rows that get no gradient.
    """
    return _Parts.apply(rows, sizes, features, used, padded)


class _Parts(torch.autograd.Function):
    """Split rows by feature, and note the features whose rows backward comes to: others have no gradient, as in torch."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sizes: list[int], features: list[int], used: UsedFeatures, padded: Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        # Nothing that autograd would save: backward may come again.
        ctx.shape, ctx.sizes, ctx.features, ctx.used, ctx.padded = rows.shape, sizes, features, used, padded
        # As for the other lookups: what split() returns could not be changed in place.
        return tuple(torch.unsafe_split_with_sizes(rows, sizes))

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        some = next((grad for grad in grads if grad is not None), None)
        if some is None:
            return None, None, None, None, None
        parts = []
        for size, feature, grad in zip(ctx.sizes, ctx.features, grads, strict=True):
            if grad is not None:
                ctx.used.used |= feature
            parts.append(some.new_zeros(size, ctx.shape[1]) if grad is None else grad)
        whole = torch.cat(parts)
        return whole if ctx.padded is None else whole.masked_fill(ctx.padded[:, None], 0), None, None, None, None
