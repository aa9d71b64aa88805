"""Every group of every suite, each case checked and then timed by pytest-benchmark: to compare two commits on one machine.

``BENCH_QUICK=1 pytest bench --benchmark-enable --benchmark-autosave -k transfer`` at the first, the same with
``--benchmark-compare`` at the second. Figures to show come from ``make bench`` and ``speedtransfer bench``.
"""

from __future__ import annotations

import copy
import os

import pytest
from store import SUITES

from speedtransfer.benchmark.measure import CANNOT_RUN, synchronize
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


def test_group(group, benchmark, device):
    try:
        cases = group.make()
    except CANNOT_RUN as error:
        pytest.skip(str(error))
    there = [case for case in cases if can_run(case, device)]
    if not there:
        pytest.skip("no case can run here")
    timers = [benchmark, *(copy.copy(benchmark) for _ in there[1:])]  # one times one thing, and a group has several
    for case, timer in zip(there, timers, strict=True):
        timer.name, timer.group, timer.extra_info = case.name, group.title, {"role": case.role, **case.memory}

        def run(case=case):
            case.run()
            synchronize(device)

        timer.pedantic(run, setup=case.before, rounds=7, warmup_rounds=2)


def can_run(case, device):
    """Run and check a case once; return whether it can run here."""
    if case.error is not None:
        return False
    try:
        if case.before is not None:
            case.before()
        case.run()
        synchronize(device)
    except CANNOT_RUN:
        return False
    if case.check is not None:
        case.check()
    return True
