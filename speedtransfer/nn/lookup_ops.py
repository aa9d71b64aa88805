"""Lookups as operators of torch, which `torch.compile` takes into its graphs without looking inside.

``speedtransfer::rows`` looks up without gradients. ``speedtransfer::lookup`` also returns a number that its backward,
``speedtransfer::deposit``, finds the active rows by; the gradient for the optimizer goes by `optim.anchor`. What a compiler
sees are functions of tensors: of ids, the leaf of the anchor, and its key.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import is_capturing
from speedtransfer.nn.active import ActiveRows, activate
from speedtransfer.nn.lookup import frozen_lookup, lookup, lookup_backward
from speedtransfer.once import once
from speedtransfer.optim import Handle
from speedtransfer.optim.anchor import handle_at

# What an id may be. Others raise where they are looked up, outside of a graph.
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_numbers = itertools.count(1)


def _rows(ids: Tensor, leaf: Tensor, key: Tensor, dim: int, padding_idx: int, by_freq: bool) -> Tensor:
    with torch.no_grad():
        return frozen_lookup(handle_at(key), ids, _given(padding_idx), by_freq)


def _lookup(ids: Tensor, leaf: Tensor, key: Tensor, dim: int, padding_idx: int, by_freq: bool) -> tuple[Tensor, Tensor]:
    handle = handle_at(key)
    if leaf.is_cuda and is_capturing():
        handle.check_capturable(True)
    with torch.no_grad():
        active = _activated(handle, ids, padding_idx)
        return lookup(active, by_freq), _remember(handle, active)


def _deposit(grad: Tensor, ids: Tensor, key: Tensor, number: Tensor, padding_idx: int, by_freq: bool) -> Tensor:
    handle = handle_at(key)
    with torch.no_grad():
        active = handle.anchor.lookups.get(int(number))
        if active is None:
            # Saved tensors may be copies (save_on_cpu).
            active = _activated(handle, ids, padding_idx)
        handle.anchor.arrive(active.ids, active._groups.known, lookup_backward(active, grad, by_freq), active.add_grad)
        return grad.new_zeros(1)


def _given(padding_idx: int) -> int | None:
    return padding_idx if padding_idx >= 0 else None


def _activated(handle: Handle, ids: Tensor, padding_idx: int) -> ActiveRows:
    return activate(handle, ids, False, padding_idx=_given(padding_idx), padded=True, by_hand=True)


def _remember(handle: Handle, active: ActiveRows) -> Tensor:
    """Keep the rows of a lookup for its backward as long as the memory of the number returned, ``()`` int64, lives."""
    number = next(_numbers)
    array = np.array(number)
    handle.anchor.lookups[number] = active
    weakref.finalize(array, handle.anchor.lookups.pop, number, None).atexit = False
    return torch.from_numpy(array)


# --- as compilers see them ------------------------------------------------------------------------------------------------


def _like(ids: Tensor, leaf: Tensor, key: Tensor, dim: int, *_: Any) -> Tensor:
    return leaf.new_empty((*ids.shape, dim))


class _Differentiable(torch.autograd.Function):
    """The operator, and the one that its backward calls."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        rows, number = _below_autograd(*args)
        ids, _, key, _, ctx.padding_idx, ctx.by_freq = args
        ctx.save_for_backward(ids, key, number)
        ctx.mark_non_differentiable(number)
        return rows, number

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids, key, number = ctx.saved_tensors
        # Gradients for the optimizer are not differentiated again.
        with torch.no_grad():
            done = torch.ops.speedtransfer.deposit(grads[0], ids, key, number, ctx.padding_idx, ctx.by_freq)
        return None, done, None, None, None, None


def _below_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        found: tuple[Tensor, Tensor] = torch.ops.speedtransfer.lookup.default(*args)
    return found


def _with_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and args[1].requires_grad:
        return _Differentiable.apply(*args)
    if type(args[0]) is Tensor and not torch._C._len_torch_dispatch_stack():
        # In a compiled graph that runs: nobody below is interested.
        return _lookup(*args)
    return _below_autograd(*args)


@once
def register() -> torch.library.Library:
    """Make the operators, once: when the first module is made, as it takes milliseconds that an import should not."""
    # A replay of a CUDA graph would leave out what the host does.
    named = ("pt2_compliant_tag", "cudagraph_unsafe")
    tags = tuple(getattr(torch.Tag, name) for name in named if hasattr(torch.Tag, name))
    made = torch.library.Library("speedtransfer", "DEF")
    of_ids = "Tensor ids, Tensor leaf, Tensor key, SymInt dim, SymInt padding_idx, bool by_freq"
    of_grad = "Tensor grad, Tensor ids, Tensor key, Tensor number, SymInt padding_idx, bool by_freq"
    for schema, function, fake in (
        (f"rows({of_ids}) -> Tensor", _rows, _like),
        (f"lookup({of_ids}) -> (Tensor, Tensor)", _lookup, lambda *args: (_like(*args), torch.empty_like(args[2]))),
        (f"deposit({of_grad}) -> Tensor", _deposit, lambda grad, *_: grad.new_empty(1)),
    ):
        name = made.define(schema, tags=tags)
        made.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"speedtransfer::{name}", fake, lib=made)
    made.impl("lookup", _with_autograd, "Autograd")
    return made
