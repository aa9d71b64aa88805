"""Join tables to the graph of autograd, where the parameter of a weight has its node, as any parameter has.

What reaches this node is deposited for the optimizer by a hook of the parameter (`receive`): the gradient of a
``torch.autograd.Function`` that was given the weight, of a reentrant checkpoint. Lookups and uses of all rows have edges to
it (`TableRows`). Where hooks, or ``torch.autograd.grad``, look at the node they send it the gradient of all rows, a
`RowGradient`; else each deposits its own, with the rows as it read them, and sends nothing.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from speedtransfer.cuda import current_stream, is_capturing
from speedtransfer.eager import uncompiled
from speedtransfer.errors import InvalidValueError
from speedtransfer.once import once
from speedtransfer.optim.whole_gradient import of_all_rows
from speedtransfer.tables import Known

# Key of the handle in the __dict__ of its parameter.
KEY = "_speedtransfer_handle"
# Within it functions of torch see the parameter itself, the placeholder, and not the whole table.
as_tensor = torch._C.DisableTorchFunctionSubclass
_grad: Any = Tensor.grad
# Whether torch tells which hooks get what autograd saves, from 2.8 on; before, those that have been entered.
TELLS_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
_entered = threading.local()
# Return the hooks that get what autograd saves, and give it back, or None. A checkpoint has some, which compute it again.
saving_hooks: Callable[[bool], Any] = (
    torch._C._autograd._top_saved_tensors_default_hooks
    if TELLS_HOOKS
    else lambda _: (*getattr(_entered, "hooks", ()), None)[0]
)


def entering(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return ``saved_tensors_hooks.__enter__``, which notes the hooks."""

    @functools.wraps(enter)
    def called(hooks: Any) -> None:
        enter(hooks)
        _entered.hooks = [(hooks.pack_hook, hooks.unpack_hook), *getattr(_entered, "hooks", ())]

    return called


def leaving(leave: Callable[..., None]) -> Callable[..., None]:
    """Return ``saved_tensors_hooks.__exit__``, which forgets the hooks."""

    @functools.wraps(leave)
    def called(hooks: Any, *error: Any) -> None:
        # None where they were entered before there was a table.
        _entered.hooks = getattr(_entered, "hooks", ())[1:]
        leave(hooks, *error)

    return called


class TableRows(torch.autograd.Function):
    """Return `values`, rows of a table, as what a graph made of the parameter of its weight.

    Not a leaf of its own: a walk over the graph, and hooks on it, find the parameter. What is guarded raises if it is changed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        param: Tensor,
        values: Tensor,
        use: tuple[Any, Tensor | None, Callable[..., None], Callable[[], int] | None, bool, Known],
    ) -> Tensor:
        """Return `values`, ``(n, dim)``, the rows that `use` names; it is what `join` was given, in one: each argument costs.

        Of the handle the rows `ids` (n,), or all (None); `deposit` takes their gradient as `grad`.
        """
        ctx.set_materialize_grads(False)
        # Of `values`, not of the result: that would be a cycle, which keeps the rows until the next gc.
        ctx.values, ctx.num_rows, ctx.use, ctx.left = values, param.shape[0], use, None
        use[0].views.joined.append(weakref.ref(ctx))
        hooks = None if use[1] is None else saving_hooks(True)
        # Kept as autograd would, but for more than one backward. A checkpoint raises if it finds another number of rows, for
        # which torch would write beyond the gradient.
        ctx.saved = hooks and (hooks[0](use[1]), hooks[1])
        # What returns its argument returns a view, which autograd guards: also where it is used after a write to its memory,
        # while another thread steps.
        return values if use[4] else values.detach()

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Deposit the gradient, or return that of all rows."""
        (handle, ids, deposit, take_features, _, known), grad, total = ctx.use, grads[0], None
        # Frozen since the forward pass: torch drops the gradient too.
        if grad is not None and ctx.left is not None:
            if ctx.left:
                raise InvalidValueError(ctx.left)
            return of_all_rows(handle, ids, grad, known, ctx.num_rows).to_dense(), None, None
        if grad is not None and ctx.saved is not None:
            packed, unpack = ctx.saved
            _check_same(handle, ids, unpack(packed))
        if grad is not None and handle.requires_grad:
            features = None if take_features is None else take_features()
            if handle.views.is_observed():
                if features is not None and not handle.views.askers:
                    handle.features.note(handle, ids, features)
                total = of_all_rows(handle, ids, grad, known, ctx.num_rows)
            else:
                if grad.is_cuda:
                    _wait_at_end(grad.device)
                deposit(grad=grad.to_dense() if grad.is_sparse else grad, features=features)
        return total, None, None


def _check_same(handle: Any, ids: Tensor, saved: Tensor) -> None:
    """Raise if a checkpoint has looked up other rows in backward, `saved`, than `ids`: the gradient is of those."""
    if saved is not ids and not (ids.is_cuda and is_capturing()) and not torch.equal(saved, ids):
        raise InvalidValueError(
            f"a checkpoint computed again with other ids than before what was looked up in {handle}; draw random ids outside "
            "of the checkpointed function and pass them to it, or from a generator that it seeds"
        )


# What `TableRows.apply` calls outside of transforms of torch.func, where nothing has to be unwrapped.
apply_plainly: Any = super(torch.autograd.Function, TableRows).apply


def _wait_at_end(device: torch.device) -> None:
    """Have the stream of the caller of this backward wait for the current one, as autograd does where gradients end."""
    stream = current_stream(device)

    def wait() -> None:
        if current_stream(device) != stream:
            current_stream(device).wait_stream(stream)

    torch.autograd.Variable._execution_engine.queue_callback(wait)


@once
def forgets_inputs() -> bool:
    """Tell whether a node of Python has no `next_functions` once its result is gone, as in torch 2.6."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = _Same.apply(torch.zeros(1, device="cpu", requires_grad=True)).grad_fn
    try:
        return not node.next_functions
    except RuntimeError:
        return True


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()


def receive(param: nn.Parameter) -> None:
    """Deposit the gradient that has reached the node of a weight: a hook of its parameter, the first."""
    handle = param.__dict__.get(KEY)
    if handle is None:
        # It has become an ordinary parameter.
        return
    with as_tensor():
        grad = _grad.__get__(param)
        if grad is None:
            # Lookups have deposited theirs.
            return
        _grad.__set__(param, None)
    handle.receive(grad)


def listen(param: nn.Parameter) -> None:
    """Have what reaches the node of the parameter of a weight deposited, before hooks of others look at the gradient."""
    with as_tensor():
        others: Any = param._post_accumulate_grad_hooks or {}
        if param.requires_grad and receive not in others.values():
            # Torch goes by the order in which they came.
            later = dict(others)
            others.clear()
            param.register_post_accumulate_grad_hook(receive)
            hooks: Any = param._post_accumulate_grad_hooks
            hooks.update(later)


def edges_to(handle: Any) -> list[GradientEdge]:
    """Return the edges that lead to the weight of `handle`, which requires gradients: to the node of its parameter.

    And to those that this had when the table had fewer rows.
    """
    with as_tensor(), torch.enable_grad():
        view: Any = handle.param.view_as(handle.param)
        nodes = {view.grad_fn.next_functions[0][0]: None}
    for ctx in handle.views.alive():
        # Of one without a result nothing comes.
        with contextlib.suppress(RuntimeError):
            nodes[ctx.next_functions[0][0]] = None
    return [GradientEdge(node, 0) for node in nodes]
