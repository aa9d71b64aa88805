"""Uses of sharded and shared tables in training, one by one: the numbers of one process, or refused in all."""

from __future__ import annotations

import pickle
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from ranks.small import DIM, ROWS, Pair, all_ids, distance, ids, rows_of, table, told
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.tracing import ONE_GRAPH
from speedtransfer.optim import gradient_exchange
from speedtransfer.optim.shards import KEPT

pytestmark = pytest.mark.parametrize("kind", ["sharded", "shared"])


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient today")


# --- which rows, and none -------------------------------------------------------------------------------------------------


def few_rows(kind: str, rows: int, sizes: tuple[int, ...], optimizer: str, idle: str) -> tuple[float, float]:
    pair = Pair(kind, getattr(torch.optim, optimizer), rows=rows, idle=idle)
    norms = 0.0
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        batches = [torch.randint(0, rows, (size,), generator=draw) for size in sizes]
        pair.emb(batches[dist.get_rank()]).square().sum().backward()
        (pair.one(torch.cat(batches)).square().sum() / len(sizes)).backward()
        found, wanted = (nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (pair.emb, pair.one))
        norms = max(norms, abs(float(found - wanted)))
        pair.end()
    return pair.distance(), norms


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize(("rows", "sizes"), [(1, (2, 2)), (1, (0, 3)), (2, (1, 0)), (ROWS, (0, 0)), (ROWS, (0, 4))])
def test_ranks_without_rows_or_ids(two, kind, rows, sizes, optimizer, idle):
    for error, norm in two(few_rows, kind, rows, sizes, optimizer, idle):
        assert error < 1e-12
        assert norm < 1e-12


def unused(kind: str) -> list[float]:
    found = []
    pair = Pair(kind, torch.optim.Adam)
    first = dist.get_rank() == 0
    for step in range(3):
        rows, more = pair.emb(ids(step)), pair.emb(ids(step + 10))
        # The loss of rank 0 uses one lookup, that of others none.
        loss = rows.square().sum() if first else torch.ones(1, dtype=torch.float64, requires_grad=True).sum()
        pair.step(loss, pair.one(ids(step, 0)).square().sum())
        del more
        found.append(pair.distance())
    # Nobody's: no row is touched.
    before = rows_of(pair.emb)
    pair.emb(ids())
    torch.ones(1, requires_grad=True).sum().backward()
    pair.opt.step()
    found.append(float((rows_of(pair.emb) - before).abs().max()))
    return found


def test_lookups_that_a_loss_does_not_use(two, kind):
    for found in two(unused, kind):
        assert max(found) < 1e-12


def two_tables(kind: str) -> float:
    a, b = Pair(kind), Pair(kind)
    for step in range(3):
        a.train(step)
        # Of one both have a gradient, of the other none.
        loss = a.emb(ids(step)).sum() + (b.emb(ids(step)).square().sum() if step == 1 else 0)
        one = a.one(all_ids(step)).sum() + (b.one(all_ids(step)).square().sum() if step == 1 else 0)
        a.step(loss, one)
        b.end()
    return max(a.distance(), b.distance())


def test_a_table_without_a_gradient_beside_another(two, kind):
    assert max(two(two_tables, kind)) < 1e-12


# --- backward -------------------------------------------------------------------------------------------------------------


