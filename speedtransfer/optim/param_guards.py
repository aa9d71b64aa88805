"""Refuses the weight of a table where torch would fail without its name: ``nn.Parameter(weight)`` and ``swap_tensors``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from speedtransfer.errors import InvalidTypeError
from speedtransfer.optim.handle import find_handle


def install() -> None:
    """Make ``nn.Parameter`` and ``torch.utils.swap_tensors`` look for tables."""
    make, swap = nn.Parameter.__new__, torch.utils.swap_tensors

    # Of many classes: theirs may have arguments of their own.
    @functools.wraps(make)
    def making(cls: Any, *args: Any, **kwargs: Any) -> Any:
        data = kwargs.get("data", args[0] if args else None)
        if type(data) is not torch.Tensor and (handle := find_handle(data)) is not None:
            raise InvalidTypeError(
                f"{handle} is the weight of a table, of which nn.Parameter (weight_norm too) cannot make another over the "
                "same rows; share it (other.weight = module.weight), copy it (nn.Parameter(weight.detach().clone())), or use "
                "torch.nn for this module (speedtransfer.to_dense)"
            )
        return make(cls, *args, **kwargs)

    @functools.wraps(swap)
    def swapping(t1: Any, t2: Any) -> None:
        if (handle := find_handle(t1) or find_handle(t2)) is not None:
            raise InvalidTypeError(
                f"{handle} is the weight of a table, which torch.utils.swap_tensors cannot swap for another tensor; assign it "
                "(module.weight = nn.Parameter(rows)), or write its rows (module.weight.data = rows)"
            )
        swap(t1, t2)

    nn.Parameter.__new__ = making  # type: ignore[method-assign]
    torch.utils.swap_tensors = swapping
