"""The sums and means of bags, and what padding is in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.eager import uncompiled
from speedtransfer.nn.active import ActiveRows
from speedtransfer.nn.jagged import Bags
from speedtransfer.nn.lookup import is_batched


class _Sums(torch.autograd.Function):
    """Sums and means of bags; the gradients of a row are added in the order of the batch, which torch would sort for."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        active: ActiveRows,
        bags: Bags,
        index: Tensor,
        padded: Tensor | None,
        modes: dict[str, str],
        padding_idx: int | None,
    ) -> Tensor:
        ctx.groups, ctx.bags, ctx.modes, ctx.padded = active._groups, bags, modes, padded
        ctx.padding = padded if padded is not None or active._groups.found < 0 else index == padding_idx
        return bags.pooled(rows, index, modes, padding_idx)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        groups, bags, padding = ctx.groups, ctx.bags, ctx.padding
        # Offsets may be anywhere.
        sizes = bags.sizes().to(grads[0].device)
        bag = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
        used = sizes if padding is None else sizes - sizes.new_zeros(len(sizes)).index_add(0, bag, padding.long())
        means = torch.tensor([ctx.modes[name] == "mean" for name in bags.counts], device="cpu")
        means = means.repeat_interleave(torch.tensor(list(bags.counts.values()), device="cpu"))
        grad, weights = grads[0], bags.weights
        if bool(means.any()):
            grad = grad * torch.where(means, used.clamp(min=1), 1).double().reciprocal().to(grad.dtype)[:, None]
        if torch.is_grad_enabled() or is_batched(grad):
            # The gradient of it may be asked for.
            each = grad[bag] if weights is None else grad[bag] * weights[:, None]
            each = each if padding is None else each * ~padding[:, None]
            return grad.new_zeros(len(groups.ids), grad.shape[1]).index_add(0, groups.inverse, each), *[None] * 6
        order = groups.order
        given = None if weights is None else weights[order]
        total = F.embedding_bag(bag[order], grad.contiguous(), groups.starts[:-1], mode="sum", per_sample_weights=given)
        if padding is not None:
            total[groups.inverse[padding]] = 0
        return total, *[None] * 6


def pool(
    rows: Tensor,
    active: ActiveRows,
    bags: Bags,
    index: Tensor,
    padded: Tensor | None,
    modes: Any,
    padding_idx: int | None,
) -> Tensor:
    """Return `bags.pooled`; `padded` are the ids that are padding, None: those of `active`."""
    weighed = bags.weights is not None and bags.weights.requires_grad
    if rows is active.rows and rows.requires_grad and _is_summed(rows, active, modes) and not weighed:
        return _Sums.apply(rows, active, bags, index, padded, modes, padding_idx)
    return bags.pooled(rows, index, modes, padding_idx)


def _is_summed(rows: Tensor, active: ActiveRows, modes: dict[str, str]) -> bool:
    """Tell whether the gradient of all bags is a sum over ids that are known in the order of their rows."""
    known = active._groups.order is not None and active._groups.starts is not None
    return known and not rows.is_cuda and rows.dtype in (torch.float32, torch.float64) and "max" not in modes.values()


def without_padding(index: Tensor, padded: Tensor | None, spare: int | None = None) -> tuple[Tensor, int | None]:
    """Return the index of ids (n,), all padding at one place, and that: `spare`, which no other id has, or None."""
    if padded is None or (spare is None and not bool(padded.any())):
        return index, None
    place = int(index[padded.nonzero()[0, 0]]) if spare is None else spare
    return index.masked_fill(padded.to(index.device), place), place
