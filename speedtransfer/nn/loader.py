"""Iterate over batches, and have the rows of the next ones read ahead."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_loader, check_size
from speedtransfer.nn.fused_lookup import read_ahead_of
from speedtransfer.nn.multi import MultiEmbedding
from speedtransfer.nn.table_module import TableModule
from speedtransfer.nn.ticket import Ticket
from speedtransfer.ranks.equal_steps import goes_on

_UNUSED_BATCHES = 8  # after so many whose rows no lookup has used it is worth a warning

# Attributes of a `PrefetchLoader`; others are those of its loader.
_OWN = {"loader", "ids_of", "depth", "_state", "_left", "_failed"}

Batch = TypeVar("Batch")
# Keys of a mapping are modules; a type for them would refuse a dict whose keys are of a subclass.
Ids = Mapping[Any, Any] | Iterable[tuple[TableModule, Any]]


def prefetch(loader: Iterable[Batch], ids_of: Callable[[Batch], Ids], depth: int = 2) -> PrefetchLoader[Batch]:
    """Return `loader` with the rows of the next batches being read, by threads, while one is trained on.

    The lookups find them by their ids: model and loop stay as they are, and so do the numbers. It has the length, the
    attributes and, at any time, the ``state_dict`` that the loader would have after the batches that were taken from it.

    The loader is `depth` batches ahead. What it draws from torch's default generator counts as drawn when its batch comes, as
    without this function. If it draws for each batch, and the loop over it draws too (dropout on the CPU), it cannot be ahead:
    there is a warning, and batches are read when they are asked for.

    Parameters
    ----------
    loader : iterable
        A ``DataLoader``, with workers or without, or any other iterable of batches.
        Of tables with `process_group` every process must have as many: wrap the loader in `equal_steps` first.
    ids_of : callable
        Takes a batch and returns pairs of a module, one of ours, and ids that it will look up: a mapping or an iterable.
    depth : int
        Batches ahead, 1 or more. Each holds the memory of its rows and, where they are trained, of their state.

    Examples
    --------
    >>> for ids, target in st.prefetch(loader, lambda batch: {model.embedding: batch[0]}):  # doctest: +SKIP
    ...     loss = criterion(model(ids), target)

    Raises
    ------
    InvalidValueError, InvalidTypeError
        `depth` is no positive int; `ids_of` cannot be called. What `loader` and `ids_of` raise comes where that batch would.
    """
    kind = StatefulPrefetchLoader if hasattr(loader, "state_dict") else PrefetchLoader
    return kind(loader, ids_of, depth)


class _Taken(NamedTuple, Generic[Batch]):
    """A batch that was taken from the loader, the state of the loader after it, and what it drew."""

    batch: Batch
    tickets: list[Ticket]
    given: list[tuple[Any, Tensor]]
    state: Any
    drawn: _Drawn | None


class _Drawn(NamedTuple):
    """States of torch's default generator before and after the loader has drawn from it."""

    before: Tensor
    after: Tensor