def backwards(kind: str) -> dict[str, float]:
    found = {}
    pair = Pair(kind)
    loss, one = pair.emb(ids()).square().sum(), pair.one(all_ids()).square().sum() / dist.get_world_size()
    for each in (loss, one):
        each.backward(retain_graph=True)
        each.backward()
    pair.end()
    found["retain_graph"] = pair.distance()

    pair, other = Pair(kind), nn.Linear(3, 1)
    for step in range(3):
        loss = pair.emb(ids(step)).square().sum()
        other(torch.ones(3)).sum().backward()
        pair.step(loss, pair.one(all_ids(step)).square().sum())
    found["another loss between"] = pair.distance()

    for reentrant in (True, False):
        pair = Pair(kind)
        for step in range(3):
            scale = torch.ones(1, dtype=torch.float64, requires_grad=True)

            def part(rows, scale, pair=pair):
                return pair.emb(rows).square().sum() * scale

            parts = [checkpoint(part, ids(turn), scale, use_reentrant=reentrant) for turn in (step, step + 9)]
            pair.step(sum(parts).sum(), sum(pair.one(all_ids(turn)).square().sum() for turn in (step, step + 9)))
        found[f"checkpoint {reentrant}"] = pair.distance()

    pair = Pair(kind, torch.optim.Adagrad)
    for step in range(3):

        def closure(emb, opt, batch, scale):
            opt.zero_grad()
            loss = emb(batch).square().sum() * scale
            loss.backward()
            return loss

        pair.opt.step(lambda step=step: closure(pair.emb, pair.opt, ids(step), 1))
        pair.one_opt.step(lambda step=step: closure(pair.one, pair.one_opt, all_ids(step), 1 / dist.get_world_size()))
    found["closure"] = pair.distance()

    pair = Pair(kind)
    for turn in range(3):
        pair.emb(ids(turn)).square().sum().backward()
        (pair.one(all_ids(turn)).square().sum() / dist.get_world_size()).backward()
    pair.end()
    found["accumulated"] = pair.distance()

    pair = Pair(kind)
    for step in range(4):
        pair.emb(ids(step)).square().sum().backward()
        (pair.one(all_ids(step)).square().sum() / dist.get_world_size()).backward()
        for opt in (pair.opt, pair.one_opt):
            opt.step()
            opt.zero_grad(set_to_none=False)
    found["set_to_none=False"] = pair.distance()
    return found


def test_backwards(two, kind):
    for found in two(backwards, kind):
        assert all(error < 1e-12 for error in found.values()), found


