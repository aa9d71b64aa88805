"""Iterate over batches, and have the rows of the next ones read ahead."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import NamedTuple

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_size
from speedtransfer.nn.fused_lookup import read_ahead_of
from speedtransfer.nn.table_module import TableModule
from speedtransfer.nn.ticket import Ticket

_UNUSED_BATCHES = 8  # after so many whose rows no lookup has used it is worth a warning

Batch = TypeVar("Batch")
# Keys of a mapping are modules; a type for them would refuse a dict whose keys are of a subclass.
Ids = Mapping[Any, Any] | Iterable[tuple[TableModule, Any]]


def prefetch(loader: Iterable[Batch], ids_of: Callable[[Batch], Ids], depth: int = 2) -> PrefetchLoader[Batch]:
    """Return `loader` with the rows of the next batches being read, by threads, while one is trained on.

    The lookups find them by their ids: model and loop stay as they are, and so do the numbers. It has the length, the
    attributes and, at any time, the ``state_dict`` that the loader would have after the batches that were taken from it.

    The loader is `depth` batches ahead. What it draws from torch's global generator without workers it draws earlier, and a
    model with dropout then draws other numbers: give the loader a generator of its own (``DataLoader(generator=...)``).

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
    """A batch that was taken from the loader, and the state of the loader after it."""

    batch: Batch
    tickets: list[Ticket]
    given: list[tuple[Any, Tensor]]
    state: Any


def _is_changed(ids: Any, before: Tensor) -> bool:
    return not torch.equal(torch.as_tensor(ids), before)


class PrefetchLoader(Generic[Batch]):
    """What `prefetch` returns; attributes that it does not have are those of `loader`."""

    def __init__(self, loader: Iterable[Batch], ids_of: Callable[[Batch], Ids], depth: int = 2) -> None:
        if not callable(ids_of):
            raise InvalidTypeError(
                f"ids_of is {ids_of!r} but must take a batch and return modules and ids; "
                "pass for instance lambda batch: {model.embedding: batch[0]}"
            )
        self.loader, self.ids_of, self.depth = loader, ids_of, check_size(depth, "depth", 1)
        self._state: Any = None
        self._left = deque[_Taken[Batch]]()

    def __iter__(self) -> Iterator[Batch]:
        source, ahead = iter(self.loader), deque[_Taken[Batch]]()
        if source is self.loader:
            # An iterator, which does not begin anew: who takes a part of it gets the next part later.
            ahead = self._left
        error: Exception | None = None
        ended, self._state, unused = False, None, 0
        while True:
            while not ended and len(ahead) <= self.depth:
                try:
                    batch = next(source)
                    ahead.append(_Taken(batch, *self._tickets(batch), self._loader_state()))
                except StopIteration:
                    ended = True
                except Exception as raised:
                    # Batches before this one come first.
                    error, ended = raised, True
            if not ahead:
                self._state = None
                if error is not None:
                    raise error
                return
            # Tickets that no lookup has used go when the next batch is asked for.
            batch, tickets, given, self._state = ahead.popleft()
            if any(ticket.is_changed() for ticket in tickets) or any(_is_changed(*pair) for pair in given):
                raise InvalidValueError(
                    "the ids of a batch have changed since it was taken from the loader, which is ahead: it seems to fill one "
                    "buffer anew for each batch; have it yield copies, or leave prefetch out"
                )
            yield batch
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
        for module, ids in wanted.items() if isinstance(wanted, Mapping) else wanted:
            if hasattr(module, "lookup_ahead"):
                # The table within it reads rows ahead, by row numbers that the module computes: its ticket has only these.
                parts = ids if isinstance(ids, tuple) and all(isinstance(part, Tensor) for part in ids) else (ids,)
                pairs.append(module.lookup_ahead(*parts))
                given += [(p, torch.as_tensor(p).clone()) for p in parts if not (isinstance(p, Tensor) and p.is_cuda)]
            else:
                pairs.append((module, ids))
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
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _loader_state(self) -> Any:
        try:
            return self.loader.state_dict()  # type: ignore[attr-defined]
        except (AttributeError, NotImplementedError):
            # Wrappers (Accelerate) have the method also where what they wrap has no state. Who asks is told by the loader.
            return None
