"""A copy of the index of ids in the memory of a CUDA device, by which ids there find their rows while the host goes on."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import VALUE_TYPES, KernelArgument, StreamOrder, is_trusted, launch_over, side_stream, to_device
from speedtransfer.vocabulary.id_rows import IdRows
from speedtransfer.vocabulary.initial import KINDS, Initial, check_range, initial_values, scaling, stream_key

# It may take this part of the memory that is free.
_SHARE = 8
_LEAST_SLOTS = 1024
# Slots for each id when the table is made, and for each one taken or removed before it is made anew: searches stay short.
_SPACE, _LEAST_SPACE = 3, 2
# Ids that are copied at once.
_CHUNK = 1 << 20
SLOT_BYTES = 16
_SOURCE = "ids.cu"
# struct Ids and struct Values of ids.cu; 64 bits of a hash as int64.
_IDS, _VALUES = KernelArgument("9q"), KernelArgument("9q3d")


class Slots(NamedTuple):
    """The hash table; where an id stands depends on random numbers, so that nobody can choose ids that make it slow.

    Its memory, ``(size, 2)`` int64 with `size` a power of two, has ids and the complements of their rows, 0 where no id
    stands, 1 where the id was removed. Seed and multiplier are signed, of 64 bits; the multiplier is odd.
    """

    memory: Tensor
    seed: int
    multiplier: int

    @classmethod
    def over(cls, memory: Tensor) -> Slots:
        """Return a table in `memory`, ``(size, 2)`` int64 zeros."""
        seed, multiplier = np.frombuffer(os.urandom(16), np.int64).tolist()
        return cls(memory, seed, multiplier | 1)

    def _pack(self, ids: Tensor, rows: Tensor, unknown: int = 0, unseen: int = -1) -> np.ndarray:
        pointers = self.memory.data_ptr(), ids.data_ptr(), rows.data_ptr(), unknown
        return _IDS.pack(*pointers, len(ids), len(self.memory) - 1, self.seed, self.multiplier, unseen)

    def find(self, ids: Tensor, unknown: Tensor | None, unseen: int) -> Tensor:
        """Return the row of each id (n,) int64, contiguous, `unseen` where it has none; their number is added to `unknown`."""
        rows = torch.empty_like(ids)
        counter = 0 if unknown is None else unknown.data_ptr()
        launch_over(len(ids), _SOURCE, "find_ids", ids.device, self._pack(ids, rows, counter, unseen))
        return rows

    def change(self, ids: Tensor, rows: Tensor) -> None:
        """Give ids, (n,) and distinct, the rows `rows` (n,), which are changed; a negative one takes its id off.

        There must be free slots for all; both are int64 and contiguous.
        """
        for name in ("change_ids", "insert_ids"):
            launch_over(len(ids), _SOURCE, name, ids.device, self._pack(ids, rows))


def fill_unseen(values: Tensor, ids: Tensor, rows: Tensor, unseen: int, seed: int, initial: Initial) -> None:
    """Set `values`, ``(n, dim)``, of each id whose row is `unseen` to what it begins with: the bits of `initial_values`.

    All are contiguous; ids and rows, ``(n,)``, are int64.
    """
    check_range(initial, values.dtype)
    kind, *numbers = scaling(initial)
    pointers = values.data_ptr(), ids.data_ptr(), rows.data_ptr()
    shape = len(ids), values.shape[-1]
    words = unseen, int(stream_key(seed).view(np.int64)[0]), KINDS.index(kind), VALUE_TYPES[values.dtype]
    packed = _VALUES.pack(*pointers, *shape, *words, *numbers)
    launch_over(len(ids) * shape[1], _SOURCE, "fill_unseen", values.device, packed)


class DeviceMap:
    """Find the rows of ids on a CUDA device.

    It is told of changes of an index, and makes them before the next lookup: by one copy to the device, for which the host
    does not wait. Whoever calls holds the lock of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._order = StreamOrder(device)
        # Memory of long life comes from a stream that is torch's own: others that have used it may be gone when it is freed.
        self._side = side_stream(device, "ids")
        with torch.cuda.stream(self._side):
            self._unknown = torch.zeros(1, dtype=torch.int64, device=device)
        torch.cuda.current_stream(device).wait_stream(self._side)
        with self._order.writing():
            pass
        self._slots: Slots | None = None
        # Slots that are not free, at most.
        self._taken = 0
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_changes = 0
        # Its memory may still be in use when the last reference is gone.
        self._order.wait_when_gone(self)

    def note(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Learn that `ids` (n,), distinct, have the rows `rows` (n,) from now on, or none where these are negative."""
        if self._slots is None:
            return
        self._changes.append((ids.copy(), rows.copy()))
        self._num_changes += len(ids)
        if self._num_changes * _LEAST_SPACE > len(self._slots.memory):
            self.note_all()

    def note_all(self) -> None:
        """Learn that any ids may have other rows."""
        if self._slots is not None:
            # Its memory may be given to others once no lookup uses it any more.
            with self._order.writing() as stream:
                self._side.wait_stream(stream)
        self._slots = None
        self._changes, self._num_changes = [], 0

    def follow(self, live: IdRows) -> bool:
        """Know all ids of `live`; return False where the memory of the device is too small for them."""
        if live.watcher is not self:
            live.watcher = self
            self.note_all()
        if self._slots is None or (self._taken + self._num_changes) * _LEAST_SPACE > len(self._slots.memory):
            return self._make(live)
        if self._changes:
            # Where an id has changed several times the last counts: the first of the reversed list.
            ids, rows = (np.concatenate([change[k] for change in self._changes])[::-1] for k in range(2))
            ids, last = np.unique(ids, return_index=True)
            with self._order.writing():
                self._send(ids, rows[last])
            self._changes, self._num_changes = [], 0
        return True

    def find(self, ids: Tensor, unseen: int, counted: bool = True) -> Tensor:
        """Return the row of each of `ids` (n,) int64, contiguous, on the device, `unseen` where it has none.

        With `counted` the latter count for `take_unknown`.
        """
        assert self._slots is not None
        with self._order.reading():
            return self._slots.find(ids, self._unknown if counted else None, unseen)

    def take_unknown(self) -> int:
        """Return how many of the ids looked up since the last call had no row; the host waits for these lookups."""
        with self._order.writing():
            number = int(self._unknown)
            self._unknown.zero_()
        return number

    def _make(self, live: IdRows) -> bool:
        """Make the table anew, with all ids of `live`, if it fits."""
        self.note_all()
        size = max(_LEAST_SLOTS, 1 << (_SPACE * len(live.index) - 1).bit_length())
        if size * SLOT_BYTES > torch.cuda.mem_get_info(self.device)[0] // _SHARE:
            return False
        if not is_trusted("ids on the device", self.device, lambda: _are_right(self.device)):
            return False
        ids, rows = live.index.items()
        with self._order.writing() as stream:
            with torch.cuda.stream(self._side):
                memory = torch.zeros(size, 2, dtype=torch.int64, device=self.device)
            stream.wait_stream(self._side)
            self._slots, self._taken = Slots.over(memory), 0
            for start in range(0, len(ids), _CHUNK):
                self._send(ids[start : start + _CHUNK], rows[start : start + _CHUNK])
        return True

    def _send(self, ids: np.ndarray, rows: np.ndarray) -> None:
        assert self._slots is not None
        there = to_device(torch.from_numpy(np.stack([ids, rows])), self.device)
        self._slots.change(there[0], there[1])
        self._taken += int(np.count_nonzero(rows >= 0))


def _are_right(device: torch.device) -> bool:
    """Tell whether the kernels do on `device` what the host does."""
    slots = Slots.over(torch.zeros(64, 2, dtype=torch.int64, device=device))
    ids = torch.tensor([5, -1, 0, 2**62, -(2**63), 7, 8, 9], device=device)
    slots.change(ids[:6], torch.arange(6, device=device))
    slots.change(ids[4:], torch.tensor([-1, 3, 8, -1], device=device))
    unknown = torch.zeros(1, dtype=torch.int64, device=device)
    rows = slots.find(ids, unknown, -1)
    values = torch.zeros(len(ids), 9, device=device)
    fill_unseen(values, ids, rows, -1, 1, ("normal", 0.0, 1.0))
    wanted = initial_values(ids.cpu().numpy(), 9, 1, ("normal", 0.0, 1.0))
    unseen = [4, 7]
    right = rows.tolist() == [0, 1, 2, 3, -1, 3, 8, -1] and int(unknown) == len(unseen)
    return right and torch.equal(values.cpu()[unseen], wanted[unseen]) and int(values.any(dim=1).sum()) == len(unseen)
