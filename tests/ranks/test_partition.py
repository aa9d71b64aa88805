"""Which rank has which row, a permutation that does not know the number of ranks; how many rows are asked of whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.ranks import Partition, zipf
from speedtransfer.ranks.partition import BUCKETS
from speedtransfer.ranks.zipf import expected_distinct_share, expected_imbalance, expected_unique

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


@given(st.integers(1, 20_000), st.integers(1, 9), st.integers(1, 9), st.data())
@settings(max_examples=30, deadline=None)
def test_a_part_of_a_shard(num_rows, ranks, others, data):
    partition, ids = Partition(num_rows, ranks), torch.arange(num_rows)
    rank = data.draw(st.integers(0, ranks - 1))
    start = data.draw(st.integers(0, partition.size(rank)))
    stop = data.draw(st.integers(start, partition.size(rank)))
    assert torch.equal(partition.ids_of(rank, start, stop), partition.ids_of(rank)[start:stop])
    # The order does not know the number of ranks: a checkpoint of other processes is read by ranges.
    assert torch.equal(partition.places(ids), Partition(num_rows, others).places(ids))


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


# --- rows that are asked for more often than others ------------------------------------------------------------------------

ROWS = 1_000_000


def load(ids: torch.Tensor, ranks: int, num_rows: int = ROWS) -> float:
    """The rows that the busiest owner is asked for, over the mean."""
    asked = torch.bincount(owners(Partition(num_rows, ranks), ids), minlength=ranks).double()
    return float(asked.max() / asked.mean())


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_frequent_rows_spread(ranks):
    rng = np.random.default_rng(0)
    # Id 0 is the most frequent; or, of hashed ids, the frequent ones are anywhere. Eight batches stand for those of all ranks.
    ids = torch.cat([torch.from_numpy(draw(rng, ROWS, 1.05, 65_536)) for _ in range(8)])
    for each in (ids, ids * 7_368_787 % ROWS):
        assert load(each, ranks) <= 1.06


@pytest.mark.parametrize("stride", [2, 10, 64, 100, 4096])
@pytest.mark.parametrize("ranks", [8, 64])
def test_ids_with_a_stride_spread(stride, ranks):
    ids = torch.arange(0, 10 * ROWS, stride)
    assert load(ids, ranks, 10 * ROWS) <= 1.06
    assert load(ids[: max(len(ids) // 10, 30 * ranks)], ranks, 10 * ROWS) <= 1.25


def draw(rng: np.random.Generator, rows: int, exponent: float, lookups: int) -> np.ndarray:
    """Distinct ids of a batch of a Zipf law."""
    below = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.unique(np.searchsorted(below / below[-1], rng.random(lookups)))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_expected_numbers_are_the_means_of_drawn_ones(exponent):
    rng, rows, lookups = np.random.default_rng(1), 3000, 2000
    drawn = [[draw(rng, rows, exponent, lookups) for _ in range(4)] for _ in range(60)]
    each = np.mean([len(ids) for ranks in drawn for ids in ranks])
    assert each == pytest.approx(expected_unique(rows, exponent, lookups), rel=0.01)
    shares = [len(np.unique(np.concatenate(ranks))) / sum(map(len, ranks)) for ranks in drawn]
    assert np.mean(shares) == pytest.approx(expected_distinct_share(rows, exponent, lookups, 4), rel=0.01)
    asked = load(torch.from_numpy(np.concatenate([ids for ranks in drawn for ids in ranks])), 4, rows)
    assert asked == pytest.approx(expected_imbalance(Partition(rows, 4), exponent, lookups), abs=0.01)


def test_blocks_of_rare_ids_change_nothing(monkeypatch):
    for exponent in (0.0, 1.0, 1.05, 2.0):
        wanted = expected_unique(1_000_000, exponent, 30_000)
        monkeypatch.setattr(zipf, "_EXACT", 1000)
        assert expected_unique(1_000_000, exponent, 30_000) == pytest.approx(wanted, rel=1e-4)
        monkeypatch.undo()


def test_large_tables():
    # Drawn once with 10M rows and 65,536 lookups by each of 8 processes: 26,073 unique rows, 0.72 of them distinct.
    assert expected_unique(10_000_000, 1.05, 65_536) == pytest.approx(26_070, rel=0.005)
    assert expected_distinct_share(10_000_000, 1.05, 65_536, 8) == pytest.approx(0.72, abs=0.005)
    assert expected_distinct_share(10_000_000, 1.05, 65_536, 64) == pytest.approx(0.47, abs=0.005)
    assert 1 <= expected_imbalance(Partition(10_000_000, 64), 1.2, 65_536) < 1.03
    assert expected_unique(10**12, 0.0, 1000) == pytest.approx(1000)


def test_edges():
    assert expected_unique(1, 1.0, 5) == 1
    assert expected_unique(10, 1.0, 0) == 0
    assert expected_distinct_share(10, 1.0, 0, 4) == 1
    assert expected_imbalance(Partition(10, 4), 1.0, 0) == 1
    assert expected_distinct_share(1, 1.0, 5, 4) == 0.25
    with pytest.raises(InvalidValueError, match="exponent is -1"):
        expected_unique(10, -1, 5)
    with pytest.raises(InvalidTypeError, match=r"lookups is 1\.5"):
        expected_unique(10, 1, 1.5)
