"""Map parts of files side by side into one range of addresses, so that one strided tensor reaches the rows of all."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, StorageError
from speedtransfer.once import once
from speedtransfer.untrusted import open_file, storage_error

# The mmap module has no MAP_FIXED, and MAP_NORESERVE of Python 3.13 on; the numbers are those of <sys/mman.h>.
_MAP_FIXED = 0x10
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0))
_NO_ACCESS = 0
_FAILED = ctypes.c_void_p(-1).value
# Where the system can map files at addresses that are given.
AVAILABLE = sys.platform != "win32"


class Piece(NamedTuple):
    """Some bytes of a file."""

    path: Path
    offset: int
    num_bytes: int


class Addresses:
    """A range of addresses of this process, without memory at first. It lives as long as a tensor over it.

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
        self._size = num_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self.address = _map(None, num_bytes, _NO_ACCESS, flags, -1, 0)
        # At exit threads may still use them.
        weakref.finalize(self, system_calls().munmap, self.address, num_bytes).atexit = False

    def __len__(self) -> int:
        return self._size

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: the addresses are those of this process."""
        raise InvalidTypeError("addresses of one process cannot be pickled; make, or open, the table in each")

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        """Advise the system on `length` bytes from `start` on, as `mmap.mmap.madvise`; what it says to that is ignored."""
        system_calls().madvise(self.address + start, self._size - start if length is None else length, advice)

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """Return a uint8 tensor over the bytes from `address` on, which keeps the range."""
        with torch.inference_mode(False):  # an inference tensor would be of no use outside of it
            return torch.from_numpy(np.asarray(_Bytes(self, address, num_bytes)))


class Span(Addresses):
    """A range of addresses with pieces of files in it, mapped privately: what is written there never reaches the files.

    Pages are those of the system's cache of files, which all processes share. No file stays open.

    Parameters
    ----------
    pieces : sequence of Piece
        None of them empty.
    writable : bool
        Whether a write makes a copy of the page for this process. Else it ends the process, and the system promises no memory
        for such copies.

    Attributes
    ----------
    addresses : list of int
        Where each piece begins.

    Raises
    ------
    StorageError
        A file cannot be opened or has become shorter, or the system refuses so many addresses.
    """

    def __init__(self, pieces: Sequence[Piece], writable: bool) -> None:
        starts = [piece.offset // mmap.PAGESIZE * mmap.PAGESIZE for piece in pieces]
        lengths = [whole_pages(p.offset + p.num_bytes - start) for p, start in zip(pieces, starts, strict=True)]
        with _limits_told(pieces[0].path, sum(lengths)):
            super().__init__(sum(lengths))
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        # Without MAP_NORESERVE Linux refuses a private map that may be written to where it exceeds the memory.
        flags = mmap.MAP_PRIVATE | _NO_RESERVE | _MAP_FIXED
        self.addresses = list[int]()
        at = self.address
        for piece, start, length in zip(pieces, starts, lengths, strict=True):
            with storage_error(f"cannot read {str(piece.path)!r}", "check the path"):
                opened = open_file(piece.path)
            with opened as file:
                if os.fstat(file.fileno()).st_size < piece.offset + piece.num_bytes:
                    raise StorageError(f"{str(piece.path)!r} has become shorter while it was opened; open it again")
                num_bytes = piece.offset + piece.num_bytes - start
                with _limits_told(piece.path, num_bytes):
                    _map(at, num_bytes, access, flags, file.fileno(), start)
            self.addresses.append(at + piece.offset - start)
            at += length


class _Bytes:
    """What NumPy makes an array over; the array keeps it, and that keeps `owner`, whose memory it is."""

    def __init__(self, owner: object, address: int, num_bytes: int) -> None:
        self._owner = owner
        # Not marked read-only: torch would warn of it.
        self.__array_interface__ = {"data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3}


def whole_pages(num_bytes: int) -> int:
    """Return the bytes of the pages that `num_bytes` bytes take."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


@once
def system_calls() -> ctypes.CDLL:
    """Return the C library with the signatures of ``mmap``, ``munmap``, ``madvise`` and ``mprotect``."""
    library = ctypes.CDLL(None, use_errno=True)
    size, number, address = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_int64), address
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = library.mprotect.argtypes = (address, size, number)
    return library


def _limits_told(path: Path, num_bytes: int) -> AbstractContextManager[None]:
    remedy = "raise the limits of this process (ulimit -v, vm.overcommit_memory, vm.max_map_count)"
    return storage_error(f"cannot map {num_bytes} bytes of {str(path)!r}", remedy)


def _map(at: int | None, size: int, access: int, flags: int, file: int, offset: int) -> int:
    found = system_calls().mmap(at, size, access, flags, file, offset)
    if found is None or found == _FAILED:
        raise_last()
    return int(found)


def raise_last() -> NoReturn:
    """Raise OSError for a system call that has failed."""
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number))
