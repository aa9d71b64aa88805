"""Save while training goes on: rows as they were when the save was asked for, and the thread that writes them."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from speedtransfer.checkpoint.table_rows import StoredRows
from speedtransfer.checkpoint.tensors import PickedRows
from speedtransfer.errors import InvalidValueError, is_url
from speedtransfer.jit import on_this_thread
from speedtransfer.once import once
from speedtransfer.rows import Rows
from speedtransfer.tables.aside import Scratch
from speedtransfer.tables.snapshots import Snapshot

# So much of a table may be copied aside in memory for the time of a save: a part of it, and something of a small one.
_ASIDE_PART, _ASIDE_BYTES = 8, 1 << 30
# Where steps take all cores they have them first; ``bench/experiments/saves.py`` measures both.
_NICE = 10


class SnapshotRows(StoredRows):
    """Rows for a plan that is written later: those of now, as of the first time that a plane of their table is asked for."""

    def __init__(self, scratch: Scratch | None) -> None:
        self.scratch = scratch
        self._snapshots: list[Snapshot] = []
        self._memory = dict[str, Tensor]()
        self._frozen: dict[Rows, Rows] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for snapshot in self._snapshots:
            snapshot.close()

    def settle(self) -> None:
        """Have the rows of tables that are files in other files, where the file system lets these share their bytes."""
        for snapshot in self._snapshots:
            snapshot.settle()

    def check(self) -> None:
        """Raise `StorageError` where the rows of a table have changed in a way that was not seen."""
        # All: a step of several tables goes on once none makes it wait.
        for snapshot in self._snapshots:
            snapshot.let_go()
        for snapshot in self._snapshots:
            snapshot.check()

    def plane(self, rows: Rows, name: str) -> Any:
        """Return a plane of a table for a checkpoint to keep."""
        if not rows.table.writable:
            return super().plane(rows, name)
        stored, frozen = rows.table.stored(name), self._frozen.get(rows) or self._freeze(rows)
        size, numbers = rows.written_here(torch.device("cpu"))

        def read(at: slice) -> Tensor:
            if frozen.lag:
                caught_up = frozen.caught_up(numbers(at.start, at.stop), name)
                assert caught_up is not None
                return caught_up[name]
            return frozen.table.chunk(name, at)

        if name not in frozen.table.planes:
            raise InvalidValueError(
                f"a table got state ({name!r}) from a step of another thread while background=True looked at it; save again"
            )
        # Idle rows are caught up with all their planes.
        row_bytes = rows.table.nbytes // max(len(stored), 1) if frozen.lag else None
        snapshot: Any = frozen.table
        mapped = (lambda: None) if frozen.lag else (lambda: snapshot.settled(name))
        return PickedRows(stored, size, slice, torch.no_grad()(read), row_bytes, mapped)

    def counters(self, rows: Rows) -> dict[str, int]:
        """Return the state of stochastic rounding, after idle rows have been written."""
        found = (self._frozen.get(rows) or rows).state_dict()
        return {**found, "writes": found["writes"] + bool(rows in self._frozen and self._frozen[rows].lag)}

    def _freeze(self, rows: Rows) -> Rows:
        """Return rows of a snapshot of the table, which do not change."""
        table = rows.table
        unseen = {"a CUDA graph steps": table.is_captured, "an array shares (numpy(), cupy(), DLPack)": table.is_viewed}
        what = next((what for what, is_so in unseen.items() if is_so), None)
        if what is not None:
            raise InvalidValueError(
                f"background=True needs to see each write of rows, but this model has a table that {what}; save without it"
            )
        if not rows.can_be_frozen:
            rows.catch_up()
        frozen: Any = copy.copy(rows)
        frozen.lag, frozen.lock = rows.lag.copy() if rows.lag else None, threading.RLock()
        size, _ = rows.written_here(table.device)
        most_bytes = max(table.nbytes * size // max(table.num_rows, 1) // _ASIDE_PART, _ASIDE_BYTES)
        frozen.table = table.snapshot(most_bytes, self._memory, self.scratch, rows.own)
        self._snapshots.append(frozen.table)
        self._frozen[rows] = frozen
        return frozen


class BackgroundSave:
    """A checkpoint that is being saved; ``save_checkpoint(background=True)`` returns it.

    Attributes
    ----------
    path : str
        Where to.
    num_bytes : int
        How much will be written.

    A process that is forked meanwhile knows nothing of the save: there the others raise `InvalidValueError`.
    """

    def __init__(self, path: str, num_bytes: int, write: Callable[[Callable[[int], None]], None]) -> None:
        self.path, self.num_bytes, self._process = path, num_bytes, os.getpid()
        self._state = _State()
        self._thread = threading.Thread(target=self._state.run, args=(write,), name=f"save {path}")
        weakref.finalize(self, self._state.warn, path)
        self._thread.start()

    def __repr__(self) -> str:
        if self._process != os.getpid():
            return f"BackgroundSave({self.path!r}, of process {self._process})"
        failed = self._state.error is not None
        state = f"{self.progress:.0%}" if not self.done() else "failed" if failed else "saved"
        return f"BackgroundSave({self.path!r}, {state})"

    @property
    def progress(self) -> float:
        """How much has been written, from 0 to 1."""
        saved = self.done() and self._state.error is None
        return 1.0 if saved else min(self._state.done_bytes / max(self.num_bytes, 1), 1.0)

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        self._check_process()
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the checkpoint is in place, at most `timeout` seconds.

        Raises
        ------
        StorageError
            It could not be written, or the rows were changed by other means than steps and methods meanwhile. What was
            there before is as it was.
        TimeoutError
            It goes on after `timeout`.
        """
        self._check_process()
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path!r} is not saved after {timeout} s ({self.progress:.0%}); wait for longer")
        error, self._state.told = self._state.error, True
        if error is not None:
            raise error

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise InvalidValueError(
                f"{self.path!r} is saved by process {self._process}, of which a fork cannot know how far that is; ask there"
            )


