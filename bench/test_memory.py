"""Peak memory of a trained table against the bytes of its planes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conftest import DIM, ROWS


def test_peak_memory_is_that_of_the_planes(request, benchmark):
    rows = 10 * ROWS if request.config.getoption("--benchmark-enable") else ROWS
    argv = [sys.executable, Path(__file__).with_name("memory.py"), str(rows), str(DIM)]
    benchmark.group = f"peak memory, AdamW over every row of {rows} x {DIM} float32"
    result = benchmark.pedantic(subprocess.run, (argv,), {"capture_output": True, "text": True, "check": True})
    measured = json.loads(result.stdout)
    benchmark.extra_info.update(measured)
    assert measured["planes"] == ["weight", "exp_avg", "exp_avg_sq"]
    assert measured["planes_bytes"] == 3 * rows * DIM * 4
    # The buffers of a step have a fixed size: they vanish beside a large table, and a small one cannot show the bound.
    assert measured["peak_bytes"] <= 1.05 * measured["planes_bytes"] + (0 if rows >= 10_000_000 else 400e6)
