"""The fast tests with the lowest and newest versions that are supported, each in an environment in .nox: `make matrix`.

Pythons that are not installed are left out. What ran is written into docs/versions.md, where rows of earlier runs stay.
"""

import datetime
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
PAGE, KEPT = Path("docs/versions.md"), Path("docs/versions.json")
LOWEST = dict(re.findall(r'"(torch|numpy|numba)>=([\d.]+)"', Path("pyproject.toml").read_text(encoding="utf-8")))
# "pinned": those of constraints.txt, which are developed with. The lowest NumPy and numba are older than Python 3.13.
CASES = [("3.10", "lowest"), ("3.11", "lowest"), ("3.11", "pinned"), ("3.13", "lowest-torch")]
CASES += [(python, "newest") for python in ("3.10", "3.11", "3.12", "3.13", "3.14")]
VERSIONS = """
import platform, importlib.metadata as found
print(platform.python_version(), *map(found.version, ("torch", "numpy", "numba")))
"""
HEAD = """# Versions

What the tests that need no GPU passed with, on Linux; `make matrix` runs them and writes this page. "lowest" are the versions
that an installation asks for, "lowest-torch" that of torch alone, "pinned" those of `constraints.txt`, "newest" what pip found
on that day. A version ends in the name of its build where it is not that of the usual index, whose torch is built for CUDA and
ran without a driver. Where files are counted, the tests of those alone were run; "again" are tests that failed, and were run
once more after they were fixed.

| | Python | torch | NumPy | numba | passed | failed | skipped | tests | day |
|---|---|---|---|---|---:|---:|---:|---|---|
"""


@nox.session(venv_backend="venv")
@nox.parametrize("python,versions", [nox.param(*case, id="-".join(case)) for case in CASES])
def matrix(session: nox.Session, versions: str) -> None:
    """Run the fast tests, or those named after --, with these versions."""
    index = os.environ.get("TORCH_INDEX")
    wanted = {
        "lowest": [f"{name}=={version}" for name, version in LOWEST.items()],
        "lowest-torch": [f"torch=={LOWEST['torch']}"],
        "pinned": ["-c", "constraints.txt"],
        "newest": ["--upgrade", "--upgrade-strategy", "eager"],
    }
    found = ["--extra-index-url", index] if index else []
    session.install(*found, *wanted[versions], "--config-settings", "editable_mode=compat", "-e", ".[dev]")
    report = Path(session.create_tmp()).resolve() / "report.xml"
    command = ["python", "-m", "pytest", "-q", "-m", "not slow and not gpu", f"--junitxml={report}"]
    tests = session.posargs or ["-n", "auto", "--dist", "worksteal"]
    session.run(*command, *tests, env={"OMP_NUM_THREADS": "1"}, success_codes=[0, 1])
    counts = ElementTree.parse(report).find("testsuite").attrib
    failed, skipped = int(counts["failures"]) + int(counts["errors"]), int(counts["skipped"])
    passed = int(counts["tests"]) - failed - skipped
    files = [argument.removeprefix("tests/") for argument in session.posargs if argument.startswith("tests")]
    what = "all fast ones" if not session.posargs else ", ".join(files) if len(files) < 4 else f"{len(files)} files"
    found = session.run("python", "-c", VERSIONS, silent=True).split()
    row = [versions, *found, passed, failed, skipped, what, f"{datetime.date.today()}"]
    rows = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    rows[f"{session.python} {versions} {what}"] = row
    KEPT.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n", encoding="utf-8")
    lines = ["| " + " | ".join(map(str, row)) + " |\n" for row in rows.values()]
    PAGE.write_text(HEAD + "".join(lines), encoding="utf-8")
    if failed:
        session.error(f"{failed} tests failed")
