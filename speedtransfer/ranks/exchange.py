"""Messages between the processes of a group: agreeing on what comes next, then rows from each to each."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, ProcessGroupError

T = TypeVar("T")

# What ranks do when they meet. The number of one is part of each message, so that ranks out of step are told so.
POINTS = (
    "makes a table",
    "makes replicas",
    "looks up rows",
    "brings gradients",
    "reduces a gradient",
    "makes a step",
    "begins to train",
    "writes rows",
    "reads all rows",
    "saves",
    "loads",
    "finds ids",
    "brings gradients at a step",
    "reads a corpus",
    "begins a forward",
)
# The first message of each meeting has this many numbers whatever is to be told: gloo ends a process that gets another size.
_VALUES = 6
# Bits that a number of a message has for others.
_WORD = 62


@dataclass
class Traffic:
    """Bytes that this process has sent to others, by what they are, and the number of collective calls."""

    control: int = 0
    ids: int = 0
    rows: int = 0
    gradients: int = 0
    calls: int = 0


class DifferenceError(ProcessGroupError):
    """The processes do the same, but to different tables."""


class Segment(NamedTuple):
    """Values on their way: ``(n, width)``, sorted by the rank they go to; how many each gets, and how many come from each."""

    values: Tensor
    sends: Sequence[int]
    receives: Sequence[int]


class Exchange:
    """Moves values between the processes of a group. Every process must make the same calls in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Else no group would ever be freed.
        self._group = weakref.ref(group)
        self._process = os.getpid()
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()
        # gloo moves memory of the host alone, NCCL that of the device. A group made without a backend may have both.
        self.on_host = not torch.cuda.is_available() or "cuda:nccl" not in dist.get_backend_config(group)
        self._number = 0
        # What messages go by, if not by the group itself.
        self._apart: Any = None
        # What messages go by that nobody waits for, and how many numbers each has (`ids_ahead`).
        self.beside: Any = None
        self.room_beside = 0

    def __deepcopy__(self, memo: object) -> Exchange:
        return self

    @property
    def is_apart(self) -> bool:
        """Whether messages go beside the group, and not by it."""
        return self._apart is not None

    def keep_apart(self) -> None:
        """Send beside the group from now on, so that messages of others that wait in it hold none of these up. Collective.

        With gloo alone: NCCL wants the messages of all groups in one order.
        """
        if not self.is_apart and self.may_be_beside:
            self._apart = self.make_beside("makes replicas")

    @property
    def may_be_beside(self) -> bool:
        """Whether messages can go beside the group; the same in all processes."""
        return self.ranks > 1 and self.on_host and "cpu:gloo" in dist.get_backend_config(self.group)

    def make_beside(self, point: str, about: str = "") -> Any:
        """Return another group of the same processes, which meet for it as in `agree`. Collective."""
        has_gloo = "cpu:gloo" in dist.get_backend_config(self.group)
        options = getattr(self.group._get_backend(torch.device("cpu")), "options", None) if has_gloo else None
        timeout = getattr(options, "_timeout", dist.default_pg_timeout)
        # Not `new_group`, which all processes call, or else name a group by how many they have, maybe not equally many.
        number = int(self.agree(point, [secrets.randbits(63)], about)[0, 0])
        store = dist.distributed_c10d.PrefixStore(f"speedtransfer/{number}", dist.distributed_c10d._get_default_store())
        return dist.ProcessGroupGloo(store, self.rank, self.ranks, timeout)

    def for_thread(self, point: str) -> Exchange:
        """Return another of the same processes, for a thread, whose messages wait for none of these. Collective."""
        made = Exchange(self.group)
        made._apart, made.on_host = self.make_beside(point), True
        return made

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        group = self._group()
        if group is None:
            raise self._destroyed()
        if self._process != os.getpid():
            # It would wait for messages that nobody sends, or take those of the process that it was forked from.
            raise ProcessGroupError(
                "the process group of these tables is that of the process that this one was forked from, and nothing can be "
                "sent here; use the tables in that process (workers of loaders return ids alone), or start this one by 'spawn'"
            )
        return group

    @property
    def members(self) -> list[int]:
        """The ranks of its processes among all."""
        if self.is_destroyed():
            raise self._destroyed()
        return dist.get_process_group_ranks(self.group)

    def _destroyed(self) -> ProcessGroupError:
        return ProcessGroupError(
            "the process group of these tables was destroyed; make them anew and load a checkpoint, and call "
            "destroy_process_group() when they are no longer used"
        )

    def _all_to_all(self, got: Tensor, sent: Tensor, what: str, receives: Any = (), sends: Any = ()) -> None:
        """Send parts of `sent` to each rank, as many as `sends`, by default as many each, and fill `got` with theirs."""
        messages = self._messages()
        with self.told_of_failure(what):
            messages.alltoall_base(got, sent, list(receives), list(sends)).wait()

    def _messages(self) -> Any:
        """Return the group that messages go by; raise if that of the tables was destroyed."""
        group = self.group
        return self._apart if self.is_apart else group

    def count(self, kind: str, num_bytes: int) -> None:
        """Note a call that has sent so many bytes of a kind of :class:`Traffic`."""
        self.traffic.calls += 1
        setattr(self.traffic, kind, getattr(self.traffic, kind) + num_bytes)

    def is_destroyed(self) -> bool:
        """Tell whether there is no process group any more."""
        group = self._group()
        if group is None:
            return True
        try:
            # A wrapped model, freed by the next gc only, may still hold it.
            dist.get_process_group_ranks(group)
        except KeyError:
            return True
        return False

    def _device(self) -> torch.device:
        return torch.device("cpu") if self.on_host else torch.device("cuda", torch.cuda.current_device())

    def agree(self, point: str, values: Tensor | Sequence[int], about: str = "") -> Tensor:
        """Send each rank its numbers and return theirs, ``(ranks, n)``, on the host, which waits for them.

        They are ``(ranks, n)`` int64, a row for each rank, or ``(n,)``, the same for all. ProcessGroupError, in all processes:
        they do not do the same thing, of `POINTS`, or `about` differs.
        """
        self._number += 1
        # Not on the default device of torch, which may be another.
        values = torch.as_tensor(values, dtype=torch.int64, device="cpu").expand(self.ranks, -1)
        count = values.shape[1]
        tag = (POINTS.index(point) << 56) | (min(count, (1 << 16) - 1) << 40) | self._number
        first = torch.zeros(self.ranks, 2 + _VALUES, dtype=torch.int64, device="cpu")
        first[:, 0], first[:, 1] = tag, zlib.crc32(about.encode())
        first[:, 2 : 2 + count] = values[:, :_VALUES]
        what = f"{point} ({about})" if about else point
        got = self._numbers(first, what)
        if bool((got[:, 0] != tag).any()):
            where = f"{point} (meeting {self._number}" + (f": {about})" if about else ")")
            kind = DifferenceError if bool((got[:, 0] >> 56 == tag >> 56).all()) else ProcessGroupError
            raise kind(
                f"the processes are out of step: {self._told(where)}; each must make the same lookups, backwards and steps"
            )
        self.check_same(got[:, 1], point, about)
        if count <= _VALUES:
            return got[:, 2 : 2 + count]
        return torch.cat([got[:, 2:], self._numbers(values[:, _VALUES:].contiguous(), what)], 1)

    def agree_on_counts(self, point: str, sends: Tensor, named: int, about: str = "") -> list[list[int]] | None:
        """Return for each table how many ids come from each rank, given how many go to each, ``(ranks, tables)``.

        `named` is a number for the tables; None: they are not the same in all processes.
        """
        told = self.tell_counts(point, sends, named, about)
        first = check_counts(told[:, 1 : 1 + sends.shape[1]])
        if bool((told[:, 0] != named).any()):
            return None
        rest = sends[:, first.shape[1] :].contiguous()
        others = [self._numbers(rest, point)] if rest.shape[1] else []
        counts: list[list[int]] = torch.cat([first, *others], 1).T.tolist()
        return counts

    def tell_counts(self, point: str, sends: Tensor, named: int, about: str) -> Tensor:
        """Send the first message of `agree_on_counts`; a count of -1 refuses."""
        message = torch.zeros(self.ranks, _VALUES, dtype=torch.int64, device="cpu")
        some = sends[:, : _VALUES - 1]
        message[:, 0], message[:, 1 : 1 + some.shape[1]] = named, some
        return self.agree(point, message, about)

    def _numbers(self, values: Tensor, what: str) -> Tensor:
        sent = values.to(self._device())
        got = torch.empty_like(sent)
        self._all_to_all(got, sent, what)
        self.count("control", (self.ranks - 1) * values.shape[1] * 8)
        return got.cpu()

    @contextlib.contextmanager
    def told_of_failure(self, what: str) -> Iterator[None]:
        """Say who failed to reach the others, and where: the messages of backends name neither."""
        try:
            yield
        except ProcessGroupError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ProcessGroupError(
                f"rank {self.rank} of {self.ranks}, process {os.getpid()} on {socket.gethostname()}, could not reach the "
                f"others where it {what}: {reason}; one of them has ended (its messages say why), cannot be reached, or took "
                "longer than the timeout of the group; start all again from the last checkpoint"
            ) from error

    def check_same(self, words: Tensor, point: str, about: str) -> None:
        """Raise `DifferenceError`, in all processes, unless all are `about` the same: `words` (ranks,) are checksums."""
        if bool((words != zlib.crc32(about.encode())).any()):
            raise DifferenceError(f"the processes differ where one {point}: {self._told(about)}; give all the same")

    def _told(self, text: str) -> str:
        return "; ".join(f"rank {rank}: {told}" for rank, told in enumerate(self.texts(text)))

    def texts(self, text: str) -> list[str]:
        """Return the texts of all processes, in the order of ranks."""
        # With a byte more, as an empty text would make no tensor.
        letters = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)
        counts = self._numbers(torch.full((self.ranks, 1), len(letters), device="cpu"), "tells texts")[:, 0].tolist()
        parts = self.gather("control", letters.unsqueeze(1), counts)[:, 0].split(counts)
        return [part.numpy().tobytes()[:-1].decode() for part in parts]

    def agree_on_error(self, point: str, error: BaseException | None, about: str = "") -> None:
        """Raise `error` where there is one; if another rank has one, raise here too."""
        # Where one failed, what it is about may differ.
        told = self.agree(point, [int(error is not None), zlib.crc32(about.encode())])
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback has this frame, and those of callers with their tables: a cycle, which only gc would free.
                error = None
        if bool(told[:, 0].any()):
            raise ProcessGroupError(
                f"rank {int(told[:, 0].argmax())} failed where it {point} (its own message says why), so no other went on"
            )
        self.check_same(told[:, 1], point, about)

    def in_all(self, point: str, do: Callable[[], T], about: Callable[[T], str] = lambda _: "") -> T:
        """Return what `do` returns; raise in all processes where it raises in one, or what it is `about` differs. Collective.

        A ProcessGroupError is one that all have raised.
        """
        error: Exception | None = None
        try:
            result = do()
        except ProcessGroupError:
            raise
        except Exception as raised:
            error = raised
        try:
            self.agree_on_error(point, error, about(result) if error is None else "")
        finally:
            error = None
        return result

    def move(self, kind: str, segments: Sequence[Segment]) -> list[Tensor]:
        """Send the values of each segment and return those received, each ``(sum of receives, width)``, in rank order.

        All go in one message. `kind` is that of :class:`Traffic` which counts them.
        """
        if not segments:
            return []
        device = segments[0].values.device
        width = [s.values.shape[1] * s.values.element_size() for s in segments]
        # Flat first: where there are none, the strides may be those of one value expanded.
        as_bytes = [
            s.values.contiguous().view(-1).view(torch.uint8).view(len(s.values), w)
            for s, w in zip(segments, width, strict=True)
        ]
        sizes = [
            [sum(s.sends[r] * w for s, w in zip(segments, width, strict=True)) for r in range(self.ranks)],
            [sum(s.receives[r] * w for s, w in zip(segments, width, strict=True)) for r in range(self.ranks)],
        ]
        if len(segments) == 1:
            joined = as_bytes[0].flatten()
        else:
            parts = [values.split(list(s.sends)) for values, s in zip(as_bytes, segments, strict=True)]
            joined = torch.cat([part[r].flatten() for r in range(self.ranks) for part in parts])
        sent = joined.to(self._device())
        got = sent.new_empty(sum(sizes[1]))
        self._all_to_all(got, sent, f"sends {kind}", sizes[1], sizes[0])
        self.count(kind, sum(sizes[0]) - sizes[0][self.rank])
        got = got.to(device)
        of_segments = [got]
        if len(segments) > 1:
            lengths = [s.receives[r] * w for r in range(self.ranks) for s, w in zip(segments, width, strict=True)]
            pieces = got.split(lengths)
            of_segments = [torch.cat(pieces[i :: len(segments)]) for i in range(len(segments))]
        return [
            part.view(s.values.dtype).view(-1, s.values.shape[1]) for part, s in zip(of_segments, segments, strict=True)
        ]

    def gather(self, kind: str, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the values of all ranks, ``(sum of counts, width)``, in rank order; those of rank r are ``counts[r]``."""
        most = max(counts)
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        sent = padded.contiguous().view(torch.uint8).to(self._device())
        parts = [torch.empty_like(sent) for _ in range(self.ranks)]
        with self.told_of_failure(f"sends {kind}"):
            self._messages().allgather([parts], [sent]).wait()
        self.count(kind, (self.ranks - 1) * sent.numel())
        kept = [part[:count] for part, count in zip(parts, counts, strict=True)]
        return torch.cat(kept).to(values.device).view(values.dtype)

    def from_first(self, values: Tensor) -> Tensor:
        """Return the values that rank 0 has, ``values`` there."""
        moved = values.contiguous().view(torch.uint8).to(self._device())
        if self.is_destroyed():
            raise self._destroyed()
        messages = self._messages()
        with self.told_of_failure("takes values of rank 0"):
            messages.broadcast(moved, 0).wait()
        self.traffic.calls += 1
        return moved.view(values.dtype).to(values.device)


def check_counts(counts: Tensor) -> Tensor:
    """Return `counts`, ``(ranks, n)``; raise if those of a rank are negative, which could not look its ids up."""
    if bool((counts < 0).any()):
        rank = int((counts < 0).any(1).int().argmax())
        raise ProcessGroupError(f"rank {rank} refused its ids (its own message says why), so no process looked any up")
    return counts


def as_int64(word: int) -> int:
    """Return a word of 64 bits, such as a seed, as the int64 with the same bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def to_words(bits: int, count: int) -> list[int]:
    """Return the lowest `count` bits of a number as numbers that can be sent, at least one."""
    return [bits >> start & (1 << _WORD) - 1 for start in range(0, max(count, 1), _WORD)]


def from_words(words: Sequence[int]) -> int:
    """Return the number that `to_words` has made `words` of."""
    return sum(word << place * _WORD for place, word in enumerate(words))


def is_first() -> bool:
    """Tell whether this is the first process, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, Exchange] = weakref.WeakKeyDictionary()


def exchange_of(group: object) -> Exchange:
    """Return the exchange of a process group, or of a device mesh of one dimension; all tables of the group have it.

    It raises if it is neither, the mesh has several dimensions, this process is not in the group, or there are no groups yet.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError(
            "process_group is given but there are no process groups; call torch.distributed."
            "init_process_group() first, in a script that torchrun starts"
        )
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise InvalidValueError(
                f"process_group is a device mesh of {group.ndim} dimensions but must have one; pass "
                "one of its dimensions: mesh['name']"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ProcessGroupError("this process is not in the process_group given; make the table in its processes alone")
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidTypeError(
            f"process_group is a {type(group).__name__} but must be a torch.distributed process group; "
            "pass torch.distributed.group.WORLD"
        )
    found = _exchanges.get(group)
    if found is None:
        found = _exchanges[group] = Exchange(group)
    return found
