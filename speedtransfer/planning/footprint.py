"""The forms that rows and their state can be stored in, what tables take of each memory then, and whether that fits."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from speedtransfer.encoding import SPLIT24, STATE_DTYPES, STORAGE_DTYPES, value_bytes
from speedtransfer.errors import check_choice, check_size, format_bytes
from speedtransfer.nn.sizing import OF_WEIGHTS, MakeOptimizer, TableSize, table_size
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.workload import Load, Workload, dtype_name

STORAGE = {dtype_name(dtype): dtype for dtype in STORAGE_DTYPES}
STATE = {dtype_name(dtype): dtype for dtype in STATE_DTYPES}
FLOAT32 = "float32"
DENSE, SPARSE = "nn.Embedding", "nn.Embedding(sparse=True)"
DEVICE, PINNED, PAGEABLE, MMAP = "device", "pinned", "pageable", "mmap"
_PAGE = 4096
# Of the staged engine: its ring of page-locked buffers, as large as they grow.
_RING_BYTES = 8 * (4 << 20)
# Lookups on a CUDA device have room for as many rows as there are ids, up to so many bytes.
_PADDED_BYTES = 512 << 20


class Form(NamedTuple):
    """How rows and their state are stored: names of dtypes, and the columns that share a scale of float8 rows."""

    storage: str = FLOAT32
    state: str = FLOAT32
    scale_block: int | None = None

    @property
    def level(self) -> int:
        """0: nothing is rounded; 1: rows in 16 or 24 bits, or state in fewer than 32; 2: rows in 8 bits."""
        if value_bytes(STORAGE[self.storage]) == 1:
            return 2
        return int(self.storage != FLOAT32 or self.state != FLOAT32)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of :class:`speedtransfer.Embedding` that make rows of this form; None for float32."""
        storage = None if self.storage == FLOAT32 else STORAGE[self.storage]
        state = None if self.state == FLOAT32 else STATE[self.state]
        return {"storage_dtype": storage, "state_dtype": state, "scale_block": self.scale_block}

    def __str__(self) -> str:
        return self.storage if self.storage == self.state else f"{self.storage} rows, {self.state} state"


# What is planned where no form is asked for. float16 takes the bytes of bfloat16 and has a smaller range.
_TRAINED: tuple[Form, ...] = (
    Form(),
    Form(state="uint8"),
    Form("bfloat16", "bfloat16"),
    Form(SPLIT24, "uint8"),
    Form("bfloat16", "uint8"),
    Form("int8", "uint8"),
    Form("float8_e4m3fn", "uint8"),
)


def forms_for(workload: Workload, storage: Any, state: Any, scale_block: int | None = None) -> list[Form]:
    """Return the forms to plan: the one of given dtypes or their names, float32 by default, or all that differ."""
    if scale_block is not None:
        check_size(scale_block, "scale_block", 1)
    if storage is not None or state is not None:
        rows, values = _checked("storage_dtype", storage, STORAGE), _checked("state_dtype", state, STATE)
        return [Form(rows, values, scale_block)]
    kept = _TRAINED
    if not state_planes(workload):  # none that could be stored in fewer bits
        kept = tuple(Form(name, FLOAT32) for name in dict.fromkeys(form.storage for form in _TRAINED))
    return [form._replace(scale_block=scale_block) if form.storage.startswith("float8") else form for form in kept]


def _checked(label: str, dtype: Any, choices: Collection[str]) -> str:
    name = dtype_name(dtype) if dtype is None or isinstance(dtype, torch.dtype) else dtype
    return str(check_choice(name, label, choices))


def state_planes(workload: Workload) -> int:
    """Return how many values of state the optimizer keeps for each value of a row."""
    dim = 3  # no other entry of a row is as wide
    size = _row_size(workload.trainer.make, workload.idle, dim, Form())
    return sum(plane.row_bytes == 4 * dim and plane.name != "weight" for plane in size.planes)


@functools.lru_cache(maxsize=256)
def _row_size(make: MakeOptimizer | None, idle: str, dim: int, form: Form) -> TableSize:
    return table_size(1, dim, make, **form.arguments, idle=idle)


def size_of(workload: Workload, table: Load, form: Form) -> TableSize:
    """Return the bytes of a table in a form, from a few rows that are really made and trained."""
    make = workload.trainer.make if table.trained else None
    return replace(_row_size(make, workload.idle, table.dim, form), rows=table.rows)


class Bytes(NamedTuple):
    """Bytes of all tables: weights as they are stored, state, last steps of rows (of exact idle rows), and scales of both."""

    weight: int
    state: int
    last_step: int
    scale: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def bytes_of(workload: Workload, form: Form) -> Bytes:
    """Return the bytes of all tables in a form."""
    sizes = [size_of(workload, table, form) for table in workload.tables]
    return Bytes(*(sum(getattr(size, f"{part}_bytes") for size in sizes) for part in Bytes._fields))


def is_exact(workload: Workload) -> bool:
    """Tell whether rows remember the last step that they have taken."""
    return _row_size(workload.trainer.make, workload.idle, workload.tables[0].dim, Form()).exact


# --- memories -----------------------------------------------------------------------------------------------------------


class Footprint(NamedTuple):
    """Bytes of one configuration.

    On the compute `device`: tables that live there, rows of a step with their gradient and state, what lookups return with its
    gradient, and all other parameters of the model; without a GPU this is host memory, and counted as such. In `host` memory,
    page-locked or not; on `disk`, in files of tables.
    """

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0


