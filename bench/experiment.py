"""What the experiments of this folder share: arguments, errors, processes with a time limit.

The package is imported where it is needed: a process that measures gensim must not hold it in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from store import ROOT

BENCH = Path(__file__).parent
GRACE_S = 10.0
logs: list[TextIO] = []  # of what processes print


class RunError(RuntimeError):
    """A process that was started failed."""


# --- the command line -----------------------------------------------------------------------------------------------------


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script of this folder, described by the first line of its docstring, with ``--out``."""
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    return parser


def exit_code(run: Callable[[], int]) -> int:
    """Return what `run` returns; print an error in one line and return 2 (data), 1 (a process) or 130 (Ctrl-C)."""
    from speedtransfer.errors import SpeedtransferError

    try:
        return run()
    except SpeedtransferError as error:
        code, message = 2, str(error)
    except RunError as error:
        code, message = 1, str(error)
    except KeyboardInterrupt:
        code, message = 130, "stopped"
    print(f"error: {message}", file=sys.stderr)
    return code


# --- processes ------------------------------------------------------------------------------------------------------------


def log(text: str, file: TextIO | None = None) -> None:
    """Print `text`, and write it to the logs."""
    for stream in (file or sys.stdout, *logs):
        stream.write(text)
        stream.flush()


def run(command: Sequence[str], limit_s: float, quiet: bool = False, **kwargs: Any) -> tuple[int | None, str]:
    """Return the exit code of `command` and its output, which is shown as it comes unless it is `quiet`.

    After `limit_s` it is killed with all that it has started, and the code is None; so it is when this process is stopped. It
    finds the package also where that is not installed.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **kwargs.pop("env", {})}
    paths = (str(ROOT), str(BENCH), environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A session of its own: at Ctrl-C a trainer would end early and with exit code 0.
    options = {"text": True, "errors": "replace", "env": environment, "start_new_session": True}
    process = subprocess.Popen(command, **pipes, **options, **kwargs)
    code, lines = None, list[str]()
    reader = threading.Thread(target=_pass_on, args=(process.stdout, lines, quiet), daemon=True)
    reader.start()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(min(max(1.0, limit_s), threading.TIMEOUT_MAX))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process stuck in the driver, or one that left the group and holds the pipe, must not block what comes next.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        reader.join(GRACE_S)
    return code, "".join(lines)


def _pass_on(stream: IO[str], lines: list[str], quiet: bool) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            if not quiet:
                log(line)


def run_job(script: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run ``python bench/<script> JOB.json``, which writes a JSON object to the path ``job["result"]``, and return that.

    Raises `RunError` if it ended with another exit code than 0.
    """
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        path, result = Path(folder, "job.json"), Path(folder, "result.json")
        path.write_text(json.dumps({**job, "result": str(result)}), encoding="utf-8")
        code, output = run([sys.executable, str(BENCH / script), str(path)], float("inf"), quiet=True)
        if code != 0 or not result.exists():
            raise RunError((output.strip().splitlines() or [f"ended with exit code {code}"])[-1])
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found
