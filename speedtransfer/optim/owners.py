"""Who has the rows of a table: this process alone, or several, which a handle asks through its `owners`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._tensor_str import PRINT_OPTS, printoptions

from speedtransfer.optim.merge import Part
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.ranks import Exchange, Partition, Segment
from speedtransfer.tables import NOTHING


class Owners:
    """This process, which has all rows, alone. What is based on it are several, each seen from one of them.

    Parameters
    ----------
    handle : Handle
    exchange : Exchange, optional
        To the other processes, where there are any.
    """

    # Whether no other process trains the table; whether this one has all rows, and may change them by itself.
    is_alone: ClassVar[bool] = True
    has_whole: ClassVar[bool] = True
    # Whether ``weight.grad`` may read as a sparse tensor.
    shows_sparse: ClassVar[bool] = True
    # Whether what several processes have for a row is added adaptively (`sharded.added_adaptively`), and not averaged.
    is_adaptive = False
    # Whether a gradient is held for the next exchange, and does not add to that of the weight at once.
    holds: bool = False
    # Whether some of the gradient that the weight has is of this process alone.
    has_local_gradient: bool = False
    # Which rows are whose; None: none is another's.
    partition: Partition | None = None
    exchange: Exchange

    def __init__(self, handle: Any, exchange: Exchange | None = None) -> None:
        self._handle = weakref.ref(handle)
        # Steps made, and backwards that failed: those of all processes.
        self.steps = self.failures = 0
        # Steps and other changes of rows, which all processes make.
        self.changes = 0
        if exchange is not None:
            self.exchange = exchange
            all_owners.append(weakref.ref(self))

    @property
    def handle(self) -> Any:
        """The handle of the table."""
        handle = self._handle()
        assert handle is not None
        return handle

    @property
    def so_far(self) -> str:
        """The table, and how many steps it has made: an interrupt may have come into one in some processes."""
        return f"{self.handle} after {self.steps} steps"

    @property
    def looked_up(self) -> str:
        """The same, and how many lookups gradients may come from: each process must have made them."""
        return self.so_far

    def is_alive(self) -> bool:
        """Tell whether the table still has these."""
        handle = self._handle()
        return handle is not None and handle.owners is self

    # --- gradients --------------------------------------------------------------------------------------------------------

    def is_open(self, at_step: bool = False) -> bool:
        """Tell whether gradients may have come since the last exchange, on this process or another.

        `at_step`: by hand, and not in a backward.
        """
        return False

    def hold(self, part: Part, whole: bool, lookup: Any) -> None:
        """Keep the gradient of some rows for the next exchange."""

    def has_left(self) -> bool:
        """Tell whether this process has a gradient for the next exchange."""
        return False

    def forget(self) -> None:
        """Forget the gradients kept since the last exchange: backward has failed, or they were set to None."""

    def announce(self) -> list[int]:
        """Return numbers, as many in each process, that tell the others as one (`from_words`) what this process has."""
        return [0]

    def ask(self, numbers: Sequence[int]) -> Tensor | None:
        """Return how many ids are sent to each rank before gradients are, ``(ranks,)``; None, in all processes: none are."""
        return None

    def send_ids(self, counts: list[int]) -> Segment:
        """Return those ids; `counts` of them come from each rank."""
        raise NotImplementedError

    def receive_ids(self, ids: Tensor) -> None:
        """Take the ids, ``(n, 1)``, that others have sent."""

    def send(self, numbers: Sequence[int]) -> list[Segment]:
        """Return the gradients to send, where the ranks have announced `numbers`."""
        return []

    def receive(self, numbers: Sequence[int], received: Sequence[Tensor]) -> None:
        """Deposit the gradients received for the next step."""

    def row_gradient(self, num_rows: int, part: Part, changed: Callable[..., None] | None, sparse: bool) -> RowGradient:
        """Return the gradient of the weight, of `num_rows` rows, that has those of `part`."""
        return RowGradient(num_rows, *part[:2], changed, sparse, part[2])

    def no_gradient(self) -> Part:
        """Return the gradient of no rows."""
        table = self.handle.table
        ids = torch.empty(0, dtype=torch.int64, device=table.device)
        return ids, torch.empty(0, table.dim, dtype=self.handle.rows.dtype, device=table.device), NOTHING

    def check_gradient(self, grad: Tensor) -> None:
        """Raise unless `grad` can be assigned to the weight."""

    def before_step(self) -> None:
        """Make ready for a step of the table, which all processes make."""

    def after_step(self) -> None:
        """End a step of the table, which all processes have made."""

    # --- rows -------------------------------------------------------------------------------------------------------------

    def share_rows(self) -> None:
        """Tell the rows, which may be new ones, how they are shared out."""

    def check_whole(self, what: str, remedy: str) -> None:
        """Raise if the weight is used in a way, `what`, that needs all rows here."""

    def shown(self) -> str:
        """Return all rows as text."""
        self.handle.step.recover()
        handle, edge = self.handle, PRINT_OPTS.edgeitems + 1
        rows, num_rows = handle.rows, handle.num_rows
        if num_rows * handle.table.dim <= PRINT_OPTS.threshold or num_rows <= 2 * edge:
            return repr(handle.whole())
        # What is shown of all, and one row more for the dots.
        some = [rows.whole("weight", 0, edge), rows.whole("weight", num_rows - edge + 1)]
        with printoptions(threshold=0):
            return repr(torch.cat(some).to(handle.table.device, rows.dtype))

    def own_row(self, row: int | None) -> int | None:
        """Return the number here of a row of the whole table; None: this process does not update it."""
        return row

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where among `ids` (n,) those that this process updates are, and their rows in the table here."""
        return torch.arange(len(ids), device="cpu"), ids

    def to_all(self, ids: Tensor, values: Tensor) -> Tensor:
        """Return the values of rows `ids` (n,), the same in all processes, of which each gives those that it has `owned`.

        Both are ``(n, width)``. Collective.
        """
        return values

    def normal_(self, start: int, stop: int | None) -> None:
        """Draw the weights of the rows from `start` to `stop` from N(0, 1): the numbers of one process."""
        self.handle.rows.normal_(start, stop)

    def load(self, values: Tensor, start: int = 0) -> None:
        """Set rows of the whole table, from `start` on, to `values`, ``(n, dim)``, rounded to nearest."""
        self.handle.rows.load("weight", values, start)

    def store(self, values: Tensor) -> None:
        """Set all rows to `values`, ``(num_rows, dim)``."""
        handle = self.handle
        handle.table.check_writable()
        handle.rows.catch_up()
        handle.table.wait()
        handle.rows.load("weight", values.detach())

    def begin_copy(self) -> None:
        """Make ready for a copy of the rows."""

    def copy_to(self, handle: Any) -> None:
        """Give the handle of a copy of the rows owners like these."""


# In the order in which they were made, which is the same on every process. Empty: no table has other processes.
all_owners: list[weakref.ref[Owners]] = []
