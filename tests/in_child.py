"""Run a function in a child of `os.fork` of this process: return what it returns there, or end it by SIGKILL."""

import os
import pickle
import signal
import sys
import traceback

import pytest
import torch
from torch import Tensor

# Marks of tests that fork.
FORKS = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def forks(test):
    """Mark a test that forks."""
    for mark in FORKS:
        test = mark(test)
    return test


def in_child(function):
    """Return what `function` returns in a child of fork, which is killed if it hangs; raise what it raises there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # pytest-timeout has a handler of its own.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        # torch's own threads do not survive a fork.
        torch.set_num_threads(1)
        try:
            try:
                result = function(), None
            except BaseException as error:
                result = None, error
            with os.fdopen(writing, "wb") as file:
                pickle.dump(result, file)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        result, error = pickle.load(file)
    os.waitpid(child, 0)
    if error is not None:
        skip_where_torch_refuses(error)
        raise error
    return result


def skip_where_torch_refuses(said):
    """Skip a test whose child has `said` that it cannot go backward, as its parent has: torch 2.6, whatever the module."""
    if torch.__version__ < "2.13" and "autograd's threading in combination with fork" in str(said):
        pytest.skip("this torch does not go backward in a child of fork once the parent has")


def plain(value):
    """Return arrays for tensors, which a process cannot pass on as they are."""
    if isinstance(value, Tensor):
        return value.detach().float().numpy().copy()
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items() if key != "step"}
    return [plain(part) for part in value] if isinstance(value, tuple | list) else value


# --- children that are killed: for scripts of one process that imports torch and starts no thread ---------------------


def kill_at_line(count, files):
    """Kill this process before the line number `count`, from 1, that runs in files whose paths end so."""
    left = count

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def run_child(call):
    """Run ``call()`` in a child and return whether it came to its end, or was killed. Raise if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False
    assert os.WEXITSTATUS(status) == 0, "a child failed; its traceback is above"
    return True
