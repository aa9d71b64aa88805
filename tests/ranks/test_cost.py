"""The cost model against what is sent and moved: equal to the byte, given the numbers of rows."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import take_step
from hypothesis import example, given, settings
from hypothesis import strategies as some

import speedtransfer as st
from ranks.pair import wrap
from speedtransfer.nn.sizing import table_size
from speedtransfer.planning.hosts import row_form
from speedtransfer.ranks import Partition, exchange_of
from speedtransfer.ranks.cost import RowCounts, StepCost, expected_counts, replicas_step, sharded_step, shared_step
from speedtransfer.ranks.partition import BUCKETS
from speedtransfer.ranks.zipf import expected_distinct_share, expected_imbalance, expected_unique

ROWS = 500


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables of a model: how many, how each is made, and what a step does with them."""

    dim: int
    count: int = 1
    idle: str = "lazy"
    storage_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | None = None
    scale_block: int | None = None
    comm_dtype: torch.dtype | None = None

    def options(self):
        return {name: getattr(self, name) for name in ("idle", "storage_dtype", "state_dtype", "scale_block")}

    def made(self, kind):
        options = self.options()
        if kind != "replicas":
            options |= {"process_group": dist.group.WORLD, "comm_dtype": self.comm_dtype}
        if kind == "shared":
            options["memory"] = "shared"
        return [st.Embedding(ROWS, self.dim, **options) for _ in range(self.count)]

    def form(self):
        return row_form(table_size(ROWS, self.dim, **self.options()), self.comm_dtype)


CASES = {
    "float32": Tables(16),
    "exact": Tables(24, idle="exact"),
    "rows and gradients in bfloat16": Tables(24, storage_dtype=torch.bfloat16, comm_dtype=torch.bfloat16),
    "rows in int8, state in blocks": Tables(130, storage_dtype=torch.int8, state_dtype=torch.uint8),
    "rows in float8, scales for 32 columns": Tables(130, storage_dtype=torch.float8_e5m2, scale_block=32),
    "rows in 24 bits": Tables(40, storage_dtype="split24"),
    "gradients in int8": Tables(32, comm_dtype=torch.int8),
    "two tables": Tables(16, count=2),
    "seven tables: a second message": Tables(4, count=7),
}


def ids_of(step, rank, number):
    draw = torch.Generator().manual_seed(10_000 * step + 100 * rank + number)
    return (torch.rand(40 + 7 * rank, generator=draw) ** 3 * ROWS).long()


