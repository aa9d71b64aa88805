"""Show a progress bar during long work once it has taken a second: saves, loads, catching up, trials."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from speedtransfer.errors import printable

if TYPE_CHECKING:  # imported when a bar appears, which is seldom
    from rich.progress import Progress, TaskID
    from typing_extensions import Self

_SHOW_AFTER_S = 1.0


class LateBar:
    """A bar on standard error that counts what is done.

    Parameters
    ----------
    text : str
        What is being done.
    total : int
    show : bool, optional
        False: never. Default: on a terminal, once a second has passed. True: then, whatever standard error is.
    """

    def __init__(self, text: str, total: int, show: bool | None = None) -> None:
        self._text, self._total = text, total
        self._wanted = sys.stderr is not None and sys.stderr.isatty() if show is None else show
        self._due = time.monotonic() + _SHOW_AFTER_S
        self._bar: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None

    def show(self, done: int, text: str | None = None) -> None:
        """Show that so much is done, and what is being done now."""
        if not self._wanted or (self._bar is None and time.monotonic() < self._due):
            return
        from rich.markup import escape

        shown = escape(printable(self._text if text is None else text))
        if self._bar is None:
            made = self._make()
            self._bar = made, made.add_task(shown, total=self._total)
            made.start()
        bar, task = self._bar
        bar.update(task, completed=done, description=shown)

    def _make(self) -> Progress:
        from rich.console import Console
        from rich.progress import Progress

        return Progress(console=Console(stderr=True), transient=True)


class ByteProgress(LateBar):
    """A bar of bytes, with their rate.

    Parameters
    ----------
    text : str
        What is being done.
    total_bytes : int
    show : bool, optional
        Default: on a terminal, once a second has passed. True: at once, whatever standard error is. False: never.
    """

    def __init__(self, text: str, total_bytes: int, show: bool | None = None) -> None:
        super().__init__(text, total_bytes, show)
        self._done = 0
        self._forced = True if show else None
        if show:
            self._due = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` as done."""
        self._done += num_bytes
        self.show(self._done)

    def _make(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        console = Console(stderr=True, force_terminal=self._forced)
        return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
