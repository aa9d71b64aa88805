"""Runs programs with a time limit, each in a process of its own, and prints and logs what they print."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from experiment import OutOfTimeError, RunError
from store import ROOT

BENCH = Path(__file__).parent
GRACE_S = 10.0
logs: list[TextIO] = []


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


def run_job(
    script: str, job: dict[str, Any], end: float = float("inf"), env: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run ``python bench/<script> JOB.json``, which writes a JSON object to the path ``job["result"]``, and return that.

    Raises
    ------
    RunError
        It ended with another exit code than 0.
    OutOfTimeError
        It was stopped at `end`, by `time.monotonic`.
    """
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        path, result = Path(folder, "job.json"), Path(folder, "result.json")
        path.write_text(json.dumps({**job, "result": str(result)}), encoding="utf-8")
        left = end - time.monotonic()
        command = [sys.executable, str(BENCH / script), str(path)]
        code, output = run(command, left, quiet=True, env=env or {}) if left > 0 else (None, "")
        if code is None:
            raise OutOfTimeError("stopped at its time limit")
        if code != 0 or not result.exists():
            raise RunError((output.strip().splitlines() or [f"ended with exit code {code}"])[-1])
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found