class _Draws:
    """Keeps what a loader draws ahead from torch's default generator apart from what the loop over it draws."""

    def __init__(self, ahead: Iterable[_Taken[Any]]) -> None:
        # Where the draws of the loader have got to, if these were before their turn.
        self._ahead: Tensor | None = None
        for taken in ahead:
            self._ahead = self._ahead if taken.drawn is None else taken.drawn.after
        self._count, self._began = 0, False
        # Whether the loader draws for batches after the first one, for which samplers draw a seed; whether the loop draws.
        self._by_loader = self._by_loop = False
        self.last: _Drawn | None = None
        self._given = torch.get_rng_state()

    @property
    def keeps_order(self) -> bool:
        """Whether a batch can be taken before its turn."""
        return not self.collide and (self._count != 1 or not self._began)

    def take(self, source: Iterator[Any]) -> Any:
        """Return the next batch; what the loader draws for it, or for its end, becomes `last`, and counts as drawn later."""
        now, self.last = torch.get_rng_state(), None
        before = now if self._ahead is None else self._ahead
        if self._ahead is not None:
            torch.set_rng_state(self._ahead)
        try:
            return next(source)
        finally:
            after = torch.get_rng_state()
            if not torch.equal(before, after):
                self.last, self._ahead = _Drawn(before, after), after
                self._began = self._began or not self._count
                self._by_loader = self._by_loader or self._count > 0
            if not torch.equal(now, after):
                torch.set_rng_state(now)
            self._count += 1

    def give(self, drawn: _Drawn | None, left: bool) -> None:
        """Let what the loader drew for a batch count as drawn, if nobody has since; `left`: it was asked for others."""
        if not left:
            self._ahead = None
        now = torch.get_rng_state()
        if drawn is not None and torch.equal(now, drawn.before):
            torch.set_rng_state(now := drawn.after)
        self._given = now

    def end_turn(self) -> None:
        """Note whether the loop has drawn since `give`."""
        self._by_loop = self._by_loop or not torch.equal(torch.get_rng_state(), self._given)

    @property
    def collide(self) -> bool:
        """Whether both the loader, for its batches, and the loop draw."""
        return self._by_loader and self._by_loop


def _warn_of_draws(early: int) -> None:
    effect = "batches are no longer read ahead"
    if early:
        effect += (
            f", and the {early} that were drawn before the loop began to draw have other numbers than without prefetch"
        )
    warnings.warn(
        f"the loader of st.prefetch draws from torch's default generator for its batches, and the loop over it does too, so "
        f"{effect}; have the loader draw from a generator of its own, or in workers (DataLoader(num_workers=...))",
        stacklevel=3,
    )


def _is_changed(ids: Any, before: Tensor) -> bool:
    return not torch.equal(torch.as_tensor(ids, device="cpu"), before)


