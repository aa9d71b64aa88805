"""Some rows of the gradient of a table, and its values in one dimension: views that share its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.optim.row_gradient import Parts, RowGradient
from speedtransfer.tables import NOTHING, Known


class PartsView(Parts):
    """What `take` makes of the ids and the rows of a gradient, which `of` has, as these are by now."""

    __slots__ = ("_seen", "_take", "of")

    def __init__(self, of: Parts, take: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.of, self._take = of, take
        self._seen: tuple[Tensor, Tensor, Tensor] = of.rows, *take(of.ids, of.rows)

    def _now(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradient of all as it is by now, and the ids and the gradient of the view."""
        if self._seen[0] is not self.of.rows:
            self._seen = self.of.rows, *self._take(self.of.ids, self.of.rows)
        return self._seen

    @property
    def ids(self) -> Tensor:  # type: ignore[override]
        """The active rows of the view, ``(n,)``."""
        return self._now()[1]

    @property
    def rows(self) -> Tensor:  # type: ignore[override]
        """Their gradient, in the memory of that of all."""
        return self._now()[2]

    @property
    def known(self) -> Known:  # type: ignore[override]
        """Nothing: they are not padded."""
        return NOTHING

    def set(self, ids: Tensor, rows: Tensor, known: Known) -> None:
        """Leave the gradient of all as it is: `changed` of the view says what becomes of it."""

    def count_write(self) -> None:
        """Have the gradient of all show that it was written to."""
        self.of.count_write()

    def freeze(self) -> None:
        """Go on showing what there is now, whatever becomes of the gradient of all."""
        frozen = Parts()
        frozen.set(self.of.ids, self._now()[0], NOTHING)
        self.of = frozen


def slice_of(parts: Parts, start: int, stop: int) -> PartsView:
    """Return the active rows from row `start` to `stop`."""

    def take(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        at = place_of(ids, start, stop)
        return ids[at] - start, rows[at]

    return PartsView(parts, take)


def _flat(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of all active rows, one after the other: each is a row of one value."""
    width = rows.shape[1]
    return (ids.unsqueeze(1) * width + torch.arange(width, device=ids.device)).view(-1), rows.view(-1)


def place_of(ids: Tensor, start: int, stop: int) -> slice:
    """Return where the rows from `start` to `stop` are among `ids` (n,), which are sorted."""
    return slice(*torch.searchsorted(ids, torch.tensor([start, stop], device=ids.device)).tolist())


def _view(grad: RowGradient, parts: Parts, length: int) -> RowGradient:
    def changed(before: Tensor, ids: Tensor, rows: Tensor, how: str) -> None:
        # Also where all of the part is active: its rows would move when the whole becomes dense, and a view of them would not.
        if how in ("dense", "viewed"):
            grad.view_dense()

    made = RowGradient(length, parts.ids, parts.rows, changed)
    made.parts = parts
    return made


def slice_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return rows of a gradient, one after the other, that share its memory, as ``grad[2:5]``."""
    given: list[Any] = [*args, *(0, None, None, 1)[len(args) - 1 :]]
    grad, dim, start, stop, step = given
    if type(grad) is not RowGradient or kwargs or dim != 0 or step != 1 or grad.sparse or grad.dim() != 2:
        return NotImplemented
    begin, end, _ = slice(start, stop).indices(grad.shape[0])
    if (begin, end) == (0, grad.shape[0]):
        return grad.detach()
    return _view(grad, slice_of(grad.trim().parts, begin, max(begin, end)), max(0, end - begin))


def select_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a row of a gradient, ``(dim,)``, that shares its memory, as ``grad[3]``."""
    grad, dim, row = args
    if type(grad) is not RowGradient or dim != 0 or not -grad.shape[0] <= row < grad.shape[0]:
        return NotImplemented
    row %= grad.shape[0]
    alone = slice_view(None, (grad, 0, row, row + 1), {})
    return alone if alone is NotImplemented else flat_view(None, (alone, [-1]), {})


def flat_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return all values of a gradient in one dimension, in the same memory, as ``grad.view(-1)``."""
    grad, size = args
    if isinstance(size, torch.dtype):
        return NotImplemented
    fits = list(size) in ([-1], [grad.numel()]) if isinstance(grad, RowGradient) else False
    if type(grad) is not RowGradient or not fits or grad.sparse or grad.dim() != 2 or not grad.rows.is_contiguous():
        return NotImplemented
    return _view(grad, PartsView(grad.trim().parts, _flat), grad.numel())


def rows_at(grad: RowGradient, index: Any, negative: bool) -> Any:
    """Return a copy of the rows that `index` names, `negative` ones from the end, ``(*index.shape, *grad.shape[1:])``."""
    num_rows = grad.shape[0]
    if not isinstance(index, Tensor) or grad.sparse:
        return NotImplemented
    grad, index = grad.trim(), index.to(grad.device)
    if index.dtype == torch.bool:
        if index.shape != (num_rows,):
            return NotImplemented
        index = index.nonzero().flatten()
    elif index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if bool(((index < (-num_rows if negative else 0)) | (index >= num_rows)).any()):
        return NotImplemented
    wanted = torch.where(index < 0, index + num_rows, index).long()
    other = grad.rows.new_full((), grad.elsewhere)
    if not len(grad.ids):
        return other.expand(*wanted.shape, *grad.shape[1:]).clone()
    at = torch.searchsorted(grad.ids, wanted).clamp_(max=len(grad.ids) - 1)
    found = grad.ids[at] == wanted
    return torch.where(found.view(*wanted.shape, *[1] * (grad.dim() - 1)), grad.rows[at], other)


def zero_rows(grad: RowGradient, index: Any, value: Any) -> bool:
    """Set the rows that `index` names to `value` if that is zero, as in ``grad[:5] = 0``; False: it is something else."""
    is_zero = isinstance(value, int | float) and value == 0
    if not is_zero or grad.sparse or grad.elsewhere or grad.of_graph or grad.dim() != 2:
        return False
    index, *more = index if isinstance(index, tuple) and index else (index,)
    if len(more) > 1 or not all(it is Ellipsis or (isinstance(it, slice) and it == slice(None)) for it in more):
        return False
    chosen = _chosen(grad.trim(), index)
    if chosen is None:
        return False
    with torch.no_grad():
        grad.rows.masked_fill_(chosen.unsqueeze(1), 0)
    return True


def _chosen(grad: RowGradient, index: Any) -> Tensor | None:
    """Return which of the active rows `index` names, ``(n,)`` bool; None: that is for torch to say."""
    ids, num_rows = grad.ids, grad.shape[0]
    if isinstance(index, slice):
        rows = range(*index.indices(num_rows))
        return (
            (ids >= rows.start) & (ids < rows.stop) & ((ids - rows.start) % rows.step == 0) if rows.step > 0 else None
        )
    if isinstance(index, list) and not all(isinstance(each, int) for each in index):
        return None
    if isinstance(index, list | np.ndarray | int) and not isinstance(index, bool):
        try:
            index = torch.as_tensor(index, device=ids.device)
        except (TypeError, ValueError):
            return None
    if not isinstance(index, Tensor) or isinstance(index, RowGradient):
        return None
    index = index.to(ids.device)
    if index.dtype == torch.bool:
        return index[ids] if index.shape == (num_rows,) else None
    if index.dtype not in (torch.int64, torch.int32) or bool(((index < -num_rows) | (index >= num_rows)).any()):
        return None
    return torch.isin(ids, torch.where(index < 0, index + num_rows, index))
