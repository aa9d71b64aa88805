"""Show a progress bar while a whole table is read or written: saves, loads, catching up."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when a bar appears, which is seldom
    from rich.progress import Progress, TaskID

_SHOW_AFTER_S = 1.0


class ByteProgress:
    """A bar on standard error.

    Parameters
    ----------
    text : str
        What is being done.
    total_bytes : int
    show : bool, optional
        Default: on a terminal, once a second has passed. True: at once, whatever standard error is. False: never.
    """

    def __init__(self, text: str, total_bytes: int, show: bool | None = None) -> None:
        self._text, self._total, self._done = text, total_bytes, 0
        self._forced = True if show else None
        self._wanted = sys.stderr is not None and sys.stderr.isatty() if show is None else show
        self._due = time.monotonic() + (0.0 if show else _SHOW_AFTER_S)
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` as done."""
        self._done += num_bytes
        if not self._wanted or (self._bar is None and time.monotonic() < self._due):
            return
        if self._bar is None:
            self._bar = _show_bar(self._text, self._total, self._forced)
        bar, task = self._bar
        bar.update(task, completed=self._done)


def _show_bar(text: str, total_bytes: int, force_terminal: bool | None) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True, force_terminal=force_terminal)
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = bar.add_task(text, total=total_bytes)
    bar.start()
    return bar, task
