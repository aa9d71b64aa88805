"""Uses of sharded and shared tables in training, one by one: the numbers of one process, or refused in all."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from ranks.small import DIM, ROWS, Pair, distance, ids, rows_of, squares, table, told
from speedtransfer.nn.tracing import ONE_GRAPH
from speedtransfer.optim import gradient_exchange
from speedtransfer.optim.shards import KEPT

pytestmark = pytest.mark.parametrize("kind", ["sharded", "shared"])
# Each trains a table and one of one process, and returns how far these are from each other.
USES: dict[str, Callable[[str], float]] = {}


def use(function: Callable[[str], float]) -> Callable[[str], float]:
    USES[function.__name__] = function
    return function


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient today")


# --- which rows, and none -------------------------------------------------------------------------------------------------


def few_rows(kind: str, rows: int, sizes: tuple[int, ...], optimizer: str, idle: str) -> float:
    pair = Pair(kind, getattr(torch.optim, optimizer), rows=rows, idle=idle)
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        batches = [torch.randint(0, rows, (size,), generator=draw) for size in sizes]
        squares(pair.emb, batches[dist.get_rank()]).backward()
        (squares(pair.one, torch.cat(batches)) / len(sizes)).backward()
        found, wanted = (nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (pair.emb, pair.one))
        assert abs(found - wanted) < 1e-12
        pair.end()
    return pair.distance()


@pytest.mark.parametrize(("optimizer", "idle"), [("AdamW", "lazy"), ("AdamW", "exact"), ("SGD", "exact")])
def test_ranks_without_rows_or_ids(two, kind, optimizer, idle):
    for rows, sizes in [(1, (2, 2)), (1, (0, 3)), (2, (1, 0)), (ROWS, (0, 0)), (ROWS, (0, 4))]:
        assert max(two(few_rows, kind, rows, sizes, optimizer, idle)) < 1e-12


@use
def unused(kind: str) -> float:
    """The loss of rank 0 uses one lookup of two, that of others none; then that of nobody any."""
    pair = Pair(kind, torch.optim.Adam)
    for step in range(4):
        rows, more = pair.emb(ids(step)), pair.emb(ids(step + 10))
        uses = step < 3 and dist.get_rank() == 0
        (rows.square().sum() if uses else torch.ones(1, requires_grad=True).sum()).backward()
        if step < 3:
            (squares(pair.one, ids(step, 0)) / dist.get_world_size()).backward()
            pair.end()
        else:
            pair.opt.step()
        del rows, more
    return pair.distance()


@use
def two_tables(kind: str) -> float:
    """In one step both have a gradient, in the others one."""
    a, b = Pair(kind), Pair(kind)
    others = {a.emb: b.emb, a.one: b.one}
    for loss in (squares, lambda emb, ids: squares(emb, ids) + squares(others[emb], ids), squares):
        a.train(0, 1, loss=loss)
        b.end()
    return max(a.distance(), b.distance())


# --- backward -------------------------------------------------------------------------------------------------------------


@use
def retain_graph(kind: str) -> float:
    pair = Pair(kind)
    loss = squares(pair.emb, ids())
    loss.backward(retain_graph=True)
    loss.backward()
    pair.one_backward()
    pair.one_backward()
    pair.end()
    return pair.distance()


@use
def another_loss_between(kind: str) -> float:
    pair, other = Pair(kind), nn.Linear(3, 1)
    for step in range(3):
        loss = squares(pair.emb, ids(step))
        other(torch.ones(3)).sum().backward()
        loss.backward()
        pair.one_backward(step)
        pair.end()
    return pair.distance()


@use
def checkpointed(kind: str) -> float:
    found = []
    for reentrant in (True, False):
        pair, scale = Pair(kind), torch.ones(1, dtype=torch.float64, requires_grad=True)

        def loss(emb, ids, reentrant=reentrant, scale=scale):
            def part(rows, scale):
                return squares(emb, rows) * scale

            return sum(checkpoint(part, rows, scale, use_reentrant=reentrant) for rows in (ids, ids // 2)).sum()

        pair.train(0, 1, 2, loss=loss)
        found.append(pair.distance())
    return max(found)


@use
def closure(kind: str) -> float:
    pair = Pair(kind, torch.optim.Adagrad)
    for step in range(3):

        def ours(step=step):
            pair.opt.zero_grad()
            loss = squares(pair.emb, ids(step))
            loss.backward()
            return loss

        pair.opt.step(ours)
        pair.one_opt.zero_grad()
        pair.one_backward(step)
        pair.one_opt.step()
    return pair.distance()


@use
def in_threads(kind: str) -> float:
    pair = Pair(kind)
    losses = {turn: squares(pair.emb, ids(turn)) for turn in range(4)}
    turns = range(4) if dist.get_rank() else range(3, -1, -1)
    threads = [threading.Thread(target=losses[turn].backward) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn in range(4):
        pair.one_backward(turn)
    pair.end()
    return pair.distance()


@use
def after_a_backward_that_raises(kind: str) -> float:
    pair = Pair(kind)
    pair.train(0)
    failing = squares(pair.emb, ids(5)) + Raising.apply(pair.emb(ids(6))).sum()
    assert told(failing.backward) == "ValueError: no gradient today"
    pair.train(1, 2)
    return pair.distance()


@use
def lookups_that_are_never_used(kind: str) -> float:
    pair = Pair(kind)
    for step in range(KEPT + 40):
        pair.emb(ids(step))
    loss = squares(pair.emb, ids())
    for step in range(30):
        pair.emb(ids(step))
    loss.backward()
    pair.one_backward()
    pair.end()
    assert len(pair.emb._handle.owners.lookups) <= KEPT
    return pair.distance()


@use
def frozen_for_a_while(kind: str) -> float:
    pair = Pair(kind)
    for step in range(6):
        for emb in (pair.emb, pair.one):
            emb.weight.requires_grad_(step not in (2, 3))
        if step in (2, 3):
            assert not pair.emb(ids(step)).requires_grad
        else:
            pair.train(step)
    return pair.distance()


@use
def another_optimizer(kind: str) -> float:
    pair = Pair(kind, torch.optim.Adam, idle="exact")
    pair.train(0, 1, 2)
    pair.opt, pair.one_opt = (torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (pair.emb, pair.one))
    pair.train(3, 4)
    return pair.distance()


class Several(nn.Module):
    """Lookups of several tables, whose messages must come in one order: also of one whose result is not used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        options = {"process_group": dist.group.WORLD, "memory": "shared" if kind == "shared" else "auto"}
        torch.manual_seed(3)
        self.rows = table(kind, max_norm=1.5 if kind == "sharded" else None)
        self.bag = st.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64, **options)
        self.features = st.MultiEmbedding({"user": 30, "item": 9}, DIM, dtype=torch.float64, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bags = self.bag(ids.view(2, -1)).square().sum()
        self.rows(ids // 2)
        found = self.features({"user": ids % 30, "item": ids[:2] % 9})
        return bags + (self.rows(ids) * found["user"]).sum() + self.features["item"](ids % 9).square().mean()


def compiled_in_turn(kind: str, backend: str) -> bool:
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
            opt.zero_grad()
            losses.append(run(batch))
            losses[-1].backward()
            opt.step()
        found.append([torch.stack(losses).detach(), *(rows_of(each) for each in (model.rows, model.bag))])
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-14) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_lookups_keep_their_order(two, kind, backend):
    assert all(two(compiled_in_turn, kind, backend, limit=300, timeout=150))


# --- gradients ------------------------------------------------------------------------------------------------------------


def two_lookups(emb, ids):
    return squares(emb, ids) + squares(emb, ids // 2)


@use
def hooked(kind: str) -> float:
    """Hooks see the gradient of all once: a clipped sum is not a sum of clipped."""
    pair, calls = Pair(kind), [0, 0]
    for place, emb in enumerate((pair.emb, pair.one)):

        def clip(grad, place=place):
            calls[place] += 1
            return grad.clamp(-0.4, 0.4)

        emb.weight.register_hook(clip)
    pair.train(0, 1, loss=two_lookups)
    assert calls == [2, 2]
    return pair.distance()


@use
def hooks_that_step(kind: str) -> float:
    found = []
    for loss in (squares, two_lookups):
        pair = Pair(kind)

        def step(param, pair=pair):
            pair.opt.step()
            pair.opt.zero_grad()

        pair.emb.weight.register_post_accumulate_grad_hook(step)
        for turn in range(3):
            pair.backward(turn, loss)
            pair.one_opt.step()
            pair.one_opt.zero_grad()
        found.append(pair.distance())
    return max(found)


@use
def gradients_by_hand(kind: str) -> float:
    pair, ranks = Pair(kind), dist.get_world_size()
    batches = [(pair.emb, ids(), 1.0), *((pair.one, ids(0, rank), 1 / ranks) for rank in range(ranks))]
    for emb, batch, scale in batches:
        active = emb.activate(batch)
        counts = torch.bincount(active.inverse.flatten(), minlength=len(active.ids)).double()
        for part in (0.25, 0.75):
            active.add_grad(counts.unsqueeze(1).expand(-1, DIM) * scale * part)
    found, wanted = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (pair.emb, pair.one))
    assert abs(found - wanted) < 1e-12
    pair.end()
    return pair.distance()


@use
def changed_in_place(kind: str) -> float:
    pair = Pair(kind)
    for step in range(2):
        pair.backward(step)
        for emb in (pair.emb, pair.one):
            emb.weight.grad = emb.weight.grad * 2
            emb.weight.grad.clamp_(-0.5, 0.5)
            nn.utils.clip_grad_value_(emb.parameters(), 0.3)
            emb.weight.grad.div_(emb.weight.grad.norm())
            emb.weight.data.mul_(0.9)
        pair.end()
    return pair.distance()


def refused(kind: str) -> dict[str, str]:
    emb = table(kind)
    before = rows_of(emb)
    dense = torch.ones(ROWS, DIM, dtype=torch.float64)
    emb(ids()).sum().backward()
    found = {
        "autograd.grad": told(lambda: torch.autograd.grad(emb(ids()).sum(), emb.weight)),
        "dense": told(lambda: setattr(emb.weight, "grad", dense)),
        "sparse": told(lambda: setattr(emb.weight, "grad", dense.to_sparse(1))),
        "pickle": told(lambda: pickle.dumps(emb)),
        "state_dict": told(emb.state_dict),
        "tied head": told(lambda: emb(ids()) @ emb.weight.t()),
        "another weight": told(lambda: setattr(emb, "weight", nn.Parameter(dense))),
        "more rows": told(lambda: setattr(emb.weight, "data", torch.zeros(ROWS + 1, DIM))),
        "LBFGS": told(lambda: torch.optim.LBFGS(emb.parameters()).step(lambda: emb(ids()).sum())),
        "grad == 0": told(lambda: emb.weight.grad == 0),
        "weight == 0": told(lambda: emb.weight == 0),
        "grad ** 2": told(lambda: emb.weight.grad**2),
        "grad[0]": told(lambda: emb.weight.grad[0]),
        "grad.mean()": told(lambda: emb.weight.grad.mean()),
        "all_reduce": told(lambda: dist.all_reduce(emb.weight.grad)),
    }
    assert torch.equal(rows_of(emb), before)
    assert "rank" in repr(emb.weight)
    return found


def test_refused_with_a_remedy(two, kind):
    for found in two(refused, kind):
        for what, message in found.items():
            assert "processes" in message or what in ("LBFGS", "more rows"), (what, message)
            assert ";" in message, (what, message)
            # A TypeError would become False in `==`, and another message in operators.
            assert "TypeError" not in message or what == "state_dict", (what, message)


# --- modules --------------------------------------------------------------------------------------------------------------


@use
def tied(kind: str) -> float:
    pair = Pair(kind)
    others = {emb: table(kind if emb is pair.emb else "one") for emb in (pair.emb, pair.one)}
    for emb, other in others.items():
        other.weight = emb.weight
    pair.train(0, 1, loss=lambda emb, ids: squares(emb, ids) + squares(others[emb], ids // 2))
    return max(pair.distance(), distance(others[pair.emb], pair.one))


@pytest.mark.parametrize("name", USES)
def test_numbers_of_one_process(two, kind, name):
    assert max(two(USES[name], kind)) < 1e-12


def replaced(kind: str) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM))
    wanted = [each.weight.detach().clone() for each in model]
    options = {"memory": "shared"} if kind == "shared" else {}
    assert st.replace_embeddings(model, min_rows=1, process_group=dist.group.WORLD, **options) == ["0", "1"]
    for each, weight in zip(model, wanted, strict=True):
        assert isinstance(each.table, st.nn.ShardedTable)
        assert torch.equal(each.table.gather(torch.arange(ROWS)), weight)
        for shown in (repr(each.table), str(st.summary(model))):
            assert f"rank {dist.get_rank()} of 2" in shown


def sharded_table(kind: str) -> None:
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
    assert ("RowIndexError" in outside) == (rank == 1)
    assert ("rank 1 failed where it writes rows" in outside) == (rank != 1)
    assert torch.equal(rows_of(emb), before)


def read_late(kind: str) -> None:
    """Rows that rank 1 reads after backward, while others may step already, are those before the step."""
    pair = Pair(kind)
    before = rows_of(pair.emb)
    pair.emb(torch.arange(ROWS)).sum().backward()
    if kind == "shared" and dist.get_rank() == 1:
        time.sleep(0.3)
    with torch.no_grad():
        seen = pair.emb(torch.arange(ROWS)).clone()
    pair.opt.step()
    assert torch.equal(seen, before)


def collected_by_one(kind: str) -> None:
    """Models that one process has collected, and another not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = table(kind)
            self.cycle = [self]

    gc.disable()
    try:
        for _ in range(2):
            model = Model()
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                model.emb(ids(step)).sum().backward()
                opt.step()
                opt.zero_grad()
            # In training, and never used.
            model.emb(ids())
            del model, opt
            if dist.get_rank() == 1:
                gc.collect()
    finally:
        gc.enable()


def open_table(kind: str) -> None:
    model = nn.Module()
    model.emb = table(kind)
    model.cycle = [model]
    model.emb(ids()).sum().backward()
    model.emb(ids())


# The last one twice: a model of a group that was destroyed stops no others.
@pytest.mark.parametrize(
    "calls",
    [(replaced,), (sharded_table,), (read_late,), (collected_by_one,), (open_table, open_table)],
    ids=lambda calls: calls[0].__name__,
)
def test_modules_and_tables(two, kind, calls):
    for call in calls:
        two(call, kind)


def made_and_dropped(kind: str, times: int) -> tuple[int, ...]:
    def make() -> None:
        emb = table(kind)
        opt = torch.optim.Adam(emb.parameters())
        emb(ids()).sum().backward()
        opt.step()

    def counts() -> tuple[int, ...]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm")), mapped, len(gradient_exchange._alive())

    make()
    before = counts()
    for _ in range(times):
        make()
    return tuple(after - was for after, was in zip(counts(), before, strict=True))


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_is_left_of_tables(two, kind, times):
    for left in two(made_and_dropped, kind, times * 5 if kind == "shared" else times):
        # What tests before have left may have gone.
        assert max(left) <= 0
