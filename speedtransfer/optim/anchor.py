"""What a compiled graph holds of a table: a leaf of autograd that its gradients come through.

A compiled graph runs the whole of its backward, whichever gradients were asked for. So gradients are kept until those of the
leaf arrive, and forgotten at the end of a backward in which they do not (``torch.autograd.grad`` of something else).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.tables import Known


class Arrived(NamedTuple):
    """The gradient of a compiled lookup.

    Attributes
    ----------
    ids, known : Tensor, Known
        ``(n,)``, the active rows; maybe padded.
    grad : Tensor
        ``(n, dim)``.
    deposit : callable
        Takes `grad`, and deposits it for the optimizer.
    """

    ids: Tensor
    known: Known
    grad: Tensor
    deposit: Callable[[Tensor], None]


class Anchor:
    """The inputs of a compiled graph that stand for a table.

    Attributes
    ----------
    leaf : Tensor
        ``(1,)``, dtype and device of the rows. Its gradient is zero. Not empty: compilers remove what computes empty tensors.
    lookups : set
        What backward needs of lookups whose graphs are alive.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = weakref.ref(handle)
        self.lookups: weakref.WeakSet[Any] = weakref.WeakSet()
        # By number of a running backward.
        self._arrived: dict[int, list[Arrived]] = {}
        self.follow(handle.rows.dtype, handle.table.device)

    def follow(self, dtype: torch.dtype, device: torch.device) -> None:
        """Have a leaf of the dtype and device that the rows are computed in."""
        # An inference tensor could not be saved for backward.
        with torch.inference_mode(False):
            self.leaf = torch.zeros(1, dtype=dtype, device=device)
        if dtype.is_floating_point:
            self.leaf.requires_grad_().register_post_accumulate_grad_hook(functools.partial(_deposit, self._handle))

    def arrive(self, ids: Tensor, known: Known, grad: Tensor, deposit: Callable[[Tensor], None]) -> None:
        """Keep the gradient ``(n, dim)`` of the rows `ids` until that of the leaf arrives."""
        task = torch._C._current_graph_task_id()
        if task < 0:
            # Not in a backward of autograd's engine.
            deposit(grad)
            return
        if task not in self._arrived:
            self._arrived[task] = []
            forget: Any = functools.partial(self._arrived.pop, task, None)
            torch.autograd.Variable._execution_engine.queue_callback(forget)
        self._arrived[task].append(Arrived(ids, known, grad, deposit))

    def take(self) -> list[Arrived]:
        """Return what has arrived in the running backward, and forget it."""
        return self._arrived.pop(torch._C._current_graph_task_id(), [])


class Joined(NamedTuple):
    """Rows of a table in the graph of a compiled lookup, whose backward ends there: what `Views.join` was given.

    Attributes
    ----------
    handle : Handle
    rows : Tensor
        ``(n, dim)``, a leaf.
    ids, known : Tensor, Known
        ``(n,)``, what rows those are; maybe padded.
    deposit, features : callable
        As `Views.join` takes them.
    """

    handle: Any
    rows: Tensor
    ids: Tensor
    known: Known
    deposit: Callable[..., None]
    features: Callable[[], int] | None

    def arrive(self, grad: Tensor) -> None:
        """Keep the gradient of the rows, for the optimizer, until that of the leaf of the anchor arrives."""
        features = None if self.features is None else self.features()
        grad = grad.to_dense() if grad.is_sparse else grad
        self.handle.anchor.arrive(self.ids, self.known, grad, functools.partial(self.deposit, features=features))


class _Kept(threading.local):
    # None: rows become part of the graph of their weight.
    joins: list[Joined] | None = None


kept = _Kept()


@contextlib.contextmanager
def joins_kept() -> Iterator[list[Joined]]:
    """Have rows of tables that this thread joins to their weights be leaves instead, and return them as a list."""
    before, kept.joins = kept.joins, []
    try:
        yield kept.joins
    finally:
        kept.joins = before


def _deposit(handle: weakref.ref[Any], leaf: Tensor) -> None:
    # Its gradient stays, zeros: another thread may be adding to it, which only autograd waits for.
    alive = handle()
    if alive is not None:
        for _, _, grad, deposit in alive.anchor.take():
            # Frozen since the forward pass: torch drops the gradient too.
            if alive.requires_grad:
                deposit(grad)


@contextlib.contextmanager
def collected(outputs: Any, handles: Iterable[Any]) -> Iterator[dict[Any, list[Arrived]]]:
    """Collect what arrives in the backward of ``torch.autograd.grad(outputs, ...)`` instead of depositing it, by handle."""
    tasks, found, hooks = set[int](), dict[Any, list[Arrived]](), list[Any]()

    def begin(grad: Tensor) -> None:
        tasks.add(torch._C._current_graph_task_id())

    def take(handle: Any, grad: Tensor) -> None:
        # Other threads may be in backwards of their own.
        if torch._C._current_graph_task_id() in tasks:
            found[handle] += handle.anchor.take()

    for handle in handles:
        found[handle] = []
        hooks.append(handle.anchor.leaf.register_hook(functools.partial(take, handle)))
    if found:
        given = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        hooks += [output.register_hook(begin) for output in given if output.requires_grad]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
