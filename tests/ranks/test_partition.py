"""Which rank has which row: a permutation that does not know the number of ranks, cut evenly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speedtransfer.ranks import Partition
from speedtransfer.ranks.partition import BUCKETS

NUM_ROWS = st.one_of(st.integers(0, 40), st.integers(4000, 4200), st.integers(0, 30_000))


def owners(partition: Partition, ids: torch.Tensor) -> torch.Tensor:
    return partition.places(ids) // partition.per_rank


@given(NUM_ROWS, st.integers(1, 70))
@example(0, 1)
@example(0, 5)
@example(1, 1)
@example(1, 7)
@example(2, 3)
@example(BUCKETS, 2)
@example(BUCKETS - 1, 64)
@example(2 * BUCKETS + 1, 3)
@settings(max_examples=60, deadline=None)
def test_every_id_has_one_place_on_one_rank(num_rows, ranks):
    partition = Partition(num_rows, ranks)
    ids = torch.arange(num_rows)
    places = partition.places(ids)
    assert torch.equal(places.sort().values, ids), "a permutation"
    assert torch.equal(partition.ids(places), ids), "and its inverse"
    sizes = [partition.size(rank) for rank in range(ranks)]
    assert sum(sizes) == num_rows
    assert max(sizes) <= partition.per_rank <= max(1, -(-num_rows // ranks))
    parts = [partition.ids_of(rank) for rank in range(ranks)]
    assert [len(part) for part in parts] == sizes
    for rank, part in enumerate(parts):
        assert bool((owners(partition, part) == rank).all())
        assert torch.equal(partition.places(part) - partition.start(rank), torch.arange(len(part)))
    assert torch.equal(torch.cat(parts).sort().values, ids)


@given(NUM_ROWS, st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_the_order_does_not_know_the_number_of_ranks(num_rows, one, other):
    # A checkpoint of other processes is read by ranges.
    first, second = Partition(num_rows, one), Partition(num_rows, other)
    assert torch.equal(first.places(torch.arange(num_rows)), second.places(torch.arange(num_rows)))


@given(st.integers(1, 20_000), st.integers(1, 8), st.data())
@settings(max_examples=30, deadline=None)
def test_a_part_of_a_shard(num_rows, ranks, data):
    partition = Partition(num_rows, ranks)
    rank = data.draw(st.integers(0, ranks - 1))
    start = data.draw(st.integers(0, partition.size(rank)))
    stop = data.draw(st.integers(start, partition.size(rank)))
    assert torch.equal(partition.ids_of(rank, start, stop), partition.ids_of(rank)[start:stop])


@pytest.mark.parametrize("num_rows", [3, 4094, 30_000])
def test_a_bucket_is_every_so_many_th_row(num_rows):
    # So that a bucket of a checkpoint is one strided copy of an nn.Embedding.
    ids = Partition(num_rows, 1).ids_of(0)
    ends = (ids.diff() != BUCKETS).nonzero().flatten() + 1
    for bucket in ids.tensor_split(ends):
        assert torch.equal(bucket, torch.arange(int(bucket[0]), num_rows, BUCKETS)[: len(bucket)])
        assert int(bucket[0]) < BUCKETS
        assert int(bucket[-1]) + BUCKETS >= num_rows


def test_many_rows():
    """Of 2**40 rows: nothing of their number is made."""
    partition = Partition(2**40, 64)
    ids = torch.tensor([0, 1, 2**31, 2**40 - 1])
    assert torch.equal(partition.ids(partition.places(ids)), ids)
    assert sum(partition.size(rank) for rank in range(64)) == 2**40


ROWS, LOOKUPS = 10_000_000, 65_536


def zipf(exponent: float, draw: torch.Generator) -> torch.Tensor:
    """Distinct ids of a batch, drawn by frequency: id 0 is the most frequent."""
    weights = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    points = torch.rand(LOOKUPS, generator=draw, dtype=torch.float64) * weights[-1]
    return torch.searchsorted(weights, points).clamp_(max=ROWS - 1).unique()


def load(batches: list[torch.Tensor], ranks: int) -> float:
    """The rows that the busiest owner is asked for, over the mean."""
    partition = Partition(ROWS, ranks)
    asked = sum(torch.bincount(owners(partition, ids), minlength=ranks) for ids in batches).double()
    return float(asked.max() / asked.mean())


@pytest.fixture(scope="module")
def by_frequency() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [zipf(1.05, draw) for _ in range(8)]


# Eight batches stand for those of all ranks.
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_frequent_rows_spread(by_frequency, ranks):
    assert load(by_frequency, ranks) <= 1.06
    # Hashed ids: the frequent ones are anywhere.
    shuffled = [ids * 7_368_787 % ROWS for ids in by_frequency]
    assert load(shuffled, ranks) <= 1.06


@pytest.mark.parametrize("stride", [2, 8, 10, 64, 100, 1024, 4096])
@pytest.mark.parametrize("ranks", [8, 64])
def test_ids_with_a_stride_spread(stride, ranks):
    ids = torch.arange(0, ROWS, stride)
    assert load([ids], ranks) <= 1.06
    assert load([ids[: max(len(ids) // 10, 30 * ranks)]], ranks) <= 1.25
