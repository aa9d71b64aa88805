"""An exception at the n-th line of the package that runs: what Ctrl-C, a signal handler or a lack of memory may do."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import speedtransfer as st

PACKAGE = str(Path(st.__file__).parent)


class Interrupt:
    """Raises `kind` at the n-th line of the package that runs; None: counts them."""

    def __init__(self, at: int | None = None, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.kind, self.lines, self.place = at, kind, 0, ""
        # Of each line that ran, if they are counted.
        self.places: list[str] = []
        # Lines of `with` that a frame has entered: an exception where it leaves one would leave a lock, or a mode of torch.
        self._entered: set[tuple[int, int]] = set()

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        # To trace, a generator that yields returns.
        if event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self._entered = {entry for entry in self._entered if entry[0] != id(frame)}
        if event == "line":
            # Python looks for signals after calls, not before the first line of a handler.
            if _text(frame, -1) in ("finally:", "except BaseException:"):
                return self._line
            entry = id(frame), frame.f_lineno
            if _text(frame).startswith("with "):
                if entry in self._entered:
                    return self._line
                self._entered.add(entry)
            self.lines += 1
            if self.at is None or self.lines == self.at:
                place = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                if self.at is None:
                    self.places.append(place)
                    return self._line
                sys.settrace(None)
                self.place = place
                raise self.kind
        return self._line

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        # What is raised while an object is deleted goes nowhere.
        deletes = frame.f_code.co_name == "__del__"
        return self._line if frame.f_code.co_filename.startswith(PACKAGE) and not deletes else None

    def visits(self, most: int) -> list[int]:
        """Return the numbers of the first visits of each line, `most` of them, and of the last one."""
        seen = dict[str, list[int]]()
        for number, place in enumerate(self.places, 1):
            seen.setdefault(place, []).append(number)
        return sorted({number for numbers in seen.values() for number in (*numbers[:most], numbers[-1])})

    def during(self, call: Callable[[], object]) -> bool:
        """Call, and tell whether it was interrupted."""
        before = sys.gettrace()
        try:
            sys.settrace(self._call)
            call()
        except self.kind:
            return True
        except BaseException:
            # A lack of memory may be told by another name.
            if not self.place:
                raise
            return True
        finally:
            sys.settrace(before)
        return False


def _text(frame: FrameType, shift: int = 0) -> str:
    """Return the line that runs, or the one `shift` lines from it."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno + shift).strip()