def expected(kind, tables, world, rank, step, training=True):
    """The cost by the numbers of rows of each lookup, from the ids of all ranks and the partition alone."""
    partition, counts = Partition(ROWS, world), []
    for n in range(tables.count):
        asked = [ids_of(step, each, n).unique() for each in range(world)]
        if kind == "replicas":
            most = max(map(len, asked))
            counts.append((tables.form(), len(asked[rank]), most, len(torch.cat(asked).unique())))
            continue
        owners = [partition.places(ids) // partition.per_rank for ids in asked]
        mine = [ids[owner == rank] for ids, owner in zip(asked, owners, strict=True)]
        others = sum(len(ids) for each, ids in enumerate(mine) if each != rank)
        away, distinct = int((owners[rank] != rank).sum()), len(torch.cat(mine).unique())
        counts.append(RowCounts(tables.form(), len(asked[rank]), away, distinct, others))
    if kind == "sharded":
        return sharded_step(counts, world, training=training)
    return (shared_step if kind == "shared" else replicas_step)(counts, world)


def so_far(embs):
    """What has been sent and moved."""
    sent = StepCost(**dataclasses.asdict(exchange_of(dist.group.WORLD).traffic))
    stats = [(emb.table.local if hasattr(emb.table, "local") else emb.table).stats() for emb in embs]
    up, down = sum(s.gathered_bytes for s in stats), sum(s.scattered_bytes for s in stats)
    return dataclasses.replace(sent, bus_up=up, bus_down=down)


def watch(embs, step_of, steps=3):
    """What each step after the first sends and moves."""
    counts = [dataclasses.astuple(so_far(embs))]
    for step in range(steps):
        step_of(step)
        counts.append(dataclasses.astuple(so_far(embs)))
    return [StepCost(*np.subtract(after, before).tolist()) for before, after in itertools.pairwise(counts[1:])]


class Sum(torch.nn.Module):
    def __init__(self, embs):
        super().__init__()
        self.embs, self.dense = torch.nn.ModuleList(embs), torch.nn.Linear(1, 1)

    def forward(self, step):
        found = sum(emb(ids_of(step, dist.get_rank(), n)).square().sum() for n, emb in enumerate(self.embs))
        return found * self.dense(torch.ones(1, 1)).sum().to(found)


def run(kind, names):
    found = {}
    for name in names:
        embs = CASES[name].made(kind)
        model = wrap(Sum(embs)) if kind == "replicas" else Sum(embs)
        opt = torch.optim.AdamW(model.parameters())
        steps = watch(embs, lambda step, opt=opt, model=model: take_step(opt, model(step)))
        found[name] = steps, watch(embs, torch.no_grad()(lambda step, model=model: model(9)), 2)[0]
    return found


def sent_of(cost):
    return dataclasses.replace(cost, bus_up=0, bus_down=0)


@pytest.mark.parametrize(
    ("kind", "world", "names"),
    [
        ("sharded", 3, ["exact", "rows in 24 bits", "gradients in int8", "seven tables: a second message"]),
        ("shared", 3, ["float32", "rows in int8, state in blocks", "two tables"]),
        ("replicas", 3, ["rows in int8, state in blocks", "two tables", "exact"]),
        *(pytest.param(kind, 3, [*CASES], marks=pytest.mark.slow) for kind in ("sharded", "shared")),
    ],
)
def test_cost_of_a_step(pool, kind, world, names):
    for rank, cases in enumerate(pool.of(world)(run, kind, names)):
        for name, (steps, evaluation) in cases.items():
            tables = CASES[name]
            for number, found in enumerate(steps, 1):
                wanted = expected(kind, tables, world, rank, number)
                assert wanted.sent > 0
                if tables.idle == "exact" and kind != "sharded":
                    # A lookup reads or writes state once more.
                    found, wanted = sent_of(found), sent_of(wanted)
                assert found == wanted, name
            if kind == "sharded":
                wanted = expected(kind, tables, world, rank, 9, training=False)
                if tables.idle == "lazy":
                    assert evaluation == wanted, name
            assert sent_of(evaluation) == (sent_of(wanted) if kind == "sharded" else StepCost()), name


def test_expected_counts_are_the_formulas_of_even_owners():
    form = row_form(table_size(1, 128, storage_dtype=torch.int8, idle="lazy"), torch.bfloat16)
    assert (form.stored, form.state, form.sent, form.gradient) == (132, 1024, 132, 256)
    cost = sharded_step([expected_counts(form, 1000, 0.7, 4)], 4)
    assert cost.sent == 750 * (8 + 132 + 256) + 2 * 3 * 64
    assert cost.bus_up == cost.bus_down == 700 * (132 + 1024)
    assert cost.calls == 5
    assert sharded_step([], 4) == StepCost()


def counts_of(unique, ranks):
    return expected_counts(row_form(table_size(1, 64, idle="lazy")), unique, 1.0, ranks)


def test_delays_are_those_of_calls_and_of_answers_to_long_messages():
    def delays(unique, ranks, tables=1):
        return sharded_step([counts_of(unique, ranks)] * tables, ranks).delays

    # A meeting, ids and rows; a meeting and gradients. Each to each process is ready, and then sends.
    assert (delays(20, 2), delays(20, 2, 4)) == (10, 28)
    # Rows and gradients of 256 bytes are more than TCP sends at once; of many processes each gets a part.
    assert (delays(256, 2), delays(256, 2, 4), delays(256, 4)) == (12, 33, 12)
    assert delays(256, 8) == 10
    assert sharded_step([counts_of(20, 2)], 2, training=False).delays == 6


# --- which rank has which row, and how many rows are asked of whom ----------------------------------------------------


NUM_ROWS = some.one_of(some.integers(0, 40), some.integers(4000, 4200), some.integers(0, 30_000))


def owners(partition, ids):
    return partition.places(ids) // partition.per_rank


@given(NUM_ROWS, some.integers(1, 70))
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
        assert torch.equal(partition.places_of(rank, part), torch.arange(len(part)))
        # A checkpoint of other processes is read by ranges.
        half = len(part) // 2
        assert torch.equal(partition.ids_of(rank, half), part[half:])
    assert torch.equal(torch.cat(parts).sort().values, ids)


# --- rows that are asked for more often than others ------------------------------------------------------------------------

MANY = 1_000_000


@pytest.mark.parametrize("num_rows", [3, 4094, 30_000])
def test_a_bucket_is_every_so_many_th_row(num_rows):
    # So that a bucket of a checkpoint is one strided copy of an nn.Embedding.
    ids = Partition(num_rows, 1).ids_of(0)
    ends = (ids.diff() != BUCKETS).nonzero().flatten() + 1
    for bucket in ids.tensor_split(ends):
        assert torch.equal(bucket, torch.arange(int(bucket[0]), num_rows, BUCKETS)[: len(bucket)])
        assert int(bucket[0]) < BUCKETS
        assert int(bucket[-1]) + BUCKETS >= num_rows


def load(ids, ranks, num_rows=MANY):
    """The rows that the busiest owner is asked for, over the mean."""
    asked = torch.bincount(owners(Partition(num_rows, ranks), ids), minlength=ranks).double()
    return float(asked.max() / asked.mean())


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_frequent_rows_spread(ranks):
    rng = np.random.default_rng(0)
    # Id 0 is the most frequent; or, of hashed ids, the frequent ones are anywhere. Eight batches stand for those of all ranks.
    ids = torch.cat([torch.from_numpy(draw(rng, MANY, 1.05, 65_536)) for _ in range(8)])
    for each in (ids, ids * 7_368_787 % MANY):
        assert load(each, ranks) <= 1.06
    # And ids with a stride.
    for stride in (2, 100, 4096):
        assert load(torch.arange(0, 10 * MANY, stride), ranks, 10 * MANY) <= 1.06


def draw(rng, rows, exponent, lookups):
    below = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.unique(np.searchsorted(below / below[-1], rng.random(lookups)))


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.2])
def test_expected_numbers_are_the_means_of_drawn_ones(exponent):
    rng, rows, lookups = np.random.default_rng(1), 3000, 2000
    drawn = [[draw(rng, rows, exponent, lookups) for _ in range(4)] for _ in range(60)]
    each = np.mean([len(ids) for ranks in drawn for ids in ranks])
    assert each == pytest.approx(expected_unique(rows, exponent, lookups), rel=0.01)
    shares = [len(np.unique(np.concatenate(ranks))) / sum(map(len, ranks)) for ranks in drawn]
    assert np.mean(shares) == pytest.approx(expected_distinct_share([(rows, lookups)], exponent, 4), rel=0.01)
    asked = load(torch.from_numpy(np.concatenate([ids for ranks in drawn for ids in ranks])), 4, rows)
    assert asked == pytest.approx(expected_imbalance(Partition(rows, 4), exponent, lookups), abs=0.01)
