"""Find the rows of ids whose vocabulary several processes share out: each knows the ids that a hash gives it.

A lookup first sends its distinct ids to their owners, who find or admit them, in the order of the ranks and of the batches as
one process would, and send the numbers of their rows in the whole table back. The lookup of these rows then goes its ordinary
way (`optim.shards`), but for asking: the owners know already.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import to_device
from speedtransfer.errors import ProcessGroupError
from speedtransfer.optim.shards import Lookup, Shards, check_counts
from speedtransfer.ranks import Segment
from speedtransfer.vocabulary import UNSEEN_ROW, owners_of
from speedtransfer.vocabulary.batches import first_unknown
from speedtransfer.vocabulary.id_rows import FREE

_POINT = "finds ids"
# What is saved of each row.
_BY_ROW = ("ids", "last_use", "counts")


class Asked(NamedTuple):
    """Ids that owners have been asked for, and found rows for."""

    # In the whole table, the row of each distinct id here, sorted by owner.
    rows: np.ndarray
    # How many this process has asked each rank for, and how many each has asked it for.
    sends: list[int]
    receives: list[int]
    # The rows here that it was asked for.
    local: np.ndarray


class VocabularyShards(Shards):
    """The shards of other processes and what ids they know, as the handle of one sees them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Lookups that a gradient has come for, of any process, since the last step.
        self._answered = set[int]()
        # By number, leaves of lookups whose gradient has not come, of this process; those of all, as they have told when there
        # were so many lookups: a bit for each, the lowest for the last.
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._held_at = self._held = 0
        # What the last `find` asked; None: the rows read are those of other processes than were asked.
        self.asked: Asked | None = None

    # --- ids --------------------------------------------------------------------------------------------------------------

    def _about_ids(self, admit: bool) -> str:
        training = torch.is_grad_enabled() and self.handle.requires_grad
        kind = f"{'in training' if training else 'without gradients'}, admitting {'new ids' if admit else 'none'}"
        return f"{self.so_far} (lookup {self._count}, {kind})"

    def refuse_ids(self, admit: bool) -> None:
        """Tell the others that this process cannot look its ids up: they raise."""
        self.exchange.agree(_POINT, [-1, 0], self._about_ids(admit))

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
        exchange = self.exchange
        distinct, counts, _, numbers = first_unknown(ids, np.full(len(ids), -1, dtype=np.int64))
        order, given = self._by_owner_of_id(distinct)
        receives = self._agree_on_ids(_POINT, given, self._about_ids(admit))
        pairs = torch.stack([torch.from_numpy(distinct[order]), torch.from_numpy(counts[order])], 1)
        (asked,) = exchange.move("ids", [Segment(pairs, given, receives)])
        local = self._answer(asked.numpy(), admit)
        whole = torch.from_numpy(self.handle.to_whole(local)).unsqueeze(1)
        (rows,) = exchange.move("ids", [Segment(whole, receives, given)])
        in_order = rows[:, 0].numpy()
        # Those without a row read one of rank 0, if that is trained.
        trained = self.handle.vocabulary.unseen == "row"
        self.asked = None if trained else Asked(in_order, given, receives, np.maximum(local, UNSEEN_ROW))
        found = np.empty(len(distinct), dtype=np.int64)
        found[order] = in_order
        return found[numbers]

    def look_up(
        self,
        ids: Tensor,
        training: bool,
        renormalize: Callable[[Tensor, Tensor], None] | None = None,
        asked: Asked | None = None,
    ) -> tuple[Tensor, Lookup | None]:
        """Return the rows `ids` (n,), as `Shards.look_up`; `asked` says that they are those of ids just found."""
        if asked is None:
            return super().look_up(ids, training, renormalize)
        device = ids.device
        # Where there are ids without a row, several ask for the same.
        rows = np.where(asked.rows < 0, self.handle.unseen_row, asked.rows)
        order = torch.searchsorted(ids, to_device(torch.from_numpy(rows), device))
        places = to_device(torch.from_numpy(asked.local), device) + self.partition.start(self.exchange.rank)
        route = self.routed(order, asked.sends, asked.receives, places)
        return self.read_by(route, training, renormalize)

    def _agree_on_ids(self, point: str, sends: list[int], about: str) -> list[int]:
        """Return how many ids come from each rank, and take note of the lookups that they wait for gradients of."""
        waiting = self._waiting()
        told = self.exchange.agree(point, torch.tensor([[count, waiting] for count in sends], device="cpu"), about)
        counts, held = check_counts(told[:, :1])[:, 0].tolist(), told[:, 1].tolist()
        self._held_at, self._held = self._count, functools.reduce(operator.or_, held)
        return counts

    def _by_owner_of_id(self, ids: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return the order of `ids` (n,) by owner, and how many each rank has."""
        owners = self.owners(ids)
        return np.argsort(owners, kind="stable"), np.bincount(owners, minlength=self.exchange.ranks).tolist()

    def owners(self, ids: np.ndarray) -> np.ndarray:
        """Return the rank that has each id, (n,) for (n,) int64."""
        owners = owners_of(ids, self.exchange.ranks)
        # Its row is that of rank 0.
        owners[ids == self.handle.vocabulary.padding_idx] = 0
        return owners

    def ids_to_owners(self, ids: np.ndarray, values: Tensor | None) -> tuple[np.ndarray, Tensor | None]:
        """Send `ids` (n,) and `values`, ``(n, dim)``, to their owners; return those that this process owns. Collective."""
        order, given = self._by_owner_of_id(ids)
        receives = self._agree_on_ids("writes rows", given, str(self.handle))
        segments = [Segment(torch.from_numpy(ids[order]).unsqueeze(1), given, receives)]
        if values is not None:
            # Rows that were read ahead are old.
            self.changes += 1
            rows = values.detach().to("cpu", self.handle.rows.dtype)[torch.from_numpy(order)]
            segments.append(Segment(rows, given, receives))
        got = self.exchange.move("rows", segments)
        return got[0][:, 0].numpy(), got[1] if values is not None else None

    def _answer(self, asked: np.ndarray, admit: bool) -> np.ndarray:
        """Return the rows here of ids that this process owns, (n,), -1 for unknown ones: `asked`, (n, 2), has their counts."""
        vocabulary, error = self.handle.vocabulary, None
        rows = np.empty(0, dtype=np.int64)
        try:
            # As one process sees them, in its order and as often.
            every = np.repeat(asked[:, 0], asked[:, 1])
            every = vocabulary.find_in_training(every) if admit else vocabulary.find(every)
            rows = every[np.cumsum(asked[:, 1]) - asked[:, 1]]
        except Exception as raised:
            error = raised
        # It may have grown.
        num_rows = self.handle.table.num_rows
        told = self.exchange.agree(_POINT, [int(error is not None), vocabulary.draws, num_rows])
        self.handle.take_sizes(told[:, 2].tolist())
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
        # Whether to admit an id by chance is drawn alike in all, also by those that had none to draw for.
        vocabulary.draws = int(told[:, 1].max())
        return rows

    # --- saved state ------------------------------------------------------------------------------------------------------

    def gather_state(self) -> dict[str, Tensor]:
        """Return in rank 0 the state of one vocabulary that has the rows of each process after those of the one before.

        Collective. Of other processes it is their own.
        """
        handle, exchange = self.handle, self.exchange
        state, sizes = dict(handle.vocabulary.state_dict()), handle.partition.sizes
        exchange.agree("saves", [0], str(handle))
        for name in _BY_ROW:
            if name in state:
                values = state[name].clone()
                if name == "last_use" and exchange.rank:
                    # The reserved rows are those of rank 0; these are of no id.
                    values[: handle.vocabulary.reserved] = FREE
                state[name] = self._gathered(values.unsqueeze(1), sizes)[:, 0]
        if "sightings" in state:
            own = state["sightings"]
            parts = self._gathered(own, [len(own)] * exchange.ranks).numpy().reshape(-1, *own.shape)
            # An id was counted by one of them, so that the sum is never too low for it.
            total = np.minimum(parts.sum(0, dtype=np.int64), np.iinfo(parts.dtype).max)
            state["sightings"] = torch.from_numpy(total.astype(parts.dtype))
        return state

    def _gathered(self, values: Tensor, counts: list[int]) -> Tensor:
        """Return in rank 0 the values ``(n, width)`` of all processes, `counts` of each; in others none."""
        none = [0] * self.exchange.ranks
        receives = counts if self.exchange.rank == 0 else none
        (got,) = self.exchange.move("rows", [Segment(values, [len(values), *none[1:]], receives)])
        return got

    # --- rows in use ------------------------------------------------------------------------------------------------------

    def hold(self, leaf: Tensor) -> None:
        """Let the rows of the last lookup, whose leaf of autograd this is, stay those of their ids for its gradient."""
        self._leaves[self._count] = weakref.ref(leaf)

    def _waiting(self) -> int:
        """Return which lookups this process waits for gradients of, a bit for each, the lowest for the last."""
        alive = {n: leaf for n, leaf in self._leaves.items() if leaf() is not None and n in self._lookups}
        self._leaves = alive
        return sum(1 << (self._count - number) for number in alive)

    def rows_asked(self) -> list[Tensor]:
        """Return the rows here of lookups that a gradient may come for, of any process."""
        return [
            lookup.route.owned
            for number, lookup in self._lookups.items()
            if number > self._held_at or self._held >> (self._held_at - number) & 1
        ]

    def take(self, ids: Tensor, grad: Tensor, whole: bool, lookup: Any) -> None:
        """Keep a gradient for the next exchange, as `Shards.take`."""
        super().take(ids, grad, whole, lookup)
        self._leaves.pop(lookup.number, None)

    def receive(self, numbers: Sequence[int], received: Sequence[Tensor]) -> None:
        """Deposit the gradients received, as `Shards.receive`."""
        self._answered.update(lookup.number for lookup, _ in self._touched(numbers))
        super().receive(numbers, received)

    def after_step(self) -> None:
        """End a step: rows that it was made of may go to other ids now, so that no second gradient can come for them."""
        super().after_step()
        self._lookups: dict[int, Lookup] = {n: each for n, each in self._lookups.items() if n not in self._answered}
        self._answered.clear()
