"""Make the table of a module and its handle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.encoding import check_dtypes
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.given_table import handle_of_table
from speedtransfer.nn.new_shard import make_shard
from speedtransfer.nn.new_vocabulary import make_vocabulary_handle
from speedtransfer.nn.new_vocabulary_shard import make_vocabulary_shard
from speedtransfer.nn.options import TableOptions, refuse_vocabulary
from speedtransfer.nn.patches import install
from speedtransfer.once import once
from speedtransfer.optim import Handle, Rows
from speedtransfer.tables import Table


def make_handle(
    weight: Tensor | Table | None,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype | None,
    requires_grad: bool,
    options: TableOptions,
    padding_idx: int | None = None,
) -> Handle:
    """Make a table of `shape` and its handle: with the values of `weight`, ``(num_rows, dim)``, or zeros.

    `options` are complete; `dtype` is that of `weight`, if it is a tensor; of a table it is what lookups give, if not None.
    `padding_idx` is that of the module, for a vocabulary.
    """
    _follow_names()
    install()
    if options["process_group"] is None and (options["memory"] == "shared" or options["comm_dtype"] is not None):
        raise InvalidValueError(
            "memory='shared' and comm_dtype are for tables of several processes; pass process_group=dist.group.WORLD of "
            "torch.distributed too, or leave them out"
        )
    if isinstance(weight, Table):
        refuse_vocabulary(options, "a table that exists", "pass a tensor of the rows of the ids from 0 on")
        return handle_of_table(weight, dtype, requires_grad, options)
    assert dtype is not None
    if options["vocabulary"] is not None and options["process_group"] is not None:
        return make_vocabulary_shard(weight, shape, device, dtype, requires_grad, options, padding_idx)
    if options["vocabulary"] is not None:
        return make_vocabulary_handle(weight, shape, device, dtype, requires_grad, options, padding_idx)
    storage_dtype = options["storage_dtype"]
    if weight is not None and storage_dtype is not None and weight.is_floating_point():
        # Rows stored in another dtype are computed in float32, whatever `weight` is.
        dtype = torch.float32
    if options["process_group"] is not None:
        return make_shard(weight, shape, device, dtype, requires_grad, options)
    check_dtypes(dtype, storage_dtype, options["state_dtype"], options["scale_block"])
    stored = dtype if storage_dtype is None else storage_dtype
    about: Any = options
    place = {name: about[name] for name in ("memory", "path", "layout", "cache_rows", "cache_counts")}
    # Codes of float8 would change their meaning with their scales.
    in_place = weight is not None and weight.dtype == stored and storage_dtype not in FLOAT8_DTYPES
    if weight is not None and in_place:
        table = Table.from_array(weight, device=device, copy=False, **place)
    else:
        table = Table(shape[0], shape[1], stored, device=device, **place)
    rows = Rows(table, storage_dtype, options["state_dtype"], options["scale_block"])
    if weight is not None and not in_place:
        rows.load("weight", weight)
    return Handle(table, requires_grad, options["idle"], rows)


@once
def _follow_names() -> None:
    """Name handles after their modules, for messages: as in ``named_modules()`` of the outermost module so far."""

    def name(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        for path, module in [] if child is None else child.named_modules(prefix=name):
            handle = vars(module).get("_handle")
            # Processes that train a table compare its name: one may put the model into another alone.
            if isinstance(handle, Handle) and (handle.owners.is_alone or not handle.owners.steps):
                handle.name = path

    register_module_module_registration_hook(name)
