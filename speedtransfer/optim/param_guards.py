"""Refuses the weight of a table to functions of torch that would make a tensor of its own of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim.handle import any_handles, find_handle


def making_no_other(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``nn.Parameter.__new__``."""

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

    return making


def swapping_none(swap: Callable[..., None]) -> Callable[..., None]:
    """Return ``torch.utils.swap_tensors``."""

    @functools.wraps(swap)
    def swapping(t1: Any, t2: Any) -> None:
        if (handle := find_handle(t1) or find_handle(t2)) is not None:
            raise InvalidTypeError(
                f"{handle} is the weight of a table, which torch.utils.swap_tensors cannot swap for another tensor; assign it "
                "(module.weight = nn.Parameter(rows)), or write its rows (module.weight.data = rows)"
            )
        swap(t1, t2)

    return swapping


def taking_none(init: Callable[..., None]) -> Callable[..., None]:
    """Return ``nn.DataParallel.__init__``, which refuses tables where it would copy the model to several GPUs."""

    @functools.wraps(init)
    def taking(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _refuse_copies(self.module, self.device_ids)

    return taking


def copying_none(replicate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``nn.DataParallel.replicate``: a table may have come into the model since."""

    @functools.wraps(replicate)
    def copying(self: Any, module: nn.Module, device_ids: Any) -> Any:
        _refuse_copies(module, device_ids)
        return replicate(self, module, device_ids)

    return copying


def _refuse_copies(model: nn.Module, device_ids: Sequence[Any]) -> None:
    # Without a GPU, or with one, it calls the model itself.
    if len(device_ids) < 2 or not any_handles():
        return
    for param in model.parameters():
        if (handle := find_handle(param)) is not None:
            raise InvalidValueError(
                f"DataParallel was given {handle}, the weight of a table, and {len(device_ids)} GPUs: it copies the model to "
                "each of them in every forward, which cannot be done with the rows of a table; use DistributedDataParallel "
                "with a process for each GPU, or DataParallel(model, device_ids=[0])"
            )
