"""The harness itself: a test must never hang, and must say which rank did what."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from ranks.run import DeadRankError, RankError


def rank_and_sum(number: int) -> tuple[int, float, int]:
    total = torch.tensor([dist.get_rank() + number])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def test_results_come_in_the_order_of_ranks_whose_processes_stay(two, three):
    first, more = two(rank_and_sum, 10), three(rank_and_sum, 10)
    assert [found[:2] for found in first] == [(0, 21), (1, 21)]
    assert [found[:2] for found in more] == [(0, 33), (1, 33), (2, 33)]
    assert [pid for *_, pid in more[:2]] == [pid for *_, pid in first]


def go_wrong(how: str, rank: int) -> str:
    dist.barrier()  # a rank that dies while the others still connect to it fails them, too
    if dist.get_rank() == rank:
        print("about to", how)
        if how == "raise":
            raise ValueError(f"rank {rank} says no")
        if how == "die":
            time.sleep(0.2)  # until the others have left the barrier
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "warn":
            warnings.warn("seen", stacklevel=1)
        while how == "hang":
            time.sleep(0.1)
    return "alive"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", r"^--- rank 1: ValueError: rank 1 says no(.|\n)*in go_wrong(.|\n)*about to raise"),
        ("hang", r"--- rank 1: TimeoutError: no answer in 1 s(.|\n)*in go_wrong"),
        ("die", r"^--- rank 1: DeadRankError: rank 1 ended by SIGKILL"),
    ],
)
def test_what_goes_wrong_is_shown_with_its_rank(two, how, words):
    with pytest.raises(RankError, match=words) as failed:
        two(go_wrong, how, 1, limit=1 if how == "hang" else 60)
    # It waits in the barrier after the function.
    assert "\n--- rank 0: " in "\n" + str(failed.value)
    assert two(go_wrong, "nothing", 1) == ["alive"] * 2


def test_fails_returns_exceptions(two):
    for how, kind in (("raise", ValueError), ("warn", UserWarning), ("die", DeadRankError)):
        alive, error = two.fails(go_wrong, how, 1)
        assert alive == "alive"
        assert isinstance(error, kind)
    with pytest.raises(RankError, match=r"^--- rank 1: TimeoutError"):
        two.fails(go_wrong, "hang", 1, limit=1)
