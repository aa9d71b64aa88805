"""Room for rows that are copied aside: in memory, and where that is used up in files without a name."""

from __future__ import annotations

import dataclasses
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# How much of a file is reserved at once, at least.
_PIECE_BYTES = 1 << 26


@dataclasses.dataclass
class Scratch:
    """Where such files may be, and how many bytes they leave free there."""

    folder: Path
    leaves: int = 0


class Aside:
    """Rows of some planes, each of which has a place here.

    Parameters
    ----------
    planes : dict of str to Tensor
        ``(num_rows, width)`` each.
    most_bytes : int
        How much memory may be used.
    scratch : Scratch, optional
        Where files go; None: there are none.
    """

    def __init__(self, planes: Mapping[str, Tensor], most_bytes: int, scratch: Scratch | None) -> None:
        self._widths = {name: (plane.shape[1] * plane.element_size()) for name, plane in planes.items()}
        self._num_rows, self._scratch = len(next(iter(planes.values()))), scratch
        self._row_bytes = max(sum(self._widths.values()), 1)
        self._in_memory = min(self._num_rows, most_bytes // self._row_bytes)
        # Memory that nobody has written takes none. By torch: NumPy asks for large pages, for whose first use a step waits
        # while the system makes them.
        self._memory = {
            name: torch.empty((self._in_memory, width), dtype=torch.uint8, device="cpu").numpy()
            for name, width in self._widths.items()
        }
        self._files, self._reserved, self._used = dict[str, _File](), 0, 0

    def take(self, count: int) -> tuple[int, dict[str, np.ndarray]] | None:
        """Return the first of `count` places, and by plane the bytes of these, ``(count, width)``; None: there is no room."""
        first, parts, start = self._used, self._memory, 0
        if first + count > self._in_memory:
            first = max(first, self._in_memory)
            start = self._in_memory
            if not self._reserve(first + count - start):
                return None
            parts = {name: file.rows for name, file in self._files.items()}
        self._used = first + count
        return first, {name: part[first - start :][:count] for name, part in parts.items()}

    def get(self, name: str, places: np.ndarray) -> np.ndarray:
        """Return the bytes of a plane at places, ``(n, width)``."""
        in_file = places >= self._in_memory
        if not in_file.any():
            return self._memory[name][places]
        found = np.empty((len(places), self._widths[name]), np.uint8)
        found[~in_file] = self._memory[name][places[~in_file]]
        found[in_file] = self._files[name].rows[places[in_file] - self._in_memory]
        return found

    def _reserve(self, count: int) -> bool:
        """Have room on the disk for `count` rows; tell whether there is."""
        if self._scratch is None or count > self._num_rows:
            return False
        if count > self._reserved:
            more = min(max(count, self._reserved + _PIECE_BYTES // self._row_bytes), self._num_rows)
            need = (more - self._reserved) * self._row_bytes
            try:
                if shutil.disk_usage(self._scratch.folder).free - need < self._scratch.leaves:
                    return False
                for name, width in self._widths.items():
                    if name not in self._files:
                        self._files[name] = _File(self._scratch.folder, self._num_rows, width)
                    self._files[name].reserve(self._reserved, more)
            except (OSError, AttributeError):
                # A full disk, a file system or an operating system without this.
                return False
            self._reserved = more
        return True


class _File:
    """A file without a name, in which `rows` (num_rows, width) are; only those that are reserved may be used."""

    def __init__(self, folder: Path, num_rows: int, width: int) -> None:
        self._file, self._width = tempfile.TemporaryFile(dir=folder), width  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._file.truncate(max(num_rows * width, 1))
        self.rows: Any = np.frombuffer(mmap.mmap(self._file.fileno(), 0), np.uint8)[: num_rows * width].reshape(
            -1, width
        )

    def reserve(self, start: int, stop: int) -> None:
        """Have room on the disk for some rows: a write to memory that has none ends the process."""
        os.posix_fallocate(self._file.fileno(), start * self._width, (stop - start) * self._width)
