"""The benchmarks run: small, once, correctness checks included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_benchmarks_run_small():
    environment = {**os.environ, "BENCH_ROWS": "2000"}
    argv = [sys.executable, "-m", "pytest", "bench", "-q", "--benchmark-disable", "-p", "no:cacheprovider"]
    result = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    assert "passed" in result.stdout
