"""The gradient of a table whose rows several processes own: each has that of its own rows, norms are those of all.

Without this, each process would clip by a norm of its own, or skip a step by itself, and the replicas of all other parameters
would drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.merge import Part
from speedtransfer.optim.row_functions import NORMS, REDUCTIONS, order_of
from speedtransfer.optim.row_gradient import RowGradient, by_rows
from speedtransfer.ranks import Exchange
from speedtransfer.tables import Known

aten = torch.ops.aten
# Functions of one number, which is that of all processes, of zeros elsewhere and of other values: no process knows whether
# there are any.
_REDUCED = {aten.sum.default, aten.count_nonzero.default, aten.any.default}, {aten.all.default}


class ShardGradient(RowGradient):
    """The gradient of all rows, of which this process has that of the active rows that it owns.

    Functions that map zeros to zeros act on these; norms, sums and the search for infinities are over all processes, and so
    must be called by all; others raise.

    Attributes
    ----------
    ids : Tensor
        Numbers of rows in the shard of this process.
    exchange : Exchange
    """

    exchange: Exchange

    @staticmethod
    def of(num_rows: int, part: Part, changed: Callable[..., None] | None, exchange: Exchange) -> ShardGradient:
        """Return the gradient of `num_rows` rows; see :class:`RowGradient`."""
        made = RowGradient.__new__(ShardGradient, num_rows, *part[:2], changed, known=part[2])
        assert isinstance(made, ShardGradient)
        made.exchange = exchange
        return made

    def _made(self, ids: Tensor, rows: Tensor, known: Known, changed: Any = None) -> RowGradient:
        made = ShardGradient.of(self.shape[0], (ids, rows, known), changed, self.exchange)
        made.stamp = self.stamp
        return made

    def agrees(self, is_so: bool) -> bool:  # noqa: D102
        return bool(_of_ranks(self.exchange, torch.tensor([float(is_so)], dtype=torch.float64, device="cpu")).amin())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute on the rows of this process, and reduce over all; raise for what needs the gradient of all rows."""
        if torch.is_inference_mode_enabled():
            return super().__torch_dispatch__(func, types, args, kwargs)
        kwargs, name = kwargs or {}, func.overloadpacket
        if name in (*NORMS, aten._foreach_norm) and any(
            isinstance(it, RowGradient) and it.elsewhere for it in tree_leaves(args[0])
        ):
            _refuse(func)
        if name is aten._foreach_norm and order_of(args, kwargs) > 0:
            return _norms(args[0], order_of(args, kwargs), kwargs.get("dtype"))
        over_all = len(args) < 3 and kwargs.get("dim") is None
        if name in NORMS and isinstance(args[0], cls) and over_all and order_of(args, kwargs) > 0:
            return _norms([args[0]], order_of(args, kwargs), kwargs.get("dtype"))[0]
        is_known = name not in REDUCTIONS or func in _REDUCED[bool(args[0].elsewhere)]
        if not is_known or name in (aten.index, aten.index_select) or _of_each_row(args):
            _refuse(func)
        result = by_rows(func, args, kwargs)
        if result is NotImplemented:
            _refuse(func)
        if name in REDUCTIONS:
            values = _of_ranks(args[0].exchange, result.double()[None])
            reduced = values.amax() if name is aten.any else values.amin() if name is aten.all else values.sum()
            return reduced.to(result)
        if name is aten._amp_foreach_non_finite_check_and_unscale_:
            found = args[1]
            for exchange in {g.exchange for g in args[0] if isinstance(g, ShardGradient)}:
                found.copy_(_of_ranks(exchange, found.double().flatten()).amax(0).view_as(found))
        return result

    def is_full(self) -> bool:
        """Tell whether every row is active: other processes have some, so never."""
        return False

    def dense(self) -> NoReturn:
        """Raise: other processes have the gradient of other rows."""
        _refuse(None)

    coo = make_dense = to_dense = dense


# Else clip_grad_norm_(foreach=True) refuses tables.
_foreach_utils._foreach_supported_types.append(ShardGradient)  # type: ignore[arg-type]


def _refuse(func: Any) -> NoReturn:
    what = "as a whole" if func is None else f"by {func.overloadpacket.__name__}()"
    raise InvalidValueError(
        f"the gradient of a table of several processes is used {what}, which needs the gradient of rows that "
        "other processes have; use norms, sums, or functions of each value (scaling, clipping), or the gradient of this "
        "process's rows: weight.grad.rows"
    )


def _of_each_row(args: tuple[Any, ...]) -> bool:
    """Tell whether another argument has a value for each row of the table: which are ours is not known there."""
    grads = [value for value in args if isinstance(value, ShardGradient)]
    others = [value for value in args if isinstance(value, Tensor) and not isinstance(value, ShardGradient)]
    return bool(grads) and any(other.dim() == 2 and len(other) == len(grads[0]) != 1 for other in others)


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms of gradients; those of shards over all processes, the same bits in each."""
    plain = [t.rows if isinstance(t, RowGradient) else t for t in tensors]
    norms = [
        torch.linalg.vector_norm(t, order, dtype=dtype) if t.numel() else t.new_zeros((), dtype=dtype or t.dtype)
        for t in plain
    ]
    by_exchange: dict[Exchange, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, ShardGradient):
            by_exchange.setdefault(tensor.exchange, []).append(i)
    for exchange, places in by_exchange.items():
        parts = _of_ranks(exchange, torch.stack([norms[i].double() for i in places]))
        total = parts.amax(0) if math.isinf(order) else parts.pow(order).sum(0).pow(1 / order)
        for i, value in zip(places, total, strict=True):
            norms[i] = value.to(norms[i])
    return norms


def _of_ranks(exchange: Exchange, values: Tensor) -> Tensor:
    """Return the numbers of all processes, ``(ranks, n)`` float64 on the host, of `values` (n,)."""
    sent = values.detach().cpu().contiguous().view(torch.int64)
    return exchange.agree("reduces a gradient", sent).contiguous().view(torch.float64)