class Moved(NamedTuple):
    """Bytes of rows and state that a step reads from where the table lives, and writes to it; those read of weights."""

    up: float
    down: float
    weight: float = 0.0


def active_bytes(workload: Workload, on_gpu: bool) -> float:
    """Return the bytes of the rows of a step, with gradient and state, and of what lookups return and its gradient."""
    planes = state_planes(workload)
    trained = workload.trainer.make is not None
    total = 0.0
    for table in workload.tables:
        rows = min(table.lookups, table.rows) if on_gpu else table.unique
        if 4 * table.dim * rows > _PADDED_BYTES:
            rows = table.unique
        returned = table.lookups / table.bag * (1 + trained)
        total += 4 * table.dim * (rows * (1 + (trained + planes if table.trained else 0)) + returned)
    return total


def dense_bytes(workload: Workload) -> float:
    """Return the bytes of all other parameters, with gradients and state of the same optimizer."""
    each = 1 if workload.trainer.make is None else 2 + state_planes(workload)
    return float(workload.dense_bytes * each + workload.frozen_bytes)


def footprint(workload: Workload, form: Form, memory: str, machine: Machine) -> Footprint:
    """Return what tables take in one of the memories, or as a module of torch.

    A dense ``nn.Embedding`` takes its weights, a gradient of all rows and the optimizer's state; a sparse one weights and
    state, and a gradient of the rows of a step. A table takes what :func:`speedtransfer.nn.sizing.table_size` says, where it
    lives. Rows of a step are on the compute device in any case.
    """
    on_gpu = machine.device is not None
    table = float(bytes_of(workload, form).total)
    device = active_bytes(workload, on_gpu) + dense_bytes(workload)
    host = disk = 0.0
    if memory in (DENSE, SPARSE):
        held = bytes_of(workload, Form())
        trained = sum(4 * table.dim * table.rows for table in workload.tables if table.trained)
        gradient = trained if memory == DENSE and workload.trainer.make is not None else 0
        device += held.weight + held.state + gradient
    elif memory == DEVICE:
        device += table
    elif memory == MMAP:
        disk = table
    else:
        host = table
    if on_gpu and memory in (PAGEABLE, MMAP):
        host += _RING_BYTES
    return Footprint(device, host, disk) if on_gpu else Footprint(0.0, host + device, disk)


def misfit(need: Footprint, machine: Machine) -> str:
    """Return why it does not fit, or that a size is not known; nothing where it fits."""
    reasons = []
    for words, wanted, have in (
        (f"memory on the {machine.device or 'device'}", need.device, machine.device_bytes),
        ("host memory", need.host, machine.host_bytes),
        ("disk", need.disk, machine.disk_bytes),
    ):
        if not wanted:
            continue
        if have is None:
            reasons.append(f"needs {format_bytes(wanted)} of {words}; how much {machine.name!r} has is not known")
        elif wanted > have:
            reasons.append(f"needs {format_bytes(wanted)} of {words}, {format_bytes(have)} are available")
    return "; ".join(reasons)


def moved(workload: Workload, form: Form) -> Moved:
    """Return the bytes that a step reads from a table and writes to it, of the distinct rows that it looks up."""
    tables = [(size_of(workload, table, form), min(table.unique, table.rows)) for table in workload.tables]
    steps = [size.step(unique) for size, unique in tables]
    weight = sum(
        unique * plane.row_bytes for size, unique in tables for plane in size.planes if plane.name in OF_WEIGHTS
    )
    return Moved(sum(step.up for step in steps), sum(step.down for step in steps), weight)


def page_bytes(workload: Workload, table: Load, form: Form) -> float:
    """Return the bytes of the pages that a row in files is on, one file for each plane, on average over rows."""
    sizes = [plane.row_bytes for plane in size_of(workload, table, form).planes if plane.row_bytes]
    return float(sum(_PAGE + size - math.gcd(size, _PAGE) for size in sizes))


class SparseWay(NamedTuple):
    """How torch trains a sparse ``nn.Embedding``; `same`: by the optimizer that was asked for, else the numbers are others."""

    make: MakeOptimizer
    name: str
    same: bool


def sparse_way(workload: Workload) -> SparseWay | None:
    """Return how torch trains these tables with sparse gradients; None where no optimizer does.

    That is tried with a few rows: SGD and Adagrad take sparse gradients. SparseAdam takes the place of Adam and AdamW; it
    leaves idle rows as they are and has no weight decay.
    """
    make = workload.trainer.make
    if make is None or not all(table.takes_sparse for table in workload.tables):
        return None
    if _takes_sparse(make):
        return SparseWay(make, workload.trainer.name, True)
    made = make([nn.Parameter(torch.zeros(2, 2, device="cpu"))])
    if type(made) in (torch.optim.Adam, torch.optim.AdamW):
        return SparseWay(torch.optim.SparseAdam, "SparseAdam", False)
    return None


def _takes_sparse(make: MakeOptimizer) -> bool:
    unchecked = torch.sparse.check_sparse_tensor_invariants(False)  # unless that is said torch warns
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), unchecked:
        module = nn.Embedding(4, 2, sparse=True, device="cpu")
        try:
            optimizer = make(list(module.parameters()))
            for _ in range(2):
                module(torch.tensor([1, 2], device="cpu")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        except (RuntimeError, ValueError, TypeError):
            return False
    # SGD with momentum keeps a sparse buffer, which grows with every row that was ever touched.
    values = [value for value in optimizer.state[module.weight].values() if isinstance(value, torch.Tensor)]
    return not any(value.is_sparse for value in values)
