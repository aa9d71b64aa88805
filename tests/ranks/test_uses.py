"""Uses of sharded and shared tables in training, one by one: the numbers of one process."""

import math

import pytest
import torch
from cases import concurrently
from sweeps import few
from torch.utils.checkpoint import checkpoint
from weight_cases import parse
from weight_world import run_code

from ranks import pair
from speedtransfer.optim.shards import KEPT


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient today")


NAMES = vars(pair) | {"math": math, "checkpoint": checkpoint, "concurrently": concurrently}
NAMES |= {"Raising": Raising, "KEPT": KEPT}
# Each trains a table of `kind` and one of one process, a `pair`. Its value, if any, is how far these are from each other.
USES = parse(
    "uses",
    """
# few rows or ids
found = []
for optimizer, idle in ((torch.optim.AdamW, "exact"), (torch.optim.SGD, "lazy")):
    for rows, sizes in [(1, (2, 2)), (1, (0, 3)), (2, (1, 0)), (ROWS, (0, 0)), (ROWS, (0, 4))]:
        modules = (table(each, rows, DIM, idle=idle) for each in (kind, "one"))
        batch = lambda step, rank: ids(step, rank, sizes[rank]) % rows
        found.append(Pair(*modules, optimizer, batch=batch).train(0, 1, clip=0.5))
max(found)

# the loss of rank 0 uses one lookup of two, that of others none; then that of nobody any
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

# of two tables both have a gradient in one step, in the others one
b = tables(kind)
others = {pair.ours: b.ours, pair.one: b.one}
for loss in (squares, lambda emb, ids: squares(emb, ids) + squares(others[emb], ids), squares):
    pair.train(0, 1, loss=loss)
    b.end()
max(pair.distance(), b.distance())

# tied
others = {pair.ours: table(kind), pair.one: table("one")}
for emb, other in others.items():
    other.weight = emb.weight
pair.train(0, 1, loss=lambda emb, ids: squares(emb, ids) + squares(others[emb], ids // 2))

# under another default device: what would be made there has no values
pair = tables(kind, sgd_with_momentum)  # AdamW of torch 2.6 raises
for step in range(3):
    with torch.device("meta"):
        pair.backward(step)
        pair.end(clip=0.5)

# retain_graph and another loss between
other, loss = nn.Linear(3, 1), squares(pair.ours, ids())
loss.backward(retain_graph=True)
other(torch.ones(3)).sum().backward()
loss.backward()
pair.one_backward()
pair.one_backward()
pair.end()

# checkpoints
def loss(emb, ids):
    part = lambda rows, scale: squares(emb, rows) * scale
    return sum(checkpoint(part, rows, scale, use_reentrant=reentrant) for rows in (ids, ids // 2)).sum()
found = []
for reentrant in (True, False):
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    found.append(tables(kind).train(0, 1, 2, loss=loss))
max(found)

# in threads
losses = {turn: squares(pair.ours, ids(turn)) for turn in range(4)}
turns = range(4) if dist.get_rank() else range(3, -1, -1)
concurrently(lambda turn: losses[turn].backward(), turns)
for turn in range(4):
    pair.one_backward(turn)
pair.end()

# after a backward that raises
pair.train(0)
failing = squares(pair.ours, ids(5)) + Raising.apply(pair.ours(ids(6))).sum()
assert told(failing.backward) == "ValueError: no gradient today"
pair.train(1, 2)

# lookups that are never used
for step in range(KEPT + 40):
    pair.ours(ids(step))
loss = squares(pair.ours, ids())
for step in range(30):
    pair.ours(ids(step))
loss.backward()
pair.one_backward()
pair.end()
assert len(pair.ours._handle.owners.lookups) <= KEPT

# an overflow of one row, which one process looks up and one of the two owns, skips the step of all
for fused in (False, True):
    pair = nets(kind, torch.optim.AdamW, pair={"fused": fused, "scales": True}, dtype=torch.float32)
    before, scaler = rows_of(pair.ours.emb), pair.scalers[0]
    scale = float("inf") if dist.get_rank() == 1 else 1.0
    loss = pair.ours.emb(torch.tensor([7])).sum() * scale + pair.ours.outer(torch.ones(DIM)).sum()
    scaler.scale(loss).backward()
    scaler.step(pair.opt)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(rows_of(pair.ours.emb), before)
0.0

# hooks see the gradient of all once: a clipped sum is not a sum of clipped
calls = []
for emb in (pair.ours, pair.one):
    emb.weight.register_hook(lambda grad, emb=emb: (calls.append(emb), grad.clamp(-0.4, 0.4))[1])
pair.train(0, 1, loss=lambda emb, ids: squares(emb, ids) + squares(emb, ids // 2))
assert calls == [pair.ours, pair.one] * 2

# many lookups, as of decoders, which look a row up for each word
nets(kind, torch.optim.Adagrad, 70, pair={"batch": lambda step, rank: ids(step, rank, 140)}).train(0, 1)

# hooks that step
def step(param):
    pair.opt.step()
    pair.opt.zero_grad()
found = []
for loss in (squares, lambda emb, ids: squares(emb, ids) + squares(emb, ids // 2)):
    pair = tables(kind)
    pair.ours.weight.register_post_accumulate_grad_hook(step)
    for turn in range(3):
        pair.backward(turn, loss)
        pair.one_opt.step()
        pair.one_opt.zero_grad()
    found.append(pair.distance())
max(found)

# gradients by hand
ranks = dist.get_world_size()
for emb, batch, scale in [(pair.ours, ids(), 1.0), *((pair.one, ids(0, rank), 1 / ranks) for rank in range(ranks))]:
    active = emb.activate(batch)
    counts = torch.bincount(active.inverse.flatten(), minlength=len(active.ids)).double()
    for part in (0.25, 0.75):
        active.add_grad(counts.unsqueeze(1).expand(-1, DIM) * scale * part)
pair.end(clip=0.1)

# functions of gradients are over the rows of all
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
max(abs(float(each(pair.ours.weight.grad)) - float(each(pair.one.weight.grad))) for each in functions)
""",
)


def distance(code, kind):
    names = {**NAMES, "kind": kind, "pair": pair.tables(kind)}
    found = run_code("use", code, names)
    return names["pair"].distance() if found is None else found


def distances(kind, every):
    return {use.title: distance(use.code, kind) for use in USES[::every]}


@pytest.mark.parametrize(
    ("kind", "every"),
    few([("sharded", 1), ("shared", 1), ("sharded", 2), ("shared", 5)], ("sharded", 2), ("shared", 5)),
)
def test_numbers_of_one_process(two, kind, every):
    for found in two(distances, kind, every, limit=120):
        assert {name: far for name, far in found.items() if not far < 1e-12} == {}
