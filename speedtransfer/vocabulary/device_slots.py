"""A hash table of ids in the memory of a CUDA device: kernels change it, look ids up and write what unknown ids begin with."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import KernelArgument, launch_over
from speedtransfer.vocabulary.initial import KINDS, Initial, check_range, scaling, stream_key

SLOT_BYTES = 16
_SOURCE = "ids.cu"
# struct Ids and struct Values of ids.cu; 64 bits of a hash as int64.
_IDS, _VALUES = KernelArgument("9q"), KernelArgument("9q3d")
# enum Type of move.cuh; float64 where no type is meant.
_TYPES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


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
    words = unseen, int(stream_key(seed).view(np.int64)[0]), KINDS.index(kind), _TYPES[values.dtype]
    packed = _VALUES.pack(*pointers, *shape, *words, *numbers)
    launch_over(len(ids) * shape[1], _SOURCE, "fill_unseen", values.device, packed)
