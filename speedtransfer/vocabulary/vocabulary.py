"""Ids without bound: a vocabulary gives ids of 64 bits rows of a table, and takes them back from those not used any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size, suggest
from speedtransfer.vocabulary import contents, copies, saved_vocabulary
from speedtransfer.vocabulary.capacity import check_max_capacity
from speedtransfer.vocabulary.changes import Changes
from speedtransfer.vocabulary.ids import as_ids
from speedtransfer.vocabulary.initial import check_initial
from speedtransfer.vocabulary.loaded_state import LoadPlan
from speedtransfer.vocabulary.policies import Admit, Evict, check_admit, check_evict, check_half_life, check_seed
from speedtransfer.vocabulary.room import Room
from speedtransfer.vocabulary.vocabulary_stats import VocabularyStats

UNSEEN = ("initial", "zeros", "row")


class Vocabulary(Room):
    """Give ids of 64 bits, as they come, the rows of a table: the argument `vocabulary` of a module makes its ids unbounded.

    Ids are any integers: int64, or uint64, whose values from 2**63 on are the negative ids of the same bits. In training
    (module in train mode, gradients enabled) new ids are admitted, and get a row with their initial value and no state of the
    optimizer. Otherwise nothing is admitted, and nothing changes. What unknown ids read gets no gradient, except with
    ``unseen="row"``.

    Parameters
    ----------
    capacity : int, optional
        Ids that there are rows for at first; by default `num_embeddings` of the module. The table has a row more for unseen
        ids, and one for padding if the module has a `padding_idx`, which is an id.
    max_capacity : int, str or float, optional
        Ids that the table may grow to, by half each time: a number of ids; bytes of the table with all its planes ("48 GB");
        ``math.inf``, as the memory allows. By default it does not grow. Rows are not copied where the memory is "pageable"
        or "mmap".
    admit : "always", int or float
        When a new id gets a row: at once; after so many sightings, which are counted in a sketch that may count too many, and
        that forgets half of them now and then; with this probability at each sighting.
    evict : {"lru", "lfu"}, int, timedelta or callable, optional
        Whose rows are taken where there are none left: the ids used longest ago; those used least, with counts that halve in
        `half_life`; those not used for so many steps, or so long (also where rows are left). Or those that a function of ids,
        last use and counts (arrays, of a part of the rows) says: it returns which may go (bool) or scores, the lowest first.
        None: none, and a table that is full raises. A step looks at a bounded number of rows, and takes the worst of them.
    unseen : {"initial", "zeros", "row"}
        What an id without a row reads: the value that it would begin with, zeros, or a row that all share, which is trained
        when ids that are not admitted are looked up in training.
    initial : tuple or float
        What a row begins with: ``("normal", mean, std)``, ``("uniform", low, high)``, drawn by a hash of the id and `seed`,
        so that it is the same on every machine; or one number. Functions of ``torch.nn.init`` that fill the weight
        (``normal_``, ``uniform_``, ``constant_``, ...) change it.
    seed : int, optional
        By default ``torch.initial_seed()`` as it is now.
    half_life : float
        Steps after which a count of uses has halved (microseconds if `evict` is a timedelta).
    on_evict : callable, optional
        Called with ids, ``(n,)`` int64, and their weights, ``(n, dim)``, before their rows are taken. If it raises they stay.
    deferred : bool
        Whether a new id is admitted at the end of the optimizer step that follows its lookup (or after 256 lookups without
        one), and reads until then what unknown ids read. Ids on a CUDA device are found there in any case, where the memory
        suffices; but in training the host waits for them, unless it is deferred.

    Notes
    -----
    With `process_group` each id belongs to one of the processes, by a hash, which has rows for its share of `capacity` (and
    some more, as shares are not quite even). If one has no row for an id, and may take none, the lookup raises in all; ids
    that others admitted in it stay admitted. In each process the vocabulary is that of its own ids: `len`, ``in``, `ids`,
    `export`, `rows`, `stats` and `on_evict` know no others. `update` and `forget` take any ids, and all processes must call
    them. `seed` is that of rank 0. The processes must agree in whether they train, and count their sightings together.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        An argument that breaks its rule.

    Examples
    --------
    >>> vocabulary = st.Vocabulary(max_capacity=10_000_000, evict="lru")
    >>> embedding = st.Embedding(100_000, 64, vocabulary=vocabulary)
    >>> embedding(torch.tensor([7, -1, 2**62])).shape, len(vocabulary)
    (torch.Size([3, 64]), 3)
    """

    def __init__(
        self,
        capacity: int | None = None,
        max_capacity: int | str | float | None = None,
        admit: Admit = "always",
        evict: Evict = None,
        unseen: Literal["initial", "zeros", "row"] = "initial",
        *,
        initial: Any = ("normal", 0.0, 1.0),
        seed: int | None = None,
        half_life: float = 10_000,
        on_evict: Callable[[Tensor, Tensor], object] | None = None,
        deferred: bool = False,
    ) -> None:
        self.capacity_asked = None if capacity is None else check_size(capacity, "capacity", 1)
        self.max_capacity = check_max_capacity(max_capacity, self.capacity_asked)
        self.admit, self.evict = check_admit(admit), check_evict(evict)
        if unseen not in UNSEEN:
            raise InvalidValueError(f"unseen is {unseen!r}, not one of its values{suggest(str(unseen), UNSEEN)}")
        if on_evict is not None and not callable(on_evict):
            raise InvalidTypeError(f"on_evict is {on_evict!r} but must be called with ids and rows; pass a function")
        self.unseen, self.on_evict = unseen, on_evict
        self.initial, self.seed = check_initial(initial), check_seed(seed)
        self.half_life = check_half_life(half_life)
        if not isinstance(deferred, bool):
            raise InvalidTypeError(f"deferred is {deferred!r} but must be True or False; pass one of them")
        self.deferred = deferred
        self.__setstate__({})

    # --- what it is ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return 0 if self._live is None else self._live.num_ids

    def __bool__(self) -> bool:
        # Also one that knows no ids yet is given, where it is an argument.
        return True

    def __repr__(self) -> str:
        live = self._live
        size = (
            f"capacity={self.capacity_asked}" if live is None else f"{len(self)} of {len(live.ids) - live.reserved} ids"
        )
        return (
            f"{type(self).__name__}({size}, max_capacity={self.max_capacity}, admit={self.admit!r}, evict={self.evict!r}, "
            f"unseen={self.unseen!r})"
        )

    @property
    def draws(self) -> int:
        """Lookups so far for which it was drawn which new ids are admitted."""
        return self._admission.draws

    @draws.setter
    def draws(self, draws: int) -> None:
        self._admission.draws = draws

    def stats(self) -> VocabularyStats:
        """Return what it has done since it was made, or `reset_stats`."""
        live, most = self._bound()[0], self._most()
        num_bytes = live.index.nbytes + sum(live.plane(name).nbytes for name in live.names)
        self._count_unknown()
        admitted, evicted, lookups, unseen = self._counts.tolist()
        return VocabularyStats(
            len(self), self.capacity, most, admitted, evicted, lookups, unseen, self.clock, num_bytes
        )

    # --- what it holds ------------------------------------------------------------------------------------------------

    def ids(self) -> Tensor:
        """Return the known ids, ``(n,)`` int64, in the order of their rows."""
        live, owner = self._bound()
        with owner.rows.lock:
            return torch.from_numpy(live.ids[live.occupied()])

    def __contains__(self, id: Any) -> bool:
        live, owner = self._bound()
        with owner.rows.lock:
            return bool(live.index.find(as_ids([id]).numpy())[0] >= 0)

    def rows(self, ids: Any) -> Tensor:
        """Return the rows of ids in ``embedding.table``, int64 in the shape of `ids`, -1 of an unknown one."""
        live, owner = self._bound()
        wanted = as_ids(ids).cpu()
        with owner.rows.lock:
            return torch.from_numpy(owner.owners.to_whole(live.index.find(wanted.reshape(-1).numpy()))).view(
                wanted.shape
            )

    def export(self) -> tuple[Tensor, Tensor]:
        """Return the known ids, ``(n,)`` int64, sorted, and their weights, ``(n, dim)`` on the CPU.

        For a plain ``nn.Embedding.from_pretrained(rows)``, whose row `i` is then that of ``ids[i]`` (``torch.searchsorted``).
        """
        return contents.export(self)

    def adopt(self, weights: Tensor, rank: int = 0, ranks: int = 1) -> None:
        """Let the ids from 0 on be known, with `weights`, ``(n, dim)``, of a table with a row for each; none was before.

        In a group, those that `rank` owns.
        """
        contents.adopt(self, weights, rank, ranks)

    def update(self, ids: Any, rows: Any = None) -> None:
        """Set the weights of ids to `rows`; new ids are admitted. The state of the optimizer stays, of new ids it is fresh.

        Parameters
        ----------
        ids : tensor, ndarray, list or Changes
            ``(n,)``, distinct; or what `changed_since` has returned: ids that were forgotten there are forgotten here too.
        rows : Tensor, optional
            ``(n, dim)``.

        Raises
        ------
        HostMemoryError
            There is no row for a new id. Nothing has changed.
        InvalidValueError, InvalidTypeError
            An id occurs twice; shapes that do not match; a gradient of an id to be forgotten is pending; changes before
            those given are missing.
        """
        contents.update(self, ids, rows)

    def forget(self, ids: Any) -> int:
        """Let ids be unknown, and erase their weights and state; return how many were known.

        Raises
        ------
        InvalidValueError
            A gradient of one of them may still come, or no step has taken it yet.
        """
        return contents.forget(self, ids)

    def changed_since(self, clock: int) -> Changes:
        """Return the ids and rows that have changed since the `clock` of this vocabulary was that, for `update` of a copy.

        A copy that has applied what came before reads then, for every id, what this table reads now. Where idle rows move too
        (``idle="exact"``, with momentum or decay), or more ids were taken off than are remembered, or a state was loaded
        since, it is complete: all ids and rows. Rows that were written to ``embedding.table`` by hand are not seen.

        Parameters
        ----------
        clock : int
            ``vocabulary.clock`` as it was, or `Changes.clock` of the last time; 0: everything.

        Raises
        ------
        InvalidValueError
            The clock has not been there yet.
        """
        return copies.changed_since(self, clock)

    def all_rows_changed(self) -> None:
        """Note that rows may have changed of which no lookup tells."""
        self._log.begins = self.clock + 1

    # --- saved state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return its state: `ids` and `last_use`, ``(num_rows,)``, by row (-1: no id), which are views, and the rest."""
        return saved_vocabulary.state_dict(self)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with a state of a table of as many rows, whose rows are there."""
        live, owner = self._bound()
        if len(state["ids"]) != len(live.ids):
            raise InvalidValueError(
                f"{owner}: the state is of {len(state['ids'])} rows but there are {len(live.ids)}; load it with the model"
            )
        self.load(self.plan_load(state, len(live.ids)))

    def plan_load(self, state: Mapping[str, Any], num_saved: int) -> LoadPlan:
        """Find a place for the rows of a saved table.

        Ids keep their rows where the table has as many, or may; otherwise they get rows one after the other.

        Parameters
        ----------
        state : mapping of str to Tensor
            What `state_dict` returned; empty: of a table without a vocabulary, whose ids are the numbers of its rows.
        num_saved : int
            Rows of the saved table.

        Raises
        ------
        InvalidValueError
            The state is malformed, or that of a vocabulary with another padding.
        HostMemoryError
            There are more ids than this vocabulary may have rows for.
        """
        return saved_vocabulary.plan_load(self, state, num_saved)

    def load(self, plan: LoadPlan) -> None:
        """Carry out a plan: the table grows, ids get their rows. The weights are to be written, by ``rows.placement``."""
        saved_vocabulary.load(self, plan)

    def reset_rows(self, fill_padding: bool = False) -> None:
        """Set the weights of all known ids to their initial values, and keep the state of the optimizer.

        The row of padding becomes zeros, or with `fill_padding` what its id would begin with.
        """
        saved_vocabulary.reset_rows(self, fill_padding)

    def set_initial(self, initial: Any) -> None:
        """Set what rows begin with, those of known ids and of padding too: functions of ``torch.nn.init`` fill all."""
        before, self.initial = self.initial, check_initial(initial)
        try:
            self.check_dtype(self._bound()[1].rows.dtype)
        except BaseException:
            self.initial = before
            raise
        self.reset_rows(fill_padding=True)