# Those that may go on, by their absolute path.
_running: dict[str, BackgroundSave] = {}


def begin(place: Any, num_bytes: int, write: Callable[[Callable[[int], None]], None]) -> BackgroundSave:
    """Start a save to a place."""
    try:
        _wait_at_exit()
        save = _running[_key(place)] = BackgroundSave(str(place), num_bytes, write)
    except RuntimeError as error:
        raise InvalidValueError(f"background=True cannot begin a thread ({error}); save without it") from error
    return save


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)


@once
def _wait_at_exit() -> None:
    # Before Python ends what the thread needs (pools of threads), which it does before it waits for the thread itself.
    threading._register_atexit(_wait_for_all)  # type: ignore[attr-defined]


def _wait_for_all() -> None:
    for save in list(_running.values()):
        save._thread.join()


def finish_earlier(place: Any) -> None:
    """Wait for a save to the same place that goes on; raise what has ended it, unless somebody knows by now."""
    earlier = _running.pop(_key(place), None)
    if earlier is not None and not (earlier.done() and earlier._state.told):
        earlier.wait()


def _key(place: Any) -> str:
    return str(place) if is_url(str(place)) else os.path.abspath(str(place))


class _State:
    """What the thread of a save tells, without a reference to whoever waits for it."""

    def __init__(self) -> None:
        self.done_bytes, self.told = 0, False
        self.error: BaseException | None = None

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def run(self, write: Callable[[Callable[[int], None]], None]) -> None:
        if sys.platform == "linux":
            # Those who train come first.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            with on_this_thread():
                write(self.advance)
        except BaseException as error:
            self.error = error

    def warn(self, path: str) -> None:
        if self.error is not None and not self.told:
            warnings.warn(f"{path!r} was not saved: {self.error}", RuntimeWarning, stacklevel=2)
