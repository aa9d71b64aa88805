"""Map 64-bit ids to row numbers: a hash table compiled by numba, or a dict without it. Knows of no table."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from speedtransfer.buffers import anonymous
from speedtransfer.errors import HostMemoryError, InvalidValueError, check_size, format_bytes
from speedtransfer.jit import compiled_module, run_on_threads
from speedtransfer.vocabulary.mixing import checked

_COMPILED = "speedtransfer.vocabulary.numba_index"
_SMALLEST = 64  # slots
_SLOT_BYTES = 16
_MAPPED_BYTES = 1 << 21  # from here on a table fills huge pages
_ENTRY_BYTES = 64  # of a dict, for the two integers of an entry


class IdIndex:
    """Map from distinct ids (any int64) to row numbers (int64, not negative).

    At most half of the slots are taken. Where an id stands depends on a random number of each index, so nobody can choose ids
    that slow it down; what the calls return does not. Any number of threads may call :meth:`find` while nothing is changed.

    Parameters
    ----------
    room : int
        Ids to have room for from the beginning.
    """

    def __init__(self, room: int = 0) -> None:
        self._compiled = compiled_module(_COMPILED)
        self.clear()
        self.reserve(room)

    @classmethod
    def of(cls, ids: np.ndarray, rows: np.ndarray) -> IdIndex:
        """Return an index of these ids and rows; see :meth:`insert`."""
        index = cls(len(ids))
        index.insert(ids, rows)
        return index

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Any, ...]:
        return IdIndex.of, self.items()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the index holds; without numba, about."""
        if self._compiled is None:
            return sys.getsizeof(self._rows) + _ENTRY_BYTES * len(self._rows)
        return self._slots.nbytes

    def clear(self) -> None:
        """Remove all ids and give the memory back."""
        self._count = 0
        self._rows: dict[int, int] = {}
        self._slots, *self._hash = table_for(0)

    def reserve(self, room: int) -> None:
        """Make room for `room` ids in all, so that inserting them takes no more memory.

        Raises
        ------
        HostMemoryError
            The system refuses that much memory; the index is as before.
        """
        room = check_size(room, "room")
        if self._compiled is None or 2 * room <= len(self._slots):
            return
        slots = _free_slots(_size_for(room))
        self._compiled.move(self._slots, slots, *self._hash)
        self._slots = slots

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the row of each id, -1 where it has none.

        Parameters
        ----------
        ids : (n,) int64 array

        Returns
        -------
        (n,) int64 array
        """
        ids = checked(ids, "ids")
        if self._compiled is None:
            return np.array([self._rows.get(id, -1) for id in ids.tolist()], dtype=np.int64)
        rows = np.empty(len(ids), np.int64)
        part = self._compiled.find, (self._slots, *self._hash, ids, rows)
        # A look-up waits for one cache line.
        run_on_threads([part], len(ids), 64 * len(ids), ())
        return rows

    def insert(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Add ids that the index does not have.

        Parameters
        ----------
        ids, rows : (n,) int64 arrays

        Raises
        ------
        InvalidValueError
            An id is repeated or has a row already, or a row is negative; the index is as before.
        HostMemoryError
            The index had to grow and the system refused the memory; it is as before.
        """
        ids, rows = checked(ids, "ids"), checked(rows, "rows")
        if len(ids) != len(rows):
            raise InvalidValueError(f"{len(ids)} ids and {len(rows)} rows were given; pass one row for each id")
        if len(rows) and rows.min() < 0:
            at = int((rows < 0).argmax())
            raise InvalidValueError(f"rows[{at}] is {rows[at]} but must not be negative; pass a row of the table")
        self.reserve(self._count + len(ids))
        done = self._insert(ids, rows)
        if done < len(ids):
            self._remove(ids[:done])
            raise InvalidValueError(f"ids[{done}] is {ids[done]}, which has a row already; remove it first")
        self._count += done

    def remove(self, ids: np.ndarray) -> None:
        """Remove ids that the index has.

        Parameters
        ----------
        ids : (n,) int64 array

        Raises
        ------
        InvalidValueError
            An id is repeated or has no row; the index is as before.
        """
        ids = checked(ids, "ids")
        rows = self.find(ids)
        done = int((rows < 0).argmax()) if len(ids) and rows.min() < 0 else len(ids)
        if done == len(ids):
            done = self._remove(ids)
            if done < len(ids):
                self._insert(ids[:done], rows[:done])
        if done < len(ids):
            raise InvalidValueError(
                f"ids[{done}] is {ids[done]}, which has no row or stands there twice; remove each id once"
            )
        self._count -= done

    def items(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all ids and their rows, in no order: two (len,) int64 arrays."""
        if self._compiled is None:
            count = len(self._rows)
            return np.fromiter(self._rows.keys(), np.int64, count), np.fromiter(self._rows.values(), np.int64, count)
        taken = self._slots[self._slots[:, 1] != 0]
        return taken[:, 0].copy(), ~taken[:, 1]

    def _insert(self, ids: np.ndarray, rows: np.ndarray) -> int:
        """Insert ids up to the first that is there already; return how many."""
        if self._compiled is not None:
            return self._compiled.insert(self._slots, *self._hash, ids, rows)
        for done, (id, row) in enumerate(zip(ids.tolist(), rows.tolist(), strict=True)):
            if self._rows.setdefault(id, row) != row or len(self._rows) != self._count + done + 1:
                return done
        return len(ids)

    def _remove(self, ids: np.ndarray) -> int:
        """Remove ids up to the first that is not there; return how many."""
        if self._compiled is not None:
            return self._compiled.remove(self._slots, *self._hash, ids)
        for done, id in enumerate(ids.tolist()):
            if self._rows.pop(id, None) is None:
                return done
        return len(ids)


def table_for(num_ids: int) -> tuple[np.ndarray, np.uint64, np.uint64]:
    """Return an empty hash table of `numba_index` with room for so many ids, and its seed and multiplier."""
    seed, multiplier = np.frombuffer(os.urandom(16), np.uint64)
    return _free_slots(_size_for(num_ids)), seed, multiplier | np.uint64(1)


def _size_for(num_ids: int) -> int:
    """Return the least power of two of which `num_ids` is no more than half."""
    return max(_SMALLEST, 1 << (2 * num_ids - 1).bit_length()) if num_ids else _SMALLEST


def _free_slots(size: int) -> np.ndarray:
    num_bytes = size * _SLOT_BYTES
    if num_bytes < _MAPPED_BYTES:
        return np.zeros((size, 2), np.int64)
    try:
        return np.frombuffer(anonymous(num_bytes), np.int64).reshape(size, 2)
    except (OSError, OverflowError) as error:
        raise HostMemoryError(
            f"an index of {size // 2} ids takes {format_bytes(num_bytes)}, which the system refused ({error}); let the "
            "vocabulary hold fewer ids (max_capacity) or use a machine with more memory"
        ) from error