def in_threads(kind: str) -> float:
    pair = Pair(kind)
    turns = range(4) if dist.get_rank() else range(3, -1, -1)
    losses = {turn: pair.emb(ids(turn)).square().sum() for turn in range(4)}
    threads = [threading.Thread(target=losses[turn].backward) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (sum(pair.one(all_ids(turn)).square().sum() for turn in range(4)) / dist.get_world_size()).backward()
    pair.end()
    return pair.distance()


def test_backward_in_threads(two, kind):
    assert max(two(in_threads, kind)) < 1e-12


def after_failures(kind: str) -> tuple[list[str], float]:
    pair = Pair(kind)
    pair.train(0)
    failing = pair.emb(ids(5)).square().sum() + Raising.apply(pair.emb(ids(6))).sum()
    messages = [told(failing.backward)]
    pair.train(1, 2)
    return messages, pair.distance()


def test_a_backward_that_raises_in_all_leaves_nothing(two, kind):
    for messages, error in two(after_failures, kind):
        assert messages == ["ValueError: no gradient today"]
        assert error < 1e-12


def never_used(kind: str) -> tuple[float, int]:
    pair = Pair(kind)
    for step in range(KEPT + 40):
        pair.emb(ids(step))
    loss = pair.emb(ids()).square().sum()
    for step in range(30):
        pair.emb(ids(step))
    pair.step(loss, pair.one(all_ids()).square().sum())
    return pair.distance(), len(pair.emb._handle.owners.lookups)


def test_lookups_that_are_never_used_do_not_pile_up(two, kind):
    for error, kept in two(never_used, kind):
        assert error < 1e-12
        assert kept <= KEPT


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


def another_optimizer(kind: str) -> float:
    pair = Pair(kind, torch.optim.Adam, idle="exact")
    pair.train(0, 1, 2)
    pair.opt, pair.one_opt = (torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (pair.emb, pair.one))
    pair.train(3, 4)
    return pair.distance()


def test_in_mid_training(two, kind):
    assert max(two(frozen_for_a_while, kind)) < 1e-12
    assert max(two(another_optimizer, kind)) < 1e-12


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


def hooked(kind: str) -> tuple[list[int], float]:
    pair, calls = Pair(kind), [0, 0]
    for place, emb in enumerate((pair.emb, pair.one)):

        def clip(grad, place=place):
            calls[place] += 1
            return grad.clamp(-0.4, 0.4)

        emb.weight.register_hook(clip)
    for step in range(2):
        # Rows of both lookups: a clipped sum is not a sum of clipped.
        loss = pair.emb(ids(step)).square().sum() + pair.emb(ids(step) // 2).square().sum()
        pair.step(loss, pair.one(all_ids(step)).square().sum() + pair.one(all_ids(step) // 2).square().sum())
    return calls, pair.distance()


def test_hooks_see_the_gradient_of_all_once(two, kind):
    for calls, error in two(hooked, kind):
        assert calls == [2, 2]
        assert error < 1e-12


def stepping_hooks(kind: str, lookups: int) -> float:
    pair = Pair(kind)

    def step(param):
        pair.opt.step()
        pair.opt.zero_grad()

    pair.emb.weight.register_post_accumulate_grad_hook(step)
    for turn in range(3):
        sum(pair.emb(ids(turn + 10 * n)).square().sum() for n in range(lookups)).backward()
        (
            sum(pair.one(all_ids(turn + 10 * n)).square().sum() for n in range(lookups)) / dist.get_world_size()
        ).backward()
        pair.one_opt.step()
        pair.one_opt.zero_grad()
    return pair.distance()


@pytest.mark.parametrize("lookups", [1, 2])
def test_hooks_that_step(two, kind, lookups):
    assert max(two(stepping_hooks, kind, lookups)) < 1e-12


def by_hand(kind: str) -> tuple[float, float]:
    pair = Pair(kind)
    for emb, batch, scale in [(pair.emb, ids(), 1.0), (pair.one, all_ids(), 1 / dist.get_world_size())]:
        active = emb.activate(batch)
        counts = torch.bincount(active.inverse.flatten(), minlength=len(active.ids)).double()
        active.add_grad(counts.unsqueeze(1).expand(-1, DIM) * scale)
    found, wanted = (nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (pair.emb, pair.one))
    pair.end()
    return abs(float(found - wanted)), pair.distance()


def test_gradients_by_hand_are_clipped_too(two, kind):
    for norm, error in two(by_hand, kind):
        assert norm < 1e-12
        assert error < 1e-12


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
            assert "TypeError: unsupported" not in message, (what, message)


def scaled(kind: str) -> float:
    pair = Pair(kind)
    for step in range(2):
        pair.emb(ids(step)).square().sum().backward()
        (pair.one(all_ids(step)).square().sum() / dist.get_world_size()).backward()
        for emb in (pair.emb, pair.one):
            emb.weight.grad = emb.weight.grad * 2
            emb.weight.grad.clamp_(-0.5, 0.5)
            nn.utils.clip_grad_value_(emb.parameters(), 0.3)
            emb.weight.grad.div_(emb.weight.grad.norm())
            emb.weight.data.mul_(0.9)
        pair.end()
    return pair.distance()


def test_gradients_and_weights_changed_in_place(two, kind):
    assert max(two(scaled, kind)) < 1e-12


# --- modules --------------------------------------------------------------------------------------------------------------


def tied(kind: str) -> float:
    pair = Pair(kind)
    other, other_one = table(kind), table("one")
    other.weight, other_one.weight = pair.emb.weight, pair.one.weight
    for step in range(2):
        loss = pair.emb(ids(step)).square().sum() + other(ids(step + 1)).square().sum()
        pair.step(loss, pair.one(all_ids(step)).square().sum() + other_one(all_ids(step + 1)).square().sum())
    return max(pair.distance(), distance(other, pair.one))


def converted(kind: str) -> dict[str, float]:
    found = {}
    for name in ("float", "double", "half", "cpu"):
        pair = Pair(kind)
        getattr(pair.emb, name)()
        getattr(pair.one, name)()
        pair.train(0, 1)
        found[name] = pair.distance()
    return found


def test_tied_and_converted(two, kind):
    assert max(two(tied, kind)) < 1e-12
    for found in two(converted, kind):
        assert max(found["float"], found["double"], found["cpu"]) < 1e-6
        assert found["half"] < 1e-3


def state_dicts(kind: str) -> None:
    emb, other = table(kind), nn.Embedding(ROWS, DIM, dtype=torch.float64)
    torch.manual_seed(0)
    for assign in (False, True):
        with torch.no_grad():
            other.weight.normal_()
        emb.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(rows_of(emb), other.weight)
    model = nn.Sequential(emb, nn.Linear(DIM, 1))
    torch.optim.AdamW(emb.parameters(), lr=0.1)
    found = st.full_state_dict(model)
    if dist.get_rank():
        assert found == {}
    else:
        assert torch.equal(found["0.weight"], other.weight)
        assert list(found) == ["0.weight", "1.weight", "1.bias"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        emb.load_state_dict({"weight": torch.zeros(ROWS - 1, DIM)})


def test_state_dicts(two, kind):
    two(state_dicts, kind)


def replaced(kind: str) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, DIM), nn.EmbeddingBag(ROWS, DIM))
    wanted = [each.weight.detach().clone() for each in model]
    options = {"memory": "shared"} if kind == "shared" else {}
    assert st.replace_embeddings(model, min_rows=1, process_group=dist.group.WORLD, **options) == ["0", "1"]
    for each, weight in zip(model, wanted, strict=True):
        assert isinstance(each.table, st.nn.ShardedTable)
        assert torch.equal(each.table.gather(torch.arange(ROWS)), weight)


def sharded_table(kind: str) -> None:
    emb, rank, ranks = table(kind), dist.get_rank(), dist.get_world_size()
    own = torch.arange(rank, ROWS, ranks)
    emb.table.scatter(own, own.unsqueeze(1).expand(-1, DIM).double())
    assert torch.equal(rows_of(emb), torch.arange(ROWS).unsqueeze(1).expand(-1, DIM).double())
    local = emb.table.local.torch() if kind == "sharded" else emb.table.local.torch()[emb.table.local_ids()]
    assert torch.equal(local[:, 0], emb.table.local_ids().double())
    stats = emb.table.stats()
    assert stats.calls > 0
    before = rows_of(emb)
    twice = told(lambda: emb.table.scatter(torch.tensor([1]), torch.zeros(1, DIM)))
    outside = told(lambda: emb.table.scatter(torch.tensor([ROWS if rank else 0]), torch.zeros(1, DIM)))
    assert "more than once" in twice or "its own message says why" in twice
    assert ("RowIndexError" in outside) == (rank == 1)
    assert ("rank 1 failed where it writes rows" in outside) == (rank != 1)
    assert torch.equal(rows_of(emb), before)


def test_replace_embeddings_and_the_table(two, kind):
    two(replaced, kind)
    two(sharded_table, kind)


def read_late(kind: str) -> bool:
    """Rows that rank 1 reads after backward, while others may step already."""
    pair = Pair(kind)
    before = rows_of(pair.emb)
    pair.emb(torch.arange(ROWS)).sum().backward()
    if kind == "shared" and dist.get_rank() == 1:
        time.sleep(0.3)
    with torch.no_grad():
        seen = pair.emb(torch.arange(ROWS)).clone()
    pair.opt.step()
    return torch.equal(seen, before)


def test_rows_are_those_before_the_step_until_the_step(two, kind):
    assert two(read_late, kind) == [True, True]


def collected_by_one(kind: str) -> None:
    import gc

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


def test_models_that_one_process_has_collected_and_another_not(two, kind):
    two(collected_by_one, kind)


def open_table(kind: str) -> None:
    model = nn.Module()
    model.emb = table(kind)
    model.cycle = [model]
    model.emb(ids()).sum().backward()
    model.emb(ids())


def test_a_model_of_a_group_that_was_destroyed_does_not_stop_others(two, kind):
    for _ in range(2):
        two(open_table, kind)


def made_and_dropped(kind: str, times: int) -> tuple[int, ...]:
    import gc
    import os

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


def test_kinds_of_errors(kind):
    # A TypeError would become False in `==`, and another message in operators.
    from speedtransfer.optim import shard_gradient, sharded

    assert not hasattr(shard_gradient, "InvalidTypeError")
    with pytest.raises(InvalidValueError):
        sharded.Sharded.check_whole(
            SimpleNamespace(handle="w", exchange=SimpleNamespace(ranks=2)), "is used", "use another"
        )
    assert not issubclass(InvalidValueError, TypeError)
