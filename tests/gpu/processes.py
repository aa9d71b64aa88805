"""Tests run in another process, each told of as it ends: one that hangs, crashes or leaves the device unusable fails alone.

After a fault on the device every call of its process fails, and nothing interrupts a host that waits for a kernel without an
end. So the pytest that was started (`Processes`) has another one run the tests (`Reporter`) and starts the next where that
one was lost. Consecutive tests share a process unless their modules give `PROCESS` different names; ``PROCESS = None`` runs
them in the first process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = (
    "SPEEDTRANSFER_GPU_TESTS"  # tells a process where its list of tests is and where to report; "inline": run here
)
START_S = 180.0  # for the first sign of life: imports, and the start of CUDA
SILENCE_S = 45.0  # for any test: a kernel that never ends makes no sound
MAX_LOST = 3  # processes of one name; after that the rest is not worth the time


def run_here(config: pytest.Config) -> bool:
    """Tell whether the tests of this session run in its own process: under a debugger, a sanitizer, or as asked."""
    return (
        ENVIRONMENT in os.environ
        or sys.platform == "win32"
        or config.option.usepdb
        or config.option.capture == "no"
        or "sanitizer" in config.option.markexpr
        or hasattr(config, "workerinput")  # of pytest-xdist
    )


# --- the process that runs tests ----------------------------------------------------------------------------------------


class Reporter:
    """Runs the tests that it was asked for and writes a line of JSON for whatever happens.

    Parameters
    ----------
    config : pytest.Config
    broken : callable
        Says, after a test that failed, what is wrong with the device; "" where it is well.
    """

    def __init__(self, config: pytest.Config, broken: Callable[[], str]) -> None:
        about = json.loads(os.environ[ENVIRONMENT])
        self.config, self.broken, self.failed = config, broken, False
        self.wanted = {name: place for place, name in enumerate(json.loads(Path(about["tests"]).read_text()))}
        self.pipe = os.fdopen(about["pipe"], "w", encoding="utf-8")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.wanted), key=lambda i: self.wanted[i.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.failed = False
        self._tell(start=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed
        self._tell(report=self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        broken = self.broken() if self.failed else ""
        self._tell(finish=nodeid, broken=broken)
        if broken:
            os._exit(1)  # an orderly end would wait for the device

    def _tell(self, **what: Any) -> None:
        self.pipe.write(json.dumps(what, default=str) + "\n")
        self.pipe.flush()


# --- the process that was started ---------------------------------------------------------------------------------------


class LostError(Exception):
    """The other process is gone, or nothing is to be expected of it."""


class Child:
    """Another pytest, under way with `tests`, the ids of some tests in `files`."""

    def __init__(self, config: pytest.Config, tests: Sequence[str], files: Sequence[str], silence_s: float) -> None:
        self.tests, self.silence_s = frozenset(tests), silence_s
        self._folder = tempfile.TemporaryDirectory(prefix="speedtransfer-gpu-tests")
        listed, self._log = Path(self._folder.name, "tests.json"), Path(self._folder.name, "log")
        listed.write_text(json.dumps(list(tests)))
        self._pipe, pipe = os.pipe()
        options = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")  # of this process
        environment = {key: value for key, value in os.environ.items() if key not in options}
        environment[ENVIRONMENT] = json.dumps({"pipe": pipe, "tests": str(listed)})
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={config.rootpath}"]
        if config.inipath is not None:
            command += ["-c", str(config.inipath)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *files],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=config.invocation_params.dir,
                env=environment,
                pass_fds=[pipe],
            )
        os.close(pipe)
        self._buffer = b""
        self._limit_s = START_S

    def reports(self, test: str) -> Iterator[dict[str, Any]]:
        """Yield what the process says of `test`, in JSON, until it is done with it; `LostError` where it will not be."""
        while True:
            said = self._line()
            self._limit_s = self.silence_s
            if "report" in said:
                yield said["report"]
            elif said.get("finish") == test:
                if said["broken"]:
                    raise LostError(f"the device cannot be used after this test: {said['broken']}")
                return

    def _line(self) -> dict[str, Any]:
        end = time.monotonic() + self._limit_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise LostError(f"no sign of life for {self._limit_s:.0f} s; the process was stopped")
            data = os.read(self._pipe, 1 << 16)
            if not data:
                code = self.process.wait()
                raise LostError(f"the process ended with {signal.Signals(-code).name if code < 0 else code}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self, limit_s: float = 0.0) -> str:
        """Stop the process, `limit_s` from now at the latest, and return the end of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGABRT)  # pytest's faulthandler says where every thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(3)
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        os.close(self._pipe)
        output = self._log.read_text(errors="replace")
        self._folder.cleanup()
        return output[-6000:]


class Processes:
    """Has other processes run the tests of a session.

    Parameters
    ----------
    config : pytest.Config
    silence_s : float
        What a test may take before its process is stopped.
    """

    def __init__(self, config: pytest.Config, silence_s: float = SILENCE_S) -> None:
        self.config, self.silence_s = config, silence_s
        self.child: Child | None = None
        self.lost: dict[str, int] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        name = process_of(item)
        if name is None:
            return None
        started, reports = time.time(), list[pytest.TestReport]()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            if self.lost.get(name, 0) >= MAX_LOST:
                raise LostError(f"not run: {MAX_LOST} processes were lost before")
            for data in self._child_for(item).reports(item.nodeid):
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
                if isinstance(report.longrepr, list):  # where and why it was skipped: JSON has no tuples
                    report.longrepr = tuple(report.longrepr)
                reports.append(report)
        except LostError as error:
            text = str(error)
            if self.child is not None:
                self.lost[name] = self.lost.get(name, 0) + 1
                text += f"\n--- the end of its output ---\n{self._close()}"
            add_failure(item, reports, text, started)
        except BaseException:
            self._close()
            raise
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_sessionfinish(self) -> None:
        self._close(30)

    def _child_for(self, item: pytest.Item) -> Child:
        if self.child is not None and item.nodeid not in self.child.tests:
            self._close(30)
        if self.child is None:
            rest = item.session.items[item.session.items.index(item) :]
            items = list(itertools.takewhile(lambda other: process_of(other) == process_of(item), rest))
            files = list(dict.fromkeys(str(other.path) for other in items))
            self.child = Child(self.config, [other.nodeid for other in items], files, self.silence_s)
        return self.child

    def _close(self, limit_s: float = 0.0) -> str:
        child, self.child = self.child, None
        return "" if child is None else child.close(limit_s)


def process_of(item: pytest.Item) -> str | None:
    """Return the name of the process that runs `item`; None: this one."""
    if item.get_closest_marker("gpu") is None:
        return None
    return getattr(getattr(item, "module", None), "PROCESS", "main")


def add_failure(item: pytest.Item, reports: list[pytest.TestReport], text: str, started: float) -> None:
    """Add `text` to the first failure among `reports`, or a failure of its own: the test did not live to give it."""
    for report in reports:
        if report.failed:
            report.sections.append(("its process", text))
            return
    now = time.time()
    reports.append(
        pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome="failed",
            longrepr=text,
            when="teardown" if any(report.when == "call" for report in reports) else "call",
            duration=now - started,
            start=started,
            stop=now,
        )
    )
