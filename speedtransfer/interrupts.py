"""An exception may come between any two lines: Ctrl-C, a handler of a signal that raises, `MemoryError`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an exception may have come between any two lines, which no error of an optimizer itself does."""
    return not isinstance(error, Exception) or isinstance(error, MemoryError | torch.OutOfMemoryError)


def pass_on_interrupt(error: BaseException) -> None:
    """Raise `error` again if it is an interrupt: it says nothing of what was tried."""
    if is_interrupt(error):
        raise error


def to_its_end(call: Callable[[], object]) -> None:
    """Call what does the same again, or goes on, when it is called once more: so it is where something comes into it."""
    try:
        call()
    except BaseException:
        call()
        raise
