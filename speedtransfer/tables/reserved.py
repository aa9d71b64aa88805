"""Memory and nameless files that may become longer: more rows without a copy of those there are."""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch
from torch import Tensor

from speedtransfer.tables.spans import Addresses, raise_last, system_calls, whole_pages

_STEP_BYTES = 1 << 21  # memory is added in steps of the large pages of the system


class Reserved(Addresses):
    """A range of `num_bytes` addresses, of which the first part is memory of this process, zero until it is written.

    The rest takes nothing, not even of the memory that the system promises, until `extend` makes it memory too. Tensors over
    the first part stay valid then.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__(whole_pages(num_bytes))
        self._used = 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # As of `buffers.anonymous`. Where the system has no large pages it says so, which does not matter.
            self.madvise(mmap.MADV_HUGEPAGE)

    def extend(self, num_bytes: int) -> None:
        """Make the first `num_bytes` bytes of the range memory; raise `OSError` where the system refuses that."""
        end = min(-(-num_bytes // _STEP_BYTES) * _STEP_BYTES, self._size)
        if end > self._used:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            if system_calls().mprotect(self.address + self._used, end - self._used, access):
                raise_last()
            self._used = end


class OpenFile:
    """Keeps a file open, by a number of its own, as long as it lives."""

    def __init__(self, number: int) -> None:
        self.number = os.dup(number)
        weakref.finalize(self, os.close, self.number).atexit = False

    def resize(self, before: int, after: int) -> None:
        """Make the file `after` bytes long; those from `before` on become zero."""
        os.ftruncate(self.number, before)
        os.ftruncate(self.number, after)


class NamelessMap(mmap.mmap):
    """A map of all of a file that has no name, which it keeps open."""

    file: OpenFile

    @classmethod
    def of(cls, file: OpenFile, num_bytes: int) -> NamelessMap:
        """Map the first `num_bytes` bytes of `file`, which is as long; changes go to the file."""
        made = cls(file.number, num_bytes, access=mmap.ACCESS_WRITE)
        made.file = file
        return made

    def tensor(self) -> Tensor:
        """Return a uint8 tensor over the map, which keeps it."""
        return torch.from_numpy(np.frombuffer(self, dtype=np.uint8))
