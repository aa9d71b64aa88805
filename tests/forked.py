"""Run a script in a process that has imported torch: a fork of one that has, as imports take seconds of every process.

For scripts that may have more imported than they use; `subprocess` is for those of a Python of their own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

# The first optimizer imports torch._dynamo, the first table numba, and its first function all that numba's compiler knows.
# Nothing of this repository: the process may find another copy of it than the tests do.
_NUMBA = ["numba", "scipy.linalg", "numba.np.linalg", "numba.np.arraymath"]
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", *_NUMBA, "pytest"]


def fork_server() -> ForkServerContext:
    """Return what makes processes that have imported PRELOAD and have no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_script(code: str, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `code` as ``python -c`` does with `arguments`, the paths of modules as they are here, and return how it ended."""
    with started_script(code, *arguments) as script:
        script.process.join(timeout)
        if script.process.exitcode is None:
            raise subprocess.TimeoutExpired(code, timeout, script.out.encode(), script.err.encode())
        return subprocess.CompletedProcess(["-c", *arguments], script.process.exitcode, script.out, script.err)


class Script:
    """A script that runs, and what it has written so far."""

    def __init__(self, code: str, arguments: tuple[str, ...], folder: str) -> None:
        self._files = Path(folder, "stdout"), Path(folder, "stderr")
        # A new process begins in another folder.
        arguments = (os.getcwd(), *arguments)
        self.process = fork_server().Process(target=_run, args=(code, arguments, self._files))
        self.process.start()

    @property
    def out(self) -> str:
        return self._files[0].read_text(encoding="utf-8") if self._files[0].exists() else ""

    @property
    def err(self) -> str:
        return self._files[1].read_text(encoding="utf-8") if self._files[1].exists() else ""

    def wait_for(self, happened: Callable[[], bool], timeout: float = 100) -> None:
        """Wait until ``happened()``, or the script has ended."""
        end = time.monotonic() + timeout
        while self.process.is_alive() and not happened():
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("script", timeout, self.out.encode(), self.err.encode())
            time.sleep(0.005)


@contextlib.contextmanager
def started_script(code: str, *arguments: str) -> Iterator[Script]:
    """Start what `run_script` runs; it is killed where it is left."""
    with tempfile.TemporaryDirectory() as folder:
        script = Script(code, arguments, folder)
        try:
            yield script
        finally:
            script.process.kill()
            script.process.join()


def _run(code: str, arguments: tuple[str, ...], files: tuple[Path, Path]) -> None:
    for number, file in enumerate(files, 1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(arguments[0])
    sys.argv = ["-c", *arguments[1:]]
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
