"""Tables that several processes own, or have replicas of: the numbers, and the bits, of one process with all batches."""

import copy
import functools
import math
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from optimizer_cases import case_named
from torch import nn

import speedtransfer as st
from ranks.pair import DIM, ROWS, Features, Pair, dense_of, ids, nets, rows_of, table, wrap
from ranks.run import on
from speedtransfer import rows as rows_module
from speedtransfer.optim import sharded
from speedtransfer.stored_planes import StoredPlanes
from speedtransfer.tables import planes


def features(rows, dim, **options):
    return Features([rows, rows], dim, [3, None], **options)


FEATURES = {"make": features, "sizes": (6, 2, 10, 4), "empty": True}
# Two processes of each kind in every run of the tests, three of one kind; of runs below these one kind.
CORE = {
    "exact": {"idle": "exact"},
    "uneven, empty ranks": {"sizes": (6, 2, 10, 4), "empty": True, "clip": 0.05, "idle": "exact"},
    "features": FEATURES | {"idle": "exact"},
}
RUNS = CORE | {
    "lazy": {"idle": "lazy"},
    "sgd momentum exact": {"optimizer": "sgd-momentum", "idle": "exact"},
    "adagrad": {"optimizer": "adagrad"},
    "clip, schedule": {"clip": 0.05, "schedule": True, "idle": "exact"},
    "clip by the largest": {"clip": 0.01, "norm": math.inf},
    "three backwards": {"accumulate": 3},
    "no_sync": {"accumulate": 3, "no_sync": True},
    "GradScaler": {"overflow": True, "clip": 0.05, "idle": "exact"},
    "two lookups": {"lookups": 2, "sizes": (8, 4, 0, 4), "idle": "exact"},
    "bag": {"make": st.EmbeddingBag, "padding_idx": 0},
    "features, lazy": FEATURES | {"optimizer": "sgd-momentum", "idle": "lazy"},
    "max_norm": {"max_norm": 0.5, "idle": "exact"},
    "padding": {"padding_idx": 3, "idle": "exact"},
    "sparse": {"optimizer": "sgd", "sparse": True},
    "foreach": {"given": {"foreach": True}},
    "fused": {"given": {"fused": True}},
}


def compare(
    kind,
    optimizer="adamw",
    sizes=(6, 6, 6, 6),
    empty=False,
    clip=None,
    norm=2.0,
    schedule=False,
    accumulate=1,
    no_sync=False,
    overflow=False,
    lookups=1,
    given=None,
    steps=9,
    **options,
):
    """Train, and return how far the rows are from those of one process, by how far they have moved; and all weights."""

    def batch(step, rank):
        size = 0 if empty and (step + rank) % 3 == 0 else sizes[rank]
        return ids(step, rank, size), float("inf") if overflow and (step, rank) == (4, 0) else 1.0

    make = case_named(optimizer).make
    opt = lambda params, lr: make(params, **(given or {}))  # noqa: E731
    how = {"batch": batch, "loss": lambda net, args: net(args[0]).square().sum() * args[1], "scales": overflow}
    pair = nets(kind, opt, lookups, pair=how, **options)
    start, opts = rows_of(pair.one.emb), (pair.opt, pair.one_opt)
    rates = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps) for opt in opts if schedule]
    for step in range(steps):
        pair.accumulate(*range(step * accumulate, (step + 1) * accumulate), no_sync=no_sync)
        pair.end(clip, norm)
        with torch.no_grad():
            for net in (pair.ours, pair.one):
                net.emb(ids(step + 1, 0).view(3, 2))
        for rate in rates:
            rate.step()
    moved = float((rows_of(pair.one.emb) - start).abs().max())
    assert moved > 1e-3
    numbers = [
        {name: float(value) for name, value in opt.state[net.emb.weight].items() if getattr(value, "ndim", 1) == 0}
        for opt, net in zip(opts, (pair.ours, pair.one), strict=True)
    ]
    assert numbers[0] == numbers[1]
    dense = torch.cat([param.detach().flatten() for param in dense_of(pair.ours)])
    return pair.distance() / moved, rows_of(pair.ours.emb), dense


