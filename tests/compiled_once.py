"""Have one process compile what several need at once: the others wait, and read from the disk what it has compiled.

In a new clone three workers, and the ranks of each, would all compile the same functions, which takes up to six seconds.
"""

import contextlib
import functools
import os
import threading

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_mine = threading.local()


@contextlib.contextmanager
def locked(path):
    """Keep other processes out of a file or folder that is locked so, until this is left or the process ends."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def install():
    """Have numba compile a function of the package while its file is locked."""
    try:
        from numba.core.dispatcher import Dispatcher
    except ImportError:
        return
    compile_now = Dispatcher.compile

    @functools.wraps(compile_now)
    def compile_once(self, signature):
        path = self.py_func.__code__.co_filename
        # What a thread compiles as a part of another function belongs to that one.
        if getattr(_mine, "compiles", False) or fcntl is None or "speedtransfer" not in path:
            return compile_now(self, signature)
        with locked(path):
            _mine.compiles = True
            try:
                return compile_now(self, signature)
            finally:
                _mine.compiles = False

    Dispatcher.compile = compile_once
