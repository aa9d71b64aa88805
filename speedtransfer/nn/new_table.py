"""Make the table of a module and its handle: alone, or in agreement with the other processes that own its rows."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from speedtransfer.dtypes import FLOAT8_DTYPES
from speedtransfer.encoding import SPLIT24
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.given_table import handle_of_table
from speedtransfer.nn.new_rows import NewRows
from speedtransfer.nn.options import TableOptions, refuse_vocabulary
from speedtransfer.nn.patches import install
from speedtransfer.once import once
from speedtransfer.optim import Handle, Sharded, SharedOwners, VocabularyIds
from speedtransfer.ranks import Exchange, Interleaved, Partition, as_int64, exchange_of
from speedtransfer.tables import Table, row_chunks


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

    With `process_group` the table of each process has the rows that it owns, and all must call this. With a vocabulary
    `weight` has the rows of the ids from 0 on.

    Parameters
    ----------
    weight : Tensor or Table, optional
        The same in all processes.
    shape : tuple of int
    device : torch.device
    dtype : torch.dtype, optional
        That of `weight`, if it is a tensor; of a table what lookups give, if not None.
    requires_grad : bool
    options : TableOptions
        Complete.
    padding_idx : int, optional
        That of the module.

    Raises
    ------
    ProcessGroupError
        The processes do not make the same table, or one of them could not.
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
    storage_dtype = options["storage_dtype"]
    if weight is not None and storage_dtype is not None and weight.is_floating_point():
        # Rows stored in another dtype are computed in float32, whatever `weight` is.
        dtype = torch.float32
    exchange = None if options["process_group"] is None else exchange_of(options["process_group"])
    new = NewRows(weight, shape, device, dtype, options, padding_idx, exchange)
    if exchange is not None:
        return _made_in_all(new, exchange, requires_grad)
    new.check()
    # Codes of float8 would change their meaning with their scales, and bfloat16 with 8 bits more beside it is another number.
    in_place = weight is not None and weight.dtype == new.stored and storage_dtype not in (*FLOAT8_DTYPES, SPLIT24)
    in_place = in_place and options["vocabulary"] is None
    rows = new.over(weight) if weight is not None and in_place else new.make()
    handle = Handle(rows.table, requires_grad, options["idle"], rows)
    if options["vocabulary"] is not None:
        ids = VocabularyIds(handle, options["vocabulary"], padding_idx)
        if weight is not None:
            ids.load_saved({}, len(weight), weight)
    elif weight is not None and not in_place:
        rows.load("weight", weight)
    return handle


def _made_in_all(new: NewRows, exchange: Exchange, requires_grad: bool) -> Handle:
    options, vocabulary, weight = new.options, new.options["vocabulary"], new.weight
    # Checked before there is memory, which processes of one host make together.
    about = exchange.in_all("makes a table", new.check, str)
    rows = exchange.in_all("makes a table", new.make, lambda _: about)
    # The seeds of processes may differ: those of rank 0 are used.
    seeds = [rows.seed] if vocabulary is None else [rows.seed, vocabulary.seed]
    told = exchange.agree("makes a table", [*map(as_int64, seeds), 0 if weight is None else _sign(weight)])
    seeds, is_same = told[0].tolist(), bool((told[:, -1] == told[0, -1]).all())
    rows.load_state_dict({"seed": seeds[0]})
    handle = Handle(rows.table, requires_grad, options["idle"], rows)
    if vocabulary is not None:
        vocabulary.seed = seeds[1]
        partition = Interleaved([rows.table.num_rows] * exchange.ranks)
        handle.owners = Sharded(handle, exchange, partition, options["comm_dtype"])
        ids = VocabularyIds(handle, vocabulary, new.padding_idx)
        if weight is not None:
            ids.load_saved({}, len(weight), weight if is_same else exchange.from_first(weight))
        return handle
    kind = SharedOwners if options["memory"] == "shared" else Sharded
    handle.owners = kind(handle, exchange, Partition(new.shape[0], exchange.ranks), options["comm_dtype"])
    if weight is not None and is_same:
        handle.load(weight)
    elif weight is not None:
        for part in row_chunks(len(weight), weight[:1].nbytes):
            handle.load(exchange.from_first(weight[part]), part.start)
    return handle


def _sign(weight: Tensor) -> int:
    """Return a number that differs where some rows of a weight do, as where only rank 0 has loaded a model."""
    some = weight.detach()[torch.linspace(0, max(len(weight) - 1, 0), min(len(weight), 64), device="cpu").long()]
    return zlib.crc32(some.cpu().contiguous().view(torch.uint8).numpy().tobytes())


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
