"""The benchmarks run: small, once, correctness checks included; and what they have recorded gets into the README."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from speedtransfer.benchmark import suites
from speedtransfer.benchmark.measure import CaseResult, GroupResult

ROOT = Path(__file__).resolve().parents[1]


def test_every_group_runs_small():
    environment = {**os.environ, "BENCH_ROWS": "2000"}
    argv = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-disable", "-p", "no:cacheprovider"]
    # Suite `memory` starts processes, which takes long: test_benchmark_suites.py runs one of them.
    result = subprocess.run(
        [*argv, "-k", "not memory"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
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


def test_the_readme_shows_what_is_recorded(tmp_path, bench):
    store, readme = bench("store"), bench("readme")
    text = f"before\n{readme.BEGIN}\nold figures\n{readme.END}\nafter\n"
    (tmp_path / "README.md").write_text(text)
    assert readme.main(check=False, root=tmp_path) == 0
    assert (tmp_path / "README.md").read_text() == text  # nothing is recorded

    path = store.path_of(tmp_path, "NVIDIA Test 1", "tax")
    store.write(path, a_result())
    assert readme.main(check=True, root=tmp_path) == 1
    assert readme.main(check=False, root=tmp_path) == 0
    assert readme.main(check=True, root=tmp_path) == 0

    shown = (tmp_path / "README.md").read_text()
    assert shown.startswith("before\n")
    assert shown.endswith("after\n")
    assert "old figures" not in shown
    for part in ("### NVIDIA Test 1", "0123456789ab", "(bench/results/nvidia-test-1/tax.png)"):
        assert part in shown
    assert 1000 < path.with_suffix(".png").stat().st_size <= readme.PLOT_BYTES


def test_the_suites_are_those_of_the_package(bench):
    assert set(bench("store").SUITES) == set(suites.SUITES)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_make_passes_arguments_on():
    argv = ["make", "-n", "gpu", "PY=python3", "ARGS=--only tests --quick"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "python3 bench/record.py gpu --only tests --quick",
        "python3 bench/readme.py",
    ]
