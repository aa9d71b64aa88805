"""Runs the tests that need a GPU, plainly and under compute-sanitizer, for record.py, and summarizes the outcome."""

from __future__ import annotations

import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from gpu_parts import FIRST_FILES, FIRST_TESTS
from running import run
from store import write

NO_TESTS_COLLECTED = 5  # pytest's exit code
SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")
SANITIZER_FOUND = 86  # our choice, for findings in tests that pass
STOPPED, REFUSED = "stopped at its time limit", "could not run"
SANITIZED = ["tests/gpu", "-m", "sanitizer"]  # every kernel, little of each: all of it runs many times slower


def run_tests(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run the GPU tests; return what went wrong."""
    chosen = FIRST_FILES if about["part"] == FIRST_TESTS else ["tests/gpu"]
    junit = logs_beside(path) / f"{about['part']}.xml"
    junit.unlink(missing_ok=True)
    options = ["-q", "--tb=short", "-p", "failures_at_once", f"--junitxml={junit}"]
    code, _ = run([sys.executable, "-m", "pytest", *chosen, "-m", "gpu", *options], limit_s, cwd=root)
    if code == NO_TESTS_COLLECTED:
        return "there are none"
    if not junit.exists():
        return ending(code)
    complete = code in (0, 1)
    result = {**about, **summary(junit, complete), "complete": complete}
    write(path, result)
    return f"{result['failed']} failed" if code == 1 else ending(code)


def ending(code: int | None) -> str:
    return {0: "", None: STOPPED}.get(code, f"ended with exit code {code}")


def summary(junit: Path, complete: bool) -> dict[str, Any]:
    """Return counts, seconds and failures of a JUnit file of pytest, without the last test if the run was stopped."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    cases = cases if complete else cases[:-1]
    failures = {}
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            failures[name] = (problem.get("message") or "").strip().splitlines()[:1]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = [case for case in cases if len(case) == 0 or {part.tag for part in case} <= _NO_OUTCOME]
    return {
        "files": dict(Counter(name for name in map(_file_of, passed) if name)),
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "failures": failures,
    }


_NO_OUTCOME = {"system-out", "system-err", "properties"}


def _file_of(case: ElementTree.Element) -> str:
    """Return the file name of a test without folder and suffix; empty where it is unknown."""
    return next((name for name in (case.get("classname") or "").split(".") if name.startswith("test_")), "")


def run_sanitizer(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run some GPU tests under compute-sanitizer, where it is installed; return what went wrong."""
    tools: dict[str, dict[str, Any]] = {}
    absent = shutil.which(SANITIZER) is None
    result = {**about, "tools": tools, "absent": absent, "complete": absent}
    write(path, result)
    end = time.monotonic() + limit_s
    for number, tool in enumerate(() if absent else TOOLS):
        pytest = [sys.executable, "-m", "pytest", "-q", *SANITIZED]
        command = [SANITIZER, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), *pytest]
        # Every tensor an allocation of its own: a cache would hide what lies beyond its end.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        start = time.monotonic()
        limit = (end - start) / (len(TOOLS) - number)
        code, output = run(command, limit, cwd=root, env=environment)
        lines = output.splitlines()
        findings = [line for line in lines if line.startswith("=========")]
        tools[tool] = {
            "exit": code,
            "seconds": round(time.monotonic() - start, 1),
            "summary": [line for line in findings if "SUMMARY" in line],
            "findings": findings[:40],
            "tests": lines[-5:],
            "ran": any(" passed" in line for line in lines[-20:]),
        }
        result["complete"] = len(tools) == len(TOOLS) and not {STOPPED, REFUSED} & {*map(verdict, tools.values())}
        write(path, result)
    verdicts = {tool: verdict(found) for tool, found in tools.items()}
    return ", ".join(f"{tool}: {text}" for tool, text in verdicts.items() if text not in ("clean", "no tests"))


def verdict(found: dict[str, Any]) -> str:
    """Return the verdict of a sanitizer tool on the tests it ran."""
    code, summary = found["exit"], found["summary"]
    if code is None:
        return STOPPED
    if code == NO_TESTS_COLLECTED:
        return "no tests"
    if not summary or (code == 0 and not found["ran"]):
        return REFUSED  # the device, so that nothing starts or all tests are skipped
    if code == 0:
        return "clean"
    # Where a test failed the code is pytest's, whatever was found.
    found_nothing = code != SANITIZER_FOUND and all("SUMMARY: 0 " in line for line in summary)
    return f"tests ended with exit code {code}" if found_nothing else "NOT CLEAN"


def logs_beside(path: Path) -> Path:
    """Return the folder for logs and JUnit files of a result; git ignores it."""
    return path.parent if path.parent.name == "logs" else path.parent / "logs"
