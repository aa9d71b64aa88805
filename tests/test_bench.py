"""The benchmarks run: small, once, correctness checks included; and what they have recorded gets into the docs."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speedtransfer.benchmark import suites
from speedtransfer.benchmark.results import CaseResult, GroupResult

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_make(monkeypatch):
    """`make test` tells its children so, and a make that is tested would say more."""
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)


# The suites themselves are run by test_benchmark.py and test_benchmark_suites.py; memory starts processes, which takes long.
@pytest.mark.slow
@pytest.mark.parametrize("groups", ["speedtorch", "not memory"])
def test_groups_run_small_under_pytest_benchmark(groups):
    environment = {**os.environ, "BENCH_ROWS": "2000"}
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "bench",
        "-q",
        "--benchmark-disable",
        "-p",
        "no:cacheprovider",
        "-k",
        groups,
    ]
    result = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout


@pytest.fixture
def bench(monkeypatch):
    """A function that imports a script of bench/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def a_result() -> dict:
    """A recorded suite of one group."""
    cases = [CaseResult(name, "other", 0, samples_s=[1e-3], host_s=[1e-3]) for name in ("NumPy", "on the device")]
    environment = {
        "device": "NVIDIA Test 1",
        "cuda": True,
        "commit": "0123456789abcdef",
        "dirty": False,
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"torch": "2.13", "cupy": "14.2"},
    }
    groups = [GroupResult("a product", {"experiment": "matmul", "size": 50}, cases).to_json()]
    return {"suite": "tax", "quick": False, "options": {}, "environment": environment, "groups": groups, "seconds": 1.0}


def page(root: Path) -> Path:
    """The page that shows suites."""
    (root / "docs").mkdir(exist_ok=True)
    return root / "docs" / "benchmarks.md"


def test_pages_show_what_is_recorded(tmp_path, bench):
    store, readme = bench("store"), bench("readme")
    text = f"before\n{readme.BEGIN}\nold figures\n{readme.END}\nafter\n"
    page(tmp_path).write_text(text)
    assert readme.main(check=False, root=tmp_path) == 0
    assert page(tmp_path).read_text() == text  # nothing is recorded

    path = store.path_of(tmp_path, "NVIDIA Test 1", "tax")
    store.write(path, a_result())
    assert readme.main(check=True, root=tmp_path) == 1
    assert readme.main(check=False, root=tmp_path) == 0
    assert readme.main(check=True, root=tmp_path) == 0

    shown = page(tmp_path).read_text()
    assert shown.startswith("before\n")
    assert shown.endswith("after\n")
    assert "old figures" not in shown
    for part in ("### NVIDIA Test 1", "0123456789ab", "(../bench/results/nvidia-test-1/tax.png)"):
        assert part in shown
    assert 1000 < path.with_suffix(".png").stat().st_size <= bench("experiment").PLOT_BYTES


def test_what_cannot_be_shown_is_left_out(tmp_path, bench, monkeypatch, capsys):
    store, readme = bench("store"), bench("readme")
    monkeypatch.setattr(bench("experiment"), "PLOT_BYTES", 100)
    page(tmp_path).write_text(f"{readme.BEGIN}\n{readme.END}\n")
    store.write(store.path_of(tmp_path, "NVIDIA Test 1", "tax"), a_result())
    for name, content in (("step", "{"), ("memory", "[]"), ("transfer", '{"environment": {"cuda": true}}')):
        store.path_of(tmp_path, "NVIDIA Test 1", name).write_text(content)
    for run in (store.QUICK, store.PARTIAL):
        store.write(store.path_of(tmp_path, "A quick GPU", "tax", run), a_result())
    assert readme.main(check=False, root=tmp_path) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" ")[0].rpartition("/")[2] for line in lines] == [
        "transfer.json",
        "step.json",
        "memory.json",
        "tax.png",
    ]
    shown = page(tmp_path).read_text()
    assert "a product" in shown or "tax.png" in shown
    assert "quick GPU" not in shown


def test_figures_that_nothing_is_recorded_for(tmp_path, bench, capsys):
    readme = bench("readme")
    page(tmp_path).write_text(f"{readme.BEGIN}\n\nfigures\n\n{readme.END}\n")
    assert readme.main(check=True, root=tmp_path) == 1
    assert "no suite is recorded" in capsys.readouterr().err
    page(tmp_path).write_text(f"{readme.BEGIN}\n\n{readme.END}\n")
    assert readme.main(check=True, root=tmp_path) == 0


def test_the_suites_are_those_of_the_package(bench):
    assert set(bench("store").SUITES) == set(suites.SUITES)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_passes_arguments_on():
    argv = ["make", "-n", "--no-print-directory", "gpu", "PY=python3", "ARGS=--only tests --quick"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("; ") == [
        "python3 bench/record.py gpu --only tests --quick",
        "status=$?",
        "python3 bench/readme.py && exit $status\n",
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(("record", "readme", "error"), [(3, 0, 3), (0, 4, 4), (0, 0, 0)])
def test_make_writes_the_readme_also_after_a_failure(tmp_path, record, readme, error):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "ran $1"\n[ "$1" = bench/record.py ] && exit {record} || exit {readme}\n')
    python.chmod(0o755)
    done = subprocess.run(["make", "-s", "bench", f"PY={python}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ran bench/record.py", "ran bench/readme.py"]
    assert done.returncode == (2 if error else 0)
    assert (f"Error {error}" in done.stderr) == bool(error)
