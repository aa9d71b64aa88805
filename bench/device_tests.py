"""Runs the tests that need a GPU, plainly and under compute-sanitizer, for record.py, and summarizes the outcome.

It is a plugin of pytest as well, for a run that may be stopped: it appends the outcome of each test to the file $OUTCOMES, and
prints each failure with its traceback, when it happens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import store
from store import STOPPED, ending, run, write

NO_TESTS_COLLECTED = 5  # pytest's exit code
WORKERS, TEST_S = 8, 60  # processes that run tests at once, and seconds of a test
# Tests in a process of their own after the others: of every kernel, and of much memory.
ALONE = tuple(f"tests/gpu/test_{name}.py" for name in ("all_kernels", "cuda", "large"))
MARK = "pytest.mark.sanitizer"
SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")
SANITIZER_FOUND = 86  # our choice, for findings in tests that pass
REFUSED = "could not run"


def run_tests(path: Path, about: dict[str, Any], limit_s: float) -> str:
    """Run the GPU tests, some of them after the others in a process of their own; return what went wrong."""
    alone = [name for name in ALONE if (store.ROOT / name).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-m", "gpu"]
    command += ["-p", "device_tests", "-p", "no:cacheprovider"]
    commands = [[*command, *workers(), "tests/gpu", *(f"--ignore={name}" for name in alone)]]
    commands += [[*command, *alone]] if alone else []
    outcomes = path.parent / "logs" / f"{about['part']}.jsonl"
    outcomes.parent.mkdir(parents=True, exist_ok=True)
    outcomes.unlink(missing_ok=True)
    start = time.monotonic()
    # Workers share the cores, and what one of them has compiled.
    given = {"OUTCOMES": str(outcomes), "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": ""}
    codes = {run(one, limit_s - (time.monotonic() - start), **given)[0] for one in commands}
    # The others are done where a process has none to run; 1: tests failed.
    worst = None if None in codes else max((code or 0 for code in codes - {NO_TESTS_COLLECTED}), key=abs, default=0)
    if not outcomes.exists():
        return ending(worst) or "there are none"
    found, seconds = summary(outcomes), round(time.monotonic() - start, 1)
    write(path, {**about, **found, "seconds": seconds, "complete": worst in (0, 1)})
    return f"{found['failed']} failed" if worst == 1 else ending(worst)


def workers() -> list[str]:
    count = min(WORKERS, os.cpu_count() or 1)
    if count == 1 or any(importlib.util.find_spec(name) is None for name in ("xdist", "pytest_timeout")):
        return []
    # Nothing but the end of its process stops a test whose host waits for a kernel.
    limit = ["--timeout", str(TEST_S), "--timeout-method", "thread"]
    return ["-n", str(count), "--dist", "worksteal", "--max-worker-restart", "30", *limit]


def summary(outcomes: Path) -> dict[str, Any]:
    """Return counts, passed tests by file, and failures with their messages, of what the plugin has written."""
    lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    # A test that fails when it ends may have passed before.
    tests = {line["test"]: line for line in sorted(lines, key=lambda line: line["outcome"] == "failed")}.values()
    counts = Counter(test["outcome"] for test in tests)
    passed = (test["test"].partition("::")[0] for test in tests if test["outcome"] == "passed")
    return {
        "files": dict(Counter(Path(name).stem for name in passed)),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": {test["test"]: test["message"] for test in tests if test["outcome"] == "failed"},
    }


def run_sanitizer(path: Path, about: dict[str, Any], limit_s: float) -> str:
    """Run some GPU tests under compute-sanitizer, where it is installed; return what went wrong."""
    tools: dict[str, dict[str, Any]] = {}
    absent = shutil.which(SANITIZER) is None
    # The files with tests for it, little of each kernel: to collect all under it takes minutes.
    files = sorted((store.ROOT / "tests" / "gpu").glob("test_*.py"))
    sanitized = [path.relative_to(store.ROOT).as_posix() for path in files if MARK in path.read_text()]
    end = time.monotonic() + limit_s
    for number, tool in enumerate(() if absent else TOOLS):
        command = [SANITIZER, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), sys.executable]
        command += ["-m", "pytest", "-q", "-m", "sanitizer", *sanitized]
        start = time.monotonic()
        # Every tensor an allocation of its own: a cache would hide what lies beyond its end.
        code, output = run(command, (end - start) / (len(TOOLS) - number), PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        lines, seconds = output.splitlines(), round(time.monotonic() - start, 1)
        findings = [line for line in lines if line.startswith("=========")]
        tools[tool] = {"exit": code, "seconds": seconds, "findings": findings[:40], "tests": lines[-5:]}
        tools[tool]["verdict"] = verdict(code, lines)
    verdicts = {tool: found["verdict"] for tool, found in tools.items()}
    complete = not {STOPPED, REFUSED} & {*verdicts.values()}
    write(path, {**about, "tools": tools, "absent": absent, "complete": complete})
    return ", ".join(f"{tool}: {text}" for tool, text in verdicts.items() if text != "clean")


def verdict(code: int | None, lines: list[str]) -> str:
    """Return what a tool has found, by its exit code and its output."""
    summary = [line for line in lines if line.startswith("=========") and "SUMMARY" in line]
    if code is None:
        return STOPPED
    if not summary or (code == 0 and not any(" passed" in line for line in lines[-20:])):
        return REFUSED  # the device, so that nothing starts or all tests are skipped
    if code == 0:
        return "clean"
    # Where a test failed the code is pytest's, whatever was found.
    found_nothing = code != SANITIZER_FOUND and all("SUMMARY: 0 " in line for line in summary)
    return f"tests ended with exit code {code}" if found_nothing else "NOT CLEAN"


def outcome_of(result: dict[str, Any]) -> str:
    """Return in a few words what the tests, or the sanitizer, have come to."""
    if "tools" not in result:
        return f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
    found = (f"{tool} {facts['verdict']}" for tool, facts in result["tools"].items())
    return f"{SANITIZER} is not installed" if result["absent"] else ", ".join(found)


# --- the plugin ---------------------------------------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Workers of pytest-xdist report to the process that has started them.
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash is not None else report.longreprtext) if report.failed else ""
    test = {"test": report.nodeid, "outcome": report.outcome, "message": text.strip().partition("\n")[0][:300]}
    with Path(os.environ["OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(test) + "\n")
