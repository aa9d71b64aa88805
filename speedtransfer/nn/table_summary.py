"""Summarize the tables of a model: their size, memory, idle rows and optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from speedtransfer.encoding import StorageDtype
from speedtransfer.errors import InvalidTypeError, format_bytes
from speedtransfer.idle import has_rule
from speedtransfer.nn.export import is_table
from speedtransfer.nn.feature import FeatureModules
from speedtransfer.nn.options import check_model
from speedtransfer.nn.table_module import TableModule
from speedtransfer.optim import Handle

_COLUMNS = ("table", "rows", "dim", "dtype", "idle", "memory", "planes", "size", "optimizer")


@dataclasses.dataclass(frozen=True)
class TableSummary:
    """One table of a model.

    Attributes
    ----------
    names : tuple of str
        The modules that use it, as in ``model.named_modules()``.
    rows, dim : int
        Its shape.
    dtype : torch.dtype or "split24"
        What the weights are stored in.
    idle : str
        What happens to rows that a step does not touch, "exact" or "lazy"; "auto" until the first step tells which.
    memory : str
        Where the rows live; for a "mmap" table with its file.
    planes : tuple of str
        "weight" first, then the optimizer's state, which appears at the first step.
    num_bytes : int
        Bytes of all planes.
    optimizer : str
        Which optimizer and which of its ``param_groups`` the table is in, such as "AdamW group 0"; "frozen" if it requires no
        gradient; "no optimizer has this table"; or "" if none was given and none has trained it.
    features : int
        How many share it, in a `MultiEmbedding`.
    """

    names: tuple[str, ...]
    rows: int
    dim: int
    dtype: StorageDtype
    idle: str
    memory: str
    planes: tuple[str, ...]
    num_bytes: int
    optimizer: str
    features: int = 0

    def _cells(self) -> tuple[str, ...]:
        return (
            ", ".join(self.names) + (f" ({self.features} features)" if self.features else ""),
            f"{self.rows:,}",
            str(self.dim),
            str(self.dtype).removeprefix("torch."),
            self.idle,
            self.memory,
            ", ".join(self.planes),
            format_bytes(self.num_bytes),
            self.optimizer or "-",
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """The tables of a model; as a string a plain text table.

    Attributes
    ----------
    tables : tuple of TableSummary
        In the order of ``model.named_modules()``.
    num_bytes : int
        Bytes of all tables.
    other_parameters, other_bytes : int
        Number of values and of bytes of all other parameters.
    """

    tables: tuple[TableSummary, ...]
    num_bytes: int
    other_parameters: int
    other_bytes: int

    def __str__(self) -> str:
        rows = [_COLUMNS, *(table._cells() for table in self.tables)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        count = f"{len(self.tables)} table{'' if len(self.tables) == 1 else 's'}"
        other = f"{self.other_parameters:,} other parameters, {format_bytes(self.other_bytes)}"
        return "\n".join([*(lines if self.tables else ()), f"{count}, {format_bytes(self.num_bytes)}; {other}"])


def summary(model: nn.Module, opt: Optimizer | Iterable[Optimizer] | None = None) -> Summary:
    """Describe the tables of a model: size, memory, idle rows, and which optimizer has them.

    Reads no row and changes nothing.

    Parameters
    ----------
    model : nn.Module
    opt : Optimizer or iterable of Optimizer, optional
        Those that train the model. By default, for each table the optimizer that trained it last.

    Returns
    -------
    Summary
        ``print(st.summary(model, opt))`` shows it.

    Raises
    ------
    InvalidTypeError
        `opt` is no optimizer.
    """
    check_model(model)
    names: dict[Handle, list[str]] = {}
    modules: dict[Handle, TableModule] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_table(module):
            names.setdefault(module._handle, []).append(name or type(module).__name__)
            modules.setdefault(module._handle, module)
    optimizers = None if opt is None else _optimizers(opt)
    tables = tuple(
        TableSummary(
            names=tuple(names[handle]),
            rows=handle.num_rows,
            dim=(table := handle.table).dim,
            dtype=handle.rows.stored,
            idle=_idle(handle, modules[handle].idle),
            memory=_memory(handle),
            planes=table.planes,
            num_bytes=table.nbytes,
            optimizer=_owner(handle, optimizers),
            features=len(modules[handle]) if isinstance(modules[handle], FeatureModules) else 0,
        )
        for handle in names
    )
    weights = {id(handle.param) for handle in names}
    others = [param for param in model.parameters() if id(param) not in weights]
    return Summary(
        tables,
        sum(table.num_bytes for table in tables),
        sum(param.numel() for param in others),
        sum(param.numel() * param.element_size() for param in others),
    )


def _idle(handle: Handle, asked: str) -> str:
    """Return what happens to idle rows: with "auto" the optimizer of the last step decides."""
    last = None if handle.state is None else handle.state.optimizer()
    if asked != "auto" or handle.state is None or last is None:
        return asked
    return "exact" if has_rule(last) and not handle.state.sparse else "lazy"


def _memory(handle: Handle) -> str:
    """Return where the rows live: the memory, its file, and which part of the table this process has."""
    table, text = handle.table, handle.table.memory
    if not handle.owners.has_whole:
        exchange = handle.owners.exchange
        text += f", rank {exchange.rank} of {exchange.ranks}"
    return text if table.path is None else f"{text} ({table.path})"


def _optimizers(opt: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    found: list[Any] = list(opt) if isinstance(opt, Iterable) and not isinstance(opt, str) else [opt]
    for each in found:
        if not hasattr(each, "param_groups"):
            raise InvalidTypeError(
                f"opt is {each!r} ({type(each).__name__}), no optimizer; pass a torch.optim.Optimizer"
            )
    return found


def _owner(handle: Handle, optimizers: list[Optimizer] | None) -> str:
    if not handle.param.requires_grad:
        return "frozen"
    if optimizers is None:
        last = None if handle.state is None else handle.state.optimizer()
        if last is None:
            return ""
        optimizers = [last]
    groups = [
        f"{type(optimizer).__name__} group {number}"
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        if any(param is handle.param for param in group["params"])
    ]
    return " and ".join(groups) or "no optimizer has this table"
