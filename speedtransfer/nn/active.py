"""The unique rows that a batch touches, as a dense tensor; backward deposits its gradient for the optimizer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import check_not_capturing, is_capturing
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.ahead import may_pad
from speedtransfer.nn.ticket import FoundRows, Ticket, find_ticket, known_again, to_row_numbers
from speedtransfer.optim import Handle, Sharded, UsedFeatures
from speedtransfer.tables import NOTHING, Known, UniqueRows, as_index, kept, padded_unique, trimmed, unique_rows


class ActiveRows:
    """The unique rows of some ids. With `training` backward deposits the gradient of `rows`.

    Attributes
    ----------
    ids : Tensor
        ``(n,)`` int64, sorted; in a lookup on a CUDA device padded.
    inverse : Tensor
        Position in `ids` of each of the original ids, in their shape.
    rows : Tensor
        ``(n, dim)`` on the compute device. With gradients they require one, which is deposited for the optimizer. The next
        step updates this memory in place.
    """

    __slots__ = ("_deposit", "_features", "_groups", "_handle", "_padding_idx", "ids", "inverse", "rows")

    def __init__(
        self,
        handle: Handle,
        groups: UniqueRows,
        shape: tuple[int, ...],
        rows: dict[str, Tensor],
        training: bool,
        padding_idx: int | None = None,
        lookup: Any = None,
        features: UsedFeatures | None = None,
        guarded: bool = True,
    ) -> None:
        self.ids, self.rows = groups.ids, rows.pop("weight")
        self.inverse = groups.inverse if len(shape) == 1 else groups.inverse.view(shape)
        # `_groups` has the positions of the original ids grouped by row, and the position of the padding row where known.
        self._padding_idx = -1 if padding_idx is None else padding_idx
        self._groups, self._handle, self._features = groups, handle, features
        ids, known, values, version = groups.ids, groups.known, self.rows, handle.rows.table.version
        # A partial of self would be a cycle that keeps the rows alive.
        self._deposit = functools.partial(
            handle.pending.deposit, ids, known=known, rows=values, version=version, state_rows=rows, lookup=lookup
        )
        if training:
            take = None if features is None else features.take
            self.rows = handle.views.join(values, ids, self._deposit, take, guarded, known)

    def add_grad(self, grad: Tensor) -> None:
        """Deposit a gradient written by hand for ``optimizer.step()``, without autograd.

        Parameters
        ----------
        grad : Tensor
            ``(n, dim)``, dtype and device of `rows`; added to the gradient deposited since the last step. It is copied.
        """
        if not isinstance(grad, Tensor):
            raise InvalidTypeError(
                f"grad is {grad!r:.80} ({type(grad).__name__}) but must be a tensor of shape {tuple(self.rows.shape)}; pass "
                "torch.as_tensor(grad)"
            )
        if grad.shape != self.rows.shape:
            raise InvalidValueError(
                f"grad has shape {tuple(grad.shape)} but there are {tuple(self.rows.shape)} active rows; "
                "sum the gradient per unique row (index_add_ by .inverse)"
            )
        if grad.dtype != self.rows.dtype or grad.device != self.rows.device:
            raise InvalidTypeError(
                f"grad is {grad.dtype} on {grad.device} but the rows are {self.rows.dtype} on {self.rows.device}; "
                "pass grad.to(active.rows)"
            )
        with torch.inference_mode(False), torch.no_grad():
            # As ``torch.Tensor.grad`` may be used again, so may this; and it may be given to several tables.
            grad = grad.detach().clone()
            features = None if self._features is None else self._features.take()
            if self.ids is self._groups.ids:
                self._deposit(grad=grad, rows=self.rows.detach(), features=features)
            else:
                # Of ids that were assigned nothing is known.
                self._handle.pending.deposit(self.ids, grad, features=features)


def activate(
    handle: Handle,
    ids: Any,
    training: bool,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    padding_idx: int | None = None,
    padded: bool = False,
    spare: bool = False,
    by_hand: bool = False,
    features: UsedFeatures | None = None,
) -> ActiveRows:
    """Read the unique rows of `ids`, which may be `UniqueRows` on the CPU already, or the `FoundRows` of a vocabulary.

    Rows longer than `max_norm` are rescaled first, in the table too. With `training` a graph has them by the weight. `padded`
    lets the ids be padded, so that the host does not wait for a CUDA device; the last is then padding if `spare`. `by_hand`:
    a gradient may come without autograd. `features`: those that the ids are of, where that matters.
    """
    if handle.state is not None and handle.state.running:
        handle.step.recover()
    owners = handle.owners
    if isinstance(owners, Sharded):
        by_hand = by_hand and handle.requires_grad
        return _activate_shards(handle, owners, ids, training, by_hand, max_norm, norm_type, padding_idx, features)
    found, ids = (ids, ids.rows) if isinstance(ids, FoundRows) else (None, ids)
    table = handle.rows.table
    num_rows, device = table.num_rows, table.device
    if device.type == "cuda" and is_capturing():
        _check_capturable(handle, ids, training or max_norm is not None, padded)
    ahead = check = None
    if handle.reads_ahead or isinstance(ids, Ticket):
        ticket = find_ticket(handle, found or ids)
        if ticket is not None:
            ahead, ids = ticket.wait(padded, ids, padding_idx), ticket.ids.view(ticket.shape) if ticket is ids else ids
    if ahead is not None:
        groups, shape = ahead.groups, tuple(ids.shape)
    elif isinstance(ids, UniqueRows):
        groups, shape = ids, tuple(ids.inverse.shape)
        # Raises if an id is out of range.
        as_index(groups.ids, num_rows, device)
    else:
        flat, shape, _ = as_index(ids, num_rows, device, check=False)
        if flat.is_cuda and table.takes_padding and len(flat):
            groups, check = _unique_on_device(handle, flat, padded, spare, padding_idx)
        else:
            # An engine that moves rows on the host takes ids there.
            flat = flat.cpu() if table.moves_on_host else flat
            groups = unique_rows(flat, num_rows, ids, padding_idx, grouped=device.type == "cuda")
    groups = groups.to(device)
    if found is not None and found.noted is not None:
        groups = groups._replace(known=groups.known._replace(noted=(found.noted,)))
    # Rescaled rows are written back, or refused: those of the parent of a forked process.
    if max_norm is not None and handle.table.writable:
        handle.rows.catch_up(groups.ids, groups.known)
    known = groups.known if check is None else groups.known._replace(check=check)
    rows = handle.rows.read(groups.ids, known=known) if ahead is None else ahead.rows(handle.rows)
    if max_norm is not None and len(groups.ids):
        _renormalize(handle, groups.ids, rows["weight"], max_norm, norm_type, groups.known)
    lookup = found and found.stamp
    # Rows that a caller gets to see cannot be changed in place.
    return ActiveRows(handle, groups, shape, rows, training, padding_idx, lookup, features, guarded=not padded)


def rows_for_lookup(handle: Handle, ids: Any, padding_idx: int | None, training: bool) -> tuple[Any, int | None]:
    """Return the rows of ids for a lookup, and that of padding.

    Raises
    ------
    RowIndexError
        An id has no row. The processes that share the rows out are told.
    """
    if handle.id_space.by_row:
        return known_again(handle, ids) if isinstance(ids, FoundRows) else ids, padding_idx
    try:
        rows, padding_idx = to_row_numbers(handle, ids, padding_idx)
    except Exception:
        if isinstance(handle.owners, Sharded):
            handle.owners.lookups.refuse(training)
        raise
    return known_again(handle, rows), padding_idx


def _activate_shards(
    handle: Handle,
    owners: Sharded,
    ids: Any,
    training: bool,
    by_hand: bool,
    max_norm: float | None,
    norm_type: float,
    padding_idx: int | None,
    features: UsedFeatures | None,
) -> ActiveRows:
    """Read the unique rows of `ids` in a table of several processes, which all call this."""
    device = handle.table.device
    ticket = find_ticket(handle, ids) if handle.reads_ahead or isinstance(ids, Ticket) else None
    if ticket is not None:
        taken = ticket.take(padding_idx)
        if taken is not None:
            groups, rows, route, read = taken
            lookup = owners.lookups.remember(route, read) if training or by_hand else None
            return ActiveRows(handle, groups, ticket.shape, {"weight": rows}, training, padding_idx, lookup, features)
        ids = ticket.ids.view(ticket.shape) if ticket is ids else ids
    found, ids = (ids, ids.rows) if isinstance(ids, FoundRows) else (None, ids)
    check_not_capturing("a lookup in a table of several processes")
    try:
        if isinstance(ids, UniqueRows):
            groups, shape = ids, tuple(ids.inverse.shape)
            as_index(groups.ids, handle.num_rows, device)
        else:
            flat, shape, _ = as_index(ids, handle.num_rows, device, check=False)
            groups = unique_rows(flat, handle.num_rows, ids, padding_idx, grouped=device.type == "cuda")
        owners.check_rows(groups.ids)
    except Exception:
        owners.lookups.refuse(training or by_hand)
        raise
    groups = groups.to(device)
    renormalize = None
    if max_norm is not None:
        renormalize = functools.partial(_renormalize, handle, max_norm=max_norm, norm_type=norm_type)
    with torch.no_grad():
        rows, lookup = owners.lookups.look_up(groups.ids, training or by_hand, renormalize, found and found.asked)
    if found is not None and lookup is not None:
        lookup.missed = found.stamp.missed
    return ActiveRows(handle, groups, shape, {"weight": rows}, training, padding_idx, lookup, features)


def _check_capturable(handle: Handle, ids: Any, writes: bool, padded: bool) -> None:
    """Raise unless a lookup can be captured in a CUDA graph."""
    if not padded:
        check_not_capturing("activate(), which counts the unique rows,", "call the module instead")
    if not (isinstance(ids, Tensor) and ids.is_cuda):
        check_not_capturing(
            f"a lookup in {handle} by ids on the host",
            "keep them in a tensor on the device, and copy each batch into it",
        )
    handle.check_capturable(writes)


def _unique_on_device(
    handle: Handle, flat: Tensor, padded: bool, spare: bool, padding_idx: int | None
) -> tuple[UniqueRows, Tensor | None]:
    """Return the unique rows of `flat` (n,), and what the read of these has to check."""
    table = handle.rows.table
    groups = padded_unique(flat, table.num_rows, spare)
    if padded and (may_pad(handle.rows, len(groups.ids)) or is_capturing()):
        return groups, flat
    table.check(flat)
    groups = trimmed(groups)
    # Raises if an id is out of range.
    table.wait()
    at = (groups.ids == padding_idx).nonzero().flatten().tolist() if padding_idx is not None else []
    return groups._replace(found=at[0] if at else -1), None


def _renormalize(
    handle: Handle, ids: Tensor, weight: Tensor, max_norm: float, norm_type: float, known: Known = NOTHING
) -> None:
    """Rescale the rows of `weight` (n, dim) that are longer than `max_norm`, also in the table; `known` is of `ids`."""
    if weight.is_cuda:
        # What torch.embedding_renorm_ does, which makes the host wait.
        norms = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
        longer = norms > max_norm
        weight.copy_(torch.where(longer, weight * (max_norm / (norms + 1e-7)), weight))
        # Which of them, only the device knows.
        handle.id_space.note_written(ids, known)
        if handle.table.takes_padding:
            # Others are written nowhere: an encoded row would be rounded anew.
            ids, padding = kept(ids, longer[:, 0], handle.table.num_rows)
            handle.rows.write(ids, {"weight": weight}, known=padding)
            return
        changed = longer[:, 0].nonzero().flatten()
    else:
        before = weight.clone()
        torch.embedding_renorm_(weight, torch.arange(len(weight), device=weight.device), max_norm, norm_type)
        changed = (weight != before).any(dim=1).nonzero().flatten()
    if len(changed):
        handle.id_space.note_written(ids[changed], NOTHING)
        handle.rows.write(ids[changed], {"weight": weight[changed]})
