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
from speedtransfer.errors import InvalidValueError, ProcessGroupError
from speedtransfer.ranks import equal_steps


class Broken:
    """Batches up to an error: the one that ends a training."""

    def __init__(self, batches: int, raises: bool) -> None:
        self.batches, self.raises = batches, raises

    def __iter__(self) -> Iterator[int]:
        yield from range(self.batches)
        if self.raises:
            raise OSError("the disk is gone")


class BrokenAtOnce:
    def __iter__(self) -> Iterator[int]:
        if dist.get_rank() == 1:
            raise OSError("no disk")
        return iter([1, 2])


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


@pytest.mark.parametrize(
    "lengths", [[0, 0, 0, 0], [0, 3, 3, 3], [1, 1, 1, 1], [4, 3, 5, 3], [3, 4, 3, 4], [5, 5, 5, 5]]
)
def test_as_many_as_the_rank_with_fewest_in_every_epoch(ranks, lengths):
    fewest = list(range(min(lengths[: ranks.world])))
    assert ranks(epochs, lengths) == [[fewest] * 3] * ranks.world


def catch(broken: list[int]) -> list:
    loader = Broken(2, dist.get_rank() in broken)
    said = []
    for _ in range(2):
        seen = []
        try:
            for batch in equal_steps(loader):
                step()
                seen.append(batch)
        except Exception as error:
            said.append((seen, type(error), str(error)))
        # All ranks are in step, and may go on.
        step()
    return said


def test_a_loader_that_raises_ends_all_ranks(three):
    first, second, third = three(catch, [1])
    assert second == [([0, 1], OSError, "the disk is gone")] * 2
    message = "the loader of rank 1 raised an error, so no rank gets another batch; rank 1 shows the error"
    assert first == third == [([0, 1], ProcessGroupError, message)] * 2


def test_loaders_of_several_ranks_that_raise(three):
    first, second, third = three(catch, [0, 2])
    assert first == third == [([0, 1], OSError, "the disk is gone")] * 2
    assert "rank 2 raised" in second[0][2]


def begin() -> list:
    return list(equal_steps(BrokenAtOnce()))


def test_a_loader_that_raises_when_the_loop_begins(two):
    first, second = two.fails(begin, timeout=5)
    assert isinstance(first, ProcessGroupError)
    assert isinstance(second, OSError)


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


def leave_first() -> float:
    """Return how long rank 0, which leaves the loop first, takes to leave."""

    def slow() -> Iterator[int]:
        yield 0
        time.sleep(0.3 * dist.get_rank())
        yield 1

    batches = iter(equal_steps(slow()))
    next(batches)
    began = time.monotonic()
    batches.close()
    return time.monotonic() - began


def test_nothing_is_under_way_after_the_loop_is_left(two):
    assert two(leave_first)[0] > 0.2


def read_ahead() -> list[list[int]]:
    module = st.Embedding(10, 2)
    loader = [torch.tensor([id]) for id in range(4 + dist.get_rank())]
    outer = st.prefetch(equal_steps(loader), lambda ids: {module: ids})
    inner = equal_steps(st.prefetch(loader, lambda ids: {module: ids}))
    return [[module(ids) is not None and ids.item() for ids in train(steps)] for steps in (outer, inner)]


def test_with_prefetch(two):
    assert two(read_ahead) == [[[0, 1, 2, 3]] * 2] * 2


def take_parts() -> list[list[int]]:
    """Of iterators, which do not begin anew."""
    steps = equal_steps(itertools.count(10 * dist.get_rank()))
    parts = [list(itertools.islice(steps, 3)), list(itertools.islice(steps, 2))]
    shorter = iter(range(2 + dist.get_rank()))
    rest = equal_steps(shorter)
    return [*parts, list(rest), list(rest), list(shorter)]


def test_an_iterator_loses_no_batch(two):
    assert two(take_parts) == [[[0, 1, 2], [3, 4], [0, 1], [], []], [[10, 11, 12], [13, 14], [0, 1], [], []]]


def in_a_group() -> list[int]:
    # Of all ranks but the first; made by all.
    group = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank() == 0:
        with pytest.raises(InvalidValueError, match="not in"):
            list(equal_steps([1], group))
        return []
    return list(equal_steps(list(range(4 - dist.get_rank())), group))


def test_a_group_of_some_ranks(three):
    assert three(in_a_group) == [[], [0, 1], [0, 1]]


def raise_in_a_group() -> list[int]:
    group = dist.new_group([1, 2])
    return list(equal_steps(Broken(0, dist.get_rank() == 2), group)) if dist.get_rank() else []


def test_the_rank_is_named_by_its_number_among_all(three):
    _, told, own = three.fails(raise_in_a_group)
    assert "the loader of rank 2 raised" in str(told)
    assert isinstance(own, OSError)


def test_in_one_process():
    assert list(equal_steps([1, 2])) == [1, 2]
    source = (number for number in range(3))
    assert next(iter(equal_steps(source))) == 0
    assert list(source) == [1, 2]
    with pytest.raises(OSError, match="disk"):
        list(equal_steps(Broken(1, True)))


def test_has_no_length():
    with pytest.raises(TypeError):
        len(equal_steps([1]))
