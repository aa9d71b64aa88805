"""Compute the host memory that a table takes with its optimizer's state, and what a training step moves over the bus.

Bytes of a row are those of a few rows that are really made and trained, so that no list of optimizers or of forms has to be
kept: the planes are the ones that :class:`speedtransfer.Embedding` makes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.encoding import LOW, SCALE, StorageDtype
from speedtransfer.errors import InvalidValueError, OptimizerError, check_size
from speedtransfer.nn.embedding import Embedding
from speedtransfer.optim.probe import STEPS
from speedtransfer.rows import LAST_STEP

# Rows that are made to find out, and those of them that each step touches.
_ROWS, _TOUCHED = 8, 4
# The planes whose bytes are those of the values of rows.
OF_WEIGHTS = ("weight", "weight" + LOW)

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class PlaneSize(NamedTuple):
    """One plane of a table.

    Attributes
    ----------
    name : str
        "weight", "weight.scale" or "weight.low", "exp_avg", ..., "idle.last_step".
    dtype : torch.dtype
    row_bytes : int
    """

    name: str
    dtype: torch.dtype
    row_bytes: int


class StepBytes(NamedTuple):
    """Bytes that a training step reads from host memory and writes to it."""

    up: float
    down: float


@dataclass(frozen=True)
class TableSize:
    """What a table takes.

    Attributes
    ----------
    rows, dim : int
    planes : tuple of PlaneSize
        Weights, scales, optimizer state and, with ``idle="exact"``, the last step of each row.
    up_row_bytes, down_row_bytes : float
        Of a row that a training step touches, read and written; without an optimizer a lookup reads and nothing is written.
    """

    rows: int
    dim: int
    planes: tuple[PlaneSize, ...]
    up_row_bytes: float
    down_row_bytes: float

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are stored, without scales."""
        return self._bytes_of(OF_WEIGHTS.__contains__)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of weights and of state."""
        return self._bytes_of(lambda name: name.endswith(SCALE))

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, without scales."""
        return self.total_bytes - self.weight_bytes - self.scale_bytes - self.last_step_bytes

    @property
    def last_step_bytes(self) -> int:
        """Bytes of the last step that each row has taken, kept for ``idle="exact"``."""
        return self._bytes_of(lambda name: name == LAST_STEP)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all planes."""
        return sum(plane.row_bytes for plane in self.planes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all planes: ``table.nbytes`` of a table that has been trained."""
        return self.rows * self.row_bytes

    @property
    def exact(self) -> bool:
        """Whether rows remember the last step that they have taken, to catch up later."""
        return any(plane.name == LAST_STEP for plane in self.planes)

    def step(self, distinct: float) -> StepBytes:
        """Return the bytes that a step moves which looks up so many distinct rows.

        Raises
        ------
        InvalidValueError
            `distinct` is not from 0 to the number of rows.
        """
        if not 0 <= distinct <= self.rows:
            raise InvalidValueError(f"distinct is {distinct} but must be from 0 to the number of rows, {self.rows}")
        return StepBytes(self.up_row_bytes * distinct, self.down_row_bytes * distinct)

    def _bytes_of(self, is_wanted: Callable[[str], bool]) -> int:
        return self.rows * sum(plane.row_bytes for plane in self.planes if is_wanted(plane.name))


def table_size(
    rows: int,
    dim: int,
    optimizer: MakeOptimizer | None = torch.optim.AdamW,
    *,
    dtype: torch.dtype = torch.float32,
    storage_dtype: StorageDtype | None = None,
    state_dtype: torch.dtype | None = None,
    scale_block: int | None = None,
    idle: str = "auto",
) -> TableSize:
    """Return the bytes of a table of ``(rows, dim)`` that is made with these arguments of :class:`speedtransfer.Embedding`.

    Only a few rows are made, whatever `rows` is. What the module holds beside the table is left out, such as the active rows
    of a batch.

    Parameters
    ----------
    rows, dim : int
    optimizer : callable, optional
        Makes an optimizer of a list of parameters: a class, or one with hyperparameters (``functools.partial``). None: the
        table is frozen, and there is no state.
    dtype : torch.dtype
        That rows are computed in.
    storage_dtype : torch.dtype or "split24", optional
    state_dtype : torch.dtype, optional
        The forms that rows and state are stored in.
    scale_block : int, optional
        Columns that share a scale of float8 rows.
    idle : {"auto", "exact", "lazy"}

    Raises
    ------
    InvalidValueError, InvalidTypeError
        As :class:`speedtransfer.Embedding`.
    OptimizerError
        The optimizer cannot train rows of a table, or ``idle="exact"`` has no rule for it.
    """
    rows, dim = check_size(rows, "rows", 1), check_size(dim, "dim", 1)
    options: dict[str, Any] = {"dtype": dtype, "storage_dtype": storage_dtype, "state_dtype": state_dtype, "idle": idle}
    options["scale_block"] = scale_block
    # Whoever asks for a size draws no random numbers, and may be in any mode.
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        # That idle="auto" is lazy with this optimizer is what `exact` says.
        warnings.filterwarnings("ignore", "it is not known what .* does to rows")
        try:
            emb, up, down = _trained(dim, optimizer, sparse=False, **options)
        except OptimizerError as error:
            # SparseAdam and its like refuse dense gradients; of all others the first error is the one to tell.
            try:
                emb, up, down = _trained(dim, optimizer, sparse=True, **options)
            except OptimizerError:
                raise error from None
    table = emb.table
    planes = ((name, table.stored(name)) for name in table.planes)
    found = tuple(PlaneSize(name, plane.dtype, plane.nbytes // _ROWS) for name, plane in planes)
    return TableSize(rows, dim, found, up, down)


def _trained(dim: int, optimizer: MakeOptimizer | None, **options: Any) -> tuple[Embedding, float, float]:
    """Return a module of a few rows after some steps, and the bytes that the last step read and wrote for each row."""
    emb = Embedding(_ROWS, dim, device="cpu", memory="pageable", **options)
    stepper = None if optimizer is None else optimizer(list(emb.parameters()))
    emb.requires_grad_(stepper is not None)
    # State that an optimizer makes late is there after as many steps as a probe takes.
    for number in range(STEPS + 1):
        emb.table.reset_stats()
        ids = (torch.arange(_TOUCHED, device="cpu") + number) % _ROWS
        rows: Tensor = emb(ids)
        if stepper is None:
            break
        rows.backward(torch.ones_like(rows))
        stepper.step()
        stepper.zero_grad()
    stats = emb.table.stats()
    return emb, stats.gathered_bytes / _TOUCHED, stats.scattered_bytes / _TOUCHED
