"""Children of `os.fork` that are ended by SIGKILL: at a line of the code under test, or at a moment.

For scripts of one process that imports torch and starts no thread, so that its children may go on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any


def kill_at_line(count: int, files: tuple[str, ...]) -> None:
    """Kill this process before the line number `count`, from 1, that runs in files whose paths end so."""
    left = count

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def run_child(call: Callable[[], object], delay: float | None = None) -> bool:
    """Run ``call()`` in a child, killed after `delay` seconds; return whether it came to its end. Raise if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0, "a child failed; its traceback is above"
    return True
