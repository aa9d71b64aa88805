"""Reading tensors of a safetensors file in chunks, from a file that was checked byte by byte and is held open since."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.dtypes import SAFETENSORS_DTYPES
from speedtransfer.errors import StorageError
from speedtransfer.tables.files import CHUNK_BYTES


def open_plain(path: Path) -> int:
    """Return a descriptor of the file at `path`, which must be an ordinary one: no link, no pipe. OSError if it is not."""
    # A pipe would block for ever; a link may lead anywhere.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(0, "it is no ordinary file")
    return handle


class TensorReader:
    """The tensors of one file.

    Parameters
    ----------
    path : Path
    facts : dict
        What the manifest says of it, known to be well formed.

    Raises
    ------
    OSError
        It cannot be opened.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.entries: dict[str, Any] = facts["tensors"]
        self._file = os.fdopen(open_plain(path), "rb", buffering=0)

    def close(self) -> None:
        """Close the file. Tensors of `mapped` live on."""
        self._file.close()

    def check(self, advance: Callable[[int], None]) -> None:
        """Raise `StorageError` unless the file is, to the bit, the one that the manifest speaks of."""
        size = os.fstat(self._file.fileno()).st_size
        if size != self.facts["bytes"]:
            raise self._damaged(f"has {size} bytes but {self.facts['bytes']} were written")
        length = int.from_bytes(self._read_bytes(0, min(8, size)), "little")
        if size < 8 or length > size - 8:
            raise self._damaged(f"has a header of {length} bytes in a file of {size}")
        self._begin = 8 + length
        data = max((e["data_offsets"][1] for e in self.entries.values()), default=0)
        if self._begin + data != size:
            raise self._damaged(f"holds {size - self._begin} bytes of data but its tensors take {data}")
        digest, buffer = hashlib.sha256(), bytearray(min(CHUNK_BYTES, max(size, 1)))
        for start in range(0, size, len(buffer)):
            part = memoryview(buffer)[: min(len(buffer), size - start)]
            self._read_into(start, part)
            digest.update(part)
            advance(len(part))
        if digest.hexdigest() != self.facts["sha256"]:
            raise self._damaged("does not have the checksum that was written")
        try:
            header = json.loads(self._read_bytes(8, length))
        except (ValueError, RecursionError):
            raise self._damaged("has a header that is no JSON") from None
        if header != self.entries:
            raise self._damaged("has another header than the manifest says")

    def _damaged(self, what: str) -> StorageError:
        return StorageError(f"{str(self.path)!r} {what}: it is damaged or was replaced; use another checkpoint")

    def _read_bytes(self, start: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._read_into(start, memoryview(buffer))
        return bytes(buffer)

    def _read_into(self, start: int, target: memoryview) -> None:
        try:
            self._file.seek(start)
            done = 0
            while done < len(target):
                count = self._file.readinto(target[done:])
                if not count:
                    raise self._damaged("was truncated while it was read")
                done += count
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"cannot read {str(self.path)!r} ({error.strerror}); check the disk") from error

    def spec(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        entry = self.entries[name]
        return SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])

    def read(self, name: str, rows: slice | None = None, buffers: dict[str, Tensor] | None = None) -> Tensor:
        """Return a tensor, or some of its rows, on the host.

        It has fresh memory, or, with `buffers`, that which the last call with the same ones used.
        """
        dtype, shape = self.spec(name)
        begin = self._begin + self.entries[name]["data_offsets"][0]
        if rows is not None:
            begin += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape = (rows.stop - rows.start, *shape[1:])
        num_bytes = math.prod(shape) * dtype.itemsize
        with torch.inference_mode(False):
            if buffers is None:
                tensor = torch.empty(shape, dtype=dtype, device="cpu")
            else:
                if name not in buffers or len(buffers[name]) < num_bytes:
                    buffers[name] = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
                tensor = buffers[name][:num_bytes].view(dtype).view(shape)
        target = tensor.view(-1).view(torch.uint8).numpy().data if num_bytes else memoryview(b"")
        for start in range(0, len(target), CHUNK_BYTES):
            self._read_into(begin + start, target[start : start + CHUNK_BYTES])
        return tensor

    def mapped(self, name: str) -> Tensor:
        """Return a tensor over the file itself, to be copied from at once: it takes no memory of its own."""
        dtype, shape = self.spec(name)
        begin, end = self.entries[name]["data_offsets"]
        if begin == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # "c" maps privately: torch wants writable memory, and the file stays as it is.
        data = np.memmap(self._file, np.uint8, "c", self._begin + begin, (end - begin,))
        return torch.from_numpy(data.view(np.ndarray)).view(dtype).view(shape)
