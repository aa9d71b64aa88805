"""Make the handle of a module whose rows are those of a table that exists: in place, or of a copy of it."""

from __future__ import annotations

import torch

from speedtransfer.dtypes import SCALED_DTYPES
from speedtransfer.encoding import LOW, SCALE, SPLIT24, StorageDtype, check_dtypes, codec_for, dtype_of
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.options import DEFAULTS, TableOptions, table_arguments
from speedtransfer.optim import Handle, Rows, handles_over
from speedtransfer.tables import Table


def handle_of_table(table: Table, dtype: torch.dtype | None, requires_grad: bool, options: TableOptions) -> Handle:
    """Return a handle of the rows of `table`, or of a copy where complete `options` ask for another memory or form.

    Parameters
    ----------
    table : Table
    dtype : torch.dtype, optional
        Of lookups. None: float32 for rows with scales or of 24 bits, else that of the table.
    requires_grad : bool
    options : TableOptions

    Raises
    ------
    InvalidValueError, InvalidTypeError
        Another `dtype` than rows can be read as; options of a table that is to be made, for one that exists; a table that
        another module trains.
    StorageError
        Rows that are read in place are to be trained.
    """
    if options["process_group"] is not None:
        raise InvalidTypeError(
            "process_group shares the rows of a new table out, but a table was given; pass a tensor, or leave it out"
        )
    coded = "weight" + SCALE in table.planes
    form: StorageDtype | None = SPLIT24 if "weight" + LOW in table.planes else table.dtype if coded else None
    source = Rows(table, form)
    storage_dtype = options["storage_dtype"]
    # The scales that rows are to get would not be in the file.
    in_form = form or (None if table.dtype in SCALED_DTYPES and table.path is not None else table.dtype)
    place = options["memory"] in ("auto", table.memory) and options["path"] is None
    # Rows in bfloat16 get the other 8 bits as zeros.
    gets_bits = storage_dtype == SPLIT24 and table.dtype == torch.bfloat16 and table.writable
    if place and (gets_bits or storage_dtype in (None, in_form)):
        return _in_place(source, dtype, requires_grad, options)
    computed = torch.float32 if storage_dtype is not None else dtype or source.dtype
    if dtype not in (None, computed):
        raise InvalidTypeError(
            f"dtype is {dtype} but rows of storage_dtype={storage_dtype} are computed in {computed}; leave one of the two out"
        )
    check_dtypes(computed, storage_dtype, options["state_dtype"], options["scale_block"])
    given = table_arguments(options)
    made = Table(table.num_rows, table.dim, dtype_of(storage_dtype or computed), device=table.device, **given)
    rows = Rows(made, storage_dtype, options["state_dtype"], options["scale_block"])
    rows.take("weight", source)
    return Handle(made, requires_grad, options["idle"], rows)


def _in_place(source: Rows, dtype: torch.dtype | None, requires_grad: bool, options: TableOptions) -> Handle:
    table, plain = source.table, source.plain and options["storage_dtype"] is None
    for name in ("layout", "cache_rows", "cache_counts", "scale_block"):
        if dict(options)[name] != dict(DEFAULTS)[name]:
            raise InvalidValueError(
                f"{name} is {dict(options)[name]!r} but the rows are those of a table that exists; pass it where the table is "
                "made (Table.open), or memory= to copy the rows"
            )
    if requires_grad:
        table.check_writable()
    check_dtypes(source.dtype if plain else torch.float32, options["storage_dtype"], options["state_dtype"])
    form = None if plain else options["storage_dtype"] or source.storage_dtype or table.dtype
    if plain and dtype not in (None, table.dtype):
        raise InvalidTypeError(
            f"dtype is {dtype} but the table holds {table.dtype}; convert what is looked up (emb(ids).to({dtype})), or copy "
            "the rows by memory="
        )
    if not plain and dtype not in (None, torch.float32) and not source.reads_as(dtype):
        raise InvalidTypeError(f"dtype is {dtype} but rows of {form} are computed in torch.float32; leave dtype out")
    if not table.is_read_only and handles_over(table):
        raise InvalidValueError(
            "the table is that of another module, which would not know what this one does to the rows; share its weight "
            "(other.weight = module.weight), or copy the rows (module.weight.detach().clone())"
        )
    if form in SCALED_DTYPES and "weight" + SCALE not in table.planes:
        # So far codes are numbers.
        part = codec_for(table.dim, torch.float32, form).parts[SCALE]
        table.add_plane("weight" + SCALE, part.width, part.dtype, 1.0)
    rows = Rows(table, form, options["state_dtype"], dtype=dtype)
    return Handle(table, requires_grad, options["idle"], rows)
