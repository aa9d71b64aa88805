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
    """Return the exit code of `command` and its output, which is shown as it comes; see `run_together`."""
    (found,) = run_together([command], limit_s, **kwargs)
    return found


def run_together(commands: Sequence[Sequence[str]], limit_s: float, **kwargs: Any) -> list[tuple[int | None, str]]:
    """Run `commands` at once and return the exit code of each and its output, which is shown as it comes.

    After `limit_s` they are stopped with all that they have started, and their codes are None. They find the package also
    where that is not installed, and listen to SIGINT also where this process does not, as background jobs of a script do not.
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
    end = time.monotonic() + max(1.0, limit_s)
    processes: list[subprocess.Popen[str]] = []
    outputs: list[list[str]] = [[] for _ in commands]
    readers = []
    try:
        for command, lines in zip(commands, outputs, strict=True):
            with listening_to_interrupts():
                process = subprocess.Popen(command, start_new_session=True, env=environment, **options, **kwargs)
            processes.append(process)
            readers.append(threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True))
            readers[-1].start()
        codes = _wait(processes, end)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            # A process stuck in the driver must not block the other tasks.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        for reader in readers:
            reader.join(GRACE_S)  # a process that left the group may hold the pipe
    return [(code, "".join(lines)) for code, lines in zip(codes, outputs, strict=True)]


def _wait(processes: Sequence[subprocess.Popen[str]], end: float) -> list[int | None]:
    """Return exit codes, None of those that had to be stopped: by SIGINT, at which pytest and suites write their results."""
    running = list(processes)
    while running:
        try:
            running[0].wait(timeout=max(0.0, min(KEEP_S, end - time.monotonic())))
            del running[0]
        except subprocess.TimeoutExpired:
            for keep in _keep:
                keep()
            if time.monotonic() >= end:
                break
    late = [process for process in running if process.poll() is None]
    for number, grace in ((signal.SIGINT, GRACE_S), (signal.SIGTERM, GRACE_S / 5)):
        there = [process for process in late if process.poll() is None]
        for process in there:
            os.killpg(process.pid, number)
        for process in there:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace)
    return [None if process in late else process.returncode for process in processes]


def _pass_on(stream: IO[str], lines: list[str]) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            log(line)
