"""End the loops over batches of all ranks at the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from speedtransfer.cuda import side_stream
from speedtransfer.errors import InvalidValueError, ProcessGroupError, check_loader

Batch = TypeVar("Batch")

# What a rank tells of its next batch; a rank whose loader raised tells -1 - its number. The lowest of all ranks counts.
_HAS, _ENDED = 1, 0


def equal_steps(loader: Iterable[Batch], group: dist.ProcessGroup | None = None) -> EqualSteps[Batch]:
    """Return the batches of `loader`, in each epoch as long as every rank has one.

    Without it the ranks with more batches than others wait for them in the next collective, until the group's timeout.
    The loader is one batch ahead: while a batch is trained on, the ranks tell each other whether they have another. What the
    loader draws from torch's global generator it draws earlier; give it one of its own (``DataLoader(generator=...)``).
    With :func:`speedtransfer.prefetch`: ``prefetch(equal_steps(loader), ids_of)``.

    All ranks iterate together, and leave the loop, if they do, at the same step. In one process it yields what `loader` does.

    Parameters
    ----------
    loader : iterable
        A ``DataLoader``, or any other iterable of batches; of an iterator, no batch is lost where the loop is left early.
    group : ProcessGroup, optional
        Default: all ranks.

    Examples
    --------
    >>> for batch in st.equal_steps(loader):  # doctest: +SKIP
    ...     criterion(model(batch)).backward()

    Raises
    ------
    ProcessGroupError
        In the loop, where that batch would be: the loader of another rank raised. That rank raises what its loader did.
    InvalidValueError
        In the loop: this process is not in `group`.
    """
    return EqualSteps(loader, group)


class EqualSteps(Generic[Batch]):
    """What `equal_steps` returns. It has no length: how many batches the other ranks have is not known before."""

    def __init__(self, loader: Iterable[Batch], group: dist.ProcessGroup | None = None) -> None:
        check_loader(loader, "loader")
        self.loader, self.group = loader, group
        # The batch or error ahead, where the loop was left: an iterator would not give it again.
        self._left: tuple[int, Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        world = dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 1
        if world < 1:
            raise InvalidValueError(
                "equal_steps was given a process group that this process is not in; call it on the ranks of the group only"
            )
        if world == 1:
            yield from _batches(self.loader)
            return
        source = _batches(self.loader)
        ahead = self._left or _take(source)
        hear, is_told = _tell(ahead[0], self.group), False
        try:
            while (lowest := hear()) == _HAS:
                batch, ahead = ahead[1], _take(source)
                # Begun here, not in the step, so that it has the same place among the collectives of the step on each rank.
                hear = _tell(ahead[0], self.group)
                yield batch
            is_told = ahead[0] < 0
            if is_told:
                raise ahead[1]
            if lowest < 0:
                rank = -1 - lowest
                raise ProcessGroupError(
                    f"the loader of rank {rank} raised an error, so no rank gets another batch; rank {rank} shows the error"
                )
        except GeneratorExit:
            # The loop was left, and the group may be destroyed next.
            hear()
            raise
        finally:
            self._left = ahead if self.goes_on and not is_told else None

    @property
    def goes_on(self) -> bool:
        """Whether the next loop goes on where one was left."""
        return goes_on(self.loader)


def goes_on(loader: Any) -> bool:
    """Return whether the next loop over a loader goes on where one was left: where its batches are those of an iterator."""
    return isinstance(loader, Iterator) or getattr(loader, "goes_on", False)


def _batches(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Begin to iterate at the first ``next``; never close an iterator, from which others may go on."""
    for batch in loader:  # noqa: UP028
        yield batch


def _take(source: Iterator[Any]) -> tuple[int, Any]:
    """Return what to tell the other ranks, and the next batch or the error."""
    try:
        return _HAS, next(source)
    except StopIteration:
        return _ENDED, None
    except Exception as error:
        return -1 - dist.get_rank(), error


def _tell(flag: int, group: dist.ProcessGroup | None) -> Callable[[], int]:
    """Send `flag` to all ranks; return a function that waits for the lowest of theirs."""
    device = torch.device("cpu")
    stream: AbstractContextManager[Any] = contextlib.nullcontext()
    if "cpu" not in dist.get_backend_config(group):
        device = torch.device("cuda", torch.cuda.current_device())
        # Else the host would wait for the whole step, which is queued on the current stream before the flag is read.
        stream = torch.cuda.stream(side_stream(device, "flags"))
    with stream:
        lowest = torch.full((1,), flag, device=device)
        work = dist.all_reduce(lowest, dist.ReduceOp.MIN, group, async_op=True)

    def hear() -> int:
        with stream:
            work.wait()
            return int(lowest)

    return hear
