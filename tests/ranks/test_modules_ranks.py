"""Modules and tables of several processes: what is made of them and with them, by all or by some, in groups of all kinds."""

import gc
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import take_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from ranks.pair import DIM, ROWS, ids, rows_of, table, tables, told
from ranks.run import on
from speedtransfer.errors import ProcessGroupError
from speedtransfer.nn.tracing import ONE_GRAPH
from speedtransfer.optim import gradient_exchange
from speedtransfer.ranks import exchange_of

KINDS = pytest.mark.parametrize("kind", ["sharded", "shared"])


class Several(nn.Module):
    """Lookups of several tables, whose messages must come in one order: also of one whose result is not used."""

    def __init__(self, kind):
        super().__init__()
        self.rows = table(kind, max_norm=1.5 if kind == "sharded" else None)
        self.bag = table(kind, make=st.EmbeddingBag, mode="sum")
        self.features = table(kind, {"user": 30, "item": 9}, DIM, make=st.MultiEmbedding)

    def forward(self, ids):
        bags = self.bag(ids.view(2, -1)).square().sum()
        self.rows(ids // 2)
        found = self.features({"user": ids % 30, "item": ids[:2] % 9})
        return bags + (self.rows(ids) * found["user"]).sum() + self.features["item"](ids % 9).square().mean()


@pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("sharded", "aot_eager"),
        *(pytest.param("shared", it, marks=pytest.mark.slow) for it in ("aot_eager", "inductor")),
    ],
)
@on(2, limit=300, timeout=150)
def test_compiled_lookups_keep_their_order(kind, backend):
    found = []
    # Of torch: inductor's own use of torch.jit.
    warnings.filterwarnings("ignore", ".*torch.jit.*is deprecated", DeprecationWarning)
    for compiles in (True, False):
        model = Several(kind)
        run = torch.compile(model, backend=backend, fullgraph=True) if compiles else model
        opt, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
        for step in range(3):
            # Batches of one size, or of two: this rank compiles once more.
            batch = torch.cat([ids(step)] * (1 + step % 2 * dist.get_rank()))
            losses.append(run(batch))
            take_step(opt, losses[-1])
        found.append([torch.stack(losses).detach(), *(rows_of(each) for each in (model.rows, model.bag))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def replaced(kind):
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM))
    wanted = [each.weight.detach().clone() for each in model]
    options = {"memory": "shared"} if kind == "shared" else {}
    assert st.replace_embeddings(model, min_rows=1, process_group=dist.group.WORLD, **options) == ["0", "1"]
    for each, weight in zip(model, wanted, strict=True):
        assert torch.equal(rows_of(each), weight)
        for shown in (repr(each.table), repr(each.weight), str(st.summary(model))):
            assert f"rank {dist.get_rank()} of 2" in shown


def sharded_table(kind):
    emb, rank, ranks = table(kind), dist.get_rank(), dist.get_world_size()
    own = torch.arange(rank, ROWS, ranks)
    emb.table.scatter(own, own.unsqueeze(1).expand(-1, DIM).double())
    assert torch.equal(rows_of(emb), torch.arange(ROWS).unsqueeze(1).expand(-1, DIM).double())
    local = emb.table.local.torch() if kind == "sharded" else emb.table.local.torch()[emb.table.local_ids()]
    assert torch.equal(local[:, 0], emb.table.local_ids().double())
    assert emb.table.stats().calls > 0
    before = rows_of(emb)
    twice = told(lambda: emb.table.scatter(torch.tensor([1]), torch.zeros(1, DIM)))
    outside = told(lambda: emb.table.scatter(torch.tensor([ROWS if rank else 0]), torch.zeros(1, DIM)))
    assert "more than once" in twice or "its own message says why" in twice
    assert ("RowIndexError" if rank == 1 else "rank 1 failed where it writes rows") in outside
    assert torch.equal(rows_of(emb), before)


def read_late(kind):
    """Rows that rank 1 reads after backward, while others may step already, are those before the step."""
    pair = tables(kind)
    before = rows_of(pair.ours)
    pair.ours(torch.arange(ROWS)).sum().backward()
    if kind == "shared" and dist.get_rank() == 1:
        time.sleep(0.3)
    with torch.no_grad():
        seen = pair.ours(torch.arange(ROWS)).clone()
    pair.opt.step()
    assert torch.equal(seen, before)


def collected_by_one(kind):
    """Models that one process has collected, and another not."""
    gc.disable()
    try:
        for _ in range(2):
            pair = tables(kind)
            pair.cycle = pair
            pair.train(0, 1)
            # In training, and never used.
            pair.ours(ids())
            del pair
            if dist.get_rank() == 1:
                gc.collect()
    finally:
        gc.enable()


def open_table(kind):
    pair = tables(kind)
    pair.cycle = pair
    pair.backward()
    pair.ours(ids())


# The last one twice: a model of a group that was destroyed stops no others.
@KINDS
def test_modules_and_tables(two, kind):
    for call in (replaced, sharded_table, read_late, collected_by_one, open_table, open_table):
        two(call, kind)


@KINDS
@on(2)
def test_nothing_is_left_of_tables(kind):
    def make():
        pair = tables(kind, torch.optim.Adam)
        take_step(pair.opt, pair)

    def counts():
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm")), mapped, len(gradient_exchange._alive())

    make()
    before = counts()
    make()
    make()
    # What tests before have left may have gone.
    assert max(after - was for after, was in zip(counts(), before, strict=True)) <= 0


# --- some of the processes ---------------------------------------------------------------------------------------------------


@on(2)
def test_all_rows_come_to_the_first_of_the_group():
    # In it the last process is the first.
    group = dist.new_group([1])
    if dist.get_rank():
        assert st.full_state_dict(st.Embedding(ROWS, DIM, process_group=group))["weight"].shape == (ROWS, DIM)


@pytest.mark.parametrize("memory", ["pageable", "shared"])
@on(2)
def test_a_group_that_was_destroyed_but_is_kept(memory, tmp_path):
    group = dist.new_group()
    net = nn.Sequential(st.Embedding(ROWS, DIM, process_group=group, memory=memory), nn.Linear(DIM, 1))
    dist.destroy_process_group(group)
    for use in (lambda: DistributedDataParallel(net), lambda: st.save_checkpoint(tmp_path / "saved", net)):
        with pytest.raises(ProcessGroupError, match="was destroyed; make them anew and load a checkpoint"):
            use()


# --- groups whose backend is not named: gloo for the host, NCCL for devices where there are any -----------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages would be on the device")
@on(2)
def test_without_cuda_messages_are_on_the_host():
    group = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(group) != "gloo"
    emb = st.Embedding(20, 4, process_group=group, device="cpu")
    opt = torch.optim.AdamW(emb.parameters())
    take_step(opt, emb(torch.arange(dist.get_rank() + 3)).sum())
    assert exchange_of(group).on_host
    rows = [None] * 2
    dist.all_gather_object(rows, emb(torch.arange(20)).detach())
    assert torch.equal(*rows)


# --- all rows -------------------------------------------------------------------------------------------------------------


@on(2)
def test_full_state_dict_of_fewer_rows_than_ranks():
    # The last rank has no rows of one chunk.
    ours, one = (table(kind, 1, DIM, dtype=torch.float32, storage_dtype=torch.bfloat16) for kind in ("sharded", "one"))
    found = st.full_state_dict(ours)
    assert not found if dist.get_rank() else torch.equal(found["weight"], one.state_dict()["weight"])
