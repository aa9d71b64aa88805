"""Show a progress bar while trials run, once they have taken a second."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported when a bar appears
    from rich.progress import Progress, TaskID

_SHOW_AFTER_S = 1.0


class TrialBar:
    """A bar on standard error.

    Parameters
    ----------
    total : int
        Trials.
    show : bool, optional
        By default on a terminal.
    """

    def __init__(self, total: int, show: bool | None = None) -> None:
        self._total = total
        self._wanted = sys.stderr is not None and sys.stderr.isatty() if show is None else show
        self._due = time.monotonic() + _SHOW_AFTER_S
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> TrialBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()

    def show(self, done: int, text: str) -> None:
        """Show that so many trials are done, and what the next one measures."""
        if not self._wanted or (self._bar is None and time.monotonic() < self._due):
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            self._bar = bar, bar.add_task("", total=self._total)
            bar.start()
        self._bar[0].update(self._bar[1], completed=done, description=f"measuring {text}")
