"""Uses of sharded and shared tables in training, one by one: the numbers of one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from cases import concurrently
from sweeps import few
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks.pair import DIM, ROWS, Pair, ids, nets, squares, table, tables, told
from speedtransfer.optim.shards import KEPT

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


def two_lookups(emb, ids):
    return squares(emb, ids) + squares(emb, ids // 2)


# --- which rows, and none -------------------------------------------------------------------------------------------------


@use
def few_rows_or_ids(kind: str) -> float:
    found = []
    for optimizer, idle in ((torch.optim.AdamW, "exact"), (torch.optim.SGD, "lazy")):
        for rows, sizes in [(1, (2, 2)), (1, (0, 3)), (2, (1, 0)), (ROWS, (0, 0)), (ROWS, (0, 4))]:
            modules = (table(each, rows, DIM, idle=idle) for each in (kind, "one"))
            batch = lambda step, rank, rows=rows, sizes=sizes: ids(step, rank, sizes[rank]) % rows  # noqa: E731
            found.append(Pair(*modules, optimizer, batch=batch).train(0, 1, clip=0.5))
    return max(found)


@use
def unused(kind: str) -> float:
    """The loss of rank 0 uses one lookup of two, that of others none; then that of nobody any."""
    pair = tables(kind, torch.optim.Adam)
    for step in range(4):
        rows, more = pair.ours(ids(step)), pair.ours(ids(step + 10))
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
    a, b = tables(kind), tables(kind)
    others = {a.ours: b.ours, a.one: b.one}
    for loss in (squares, lambda emb, ids: squares(emb, ids) + squares(others[emb], ids), squares):
        a.train(0, 1, loss=loss)
        b.end()
    return max(a.distance(), b.distance())


@use
def tied(kind: str) -> float:
    pair = tables(kind)
    others = {pair.ours: table(kind), pair.one: table("one")}
    for emb, other in others.items():
        other.weight = emb.weight
    return pair.train(0, 1, loss=lambda emb, ids: squares(emb, ids) + squares(others[emb], ids // 2))


@use
def under_another_default_device(kind: str) -> float:
    """What would be made there has no values."""
    pair = tables(kind, torch.optim.AdamW)
    for step in range(3):
        with torch.device("meta"):
            pair.backward(step)
            pair.end(clip=0.5)
    return pair.distance()


# --- backward -------------------------------------------------------------------------------------------------------------


@use
def retain_graph_and_another_loss_between(kind: str) -> float:
    pair, other = tables(kind), nn.Linear(3, 1)
    loss = squares(pair.ours, ids())
    loss.backward(retain_graph=True)
    other(torch.ones(3)).sum().backward()
    loss.backward()
    pair.one_backward()
    pair.one_backward()
    pair.end()
    return pair.distance()


@use
def checkpointed(kind: str) -> float:
    found = []
    for reentrant in (True, False):
        scale = torch.ones(1, dtype=torch.float64, requires_grad=True)

        def loss(emb, ids, reentrant=reentrant, scale=scale):
            def part(rows, scale):
                return squares(emb, rows) * scale

            return sum(checkpoint(part, rows, scale, use_reentrant=reentrant) for rows in (ids, ids // 2)).sum()

        found.append(tables(kind).train(0, 1, 2, loss=loss))
    return max(found)


@use
def in_threads(kind: str) -> float:
    pair = tables(kind)
    losses = {turn: squares(pair.ours, ids(turn)) for turn in range(4)}
    turns = range(4) if dist.get_rank() else range(3, -1, -1)
    concurrently(lambda turn: losses[turn].backward(), turns)
    for turn in range(4):
        pair.one_backward(turn)
    pair.end()
    return pair.distance()


@use
def after_a_backward_that_raises(kind: str) -> float:
    pair = tables(kind)
    pair.train(0)
    failing = squares(pair.ours, ids(5)) + Raising.apply(pair.ours(ids(6))).sum()
    assert told(failing.backward) == "ValueError: no gradient today"
    return pair.train(1, 2)


@use
def lookups_that_are_never_used(kind: str) -> float:
    pair = tables(kind)
    for step in range(KEPT + 40):
        pair.ours(ids(step))
    loss = squares(pair.ours, ids())
    for step in range(30):
        pair.ours(ids(step))
    loss.backward()
    pair.one_backward()
    pair.end()
    assert len(pair.ours._handle.owners.lookups) <= KEPT
    return pair.distance()


@use
def many_lookups(kind: str) -> float:
    """As decoders, which look a row up for each word."""
    return nets(kind, torch.optim.Adagrad, 70, pair={"batch": lambda step, rank: ids(step, rank, 140)}).train(0, 1)


# --- gradients ------------------------------------------------------------------------------------------------------------


@use
def hooked(kind: str) -> float:
    """Hooks see the gradient of all once: a clipped sum is not a sum of clipped."""
    pair, calls = tables(kind), [0, 0]
    for place, emb in enumerate((pair.ours, pair.one)):

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
        pair = tables(kind)

        def step(param, pair=pair):
            pair.opt.step()
            pair.opt.zero_grad()

        pair.ours.weight.register_post_accumulate_grad_hook(step)
        for turn in range(3):
            pair.backward(turn, loss)
            pair.one_opt.step()
            pair.one_opt.zero_grad()
        found.append(pair.distance())
    return max(found)


@use
def gradients_by_hand(kind: str) -> float:
    pair, ranks = tables(kind), dist.get_world_size()
    batches = [(pair.ours, ids(), 1.0), *((pair.one, ids(0, rank), 1 / ranks) for rank in range(ranks))]
    for emb, batch, scale in batches:
        active = emb.activate(batch)
        counts = torch.bincount(active.inverse.flatten(), minlength=len(active.ids)).double()
        for part in (0.25, 0.75):
            active.add_grad(counts.unsqueeze(1).expand(-1, DIM) * scale * part)
    pair.end(clip=0.1)
    return pair.distance()


@use
def functions_of_gradients(kind: str) -> float:
    """They are over the rows of all."""
    pair = tables(kind)
    pair.backward()
    functions = [lambda grad, p=p: torch.linalg.vector_norm(grad, p) for p in (1, 2, 3, math.inf)]
    functions += [
        lambda grad: torch._foreach_norm([grad], 2)[0],
        lambda grad: nn.utils.get_total_norm([grad]),
        lambda grad: grad.sum(),
        lambda grad: grad.abs().sum(),
        lambda grad: grad.count_nonzero(),
        lambda grad: grad.isnan().any(),
        lambda grad: grad.pow(2).sum(),
        lambda grad: (grad > 0.1).sum(),
        lambda grad: torch.isfinite(grad).all(),
        # Some of each process are negative.
        lambda grad: torch.isfinite(grad.sqrt()).all() or (grad.sqrt() != grad.sqrt()).any(),
        lambda grad: torch.tensor(grad.numel()),
        lambda grad: grad.clone().data.float().norm().round(decimals=4),
    ]
    return max(abs(float(each(pair.ours.weight.grad)) - float(each(pair.one.weight.grad))) for each in functions)


def distances(kind: str, every: int) -> dict[str, float]:
    return {name: USES[name](kind) for name in [*USES][::every]}


@pytest.mark.parametrize(
    ("kind", "every"),
    few([("sharded", 1), ("shared", 1), ("sharded", 2), ("shared", 5)], ("sharded", 2), ("shared", 5)),
)
def test_numbers_of_one_process(two, kind, every):
    for found in two(distances, kind, every, limit=120):
        assert {name: far for name, far in found.items() if not far < 1e-12} == {}
