"""The harness itself: a test must never hang, and must say which rank did what."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks.run import DeadRankError, RankError


def rank_and_sum(number: int) -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(total)
    return dist.get_rank(), total, os.getpid()


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to raise")
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.1)


def die_on(rank: int) -> str:
    dist.barrier()  # a rank that dies while the others still connect to it fails them, too
    if dist.get_rank() == rank:
        time.sleep(0.2)  # until the others have left the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def warn() -> None:
    warnings.warn("seen", stacklevel=1)


def test_results_come_in_the_order_of_ranks(ranks):
    results = ranks(rank_and_sum, 10)
    assert [rank for rank, _, _ in results] == list(range(ranks.world))
    assert {total.item() for _, total, _ in results} == {sum(range(10, 10 + ranks.world))}


def test_processes_stay(two, three):
    first = [pid for *_, pid in two(rank_and_sum, 0)]
    assert [pid for *_, pid in three(rank_and_sum, 0)][:2] == first
    assert len({*first, os.getpid()}) == 3


def test_an_exception_is_shown_with_its_rank_and_what_was_printed(two):
    with pytest.raises(
        RankError, match=r"^--- rank 1: ValueError: rank 1 says no(.|\n)*in raise_on(.|\n)*about to raise"
    ) as failed:
        two(raise_on, 1)
    assert re.search(r"\n--- rank 0: RuntimeError", str(failed.value))
    assert len(two(rank_and_sum, 0)) == 2


def test_a_rank_that_hangs_is_shown_with_its_stack(two):
    with pytest.raises(RankError, match=r"--- rank 1: TimeoutError: no answer in 2 s(.|\n)*in hang_on") as failed:
        two(hang_on, 1, limit=2)
    assert "--- rank 0: TimeoutError" in str(failed.value), "rank 0 waits in the barrier after the function"
    with pytest.raises(RankError, match=r"^--- rank 1: TimeoutError"):
        two.fails(hang_on, 1, limit=1)


def test_a_rank_that_dies(two):
    with pytest.raises(RankError, match=r"^--- rank 1: DeadRankError: rank 1 ended by SIGKILL"):
        two(die_on, 1)
    alive, died = two.fails(die_on, 1)
    assert alive == "alive"
    assert isinstance(died, DeadRankError)


def test_fails_returns_exceptions(two):
    own, other = two.fails(raise_on, 0, timeout=1)
    assert isinstance(own, ValueError)
    assert isinstance(other, RuntimeError)
    assert [type(error) for error in two.fails(warn, fresh=False)] == [UserWarning] * 2
    assert len(two(rank_and_sum, 0)) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    code = (
        "import os, signal, time\nfrom ranks import run, test_run\n"
        "if __name__ == '__main__':\n"
        "    pids = [pid for *_, pid in run.Pool().of(2)(test_run.rank_and_sum, 0)]\n"
        "    print(*pids, flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "main.py").write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, tmp_path / "main.py"], env=env, stdout=subprocess.PIPE, text=True, timeout=60
    )
    pids = result.stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path("/proc", pid).exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
