"""Who knows the rows of the ids of a vocabulary: this process, or several, of which each knows the ids that a hash gives it.

A lookup among several first sends its distinct ids to their owners, who find or admit them, in the order of the ranks and of
the batches as one process would, and send the numbers of their rows in the whole table back. The lookup of these rows then
goes its ordinary way (`optim.shards`), but for asking: the owners know already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import ProcessGroupError
from speedtransfer.optim.sharded import Sharded, of_owners
from speedtransfer.optim.shards import Asked
from speedtransfer.ranks import Exchange, Interleaved, Segment, check_counts, from_words
from speedtransfer.vocabulary import UNSEEN_ROW, Vocabulary, owned, owners_of
from speedtransfer.vocabulary.id_index import first_unknown
from speedtransfer.vocabulary.id_rows import FREE
from speedtransfer.vocabulary.loaded_state import NUMBERS, OF_SHARE

_POINT = "finds ids"
# What is saved of each row.
_BY_ROW = ("ids", "last_use", "counts")


class IdOwners(owned.IdOwners):
    """This process, which knows the rows of all ids, as the ids of a vocabulary see it.

    Parameters
    ----------
    handle : Handle
        Not kept alive.
    vocabulary : Vocabulary
    """

    # Whether rows are held for the gradients of lookups by their owners, which know lookups by their number.
    holds_lookups: ClassVar[bool] = False
    # What the owners know of the last ids that were found.
    asked: Asked | None = None

    def __init__(self, handle: Any, vocabulary: Vocabulary) -> None:
        self._handle, self.vocabulary = weakref.ref(handle), vocabulary

    @property
    def handle(self) -> Any:
        """The handle of the table."""
        handle = self._handle()
        assert handle is not None
        return handle

    def find(self, ids: np.ndarray, admit: bool) -> np.ndarray:
        """Return the row of each id, (n,) int64, -1 where it has none; with `admit` after new ones were admitted."""
        return self.vocabulary.find(ids, admit)

    def any_unknown(self, ids: np.ndarray) -> bool:
        """Tell whether one of `ids` (n,) has no row; of several processes, one of those of any."""
        return bool((self.vocabulary.rows(ids) < 0).any())

    def refuse_ids(self, admit: bool) -> None:
        """Tell the others that this process cannot look its ids up: they raise."""

    def hold(self, rows: Tensor) -> None:
        """Have the owners hold the rows of the last lookup, which a graph has as `rows`, for its gradient."""

    def rows_asked(self) -> list[Tensor]:
        """Return the rows here of lookups of any process that a gradient may come for."""
        return []

    def saved(self) -> dict[str, Tensor]:
        """Return the state of the vocabulary, for a state dict."""
        return self.vocabulary.state_dict()


class RankIdOwners(IdOwners):
    """The processes that share the ids of a vocabulary out, as its ids see them from one; of a table that is `Sharded`."""

    holds_lookups = True

    def __init__(self, handle: Any, vocabulary: Vocabulary) -> None:
        super().__init__(handle, vocabulary)
        self._shards: Sharded = handle.owners
        self._exchange: Exchange = handle.owners.exchange
        self._partition: Interleaved = handle.owners.partition
        self._gathered: dict[str, Tensor] | None = None
        self.processes, self.rank = self._exchange.ranks, self._exchange.rank

    def to_whole(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in the whole table of `rows` (n,) here, -1 for -1; reserved rows are those of rank 0."""
        rank = np.where(rows < self.vocabulary.reserved, 0, self._exchange.rank)
        return np.where(rows < 0, rows, rows * self._partition.ranks + rank)

    def take_sizes(self, sizes: list[int]) -> None:
        """Let the whole table have as many rows as the processes have told each other by now."""
        if sizes != self._partition.sizes:
            self._partition.grow(sizes)
            self.handle.show_growth()

    def _about_ids(self, admit: bool) -> str:
        training = torch.is_grad_enabled() and self.handle.requires_grad
        kind = f"{'in training' if training else 'without gradients'}, admitting {'new ids' if admit else 'none'}"
        return f"{self._shards.looked_up} ({kind})"

    def refuse_ids(self, admit: bool) -> None:  # noqa: D102
        self._exchange.agree(_POINT, [-1, 0], self._about_ids(admit))

    def find(self, ids: np.ndarray, admit: bool) -> np.ndarray:
        """Return the rows of `ids` (n,) int64 in the whole table, (n,) int64, -1 for an unknown one. Collective.

        Parameters
        ----------
        ids : ndarray
        admit : bool
            Admit new ids, and note that all were used now.

        Raises
        ------
        ProcessGroupError
            Another process could not look its ids up, or has no room for those that it is to admit.
        """
        exchange = self._exchange
        distinct, counts, _, numbers = first_unknown(ids, np.full(len(ids), -1, dtype=np.int64))
        order, given = self._by_owner_of_id(distinct)
        receives = self._agree_on_ids(_POINT, given, self._about_ids(admit))
        pairs = torch.stack([torch.from_numpy(distinct[order]), torch.from_numpy(counts[order])], 1)
        (asked,) = exchange.move("ids", [Segment(pairs, given, receives)])
        local = self._answer(asked.numpy(), admit)
        whole = torch.from_numpy(self.to_whole(local)).unsqueeze(1)
        (rows,) = exchange.move("ids", [Segment(whole, receives, given)])
        in_order = rows[:, 0].numpy()
        # Those without a row read that of unseen ids: of rank 0 if it is trained, else of their owner.
        trained = self.vocabulary.unseen == "row"
        read = np.maximum(in_order, UNSEEN_ROW * self.processes)
        self.asked = None if trained else Asked(read, given, receives, np.maximum(local, UNSEEN_ROW))
        found = np.empty(len(distinct), dtype=np.int64)
        found[order] = in_order
        return found[numbers]

    def _agree_on_ids(self, point: str, sends: list[int], about: str) -> list[int]:
        """Return how many ids come from each rank, and take note of the lookups that they wait for gradients of."""
        lookups = self._shards.lookups
        waiting = lookups.waiting()
        told = self._exchange.agree(point, torch.tensor([[count, *waiting] for count in sends], device="cpu"), about)
        counts: list[int] = check_counts(told[:, :1])[:, 0].tolist()
        lookups.note_waiting(map(from_words, told[:, 1:].tolist()))
        return counts

    def _by_owner_of_id(self, ids: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return the order of `ids` (n,) by owner, and how many each rank has."""
        owners = self.owners(ids)
        return np.argsort(owners, kind="stable"), np.bincount(owners, minlength=self._exchange.ranks).tolist()

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """Return the rank that has each id, (n,) for (n,) int64."""
        owners = owners_of(ids, self._exchange.ranks)
        # Its row is that of rank 0.
        owners[ids == self.vocabulary.padding_idx] = 0
        return owners

    def to_owners(self, ids: np.ndarray, values: Tensor | None = None) -> tuple[np.ndarray, Any]:  # noqa: D102
        order, given = self._by_owner_of_id(ids)
        receives = self._agree_on_ids("writes rows", given, str(self.handle))
        segments = [Segment(torch.from_numpy(ids[order]).unsqueeze(1), given, receives)]
        if values is not None:
            # Rows that were read ahead are old.
            self._shards.changes += 1
            rows = values.detach().to("cpu", self.handle.rows.dtype)[torch.from_numpy(order)]
            segments.append(Segment(rows, given, receives))
        got = self._exchange.move("rows", segments)
        return got[0][:, 0].numpy(), got[1] if values is not None else None

    def _answer(self, asked: np.ndarray, admit: bool) -> np.ndarray:
        """Return the rows here of ids that this process owns, (n,), -1 for unknown ones: `asked`, (n, 2), has their counts."""
        vocabulary, error = self.vocabulary, None
        rows = np.empty(0, dtype=np.int64)
        try:
            # As one process sees them, in its order and as often.
            every = vocabulary.find(np.repeat(asked[:, 0], asked[:, 1]), admit)
            rows = every[np.cumsum(asked[:, 1]) - asked[:, 1]]
        except Exception as raised:
            error = raised
        # It may have grown.
        num_rows = self.handle.table.num_rows
        told = self._exchange.agree(_POINT, [int(error is not None), num_rows])
        self.take_sizes(told[:, 1].tolist())
        try:
            if error is not None:
                raise error
        finally:
            # The error has this frame, which must not have it: the table would stay until the next gc.
            error = None
        if bool(told[:, 0].any()):
            raise ProcessGroupError(
                f"rank {int(told[:, 0].argmax())} could not give its ids rows (its own message says why), so no process "
                "looked any up"
            )
        return rows

    def any_unknown(self, ids: np.ndarray) -> bool:  # noqa: D102
        return self.sum(int((self.find(ids, admit=False) < 0).any())) > 0

    def owns(self, ids: np.ndarray) -> np.ndarray:  # noqa: D102
        owned: np.ndarray = self.owners(ids) == self._exchange.rank
        return owned

    def together(self, call: Callable[[], Any]) -> Any:  # noqa: D102
        return self._exchange.in_all("writes rows", call, lambda _: str(self.handle))

    def to_all(self, ids: np.ndarray, values: Tensor) -> Tensor:  # noqa: D102
        return of_owners(self._exchange, torch.from_numpy(self.owners(ids)), values)

    def joined(self, ids: np.ndarray, values: Tensor) -> tuple[np.ndarray, Tensor]:  # noqa: D102
        told = self._exchange.agree("reads all rows", [len(ids)], str(self.handle))
        ranks = torch.arange(self.processes, device="cpu").repeat_interleave(told[:, 0])
        every = of_owners(self._exchange, ranks, torch.from_numpy(ids).unsqueeze(1))[:, 0].numpy()
        order = np.argsort(every)
        return every[order], of_owners(self._exchange, ranks, values)[torch.from_numpy(order)]

    def from_first(self, values: Tensor) -> Tensor:  # noqa: D102
        return self._exchange.from_first(values)

    def sum(self, number: int) -> int:  # noqa: D102
        return int(self._exchange.agree("writes rows", [number]).sum())

    # --- rows in use ------------------------------------------------------------------------------------------------------

    def hold(self, rows: Tensor) -> None:  # noqa: D102
        self._shards.lookups.hold(rows)

    def rows_asked(self) -> list[Tensor]:  # noqa: D102
        return self._shards.lookups.rows_asked()

    # --- saved state ------------------------------------------------------------------------------------------------------

    def _gather_state(self) -> dict[str, Tensor]:
        """Return in rank 0 the state of one vocabulary that has the rows of each process after those of the one before.

        Collective. Of other processes it is their own.
        """
        exchange = self._exchange
        state, sizes = dict(self.vocabulary.state_dict()), self._partition.sizes
        numbers = dict(zip(NUMBERS, state["numbers"].tolist(), strict=True))
        counts = {"rows": self.handle.table.num_rows, "released": len(state["released"])}
        shares = exchange.agree("saves", [(numbers | counts)[name] for name in OF_SHARE], str(self.handle))
        for name in _BY_ROW:
            if name in state:
                values = state[name].clone()
                if name == "last_use" and exchange.rank:
                    # The reserved rows are those of rank 0; these are of no id.
                    values[: self.vocabulary.reserved] = FREE
                state[name] = self._to_first(values.unsqueeze(1), sizes)[:, 0]
        state["released"] = self._to_first(state["released"].unsqueeze(1), shares[:, 1].tolist())[:, 0]
        if "sightings" in state:
            state["sightings"] = self._to_first(state["sightings"], [len(state["sightings"])] * exchange.ranks)
        return state | {"shares": shares}

    def _to_first(self, values: Tensor, counts: list[int]) -> Tensor:
        """Return in rank 0 the values ``(n, width)`` of all processes, `counts` of each; in others none."""
        none = [0] * self._exchange.ranks
        receives = counts if self._exchange.rank == 0 else none
        (got,) = self._exchange.move("rows", [Segment(values, [len(values), *none[1:]], receives)])
        return got

    def gather(self) -> None:  # noqa: D102
        self._gathered = self._gather_state()

    def release(self) -> None:  # noqa: D102
        self._gathered = None

    def tell_sizes(self) -> None:  # noqa: D102
        told = self._exchange.agree("loads", [self.handle.table.num_rows], str(self.handle))
        self.take_sizes(told[:, 0].tolist())

    def saved(self) -> dict[str, Tensor]:
        """Return the state of the vocabulary for a checkpoint: in rank 0, that of all processes as it was gathered last."""
        return super().saved() if self._gathered is None else self._gathered
