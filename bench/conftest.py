"""The suites of ``speedtransfer bench`` under pytest-benchmark: what is run, and at what size."""

from __future__ import annotations

import os

import pytest
from store import SUITES

from speedtransfer.benchmark.suites import SUITES as BY_NAME
from speedtransfer.cuda import resolve_device

# BENCH_QUICK: small sizes. BENCH_ROWS: smaller still, as the tests run all of this to see that it works.
ROWS = int(os.environ.get("BENCH_ROWS", 0))
QUICK = bool(ROWS) or os.environ.get("BENCH_QUICK", "") not in ("", "0")
TINY = {"rows": ROWS, "table_bytes": max(1 << 16, ROWS * 4096), "max_bytes": 32_768 * ROWS} if ROWS else {}


@pytest.fixture(scope="session")
def device():
    """The compute device."""
    return resolve_device(None)


def pytest_generate_tests(metafunc):
    """One test for each group of each suite."""
    if "group" in metafunc.fixturenames:
        device = resolve_device(None)
        found = [(name, group) for name in SUITES for group in BY_NAME[name].groups(device, QUICK, **TINY)]
        metafunc.parametrize("group", [pytest.param(group, id=f"{name}: {group.title}") for name, group in found])
