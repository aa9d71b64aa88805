"""Bytes that files share until one of them changes, which takes no time and no room: reflinks, as XFS and Btrfs have them."""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from speedtransfer.system import fcntl, physical_bytes
from speedtransfer.tables import files
from speedtransfer.tables.page_advice import LARGE_PART
from speedtransfer.tables.reserved import OpenFile

# What is shared begins and ends at multiples of that, in both files; where the file system has longer blocks it refuses.
BLOCK = 4096
_FICLONERANGE = 0x4020940D  # of linux/fs.h


class Origin(NamedTuple):
    """A file that is mapped into memory, and at which byte of it a tensor begins."""

    file: OpenFile
    begin: int


def are_worth(num_bytes: int) -> bool:
    """Tell whether so much is better shared: pages that are written after it cost more than usual, each once."""
    return num_bytes >= LARGE_PART * physical_bytes()


def origin_of(tensor: Tensor) -> Origin | None:
    """Return the file that a tensor is in, which has all that was written to it; None: none, or it cannot be known."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
        return None
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines():
        span, access, offset, _, inode, *path = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= address < end:
            # Of a private map the file has not all.
            file = _opened(path[0], int(inode)) if path and access[3] == "s" else None
            return None if file is None else Origin(file, int(offset, 16) + address - begin)
    return None


def _opened(path: str, inode: int) -> OpenFile | None:
    """Return the file of a map: one without a name cannot be opened, but the map of Python keeps it open."""
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.fstat(number).st_ino == inode and os.readlink(f"/proc/self/fd/{number}") == path:
                file = OpenFile(number)
                # Another thread may have closed that one, and opened another.
                if os.fstat(file.number).st_ino == inode:
                    return file
        except OSError:
            continue
    return None


def clone(target: int, at: int, origin: Origin, count: int) -> bool:
    """Have the open file `target` share `count` bytes of another, from byte `at` of it on; tell whether that can be."""
    if fcntl is None:
        return False
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", origin.file.number, origin.begin, count, at))
    except OSError:
        return False
    return True


def can_clone(target: int, origin: Origin) -> bool:
    """Tell whether the open file `target`, which is empty, can share bytes of another."""
    found = clone(target, 0, Origin(origin.file, origin.begin // BLOCK * BLOCK), BLOCK)
    os.ftruncate(target, 0)
    return found


def cloned(planes: Mapping[str, tuple[Tensor, Origin]], folder: Path) -> dict[str, Tensor] | None:
    """Return tensors in files without a name that share the bytes of others; None: the file system has not that."""
    found = {}
    for name, (plane, (file, begin)) in planes.items():
        first, size = begin // BLOCK * BLOCK, os.fstat(file.number).st_size
        last = min(-(-(begin + plane.nbytes) // BLOCK) * BLOCK, size)
        with tempfile.TemporaryFile(dir=folder) as made:
            if not clone(made.fileno(), 0, Origin(file, first), last - first):
                return None
            found[name], _ = files.map_tensor(made, begin - first, tuple(plane.shape), plane.dtype, "r+")
    return found
