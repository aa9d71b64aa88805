"""What a training run shows, a bar or a line every ten seconds, and the signals that end it after a step."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from speedtransfer.errors import printable

LINE_EVERY_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def format_loss(loss: float) -> str:
    """Return a loss with three decimals, or short where training has blown it up."""
    return f"{loss:.3f}" if loss < 1e6 else f"{loss:.3g}"


class TrainingProgress:
    """Progress of reading and training, on standard error; without `enabled` only `log` writes."""

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False) if console is None else console
        self._enabled = enabled
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> TrainingProgress:
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("reading", total=None, facts="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def log(self, text: str) -> None:
        """Write a line, above the bar if there is one."""
        self._console.print(printable(text), markup=False)

    def reading(self, num_words: int) -> None:
        """Show that `num_words` words of the corpus have been read."""
        if self._bar is not None:
            self._bar.update(self._task, facts=f"{num_words:,} words")
        elif self._line_is_due():
            self.log(f"reading: {num_words:,} words")

    def training(self, epoch: str, share: float, words_per_s: float, loss: float, left_s: float) -> None:
        """Show the state of training.

        `epoch` is such as "epoch 2/5", `share` what is done (0 to 1), `words_per_s` of the corpus, `loss` the running mean per
        pair, `left_s` the seconds left at this speed.
        """
        facts = f"{words_per_s:,.0f} words/s  loss {format_loss(loss)}"
        if self._bar is not None:
            self._bar.update(self._task, description=epoch, total=1.0, completed=share, facts=facts)
        elif self._line_is_due():
            self.log(f"{epoch}  {share:.0%}  {facts}  {timedelta(seconds=round(left_s))} left")

    def busy(self, what: str) -> None:
        """Show that training waits for something, such as "saving"."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def _line_is_due(self) -> bool:
        now = time.monotonic()
        if not self._enabled or now - self._last_line < LINE_EVERY_S:
            return False
        self._last_line = now
        return True


class StopOnSignal:
    """Within this context the first SIGINT (Ctrl-C) or SIGTERM sets `requested` and does nothing else.

    An exception between two writes would leave weights and optimizer state of different steps. Ctrl-C after that raises
    KeyboardInterrupt; another SIGTERM does nothing, since ``timeout`` and job schedulers send several.

    In a thread other than the main one nothing is changed, nor is a signal that the program ignores or handles itself: one
    that is ignored, as SIGINT is in background jobs of a script, stays so.

    Attributes
    ----------
    requested : int or None
        The number of the signal.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                if previous in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = previous
                    signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous.clear()