def _marks(world, name):
    if world == 4 or (world == 3 and name not in CORE):
        return [pytest.mark.slow]
    return [pytest.mark.sweep("kind", "name")] if world == 3 or name not in CORE else []


CASES = [
    pytest.param(world, kind, name, marks=_marks(world, name))
    for world in (2, 3, 4)
    for name in RUNS
    for kind in ("sharded", "shared", "replicas")
    # Others refuse it.
    if kind == "sharded" or name != "max_norm"
]


@pytest.mark.parametrize(("world", "kind", "name"), CASES)
def test_numbers_of_one_process(pool, world, kind, name):
    found = pool.of(world)(functools.partial(compare, kind, **RUNS[name]))
    for error, rows, dense in found:
        assert error < 1e-10
        assert torch.equal(rows, found[0][1])
        assert torch.equal(dense, found[0][2])


# --- small forms of rows, state and messages --------------------------------------------------------------------------------

FORMS = {
    "int8": {"storage_dtype": torch.int8},
    "float8_e4m3fn": {"storage_dtype": torch.float8_e4m3fn, "scale_block": 3},
    "float8_e5m2": {"storage_dtype": torch.float8_e5m2, "state_dtype": torch.bfloat16},
    "float16": {"storage_dtype": torch.float16},
    "split24": {"storage_dtype": "split24", "state_dtype": torch.uint8},
    "state bfloat16": {"state_dtype": torch.bfloat16},
    "both": {"storage_dtype": torch.int8, "state_dtype": torch.uint8},
}


@torch.no_grad()
def looked_up(emb):
    """All rows; the table of one process would give them as they are stored."""
    return emb(torch.arange(ROWS)).clone()


class Scaled(nn.Module):
    """A table and a weight, which DistributedDataParallel asks for."""

    def __init__(self, emb):
        super().__init__()
        self.emb, self.scale = emb, nn.Parameter(torch.ones(()))

    def forward(self, ids):
        return self.emb(ids) * self.scale


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["sharded", "shared", "replicas"])
@pytest.mark.parametrize(("idle", "in_chunks"), [("lazy", False), ("exact", False), ("exact", True)])
@pytest.mark.parametrize("name", FORMS)
@on(2)
def test_small_forms_have_the_bits_of_one_process(kind, name, idle, in_chunks):
    """After a step of the same gradient (exact in any order)."""
    ours, one = (table(each, dtype=torch.float32, idle=idle, **FORMS[name]) for each in (kind, "one"))
    # Rows that one rank looks up alone, so that sums need no rounding.
    batch = lambda step, rank: (ids(step, rank) // 2 * 2 + rank).clamp(max=ROWS - 1)  # noqa: E731
    around = {"wrap": lambda emb: wrap(Scaled(emb))} if kind == "replicas" else {}
    pair = Pair(ours, one, torch.optim.AdamW, batch=batch, loss=lambda emb, ids: emb(ids).sum(), **around)
    start, chunks = looked_up(one), rows_module.row_chunks
    if in_chunks:
        chunks = lambda count, size: (slice(i, min(i + 7, count)) for i in range(0, count, 7))  # noqa: E731
    with mock.patch.object(rows_module, "row_chunks", chunks):
        for step in range(6):
            pair.backward(step)
            pair.end()
            # Reading a row of one process writes it as caught up, which rounds it.
            if step == 5 or (step == 3 and idle == "exact"):
                for each in (ours, one):
                    each._handle.rows.catch_up()
    assert torch.equal(looked_up(ours), looked_up(one))
    assert (looked_up(one) - start).abs().max() > 0.01


DRAWS = 80


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize(("comm_dtype", "step"), [(torch.bfloat16, 2**-7), (torch.int8, 1 / 100)])
@on(2)
def test_rounded_gradients_are_unbiased(kind, comm_dtype, step):
    """The mean of many rounded gradients is near the gradient."""
    weights = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    ours, one = table(kind, dtype=torch.float32, comm_dtype=comm_dtype), table("one", dtype=torch.float32)
    pair = Pair(ours, one, loss=lambda emb, ids: (emb(ids) * weights[ids]).sum())
    pair.one_backward()
    found = []
    for _ in range(DRAWS):
        ours.weight.grad = None
        pair.loss(ours, ids()).backward()
        found.append(ours.weight.grad.rows.double())
    owned = ours._handle.owners.partition.ids_of(dist.get_rank()) if kind == "sharded" else torch.arange(ROWS)
    wanted = one.weight.grad.to_dense()[owned[ours.weight.grad.ids]].double()
    # A rank may own none of the rows.
    if wanted.numel():
        mean, once = (float((it - wanted).abs().max() / wanted.abs().max()) for it in (sum(found) / DRAWS, found[0]))
        assert 0 < once <= step
        assert mean <= step / 6


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Rprop])
@on(2)
def test_nobody_steps_on_state_that_others_still_write(optimizer):
    """One process is late to write what all write: state that was copied, and what it begins with."""
    pair = Pair(table("shared"), table("one"), optimizer)

    def late(function):
        return lambda *args, **kwargs: (time.sleep(0.1 * dist.get_rank()), function(*args, **kwargs))[1]

    with (
        mock.patch.object(planes, "set_plane", late(planes.set_plane)),
        mock.patch.object(StoredPlanes, "load", late(StoredPlanes.load)),
    ):
        for step in range(3):
            pair.accumulate(step)
            pair.end()
            pair.ours, pair.opt = copy.deepcopy((pair.ours, pair.opt))
            pair.model = pair.ours
    assert pair.distance() < 1e-10


