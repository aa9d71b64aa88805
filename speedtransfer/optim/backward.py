"""``backward(inputs=...)`` with the weight of a table among the inputs.

The weight itself is in no graph: the leaves of its lookups are, and deposit for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.handle import any_handles, find_handle


def install() -> None:
    """Make ``torch.autograd.backward``, which ``Tensor.backward`` calls, take weights of tables as inputs."""
    torch.autograd.backward = _with_leaves(torch.autograd.backward)


def _with_leaves(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def called(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("inputs") is not None and any_handles():
            kwargs["inputs"] = _leaves_of(kwargs["inputs"])
        return backward(*args, **kwargs)

    return called


def _leaves_of(inputs: Any) -> list[Tensor]:
    flat: list[Tensor] = []
    for tensor in [inputs] if isinstance(inputs, Tensor) else inputs:
        handle = find_handle(tensor)
        if handle is None:
            flat.append(tensor)
            continue
        leaves = handle.leaves()
        if not leaves:
            raise InvalidValueError(f"no graph leads to the rows of {handle}; look them up (emb(ids)) before backward")
        flat.extend(leaf for leaf, _ in leaves)
    return flat
