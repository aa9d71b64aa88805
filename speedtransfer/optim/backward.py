"""What ``torch.autograd.backward`` does for tables: weights among its `inputs`, and the exchange between processes at its end.

A compiled lookup is not joined to its weight: the leaf of its anchor stands for that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.optim.gradient_exchange import backward_lock, beside_others, exchange_gradients, forget
from speedtransfer.optim.graph import edges_to
from speedtransfer.optim.handle import any_handles, find_handle
from speedtransfer.optim.owners import all_owners


def knowing_tables(backward: Callable[..., None]) -> Callable[..., None]:
    """Return ``torch.autograd.backward``, which ``Tensor.backward`` calls, with these two."""

    @functools.wraps(backward)
    def called(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            # Hooks of tables deposit gradients, which a compiler may not repeat.
            return torch.compiler.disable(called)(*args, **kwargs)
        # Not imported for this, which takes seconds.
        compiled_autograd: Any = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled_autograd, "compiled_autograd_enabled", False) and any_handles():
            # It would record one batch; what is left without it are the same numbers.
            with compiled_autograd._disable():
                return called(*args, **kwargs)
        if kwargs.get("inputs") is not None and any_handles():
            kwargs["inputs"] = _edges_to(kwargs["inputs"])
        # One within another (a checkpoint that runs a part of the model again) is a part of that.
        if not all_owners or torch._C._current_graph_task_id() >= 0:
            return backward(*args, **kwargs)
        with backward_lock:
            hooks, exchanged = (
                _exchanging_within(args[0] if args else kwargs.get("tensors")) if beside_others() else ([], [])
            )
            try:
                backward(*args, **kwargs)
            except BaseException:
                forget()
                raise
            finally:
                for hook in hooks:
                    hook.remove()
            if not exchanged:
                exchange_gradients()

    return called


def _exchanging_within(tensors: Any) -> tuple[list[Any], list[bool]]:
    """Have the exchange be the first thing at the end of a backward of `tensors`; return hooks, and a list filled by then.

    `DistributedDataParallel` waits for its own messages at the end of backward. Where another process has left something out
    these do not come; the exchange, made before this wait, says so.
    """
    begun: list[bool] = []
    exchanged: list[bool] = []

    def exchange() -> None:
        exchanged.append(True)
        exchange_gradients()

    def begin(grad: Tensor) -> None:
        if not begun:
            begun.append(True)
            torch.autograd.Variable._execution_engine.queue_callback(exchange)

    flat = [tensors] if isinstance(tensors, Tensor) else list(tensors or ())
    return [each.register_hook(begin) for each in flat if isinstance(each, Tensor) and each.requires_grad], exchanged


def _edges_to(inputs: Any) -> list[Any]:
    flat: list[Any] = []
    given = inputs.values() if isinstance(inputs, dict) else inputs
    for tensor in [inputs] if isinstance(inputs, Tensor) else given:
        handle = find_handle(tensor)
        if handle is None:
            flat.append(tensor)
            continue
        # Edges, as functions of torch would take the whole table for a weight.
        flat += edges_to(handle) if handle.requires_grad else [tensor]
        if handle.anchor.lookups:
            flat.append(handle.anchor.leaf)
    return flat
