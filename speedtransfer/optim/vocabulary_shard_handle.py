"""The handle of a table whose ids come and go, and whose rows several processes own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import RowIndexError
from speedtransfer.optim.handle import Handle
from speedtransfer.optim.shard_handle import ShardHandle
from speedtransfer.optim.vocabulary_handle import VocabularyHandle
from speedtransfer.optim.vocabulary_shards import VocabularyShards
from speedtransfer.ranks import Exchange, Interleaved
from speedtransfer.rows import Rows
from speedtransfer.vocabulary import PADDING_ROW, UNSEEN_ROW, NotedIds, Vocabulary


class VocabularyShardHandle(VocabularyHandle, ShardHandle):
    """Tie a parameter to the rows that this process owns of a table whose rows belong to ids.

    The table of each process begins with the reserved rows; those of rank 0 are the ones that are read, whoever has the id.

    Parameters
    ----------
    rows : Rows
        Those of this process.
    partition : Interleaved
    exchange : Exchange
    vocabulary : Vocabulary
        One that no other table has, which knows the ids of this process.
    padding_idx : int, optional
        The id of padding.
    requires_grad : bool
    idle : {"auto", "exact", "lazy"}
    comm_dtype : torch.dtype, optional
        What gradients are sent as.
    """

    grows_alone = True
    reducer: VocabularyShards
    reducer_kind = VocabularyShards
    partition: Interleaved

    def __init__(
        self,
        rows: Rows,
        partition: Interleaved,
        exchange: Exchange,
        vocabulary: Vocabulary,
        padding_idx: int | None = None,
        requires_grad: bool = True,
        idle: str = "lazy",
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        ShardHandle.__init__(self, rows, partition, exchange, requires_grad, idle, comm_dtype)
        self.processes = exchange.ranks
        self._gathered: dict[str, Tensor] | None = None
        self._bind(vocabulary, padding_idx)
        if exchange.rank != 0:
            # Sparse gradients leave out the padding row, which is that of rank 0.
            self.padding_idx = None

    # --- rows of ids ------------------------------------------------------------------------------------------------------

    @property
    def unseen_row(self) -> int:
        """The row in the whole table that unseen ids read."""
        return UNSEEN_ROW * self.partition.ranks

    @property
    def padding_row(self) -> int | None:
        """The row of padding in the whole table."""
        return None if self.vocabulary.padding_idx is None else PADDING_ROW * self.partition.ranks

    @property
    def asked(self) -> Any:
        """What the owners know of the last ids that were found."""
        return self.reducer.asked

    def to_whole(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in the whole table of `rows` (n,) here, -1 for -1; reserved rows are those of rank 0."""
        rank = np.where(rows < self.vocabulary.reserved, 0, self.reducer.exchange.rank)
        return np.where(rows < 0, rows, rows * self.partition.ranks + rank)

    def take_sizes(self, sizes: list[int]) -> None:
        """Let the whole table have as many rows as the processes have told each other by now."""
        if sizes != self.partition.sizes:
            self.partition.grow(sizes)
            # What shows the gradient has as many rows as before.
            self._shown = None
            self.reset_param()

    @property
    def saved_sizes(self) -> list[int] | None:
        """How many rows each process saves in a checkpoint: all that it has."""
        return self.partition.sizes

    @property
    def num_saved(self) -> int:
        """How many rows a checkpoint has."""
        return sum(self.partition.sizes)

    def gather_ids(self) -> None:
        """Let rank 0 know the state of the vocabularies of all processes, for state dicts until `release_ids`. Collective."""
        self._gathered = self.reducer.gather_state()

    def tell_sizes(self) -> None:
        """Tell the other processes how many rows this one has by now. Collective."""
        exchange = self.reducer.exchange
        self.take_sizes(exchange.agree("loads", [self.table.num_rows], str(self))[:, 0].tolist())

    def release_ids(self) -> None:
        """Forget what `gather_ids` has gathered."""
        self._gathered = None

    def saved_ids(self) -> dict[str, Tensor]:
        """Return the state of the vocabulary for a checkpoint: in rank 0, that of all processes as it was gathered last."""
        return self.vocabulary.state_dict() if self._gathered is None else self._gathered

    def check_rows(self, rows: Tensor) -> None:
        """Raise for one of `rows` (n,), of the whole table, that its process does not have: it may have fewer than another."""
        sizes = torch.tensor(self.partition.sizes, device=rows.device)
        missing = rows[rows // self.partition.ranks >= sizes[rows % self.partition.ranks]]
        if len(missing):
            owner = int(missing[0]) % self.partition.ranks
            raise RowIndexError(
                f"{self}: row {int(missing[0])} is one of rank {owner}, which has {self.partition.sizes[owner]} rows so far; "
                "pass rows that ids have (vocabulary.rows)"
            )

    def find(self, ids: np.ndarray, admit: bool) -> np.ndarray:
        """Return the row of each id in the whole table, (n,) int64, -1 where it has none. Collective."""
        return self.reducer.find(ids, admit)

    def any_unknown(self, ids: np.ndarray) -> bool:
        """Tell whether one of the ids (n,) of any process has no row. Collective."""
        return self.sum(int((self.find(ids, admit=False) < 0).any())) > 0

    def refuse_ids(self, admit: bool) -> None:
        """Have the other processes raise, as this one will: its ids cannot be looked up."""
        self.reducer.refuse_ids(admit)

    def owns(self, ids: np.ndarray) -> np.ndarray:
        """Tell of each id (n,) whether it is one of this process."""
        owned: np.ndarray = self.reducer.owners(ids) == self.reducer.exchange.rank
        return owned

    def together(self, call: Callable[[], Any]) -> Any:
        """Return ``call()``; if that of a process raises all raise. Collective."""
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            error = raised
        try:
            self.reducer.exchange.agree_on_error("writes rows", error, str(self))
        finally:
            error = None
        return result

    def to_owners(self, ids: np.ndarray, values: Tensor | None = None) -> tuple[np.ndarray, Any]:
        """Send ids (n,) and their values ``(n, dim)`` to their owners; return those that this process owns. Collective."""
        return self.reducer.ids_to_owners(ids, values)

    def sum(self, number: int) -> int:
        """Return the sum of the numbers of all processes. Collective."""
        return int(self.reducer.exchange.agree("writes rows", [number]).sum())

    def join(self, rows: Tensor, ids: Tensor | None, deposit: Callable[..., None], *features: Any) -> Tensor:
        """Join rows to a graph, as `Handle.join`; they are held by their owners."""
        if ids is not None:
            self.reducer.hold(rows)
        return Handle.join(self, rows, ids, deposit, *features)

    def date(self, tensor: Tensor) -> None:
        """Do nothing: the lookup is known by its number, and for how long a gradient may come for it."""

    def check_lookup(self, ids: Tensor) -> None:
        """Do nothing: see `date`."""

    def know(self, ids: Tensor, noted: NotedIds | None) -> None:
        """Do nothing: of the rows of a lookup only their owners have to know."""

    def rows_in_use(self) -> np.ndarray | None:
        """Return the rows here of which a gradient may come or is pending, of any process, (n,), some perhaps twice."""
        pending = [] if self.ids is None or self.is_cleared() else [self.ids]
        parts = [*self.reducer.rows_asked(), *(ids for ids, _ in self._arriving.values()), *pending]
        rows = torch.cat(parts).cpu().numpy() if parts else np.empty(0, dtype=np.int64)
        # Without padding.
        return rows[rows < self.table.num_rows]

    def deposit(self, ids: Tensor, grad: Tensor, *args: Any, **kwargs: Any) -> None:
        """Add a gradient, as `VocabularyHandle.deposit`; ids that were not admitted are counted where they were looked up."""
        with self.rows.lock:
            summed = kwargs.get("summed", False)
            missed = self._num_missed if summed or self.grad is not None or self.reducer.has_left() else 0
            super().deposit(ids, grad, *args, **kwargs)
            self._num_missed = missed + getattr(ids, "_num_missed", 0)

    # --- all rows ---------------------------------------------------------------------------------------------------------

    def draw(self, function: Callable[[Tensor], object], start: int = 0, stop: int | None = None) -> None:
        """Refuse to draw rows: initial values are those of ids."""
        self._refuse("drawn anew")

    def change(self, function: Callable[[Tensor], object]) -> None:
        """Refuse to change all rows."""
        self._refuse("changed as a whole")

    def load(self, values: Tensor, start: int = 0) -> None:
        """Refuse to set rows by their numbers."""
        self._refuse("written as a whole")

    def _refuse(self, what: str, remedy: str | None = None) -> NoReturn:
        if remedy is None:
            VocabularyHandle._refuse(self, what)
        ShardHandle._refuse(self, what, remedy)

    # --- copies -----------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        self.rows.catch_up()
        made, exchange = copy.deepcopy(self.vocabulary, memo), self.reducer.exchange
        partition = Interleaved(self.partition.sizes)
        rest = self.requires_grad, self.idle, self.reducer.comm_dtype
        padding = self.vocabulary.padding_idx
        duplicate = VocabularyShardHandle(self.rows.copy(), partition, exchange, made, padding, *rest)
        duplicate.__dict__.update(self._of_module())
        made.load_state_dict(self.vocabulary.state_dict())
        memo[id(self)] = duplicate
        return duplicate

    def __reduce__(self) -> Any:
        return ShardHandle.__reduce__(self)
