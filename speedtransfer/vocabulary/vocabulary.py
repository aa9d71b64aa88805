"""Ids without bound: a vocabulary gives ids of 64 bits rows of a table, and takes them back from those not used any more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_choice, check_number, check_size
from speedtransfer.vocabulary import changed_ids, contents, saved_vocabulary
from speedtransfer.vocabulary.ids import as_ids
from speedtransfer.vocabulary.initial import check_initial, check_range
from speedtransfer.vocabulary.policies import Admit, Evict, check_admit, check_evict, check_max_capacity, check_seed
from speedtransfer.vocabulary.room import Room


@dataclasses.dataclass(frozen=True)
class VocabularyStats:
    """Counters of a vocabulary.

    Attributes
    ----------
    size, capacity, max_capacity : int
        Known ids; those that there are rows for; those that there may be rows for (None: as the memory allows).
    admitted, evicted : int
        Ids that got a row and that lost it, since the vocabulary was made or `reset_stats`.
    lookups, unseen : int
        Ids looked up, and those of them that had no row.
    clock : int
        Optimizer steps so far.
    num_bytes : int
        Of the index and of the planes of ids and their use.
    """

    size: int
    capacity: int
    max_capacity: int | None
    admitted: int
    evicted: int
    lookups: int
    unseen: int
    clock: int
    num_bytes: int

    @property
    def load(self) -> float:
        """The share of the rows that have an id."""
        return self.size / self.capacity if self.capacity else 0.0

    @property
    def unseen_rate(self) -> float:
        """The share of the ids looked up that had no row."""
        return self.unseen / self.lookups if self.lookups else 0.0

    def scalars(self, prefix: str = "vocabulary") -> dict[str, float]:
        """Return what is worth a curve, by name: for ``SummaryWriter.add_scalar``."""
        names = "size", "load", "admitted", "evicted", "unseen_rate"
        return {f"{prefix}/{name}": float(getattr(self, name)) for name in names}


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
    admit : "always" or int
        When a new id gets a row: at once; after so many sightings, which are counted in a sketch that may count too many, and
        that forgets half of them now and then.
    evict : {"lru", "lfu"}, int or callable, optional
        Whose rows are taken where there are none left: the ids used longest ago; those used least, with counts that halve in
        `half_life`; those not used for so many steps (also where rows are left). Or those that a function of ids, last use and
        counts (arrays, of a part of the rows) says: it returns which may go (bool) or scores, the lowest first.
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
        Steps after which a count of uses has halved.
    on_evict : callable, optional
        Called with ids, ``(n,)`` int64, and their weights, ``(n, dim)``, before their rows are taken. If it raises they stay.
    deferred : bool
        Whether a new id is admitted at the end of the optimizer step that follows its lookup (or after 256 lookups without
        one), and reads until then what unknown ids read. Ids on a CUDA device are found there in any case, where the memory
        suffices; but in training the host waits for them, unless it is deferred.

    Notes
    -----
    With `process_group` each id belongs to one of the processes, which has rows for its share of `capacity`. There `len`,
    ``in``, `ids`, `export`, `rows`, `stats` and `on_evict` know its own ids alone. `update` and `forget` take any ids, and all
    processes must call them. `seed` is that of rank 0.

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

    # Keys of state dicts, "emb.vocabulary.last_use", which torch.distributed.checkpoint looks up as attributes.
    last_use = counts = sightings = released = origin = numbers = None

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
        self.max_capacity = check_max_capacity(max_capacity)
        if capacity is not None and isinstance(self.max_capacity, int) and self.max_capacity < capacity:
            raise InvalidValueError(
                f"max_capacity is {max_capacity} but capacity is {capacity}; pass at least as many, or leave it out"
            )
        self.admit, self.evict = check_admit(admit), check_evict(evict)
        if on_evict is not None and not callable(on_evict):
            raise InvalidTypeError(f"on_evict is {on_evict!r} but must be called with ids and rows; pass a function")
        self.unseen, self.on_evict = check_choice(unseen, "unseen", ["initial", "zeros", "row"]), on_evict
        self.initial, self.seed = check_initial(initial), check_seed(seed)
        self.half_life = check_number(half_life, "half_life", above=True)
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

    def stats(self) -> VocabularyStats:
        """Return what it has done since it was made, or `reset_stats`."""
        live, most = self._bound()[0], self._most()
        num_bytes = live.index.nbytes + sum(plane.nbytes for plane in live.planes().values())
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
        rows = self.rows(id)
        if rows.numel() != 1:
            raise InvalidValueError(
                f"id has shape {tuple(rows.shape)} but `in` asks for one id; pass one, or call vocabulary.rows(ids) >= 0"
            )
        return rows.item() >= 0

    def rows(self, ids: Any) -> Tensor:
        """Return the rows of ids in ``embedding.table``, int64 in the shape of `ids`, -1 of an unknown one."""
        wanted, owners = as_ids(ids).cpu(), self._bound()[1].owners
        return torch.from_numpy(owners.to_whole(self.rows_here(wanted.reshape(-1).numpy()))).view(wanted.shape)

    by_id = contents.by_id
    rows_here = contents.rows_here
    export = contents.export
    update = contents.update
    make_room_for = contents.make_room_for
    follow_changes = contents.follow_changes
    forget = contents.forget
    changed_since = changed_ids.changed_since
    check_changes = changed_ids.check_changes

    # --- saved state --------------------------------------------------------------------------------------------------

    state_dict = saved_vocabulary.state_dict

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with a state of a table of as many rows, whose rows are there."""
        self.load(self.plan_load(state, len(self._bound()[0].ids)))

    plan_load = saved_vocabulary.plan_load
    would_move = saved_vocabulary.would_move
    load = saved_vocabulary.load
    go_on_with = saved_vocabulary.go_on_with
    reset_rows = saved_vocabulary.reset_rows

    def set_initial(self, initial: Any) -> None:
        """Set what rows begin with, those of known ids and of padding too: functions of ``torch.nn.init`` fill all."""
        initial = check_initial(initial)
        check_range(initial, self._bound()[1].rows.dtype)
        self.initial = initial
        self.reset_rows(fill_padding=True)
