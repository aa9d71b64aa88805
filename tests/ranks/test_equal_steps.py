"""`equal_steps`: all ranks leave the loop at the same step, whatever their loaders do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import speedtransfer as st
from speedtransfer.errors import InvalidValueError
from speedtransfer.ranks import equal_steps


class Broken:
    """Batches up to an error: the one that ends a training."""

    def __init__(self, batches: int, raises: bool = True) -> None:
        self.batches, self.raises = batches, raises

    def __iter__(self) -> Iterator[int]:
        if self.batches < 0:
            raise OSError("the disk is gone")
        return self.numbers()

    def numbers(self) -> Iterator[int]:
        yield from range(self.batches)
        if self.raises:
            raise OSError("the disk is gone")


def step() -> None:
    """A collective of a training step: comes out wrong, or hangs, where the ranks are not at the same step."""
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3


def train(steps) -> list:
    seen = []
    for batch in steps:
        step()
        seen.append(batch)
    return seen


def epochs(lengths: list[int]) -> list[list[int]]:
    steps = equal_steps(list(range(lengths[dist.get_rank()])))
    return [train(steps) for _ in range(3)]


@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 3, 3], [4, 3, 5], [3, 4, 3], [5, 5, 5]])
def test_as_many_as_the_rank_with_fewest_in_every_epoch(three, lengths):
    assert three(epochs, lengths) == [[list(range(min(lengths)))] * 3] * 3


def catch(broken: list[int], batches: int, ranks: list[int] | None) -> list:
    group, said = None if ranks is None else dist.new_group(ranks), []
    if ranks is not None and dist.get_rank() not in ranks:
        return []
    is_broken = dist.get_rank() in broken
    for _ in range(2):
        seen = []
        try:
            for batch in equal_steps(Broken(batches if is_broken else 2, is_broken), group):
                seen.append(batch)
        except Exception as error:
            said.append((seen, f"{type(error).__name__}: {error}"))
        # All ranks are in step, and may go on.
        dist.barrier(group)
    return said


# Of a group of some, the rank is named by its number among all.
@pytest.mark.parametrize(
    ("broken", "batches", "ranks"), [([1], 2, None), ([0, 2], 2, None), ([1], -1, None), ([2], 0, [1, 2])]
)
def test_loaders_that_raise_end_all_ranks(three, broken, batches, ranks):
    told = "the loader of rank {0} raised an error, so no rank gets another batch; rank {0} shows the error"
    seen = list(range(max(batches, 0)))
    for rank, said in enumerate(three(catch, broken, batches, ranks)):
        if rank in broken:
            assert said == [(seen, "OSError: the disk is gone")] * 2
        elif ranks is None or rank in ranks:
            assert said == [(seen, f"ProcessGroupError: {told.format(broken[-1])}")] * 2


def leave() -> list:
    """Leave the loop in every way that leaves it at the same step on all ranks."""
    seen = []
    loader = DataLoader(range(dist.get_rank(), 10), batch_size=1, num_workers=1, persistent_workers=True)
    steps = equal_steps(loader)
    for _ in range(2):
        for number, batch in enumerate(steps):
            step()
            if number == 1:
                seen.append(batch.item())
                break
        step()
    seen += [batch.item() for batch in itertools.islice(steps, 3)]
    with pytest.raises(ZeroDivisionError):
        train(1 / 0 for _ in steps)
    return [*seen, len(train(steps))]


def test_the_loop_may_be_left(two):
    assert two(leave) == [[1, 1, 0, 1, 2, 9], [2, 2, 1, 2, 3, 9]]


def left_first() -> bool:
    """Tell whether rank 1 has told what comes by when rank 0 has left the loop."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()

    def slow() -> Iterator[int]:
        yield 0
        if rank == 1:
            time.sleep(0.3)
            store.set("told", "")
        yield 1

    batches = iter(equal_steps(slow()))
    next(batches)
    batches.close()
    return store.check(["told"])


def test_nothing_is_under_way_after_the_loop_is_left(two):
    assert two(left_first) == [True, True]


def read_ahead() -> list[list[int]]:
    module = st.Embedding(10, 2)
    loader = [torch.tensor([id]) for id in range(4 + dist.get_rank())]
    outer = st.prefetch(equal_steps(loader), lambda ids: {module: ids})
    inner = equal_steps(st.prefetch(loader, lambda ids: {module: ids}))
    return [[module(ids) is not None and ids.item() for ids in train(steps)] for steps in (outer, inner)]


def test_with_prefetch(two):
    assert two(read_ahead) == [[[0, 1, 2, 3]] * 2] * 2


def take_parts() -> list[list[int]]:
    """Of iterators, which do not begin anew, no batch is lost."""
    steps = equal_steps(itertools.count(10 * dist.get_rank()))
    parts = [list(itertools.islice(steps, 3)), list(itertools.islice(steps, 2))]
    shorter = iter(range(2 + dist.get_rank()))
    rest = equal_steps(shorter)
    return [*parts, list(rest), list(rest), list(shorter)]


def test_an_iterator_loses_no_batch(two):
    assert two(take_parts) == [[[0, 1, 2], [3, 4], [0, 1], [], []], [[10, 11, 12], [13, 14], [0, 1], [], []]]


def in_a_group() -> list[int]:
    # Of all ranks but the first; made by all.
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        with pytest.raises(InvalidValueError, match="not in"):
            list(equal_steps([1], group))
        return []
    return list(equal_steps(list(range(4 - dist.get_rank())), group))


def test_a_group_of_some_ranks(three):
    assert three(in_a_group) == [[], [0, 1], [0, 1]]


def test_in_one_process():
    assert list(equal_steps([1, 2])) == [1, 2]
    source = (number for number in range(3))
    assert next(iter(equal_steps(source))) == 0
    assert list(source) == [1, 2]
    with pytest.raises(OSError, match="disk"):
        list(equal_steps(Broken(1)))
    with pytest.raises(TypeError):
        len(equal_steps([1]))
