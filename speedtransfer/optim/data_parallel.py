"""Refuses models with tables in ``nn.DataParallel`` on several GPUs, which copies a model to each of them in every forward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from speedtransfer.errors import InvalidValueError
from speedtransfer.optim.handle import any_handles, find_handle


def install() -> None:
    """Make ``nn.DataParallel`` look for tables when it takes a model, and when it copies one."""
    init, replicate = nn.DataParallel.__init__, nn.DataParallel.replicate

    @functools.wraps(init)
    def taking(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        _refuse_tables(self.module, self.device_ids)

    @functools.wraps(replicate)
    def copying(self: Any, module: nn.Module, device_ids: Any) -> Any:
        _refuse_tables(module, device_ids)
        return replicate(self, module, device_ids)

    nn.DataParallel.__init__ = taking  # type: ignore[method-assign]
    nn.DataParallel.replicate = copying  # type: ignore[method-assign]


def _refuse_tables(model: nn.Module, device_ids: Sequence[Any]) -> None:
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
