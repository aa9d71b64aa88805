"""An exception at any point of the package that runs: what Ctrl-C, a signal handler or a lack of memory may do."""

import inspect
import linecache
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import speedtransfer as st
from speedtransfer.errors import SpeedtransferError

# Where an interrupt may come: in the package, and in the optimizer.
TRACED = str(Path(st.__file__).parent), str(Path(torch.optim.__file__).parent)


class Interrupt:
    """Raises `kind` at the n-th point: where a line begins, or where a function has returned; None: counts them.

    Between two bytecodes an interrupt comes there too: after calls. `within`: points are those of functions of that name.
    """

    def __init__(self, at=None, kind=KeyboardInterrupt, within=None):
        self.at, self.kind, self.within, self.place = at, kind, within, ""
        # Of each point, if they are counted.
        self.places = []
        self._count = 0
        # Lines of `with` that a frame has entered: an exception where it leaves one would leave a lock, or a mode of torch.
        self._entered = set()
        # The line that each frame has begun.
        self._at = {}

    def _line(self, frame, event, arg):
        # Python leaves a generator that is interrupted where it yields without its `finally`.
        returns = event == "return" and not frame.f_code.co_flags & inspect.CO_GENERATOR
        if returns:
            self._entered = {entry for entry in self._entered if entry[0] != id(frame)}
            self._at.pop(id(frame), None)
        if event == "line":
            # Python looks for signals after calls, not before the first line of a handler. Nor does it at a `try`, where an
            # exception would pass a `with` around it.
            if _text(frame) == "try:" or _text(frame, -1) in ("finally:", "except BaseException:"):
                return self._line
            # A comprehension goes on: from Python 3.12 on its function's `with` would not see what is raised here, as it does
            # see what a signal handler raises.
            if self._at.get(id(frame)) == frame.f_lineno and sys.version_info >= (3, 12):
                return self._line
            self._at[id(frame)] = frame.f_lineno
            entry = id(frame), frame.f_lineno
            if _text(frame).startswith("with "):
                if entry in self._entered:
                    return self._line
                self._entered.add(entry)
        if (event == "line" or returns) and self.within in (None, frame.f_code.co_name):
            self._point(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}:{event}")
        return self._line

    def _point(self, place):
        self._count += 1
        if self.at is None:
            self.places.append(place)
        elif self._count == self.at:
            sys.settrace(None)
            self.place = place
            raise self.kind

    def _call(self, frame, event, arg):
        # What is raised while an object is deleted goes nowhere.
        caller = frame.f_back.f_code if frame.f_back is not None else frame.f_code
        deletes = frame.f_code.co_name == "__del__" or caller is weakref.finalize.__call__.__code__
        return self._line if frame.f_code.co_filename.startswith(TRACED) and not deletes else None

    def visits(self, most):
        """Return the numbers of the first visits of each point, `most` of them, and of the last one."""
        seen = dict[str, list[int]]()
        for number, place in enumerate(self.places, 1):
            seen.setdefault(place, []).append(number)
        return sorted({number for numbers in seen.values() for number in (*numbers[:most], numbers[-1])})

    def during(self, call):
        """Call, and tell whether it was interrupted; an interrupt may have become an error of ours, but does not get lost.

        A lack of memory may have been made up for.
        """
        before = sys.gettrace()
        try:
            sys.settrace(self._call)
            call()
        except (self.kind, SpeedtransferError):
            if not self.place:
                raise
            return True
        except RuntimeError as error:
            # What torch's load_state_dict makes of an Exception where a parameter is copied.
            if not self.place or "an exception occurred : ()" not in str(error):
                raise
            return True
        finally:
            sys.settrace(before)
            # What torch does itself when it is interrupted as it leaves a step.
            torch.set_grad_enabled(True)
        assert not self.place or self.kind is MemoryError, f"the interrupt at {self.place} got lost"
        return bool(self.place)


def sweep(count, attempt, points, kind=KeyboardInterrupt, within=None):
    """Interrupt at some points; return how often each outcome came, none of which begins with "torn".

    `count` does what is interrupted without being so. `points` picks from the numbers of all points.
    """
    counting, found, torn = Interrupt(within=within), Counter[str](), Counter[str]()
    counting.during(count)
    for at in points(counting.visits(2)):
        interrupt = Interrupt(at, kind, within)
        outcome = attempt(interrupt)
        found[outcome.partition(":")[0]] += 1
        if outcome.startswith("torn"):
            torn[f"{interrupt.place} {outcome}"] += 1
    assert not torn, f"{torn.total()} of {found.total()} points:\n" + "\n".join(
        f"{n} {it}" for it, n in torn.most_common(40)
    )
    return found


@pytest.fixture
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _text(frame, shift=0):
    """Return the line that runs, or the one `shift` lines from it."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno + shift).strip()
