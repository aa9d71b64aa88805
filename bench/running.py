"""Runs programs with a time limit: prints and logs their output, and keeps their results while they run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from store import ROOT

GRACE_S = 10.0  # to write what was measured
KEEP_S = 20.0  # between two calls of `keep`

_logs: list[TextIO] = []
_keep: list[Callable[[], None]] = []


@contextlib.contextmanager
def logged(paths: Sequence[Path], keep: Callable[[], None]) -> Iterator[None]:
    """Also write to `paths` what `log` prints, and call `keep` now and then, and at the end whatever happens."""
    with contextlib.ExitStack() as stack:
        stack.callback(keep)
        for path in paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _logs.append(stack.enter_context(path.open("w", encoding="utf-8", errors="replace")))
            except OSError as error:
                print(f"cannot write {path}: {error}", file=sys.stderr)
        _keep.append(keep)
        try:
            yield
        finally:
            _logs.clear()
            _keep.clear()


def log(text: str, file: TextIO | None = None) -> None:
    """Print `text`, and write it to the logs."""
    for stream in (file or sys.stdout, *_logs):
        stream.write(text)
        stream.flush()


@contextlib.contextmanager
def listening_to_interrupts() -> Iterator[None]:
    """Start programs with the default action for SIGINT: where it is ignored here they would inherit that."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # with a handler nothing is inherited
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(command: Sequence[str], limit_s: float, **kwargs: Any) -> tuple[int | None, str]:
    """Return the exit code of `command` and its output, which is shown as it comes.

    After `limit_s` it is stopped with all that it has started, and the code is None. It finds the package also where that is
    not installed, and listens to SIGINT also where this process does not, as background jobs of a script do not.
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **kwargs.pop("env", {})}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "bench"), environment.get("PYTHONPATH")))
    )
    options: dict[str, Any] = {
        "text": True,
        "errors": "replace",
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    lines: list[str] = []
    end = time.monotonic() + max(1.0, limit_s)
    with listening_to_interrupts():
        process = subprocess.Popen(command, start_new_session=True, env=environment, **options, **kwargs)
    reader = threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        code = _wait(process, end)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process stuck in the driver must not block the other tasks.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        reader.join(GRACE_S)  # a process that left the group may hold the pipe
    return code, "".join(lines)


def _wait(process: subprocess.Popen[str], end: float) -> int | None:
    """Return the exit code, or None after stopping the process: by SIGINT, at which pytest writes its results."""
    while True:
        try:
            return process.wait(timeout=max(0.0, min(KEEP_S, end - time.monotonic())))
        except subprocess.TimeoutExpired:
            for keep in _keep:
                keep()
        if time.monotonic() >= end:
            break
    for number, grace in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, GRACE_S / 5)):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
            break
    return None


def _pass_on(stream: IO[str], lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            log(line)
