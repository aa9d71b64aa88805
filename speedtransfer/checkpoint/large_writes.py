"""Write a file front to back in large pieces, each while the next one comes, past the page cache where the disk takes that.

The pages of a checkpoint would take the place of what is in use, tables in files among it. And on a virtual machine new pages
may be slow to come: writes by the cache then take up to ten times as long, which differs from one to the next
(``bench/experiments/saves.py``).
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import Self

from speedtransfer.system import fcntl
from speedtransfer.tables.clones import Origin, clone
from speedtransfer.workers import Workers, done_here

_DIRECT = getattr(os, "O_DIRECT", 0) if fcntl is not None else 0
# Writes past the page cache begin and end at multiples of that, in the file and in memory.
_BLOCK = 4096
_BUFFER_BYTES = 1 << 24


class LargeWrites:
    """A new file, as `open` returns it without a buffer, that takes bytes in pieces of any size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.name = file, file.name
        # The one that is filled, and the one that is written meanwhile.
        self._buffers = list[Any]()
        self._writer, self._writing = Workers("write"), done_here(lambda: None)
        self._used, self._written, self._direct = 0, 0, bool(_DIRECT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, data: Any) -> None:
        """Take bytes, which may change once this returns."""
        values = np.frombuffer(data, np.uint8)
        if not self._buffers:
            # Aligned to pages.
            self._buffers = [np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8) for _ in range(2)]
        while len(values):
            count = min(len(values), _BUFFER_BYTES - self._used)
            self._buffers[0][self._used : self._used + count] = values[:count]
            self._used += count
            values = values[count:]
            if self._used == _BUFFER_BYTES:
                self._writing.result()
                self._writing = self._writer.submit(self._send, self._buffers[0])
                self._buffers.reverse()
                self._used = 0

    def share(self, origin: Origin, count: int) -> Iterator[Any]:
        """Take `count` bytes of another file, as they are now, without a copy of them, and yield what they are in pieces.

        Both files have them at a multiple of `BLOCK`. OSError: that cannot be.
        """
        self.flush()
        if not clone(self._file.fileno(), self._written, origin, count):
            raise OSError(errno.EOPNOTSUPP, "the file system shares no bytes of files any more")
        begin, self._written = self._written, os.lseek(self._file.fileno(), count, os.SEEK_CUR)
        with open(self.name, "rb", buffering=0) as file:
            file.seek(begin)
            for start in range(0, count, _BUFFER_BYTES):
                yield file.read(min(_BUFFER_BYTES, count - start))
                # They would take the place of what is in use.
                os.posix_fadvise(file.fileno(), begin + start, _BUFFER_BYTES, os.POSIX_FADV_DONTNEED)

    def _send(self, values: np.ndarray) -> None:
        """Write some bytes of a buffer, which begin at a multiple of `_BLOCK` in it."""
        begin = 0
        while begin < len(values):
            direct = self._direct and not (self._written % _BLOCK or begin % _BLOCK or (len(values) - begin) % _BLOCK)
            try:
                self._set_direct(direct)
                sent = os.write(self._file.fileno(), values[begin:].data)
            except OSError as error:
                if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                # A file system that does not take it.
                self._direct = False
                continue
            begin, self._written = begin + sent, self._written + sent

    def _set_direct(self, direct: bool) -> None:
        if _DIRECT:
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            if bool(flags & _DIRECT) is not direct:
                fcntl.fcntl(self._file, fcntl.F_SETFL, flags ^ _DIRECT)

    def tell(self) -> int:
        """Return how many bytes have been taken."""
        self._writing.result()
        return self._written + self._used

    def flush(self) -> None:
        """Write all that has been taken."""
        self._writing.result()
        if self._used:
            # The end is not of whole blocks.
            whole = self._used // _BLOCK * _BLOCK
            self._send(self._buffers[0][:whole])
            self._send(self._buffers[0][whole : self._used])
            self._used = 0

    def fileno(self) -> int:
        """Return the number of the open file."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; what has not been flushed is lost."""
        self._writer.close()
        self._file.close()
