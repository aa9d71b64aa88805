"""The forms that rows and their state can be stored in, from the least lossy on, and the bytes of a table in each."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from speedtransfer.encoding import STATE_DTYPES, STORAGE_DTYPES
from speedtransfer.errors import InvalidValueError, check_size, suggest
from speedtransfer.nn.sizing import MakeOptimizer, TableSize, table_size
from speedtransfer.planning.workload import Load, Workload, dtype_name

STORAGE = {dtype_name(dtype): dtype for dtype in STORAGE_DTYPES}
STATE = {dtype_name(dtype): dtype for dtype in STATE_DTYPES}
FLOAT32 = "float32"


class Form(NamedTuple):
    """How rows and their state are stored: names of dtypes, and the columns that share a scale of float8 rows."""

    storage: str = FLOAT32
    state: str = FLOAT32
    scale_block: int | None = None

    @property
    def level(self) -> int:
        """0: nothing is rounded; 1: rows in 16 bits, or state in fewer than 32; 2: rows in 8 bits."""
        if STORAGE[self.storage].itemsize == 1:
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
    Form("bfloat16", "uint8"),
    Form("int8", "uint8"),
    Form("float8_e4m3fn", "uint8"),
)


def forms_for(workload: Workload, storage: str | None, state: str | None, scale_block: int | None = None) -> list[Form]:
    """Return the forms to plan: the one of given dtypes, of which float32 is the default, or all that differ."""
    if scale_block is not None:
        check_size(scale_block, "scale_block", 1)
    if storage is not None or state is not None:
        rows, values = _checked("storage_dtype", storage, STORAGE), _checked("state_dtype", state, STATE)
        return [Form(rows, values, scale_block)]
    kept = _TRAINED
    if not has_wide_state(workload):
        kept = tuple(Form(name, FLOAT32) for name in dict.fromkeys(form.storage for form in _TRAINED))
    return [form._replace(scale_block=scale_block) if form.storage.startswith("float8") else form for form in kept]


def _checked(label: str, name: str | None, choices: dict[str, torch.dtype]) -> str:
    if name is None:
        return FLOAT32
    if not isinstance(name, str) or name not in choices:
        raise InvalidValueError(f"{label} is {name!r}{suggest(str(name), choices)}")
    return name


def has_wide_state(workload: Workload) -> bool:
    """Tell whether the optimizer keeps state as wide as the rows, which can be stored in fewer bits."""
    return state_planes(workload) > 0


def state_planes(workload: Workload) -> int:
    """Return how many values of state the optimizer keeps for each value of a row."""
    dim = 3  # no other entry of a row is as wide
    size = _row_size(workload, dim, Form())
    return sum(plane.row_bytes == 4 * dim and plane.name != "weight" for plane in size.planes)


@functools.lru_cache(maxsize=256)
def _row_size_of(make: MakeOptimizer | None, idle: str, dim: int, form: Form) -> TableSize:
    return table_size(1, dim, make, **form.arguments, idle=idle)


def _row_size(workload: Workload, dim: int, form: Form) -> TableSize:
    return _row_size_of(workload.trainer.make, workload.idle, dim, form)


def size_of(workload: Workload, table: Load, form: Form) -> TableSize:
    """Return the bytes of a table in a form, from a few rows that are really made and trained."""
    return replace(_row_size(workload, table.dim, form), rows=table.rows)


@dataclass(frozen=True)
class Bytes:
    """Bytes of all tables: weights as they are stored, state, last steps of rows (of exact idle rows), and scales of both."""

    weight: int = 0
    state: int = 0
    last_step: int = 0
    scale: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weight + self.state + self.last_step + self.scale


def bytes_of(workload: Workload, form: Form) -> Bytes:
    """Return the bytes of all tables in a form."""
    sizes = [size_of(workload, table, form) for table in workload.tables]
    parts = ("weight", "state", "last_step", "scale")
    return Bytes(*(sum(getattr(size, f"{part}_bytes") for size in sizes) for part in parts))


def is_exact(workload: Workload) -> bool:
    """Tell whether rows remember the last step that they have taken."""
    return _row_size(workload, workload.tables[0].dim, Form()).exact
