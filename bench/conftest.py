"""What the benchmarks share: sizes, ids, and a table of ratios at the end of the run."""

from __future__ import annotations

import os
from statistics import median

import pytest
import torch

ROWS = int(os.environ.get("BENCH_ROWS", 1_000_000))  # the tests run all of this small, to see that it still works
DIM = 128
LOOKUPS = min(98_304, ROWS)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def zipf_ids(num_rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Return `count` ids whose frequency falls as 1 / rank, the ranks spread over the table at random."""
    generator = torch.Generator().manual_seed(seed)
    cumulative = (1 / torch.arange(1, num_rows + 1, dtype=torch.float64)).cumsum(0)
    ranks = torch.searchsorted(cumulative, torch.rand(count, generator=generator, dtype=torch.float64) * cumulative[-1])
    return torch.randperm(num_rows, generator=generator)[ranks.clamp_(max=num_rows - 1)]


# Noise comes in bursts of seconds: every case has several turns, all of them taken before the next turn, and the samples of
# its turns count together.
turns = pytest.mark.parametrize("turn", range(3 if ROWS >= 1_000_000 else 1))


@pytest.fixture
def synchronize():
    """Return a function that waits for the compute device: a kernel that is queued is not done."""
    return torch.cuda.synchronize if DEVICE.type == "cuda" else (lambda: None)


def pytest_terminal_summary(terminalreporter, config):
    """Print, for each group, every median as a ratio to ours."""
    session = getattr(config, "_benchmarksession", None)
    groups: dict[str, dict[str, list[float]]] = {}
    for bench in getattr(session, "benchmarks", []):
        if bench.group and bench.stats.rounds and "beyond_planes" not in bench.extra_info:
            groups.setdefault(bench.group, {}).setdefault(bench.params["case"], []).extend(bench.stats.data)
    for group, cases in sorted(groups.items()):
        medians = {name: median(samples) for name, samples in cases.items()}
        ours = medians.get("speedtransfer")
        terminalreporter.write_sep("-", group)
        for name, value in sorted(medians.items(), key=lambda item: item[1]):
            ratio = f"{value / ours:6.2f}x ours" if ours else ""
            terminalreporter.write_line(f"{name:34s} {value * 1e3:10.2f} ms  {ratio}")
