"""Memory and nameless files that may become longer: more rows without a copy of those there are."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError
from speedtransfer.tables.spans import AVAILABLE, FAILED, NO_ACCESS, NO_RESERVE, Bytes, system_calls, whole_pages

_STEP_BYTES = 1 << 21  # memory is added in steps of the large pages of the system


class Reserved:
    """A range of addresses, of which the first part is memory of this process, zero until it is written.

    The rest takes nothing, not even of the memory that the system promises, until `extend` makes it memory too. Tensors over
    the first part stay valid then. The range lives as long as a tensor over it.

    Parameters
    ----------
    num_bytes : int
        Of the whole range.

    Attributes
    ----------
    address : int
        Where it begins.

    Raises
    ------
    OSError
        The system refuses so many addresses, or cannot reserve any.
    """

    def __init__(self, num_bytes: int) -> None:
        if not AVAILABLE:
            raise OSError(0, "no addresses can be reserved on this system")
        self._size, self._used = whole_pages(num_bytes), 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        address = system_calls().mmap(None, self._size, NO_ACCESS, flags, -1, 0)
        if address is None or address == FAILED:
            _raise_last()
        self.address = int(address)
        # At exit threads may still use it.
        weakref.finalize(self, system_calls().munmap, self.address, self._size).atexit = False
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # As of `buffers.anonymous`. Where the system has no large pages it says so, which does not matter.
            system_calls().madvise(self.address, self._size, mmap.MADV_HUGEPAGE)

    def __len__(self) -> int:
        return self._size

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: the addresses are those of this process."""
        raise InvalidTypeError("addresses are reserved for one process and cannot be pickled; make the table in each")

    def extend(self, num_bytes: int) -> None:
        """Make the first `num_bytes` bytes of the range memory; raise `OSError` where the system refuses that."""
        end = min(-(-num_bytes // _STEP_BYTES) * _STEP_BYTES, self._size)
        if end > self._used:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            if system_calls().mprotect(self.address + self._used, end - self._used, access):
                _raise_last()
            self._used = end

    def tensor(self, num_bytes: int) -> Tensor:
        """Return a uint8 tensor over the first `num_bytes` bytes, which keeps the range."""
        return torch.from_numpy(np.asarray(Bytes(self, self.address, num_bytes)))


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


def _raise_last() -> NoReturn:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
