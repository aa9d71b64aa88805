"""A progress bar for passes over whole tables: saving, loading, catching up idle rows."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_SHOW_AFTER_S = 1.0


class ByteProgress:
    """A bar on standard error.

    Parameters
    ----------
    text : str
        Description beside the bar.
    total_bytes : int
    show : bool, optional
        Default: on a terminal, once a second has passed. True: at once, whatever standard error is. False: never.
    """

    def __init__(self, text: str, total_bytes: int, show: bool | None = None) -> None:
        self._text, self._total, self._done = text, total_bytes, 0
        self._forced = True if show else None
        self._wanted = sys.stderr is not None and sys.stderr.isatty() if show is None else show
        self._due = time.monotonic() + (0.0 if show else _SHOW_AFTER_S)
        self._bar: Progress | None = None

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` as done."""
        self._done += num_bytes
        if not self._wanted or (self._bar is None and time.monotonic() < self._due):
            return
        if self._bar is None:
            # Not above: it takes longer to import than all else, and most saves and loads show no bar.
            from rich import progress as shown
            from rich.console import Console

            columns = shown.TextColumn("{task.description}"), shown.BarColumn(), shown.DownloadColumn()
            rates = shown.TransferSpeedColumn(), shown.TimeRemainingColumn()
            console = Console(stderr=True, force_terminal=self._forced)
            self._bar = shown.Progress(*columns, *rates, console=console, transient=True)
            self._task = self._bar.add_task(self._text, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=self._done)
