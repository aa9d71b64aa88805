"""Runs one job in a process of its own and measures its peak memory, that of its child processes included."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiment import OutOfTimeError, RunError
from store import ROOT

_EVERY_S = 0.1


def run_job(script: str, job: dict[str, Any], end: float = float("inf")) -> dict[str, Any]:
    """Run ``python bench/<script> JOB.json``, which writes a JSON object to the path ``job["result"]``, and return that.

    The result also has ``peak_bytes``, the largest sum of resident memory of the process and its children. What
    lies in two of them is counted twice.

    Parameters
    ----------
    script : str
    job : dict
    end : float
        When the job is stopped, by `time.monotonic`.

    Raises
    ------
    RunError
        It ended with another exit code than 0.
    OutOfTimeError
        It was stopped.
    """
    if time.monotonic() > end:
        raise OutOfTimeError("stopped at its time limit")
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        path, log, result = (Path(folder, name) for name in ("job.json", "log.txt", "result.json"))
        path.write_text(json.dumps({**job, "result": str(result)}), encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        }
        command = [sys.executable, str(Path(__file__).with_name(script)), str(path)]
        with log.open("wb") as errors:
            # A session of its own: at Ctrl-C a trainer would end early and with exit code 0.
            process = subprocess.Popen(
                command, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
            try:
                peak = _watch(process, end)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0 or not result.exists():
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise RunError(lines[-1] if lines else f"ended with exit code {process.returncode}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return {**found, "peak_bytes": max(peak, found.get("peak_bytes", 0))}


def _watch(process: subprocess.Popen[bytes], end: float) -> int:
    """Wait for `process` and return the most memory that was seen."""
    import psutil

    peak, root = 0, psutil.Process(process.pid)
    while True:
        with contextlib.suppress(psutil.Error):
            family, total = [root, *root.children(recursive=True)], 0
            for member in family:
                with contextlib.suppress(psutil.Error):
                    total += member.memory_info().rss
            peak = max(peak, total)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EVERY_S)
            return peak
        if time.monotonic() > end:
            raise OutOfTimeError("stopped at its time limit")
