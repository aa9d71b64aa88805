"""Functions of torch that set the weight of a table whose rows several processes own: each keeps the rows of its own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.weight import TableWeight, WeightData, handle_of, special
from speedtransfer.optim import Handle, Sharded


def _owners_of(weight: Any) -> Sharded | None:
    """Return the processes that own the rows of a weight, if several do."""
    handle = handle_of(weight) if isinstance(weight, TableWeight | WeightData) else None
    owners = handle.owners if isinstance(handle, Handle) else None
    return owners if isinstance(owners, Sharded) else None


def _drawn(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``weight.normal_`` or the like, which draws the numbers of one process."""

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        owners = _owners_of(weight)
        if owners is None:
            return NotImplemented
        owners.draw(lambda values: func(values, *args, **kwargs))
        return weight

    return call


def _changed(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``weight.mul_`` or the like, which changes every value by itself if its arguments are numbers."""

    def call(weight: Any, *args: Any, **kwargs: Any) -> Any:
        owners = _owners_of(weight)
        numbers = all(isinstance(value, bool | int | float) or value is None for value in (*args, *kwargs.values()))
        if owners is None or not numbers:
            return NotImplemented
        owners.change(lambda values: func(values, *args, **kwargs))
        return weight

    return call


def _copied(weight: Any, values: Tensor, non_blocking: bool = False) -> Any:
    owners = _owners_of(weight)
    if owners is None:
        return NotImplemented
    handle = owners.handle
    handle.store(torch.as_tensor(values).expand(handle.num_rows, handle.table.dim))
    return weight


def _initialized(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.nn.init``, which is called with the data of the weight."""

    # Torch calls it with all arguments by name.
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        owners = _owners_of(tensor)
        if owners is None:
            return NotImplemented
        owners.draw(lambda values: func(values, *args, **kwargs))
        return tensor

    return call


def _kaiming_uniform(
    tensor: Any, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    owners = _owners_of(tensor)
    if owners is None:
        return NotImplemented
    # The fans are those of all rows.
    whole = torch.empty(owners.partition.num_rows, owners.handle.table.dim, device="meta")
    # In the order of torch, for the same bits.
    std = init.calculate_gain(nonlinearity, a) / math.sqrt(init._calculate_correct_fan(whole, mode))
    bound = math.sqrt(3.0) * std
    owners.draw(lambda values: values.uniform_(-bound, bound, generator=generator))
    return tensor


def of_whole(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``torch.nn.init`` that raises before it writes if it would have to see all rows at once."""
    # Older versions of torch cut a normal distribution off by a formula of each value.
    if "erfinv_" in func.__code__.co_names:
        return func

    @functools.wraps(func)
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        handle = handle_of(tensor) if isinstance(tensor, TableWeight | WeightData) else None
        if isinstance(handle, Handle) and not handle.owners.has_whole:
            raise InvalidValueError(
                f"{handle} has rows in several processes, and {func.__name__.removeprefix('_no_grad_')}() "
                "draws anew where values of any row ask for it; draw all rows in every process, with the same seed, and set "
                "them: weight.data = torch.nn.init....(torch.empty(num_rows, dim)); or use normal_(), uniform_()"
            )
        if isinstance(handle, Handle) and handle.id_space.come_and_go and func.__name__ == "sparse_":
            # It draws all values before it writes zeros to some, which is refused.
            handle.store(tensor)
        return func(tensor, *args, **kwargs)

    return call


# Whose numbers are the same if drawn in chunks.
_DRAWS = "normal_ uniform_ random_"
_CHANGES = "zero_ fill_ mul_ div_ add_ sub_ clamp_ clamp_min_ clamp_max_ erfinv_ neg_ abs_ sqrt_ exp_ tanh_ nan_to_num_"
special.update({getattr(Tensor, name): _drawn(getattr(Tensor, name)) for name in _DRAWS.split()})
special.update({getattr(Tensor, name): _changed(getattr(Tensor, name)) for name in _CHANGES.split()})
# Those that torch gives to __torch_function__ as a whole.
special.update({func: _initialized(func) for func in (init.uniform_, init.normal_, init.constant_)})
special.update({init.kaiming_uniform_: _kaiming_uniform, Tensor.copy_: _copied})