# --- first weights --------------------------------------------------------------------------------------------------------


def first_weights(memory):
    """Of a table, of features, and after functions of ``torch.nn.init``; with the next number of torch's generator."""
    given = {"process_group": dist.group.WORLD, "idle": "lazy"} | ({} if memory is None else {"memory": memory})
    torch.manual_seed(3)
    emb, bag = st.Embedding(500, DIM, padding_idx=2, **given), st.EmbeddingBag(40, DIM, **given)
    many = st.MultiEmbedding([300, 200], DIM, **given)
    found = [emb.table.gather(torch.arange(500)), many.table.gather(torch.arange(500))]
    nn.init.uniform_(emb.weight, -2.0, -1.0)
    nn.init.kaiming_uniform_(bag.weight)
    nn.init.normal_(many[1].weight, 5.0, 0.1)
    found += [emb.table.gather(torch.arange(500)), bag.table.gather(torch.arange(40))]
    return [*found, many.table.gather(torch.arange(500)), torch.rand(1)]


def first_weights_of_own(memory):
    with mock.patch.object(sharded, "_DRAWN_BY_ALL", 7):
        return first_weights(memory)


@pytest.mark.parametrize("memory", [None, "shared"])
def test_large_tables_start_alike_in_any_number_of_processes(memory, pool):
    wanted = pool.of(1)(first_weights_of_own, memory)[0]
    emb, many, uniform, bag, changed, _ = wanted
    assert not emb[2].any()
    for drawn in (torch.cat([emb[:2], emb[3:]]), many):
        assert abs(drawn.mean()) < 0.1
        assert 0.9 < drawn.std() < 1.1
        assert len(drawn.unique()) == drawn.numel()
    for values, least, most in ((uniform, -2, -1), (bag, -((6 / DIM) ** 0.5), (6 / DIM) ** 0.5), (changed[300:], 4, 6)):
        assert least <= values.min() < values.max() <= most
    assert torch.equal(changed[:300], many[:300])
    for world in (2, 3):
        for found in pool.of(world)(first_weights_of_own, memory):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@on(2)
def test_small_tables_start_as_in_one_process():
    torch.manual_seed(3)
    plain = nn.Embedding(500, DIM, padding_idx=2)
    assert torch.equal(first_weights(None)[0], plain.weight)
    emb = st.Embedding(500, DIM, process_group=dist.group.WORLD)
    emb(torch.arange(500))
    stats = emb.table.stats()
    assert (stats.asked_rows, stats.served_rows) == (500, 250)
