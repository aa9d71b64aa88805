"""Run a script in a process that has imported torch: a fork of one that has, as imports take seconds of every process.

For scripts that may have more imported than they use; `subprocess` is for those of a Python of their own.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The first optimizer imports torch._dynamo, the first table numba, and its first function all that numba's compiler knows.
# Nothing of this repository: the process may find another copy of it than the tests do.
_NUMBA = ["numba", "scipy.linalg", "numba.np.linalg", "numba.np.arraymath"]
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", *_NUMBA, "pytest"]


def fork_server():
    """Return what makes processes that have imported PRELOAD and have no threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_script(code, *arguments, timeout=300):
    """Run `code` as ``python -c`` does with `arguments`, the paths of modules as they are here, and return how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        # A new process begins in another folder.
        process = fork_server().Process(target=_run, args=(code, (os.getcwd(), *arguments), files))
        process.start()
        try:
            process.join(timeout)
            code_of_exit = process.exitcode
        finally:
            process.kill()
            process.join()
        out, err = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files)
    if code_of_exit is None:
        raise subprocess.TimeoutExpired(code, timeout, out.encode(), err.encode())
    return subprocess.CompletedProcess(["-c", *arguments], code_of_exit, out, err)


def _run(code, arguments, files):
    for number, file in enumerate(files, 1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(arguments[0])
    sys.argv = ["-c", *arguments[1:]]
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})