def _copies(parts: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    return [(p, torch.as_tensor(p, device="cpu").clone()) for p in parts if not (isinstance(p, Tensor) and p.is_cuda)]


class PrefetchLoader(Generic[Batch]):
    """What `prefetch` returns; attributes that it does not have are those of `loader`."""

    def __init__(self, loader: Iterable[Batch], ids_of: Callable[[Batch], Ids], depth: int = 2) -> None:
        check_loader(loader, "loader")
        if not callable(ids_of):
            raise InvalidTypeError(
                f"ids_of is {ids_of!r} but must take a batch and return modules and ids; "
                "pass for instance lambda batch: {model.embedding: batch[0]}"
            )
        self.loader, self.ids_of, self.depth = loader, ids_of, check_size(depth, "depth", 1)
        self._state: Any = None
        self._left = deque[_Taken[Batch]]()
        self._failed: list[Exception] = []

    @property
    def goes_on(self) -> bool:
        """Whether the next loop goes on where one was left."""
        return goes_on(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        # With the first batch: frameworks call iter() to see whether it can be, which would begin the workers of a loader.
        source, ahead, failed = iter(self.loader), deque[_Taken[Batch]](), list[Exception]()
        if self.goes_on:
            # Who takes a part of it gets the next part later.
            ahead, failed = self._left, self._failed
        ended, self._state, unused = bool(failed), None, 0
        draws, warned = _Draws(ahead), False
        while True:
            early = sum(taken.drawn is not None for taken in ahead)
            while not ended and len(ahead) <= (self.depth if draws.keeps_order else 0):
                try:
                    batch = draws.take(source)
                    ahead.append(_Taken(batch, *self._tickets(batch), self._loader_state(), draws.last))
                except StopIteration:
                    ended = True
                except Exception as raised:
                    # Batches before this one come first.
                    failed.append(raised)
                    ended = True
            if draws.collide and not warned:
                warned = True
                _warn_of_draws(early)
            if not ahead:
                draws.give(draws.last, False)
                self._state = None
                if failed:
                    raise failed.pop()
                return
            # Tickets that no lookup has used go when the next batch is asked for.
            batch, tickets, given, self._state, drawn = ahead.popleft()
            if any(ticket.is_changed() for ticket in tickets) or any(_is_changed(*pair) for pair in given):
                raise InvalidValueError(
                    "the ids of a batch have changed since it was taken from the loader, which is ahead: it seems to fill one "
                    "buffer anew for each batch; have it yield copies, or leave prefetch out"
                )
            draws.give(drawn, bool(ahead))
            yield batch
            draws.end_turn()
            # -1: some were used.
            unused = unused + 1 if unused >= 0 and tickets and all(ticket.is_waiting for ticket in tickets) else -1
            if unused == _UNUSED_BATCHES:
                warnings.warn(
                    f"the rows of {unused} batches were read ahead and no lookup has used them; ids_of must return what the "
                    "modules look up: the same values on the host or, on a CUDA device, the same tensors (move the batches "
                    "there before prefetch), or else pass the ticket of module.prefetch(ids) in the place of the ids",
                    stacklevel=2,
                )
            del tickets, given, batch

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    def _loader_state(self) -> Any:
        return None

    def _tickets(self, batch: Batch) -> tuple[list[Ticket], list[tuple[Any, Tensor]]]:
        """Return tickets for the ids of a batch; and the ids that are not their own, each with a copy."""
        wanted = self.ids_of(batch)
        if not isinstance(wanted, Iterable) or isinstance(wanted, Tensor):
            raise InvalidTypeError(
                f"ids_of returned a {type(wanted).__name__} but must return pairs of a module and its ids; return for "
                "instance {model.embedding: ids}"
            )
        pairs: list[tuple[Any, Any]] = []
        given: list[tuple[Any, Tensor]] = []
        for pair in wanted.items() if isinstance(wanted, Mapping) else wanted:
            try:
                module, ids = pair
            except (TypeError, ValueError):
                raise InvalidTypeError(
                    f"ids_of returned a {type(wanted).__name__} with a {type(pair).__name__} in it but must return pairs of a "
                    "module and its ids; return for instance {model.embedding: ids}"
                ) from None
            if hasattr(module, "lookup_ahead"):
                # The table within it reads rows ahead, by row numbers that the module computes: its ticket has only these.
                parts = ids if isinstance(ids, tuple) and all(isinstance(part, Tensor) for part in ids) else (ids,)
                module, ids = module.lookup_ahead(*parts)
                given += _copies(parts) if not isinstance(module, MultiEmbedding) else []
            pairs.append((module, ids))
            if isinstance(module, MultiEmbedding):
                # Its ticket has row numbers too.
                given += _copies(module._tensors_of(ids))
        for module, _ in pairs:
            if not isinstance(module, TableModule):
                kind = f"{type(module).__module__}.{type(module).__qualname__}"
                raise InvalidTypeError(
                    f"ids_of returned ids for an object of {kind}, which has no rows to read ahead; return pairs of a "
                    "speedtransfer.Embedding or EmbeddingBag and its ids"
                )
        return read_ahead_of(pairs), given


class StatefulPrefetchLoader(PrefetchLoader[Batch]):
    """What `prefetch` returns for a loader with a ``state_dict``. Trainers ask every loader that has one for its state."""

    def state_dict(self) -> Any:
        """Return the state of the loader as it was after the last batch that was taken."""
        return self.loader.state_dict() if self._state is None else self._state  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Go on, with the next iteration, where `state` says."""
        self._state = None
        self._left.clear()
        self._failed.clear()
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _loader_state(self) -> Any:
        try:
            # Which may go on changing as the loader does.
            return copy.deepcopy(self.loader.state_dict())  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError):
            # Wrappers (Accelerate) have the method also where what they wrap has no state. Who asks is told by the loader.
            return None
