"""Keeps models with tables out of `DistributedDataParallel`, which cannot keep the rows of its replicas equal.

It broadcasts first values and averages gradients of parameters; the rows of a table are in none.
"""

from __future__ import annotations

import functools
import inspect
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speedtransfer.errors import InvalidValueError, OptimizerError
from speedtransfer.optim.handle import Handle, any_handles, find_handle
from speedtransfer.tables import row_chunks

# Frozen tables that replicas share the rows of, with the names of their modules.
_replicated: weakref.WeakKeyDictionary[Handle, str] = weakref.WeakKeyDictionary()


def install() -> None:
    """Make `DistributedDataParallel` look for tables before it takes a model."""
    DistributedDataParallel.__init__ = _checking(DistributedDataParallel.__init__)  # type: ignore[method-assign]


def _checking(method: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def checking(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if any_handles() and dist.is_available() and dist.is_initialized():
            given = signature.bind(self, *args, **kwargs).arguments
            mesh = given.get("device_mesh")
            _leave_out_tables(given["module"], given.get("process_group") if mesh is None else mesh.get_group(0))
        method(self, *args, **kwargs)

    return checking


def _leave_out_tables(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Tell `DistributedDataParallel` to ignore the tables in `module`; raise where replicas of one could differ."""
    tables: dict[str, Handle] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        handle = find_handle(param)
        if handle is not None:
            tables[name] = handle
    if not tables:
        return
    if dist.get_world_size(group) > 1:
        trained = [_name_of_module(name) for name, handle in tables.items() if handle.param.requires_grad]
        if trained:
            raise InvalidValueError(
                f"DistributedDataParallel was given a model with the table {', '.join(trained)}, which it cannot "
                "keep equal in all processes: each would train rows of its own; train in one process, use "
                "torch.nn.Embedding there, or freeze the table with weight.requires_grad_(False)"
            )
        for name, handle in tables.items():
            if handle not in _replicated:
                _check_same_rows(_name_of_module(name), handle, group)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    # Its list of parameters calls those of the model itself ".weight".
    ignored.update(*((name, f".{name}") for name in tables))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)


def _name_of_module(name: str) -> str:
    """Return what messages call the module whose parameter is `name`."""
    module = name.rpartition(".")[0]
    return repr(module) if module else "(the model itself)"


def _check_same_rows(name: str, handle: Handle, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank where the rows of one differ from those of another; else remember that they must stay equal."""
    handle.rows.catch_up()
    handle.table.wait()
    digest = 0
    for part in handle.rows.parts("weight").values():
        for rows in row_chunks(len(part), max(part[:1].nbytes, 1)):
            digest = zlib.crc32(part[rows].cpu().contiguous().view(torch.uint8).numpy().data, digest)
    extremes = torch.tensor([digest, -digest], device=handle.table.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
    if int(extremes[0]) != -int(extremes[1]):
        raise InvalidValueError(
            f"the rows of the frozen table {name} are not the same in all processes, and DistributedDataParallel does not "
            "send them; load the same rows in each, or make the table after the same torch.manual_seed"
        )
    _replicated[handle] = name


def check_not_replicated(handle: Handle) -> None:
    """Raise where a step would train a table that was frozen when `DistributedDataParallel` took it."""
    if _replicated and handle in _replicated:
        raise OptimizerError(
            f"the table {_replicated[handle]} was frozen when DistributedDataParallel took the model and trains now: its "
            "rows would differ from process to process; keep weight.requires_grad False, or train in one process"
        )
