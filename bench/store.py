"""Where results are: ``bench/results/<device>/<part>.json``.

A run that is under way or was interrupted has its own in ``<part>.partial.json``, a quick one in ``<part>.quick.json``:
neither takes the place of a complete one. Each names its commit: ``git log COMMIT.. -- PATH`` tells what has changed since.

And processes with a time limit. The package is imported where it is needed: a process that measures gensim must not hold it
in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
# Also where the package is not installed.
sys.path[:0] = [name for name in (str(ROOT), str(ROOT / "bench")) if name not in sys.path]

CHECKS = ("tests", "sanitizer")  # need a GPU
SUITES = ("transfer", "step", "memory", "precision", "lookup", "prefetch", "cache")  # of speedtransfer bench
EXPERIMENTS = {  # bench/experiments/NAME.py, declared as those are: the title, and the section of docs/results.md, if any
    "tax": ("Compute against transfer", ""),
    "mixed": ("Mixed precision by batch size: time, memory, accuracy", "mixed precision"),
    "rounding": ("What rounding rows costs: a matrix factorised down to its noise", "rounding"),
    "exchange": ("Gradients in fewer bytes: to the same loss", "exchange"),
    "gpu": ("What a training step takes of a GPU", "experiments"),
    "peers": ("Training steps beside other libraries", "beside others"),
    "plan_accuracy": ("Planned beside measured times of a step", "plan accuracy"),
    "hosts": ("Planned beside measured steps of two hosts", "two hosts"),
    "saves": ("Checkpoints: saved, loaded, and written while training goes on", "checkpoints"),
    "oversized": ("Tables up to 37 times as large as memory", "oversized"),
    "idle": ("Training with dense, exact, lazy and SparseAdam's idle rows", "idle rows"),
    "word2vec": ("word2vec beside gensim: words/s and quality", "word2vec"),
    "ngram_example": ("Ways to hold the n-gram tables of a language model", "ngram example"),
}
MEASURED = (*SUITES, *EXPERIMENTS)
# Those that need neither much time nor data, root or libraries.
USUAL = (*SUITES, "tax", "mixed", "rounding", "exchange", "saves")
PARTIAL, QUICK = ".partial", ".quick"  # runs that take no place of a full one
GRACE_S, STOPPED = 10.0, "stopped at its time limit"
logs: list[TextIO] = []  # of what processes print


def suites() -> dict[str, Any]:
    """Return the suites of the command and the experiments by name, also for the reports of the package."""
    from speedtransfer.benchmark.measure import SUITES as KNOWN
    from speedtransfer.benchmark.measure import Suite

    KNOWN.update({name: Suite(name, title, package="experiments") for name, (title, _) in EXPERIMENTS.items()})
    return KNOWN


def header(part: str) -> dict[str, Any]:
    """Return what identifies a result: machine, versions, and the commit, by $COMMIT where there is no git."""
    from speedtransfer.benchmark.environment import environment

    facts = environment()
    if facts["commit"] == "unknown":
        facts["commit"], changes, _ = os.environ.get("COMMIT", "unknown").partition("+changes")
        facts["dirty"] = True if changes else None
    return {"part": part, "environment": facts, "complete": False}


def folder_of(device: str) -> Path:
    return ROOT / "bench" / "results" / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def recorded(*runs: str) -> Iterator[tuple[str, Path]]:
    """Yield the part and path of every result of `runs` (by default full ones), device by device."""
    for folder in sorted((ROOT / "bench" / "results").glob("*/")):
        paths = ((part, folder / f"{part}{run}.json") for part in (*CHECKS, *MEASURED) for run in runs or ("",))
        yield from ((part, path) for part, path in paths if path.exists())


def read(path: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); record it again") from error
    return result


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result; an interrupted write leaves the old one."""
    from speedtransfer.benchmark.results import to_text
    from speedtransfer.system import replace_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(f"{to_text(result)}\n".encode())


# --- processes ------------------------------------------------------------------------------------------------------------


def log(text: str) -> None:
    """Print `text`, and write it to the logs."""
    for stream in (sys.stdout, *logs):
        stream.write(text)
        stream.flush()


def run(command: Sequence[str], limit_s: float, **environment: str) -> tuple[int | None, str]:
    """Return the exit code of `command`, run at the root of the repository, and its output, which is shown as it comes.

    After `limit_s` it is killed with all that it has started, and the code is None; so it is when this process is stopped. It
    finds the package also where that is not installed.
    """
    known = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    known["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "bench"), known.get("PYTHONPATH"))))
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A session of its own: at Ctrl-C a trainer would end early and with exit code 0.
    process = subprocess.Popen(
        command, text=True, errors="replace", env=known, start_new_session=True, cwd=ROOT, **pipes
    )
    code, lines = None, list[str]()

    def pass_on() -> None:
        stream: Any = process.stdout
        with stream:
            for line in stream:
                lines.append(line)
                log(line)

    reader = threading.Thread(target=pass_on, daemon=True)
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


def ending(code: int | None) -> str:
    return {0: "", None: STOPPED}.get(code, f"ended with exit code {code}")
