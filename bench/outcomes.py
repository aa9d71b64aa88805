"""A plugin of pytest for a run that may be stopped: appends the outcome of each test to the file $OUTCOMES, and prints each
failure with its traceback, when it happens.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist report to the process that has started them.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reporter(config), "outcomes, reporter")


class _Reporter:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcomes: dict[str, str] = {}  # of tests that have not ended, and of failures

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid, "passed")
        if report.failed:
            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None:
                terminal.write_line(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}")
            if before != "failed":
                self._write(report.nodeid, "failed", _message(report))
            self.outcomes[report.nodeid] = "failed"
        elif before != "failed":
            self.outcomes[report.nodeid] = "skipped" if report.skipped else before
            if report.when == "teardown":
                self._write(report.nodeid, self.outcomes.pop(report.nodeid))

    def _write(self, test: str, outcome: str, message: str = "") -> None:
        with Path(os.environ["OUTCOMES"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "message": message}) + "\n")


def _message(report: pytest.TestReport) -> str:
    """Return the first line of what went wrong."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next(iter(text.strip().splitlines()), "")[:300]
