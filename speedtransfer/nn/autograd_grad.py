"""``torch.autograd.grad`` of weights of tables: it is asked for the nodes of their parameters in the graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtransfer.cuda import check_not_capturing
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.weight import TableWeight, handle_of, special
from speedtransfer.optim import Handle
from speedtransfer.optim.anchor import Arrived, collected
from speedtransfer.optim.graph import edges_to
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.optim.whole_gradient import hooked, of_all_rows
from speedtransfer.tables import padded_anew


def _grad(
    outputs: Any,
    inputs: Any,
    *,
    create_graph: bool,
    allow_unused: bool | None,
    is_grads_batched: bool,
    materialize_grads: bool,
    **others: Any,
) -> Any:
    """Replace ``torch.autograd.grad``, which would take a weight for the whole table: ask for the node of its parameter.

    Torch passes all but the first two arguments by name.
    """
    check_not_capturing(
        "torch.autograd.grad of the weight of a table (make_graphed_callables)",
        "capture the whole step (torch.cuda.graph), with backward() and the optimizer",
        "as no optimizer would see it",
    )
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    for weight in wanted:
        handle = handle_of(weight) if isinstance(weight, TableWeight) else None
        if handle is not None and not handle.of.owners.has_whole:
            raise InvalidValueError(
                f"torch.autograd.grad was asked for the gradient of {handle}, but its rows are owned by "
                "several processes, which bring their gradients together at the end of backward(); call "
                "backward() and use weight.grad, or give the rows: active = emb.activate(ids), ..., grad(loss, active.rows)"
            )
    handles = {handle_of(w) for w in wanted if isinstance(w, TableWeight)}
    if not all(handle.requires_grad for handle in handles):
        raise RuntimeError("One of the differentiated Tensors does not require grad")
    for handle in handles:
        if handle.late_hooks and handle.has_hooks():
            handle.views.refuse_node()
    compiled = [handle for handle in handles if handle.anchor.lookups]
    if compiled and (create_graph or is_grads_batched):
        raise InvalidTypeError(
            f"torch.autograd.grad was asked for the gradient of {compiled[0]}, which a compiled model has looked up in, to be "
            "differentiated again (create_graph) or for many at once (is_grads_batched); leave torch.compile out there"
        )
    followed: list[Any] = [edges_to(handle_of(w)) if isinstance(w, TableWeight) else [w] for w in wanted]
    flat = [*(edge for edges in followed for edge in edges), *(handle.anchor.leaf for handle in compiled)]
    # Zeros are made below: torch makes none of the nodes of weights.
    if materialize_grads and allow_unused is False:
        raise ValueError(
            "Expected allow_unused to be True or not passed when materialize_grads=True, but got: allow_unused=False."
        )
    how = {**others, "create_graph": create_graph, "is_grads_batched": is_grads_batched, "allow_unused": True}
    with _asking(handles), collected(outputs, compiled) as arrived:
        found = iter(torch.autograd.grad(outputs, flat, **how))
    results: list[Tensor | None] = []
    for weight, edges in zip(wanted, followed, strict=True):
        parts: list[Tensor | None] = [next(found) for _ in edges]
        result = parts[0]
        if isinstance(weight, TableWeight):
            result = _of_weight(handle_of(weight), parts, arrived.get(handle_of(weight), []))
        if result is None and not (allow_unused or materialize_grads):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this "
                "is the desired behavior."
            )
        if result is None and materialize_grads:
            result = torch.zeros_like(weight)
        results.append(result)
    return tuple(results)


@contextlib.contextmanager
def _asking(handles: set[Handle]) -> Iterator[None]:
    """Send gradients of rows to the nodes of their parameters, where autograd finds them."""
    for handle in handles:
        handle.views.askers += 1
    try:
        yield
    finally:
        for handle in handles:
            handle.views.askers -= 1


def _of_weight(handle: Handle, parts: list[Tensor | None], arrived: list[Arrived]) -> Tensor | None:
    """Return the gradient of all rows from those of the nodes of the parameter, and those of compiled lookups."""
    if arrived:
        rows = handle.num_rows
        with torch.no_grad():
            found = [
                of_all_rows(handle, padded_anew(ids, known, rows), grad, known, rows) for ids, known, grad, _ in arrived
            ]
            parts = [*parts, hooked(handle, functools.reduce(torch.add, found))]
    total: Tensor | None = None
    for given in parts:
        if given is None:
            continue
        part: Tensor = given
        if isinstance(given, RowGradient):
            part = given.coo() if given.sparse else given.dense()
        if part.shape[-2] < handle.num_rows:
            # Of rows that were used when there were fewer.
            part = F.pad(part.to_dense(), (0, 0, 0, handle.num_rows - part.shape[-2]))
        total = part if total is None else total + part
    return total


special[torch.autograd.grad] = _grad
