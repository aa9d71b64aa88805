"""Defer Ctrl-C and SIGTERM to the end of a training step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_entered: list[StopOnSignal] = []  # of the main thread; the handlers are those of the first


class StopOnSignal:
    """Within this context the first SIGINT (Ctrl-C) or SIGTERM sets `requested` and does nothing else.

    An exception between two writes would leave weights and optimizer state of different steps. Ctrl-C after that raises
    KeyboardInterrupt; another SIGTERM does nothing, since ``timeout`` and job schedulers send several.

    May be nested: all of them see the signal. In a thread other than the main one nothing is changed, nor is a signal that
    the program ignores or handles itself: one that is ignored, as SIGINT is in background jobs of a script, stays so.

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
            _entered.append(self)
            self.requested = _entered[0].requested
            if len(_entered) == 1:
                for number in _SIGNALS:
                    previous = signal.getsignal(number)
                    if previous in (signal.SIG_DFL, signal.default_int_handler):
                        self._previous[number] = previous
                        signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        for one in _entered:
            one.requested = number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            _entered.remove(self)
            for number, previous in self._previous.items():
                signal.signal(number, previous)
            self._previous.clear()


def exit_code(number: int) -> int:
    """Return the exit code of a program that signal `number` ended, by the convention of shells: 130, or 143 for SIGTERM."""
    return 128 + number
