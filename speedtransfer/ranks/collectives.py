"""Functions of ``torch.distributed`` that are given rows of a table: most write to their first argument, some later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_leaves

from speedtransfer.errors import InvalidValueError

_SENDING = {"send", "isend", "gather"}
_NAMES = """
    send isend recv irecv broadcast reduce scatter gather all_reduce all_reduce_coalesced all_gather all_gather_into_tensor
    all_gather_coalesced reduce_scatter reduce_scatter_tensor all_to_all all_to_all_single
"""


def _is_collective(func: Any) -> bool:
    return getattr(func, "__module__", None) == "torch.distributed.distributed_c10d"


def receives(func: Any) -> bool:
    """Tell whether `func` is one that writes to its first argument."""
    return _is_collective(func) and func.__name__ not in _SENDING


def wait_for(func: Any, result: Any) -> None:
    """Wait for one that goes on when its function has returned (``async_op=True``), to write back what it writes."""
    if _is_collective(func) and hasattr(result, "wait"):
        result.wait()


def refuse_irecv(func: Any, rows: Any) -> None:
    """Raise for ``irecv`` into a copy of `rows`: the process that sends may wait for what comes after it here."""
    if _is_collective(func) and func.__name__ == "irecv":
        raise InvalidValueError(
            f"irecv was given rows of {rows}, of which it gets a copy, and they would come when nobody writes that back; "
            "receive into a tensor, and copy it (weight.data.copy_)"
        )


def patches() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return what has those ask the classes of their tensors that do not, which torch 2.13 does itself."""
    if not dist.is_available():
        return []
    named = [(name, getattr(dist, name, None)) for name in _NAMES.split()]
    silent = [name for name, it in named if it and "has_torch_function" not in inspect.unwrap(it).__code__.co_names]
    return [(module, name, _asking) for name in silent for module in (dist, dist.distributed_c10d)]


def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        given = tuple(tree_leaves((args, kwargs)))
        if has_torch_function(given):
            return handle_torch_function(function, given, *args, **kwargs)
        return function(*args, **kwargs)

    return asking
