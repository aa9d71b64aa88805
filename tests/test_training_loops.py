"""The ways that a loop may go between two steps, on a table and on ``nn.Embedding``: lazily, and by sparse gradients.

Names that programs use: `module` and its optimizer `opt`; `zero_grad` and `step`, which takes what makes the step if that is
not `opt.step`; `loss` of ids and target, `batches` of these, by threes in `threes`; `train` makes ordinary steps, `fail` one
that fails; `put` writes rows; what goes into `seen` is compared, too.
"""

import collections
import copy
import math
from typing import Any

import pytest
import torch
from lazy_oracle import Twins, sparse, squared_loss, tensors_in
from optimizer_cases import case_named
from third_party import TAKERS
from torch import nn
from weight_cases import Case, parse

import speedtransfer

# torch warns once a process that it does not check what sparse tensors hold.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
PROGRAMS = parse(
    "loop",
    """
# several backwards before one step
for first, second, third in threes:
    zero_grad()
    (loss(*first) + loss(*second)).backward()
    loss(*third).backward()
    step()

# a gradient set to zero before the step
for discarded, kept, _ in threes:
    zero_grad()
    loss(*discarded).backward()
    zero_grad(set_to_none=False)
    loss(*kept).backward()
    step()

# the gradient stays until somebody clears it
for batch in batches[:2]:
    zero_grad()
    loss(*batch).backward()
    step()
    seen.append(module.weight.grad.to_dense().clone())
    step()
loss(*batches[0]).backward()
seen.append(module.weight.grad.to_dense().clone())
zero_grad()
seen.append(module.weight.grad is None)

# a hand on the gradient
for number, batch in enumerate(batches[:9]):
    zero_grad()
    loss(*batch).backward()
    if number % 3 == 0:
        module.weight.grad.mul_(0.5)
    elif number % 3 == 1:
        module.weight.grad = module.weight.grad * 2
    else:
        module.weight.grad.mul_(0)
    step()

# batches of no ids, first and later
train([empty])
train(batches[:3])
train([empty] * 2)
train(batches[3:6])

# rows written before the step
for ids, target in batches[:6]:
    zero_grad()
    loss(ids, target).backward()
    put([int(ids[0, 0]), 40])
    step()

# all rows loaded before the step
train(batches[:3])
zero_grad()
loss(*batches[3]).backward()
module.load_state_dict({"weight": torch.ones_like(module.weight).cumsum(0)})
step()

# weights and then state loaded again
train(batches[:4])
saved = copy.deepcopy((module.state_dict(), opt.state_dict()))
train(batches[4:8])
module.load_state_dict(saved[0])
train(batches[8:12])
opt.load_state_dict(saved[1])
train(batches[12:16])

# state emptied
fresh, adagrad = copy.deepcopy(opt.state_dict()), isinstance(opt, torch.optim.Adagrad)  # which makes none in a step
for empty in (opt.state.clear, lambda: setattr(opt, "state", collections.defaultdict(dict))):
    train(batches[:4])
    opt.load_state_dict(copy.deepcopy(fresh)) if adagrad else empty()
    train(batches[4:8])
opt.load_state_dict(copy.deepcopy(fresh))
train(batches[8:12])

# steps that fail, the first one too
for number, batch in enumerate(batches[:12]):
    zero_grad()
    loss(*batch).backward()
    if number in (0, 4, 8):
        fail()
    if number != 8:
        step()
fail()

# hyperparameters edited
for number, batch in enumerate(batches):
    train([batch])
    edits = {"lr": 0.02, "weight_decay": 0.1} if number == 4 else {"momentum": 0.8, "eps": 1e-3}
    opt.param_groups[0].update({name: edits[name] for name in edits if number in (4, 9) and name in opt.param_groups[0]})

# the norm of gradients clipped
for number, batch in enumerate(batches[:12]):
    zero_grad()
    loss(*batch).backward()
    seen.append(nn.utils.clip_grad_norm_(module.parameters(), 2.0, norm_type=(2.0, 1.0, math.inf)[number % 3]))
    step()

# values of gradients clipped between two backwards
for first, second, _ in threes:
    zero_grad()
    loss(*first).backward()
    nn.utils.clip_grad_value_(module.parameters(), 0.3)
    loss(*second).backward()
    step()

# a scaler that skips steps, the first one too
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=5)
for number, batch in enumerate(batches[:16]):
    zero_grad()
    scaler.scale(loss(*batch) * (math.inf if number in (0, 4, 9, 10) else 1.0)).backward()
    if number % 2:
        scaler.unscale_(opt)
    step(lambda: scaler.step(opt))
    scaler.update()
seen.append(scaler.get_scale())
seen.append([float(state["step"]) for state in opt.state.values() if "step" in state])
""",
)
# Those whose sums torch makes in another order, and those that torch cannot do with sparse gradients.
SUMMED, DENSE = ("several", "two backwards", "clipped"), ("clipped", "edited")


def has(program, words):
    return any(word in program.title for word in words)


# Every kind of state and implementation.
LAZY = ("sgd-momentum", "adamw-fused", "adagrad", "rprop", "nadam", "adamw-foreach", "adam-fused")


def run(program, module, opt, batches, oracle=None):
    """Run a program on one side and return what it saw; `oracle` makes the steps of the dense side of lazy ones."""

    def loss(ids, target):
        return squared_loss(module(ids), target)

    def step(function=None):
        return (function or opt.step)() if oracle is None else oracle.step(function)

    def train(some):
        for batch in some:
            zero_grad()
            loss(*batch).backward()
            step()

    def put(index):
        if isinstance(module, speedtransfer.Embedding):
            module.table[index] = torch.ones(len(index), module.embedding_dim, device=device)
        else:
            module.weight.data[index] = 1.0

    def fail():
        """Raise after the work of a step: rows and their state stay, and what all rows share has counted it, as in torch."""
        if isinstance(module, speedtransfer.Embedding):
            opt._optimizer_step_code = lambda: [].pop()  # torch calls it before the hooks after a step
            with pytest.raises(IndexError, match="pop from empty list"):
                opt.step()
            del opt._optimizer_step_code
            (weight,) = opt.param_groups[0]["params"]
            assert weight.shape == module.weight.shape
        elif opt.state:
            planes = [module.weight.data, *(it for it in tensors_in(opt.state[module.weight]).values() if it.dim())]
            before = [plane.clone() for plane in planes]
            opt.step()
            for plane, values in zip(planes, before, strict=True):
                plane.copy_(values)

    device, seen = module.weight.device, list[Any]()
    zero_grad = opt.zero_grad if oracle is None else oracle.zero_grad
    names = {"collections": collections, "copy": copy, "torch": torch, "nn": nn, "math": math, "device": device.type}
    names |= {"seen": seen, "batches": batches, "module": module, "opt": opt, "zero_grad": zero_grad}
    names |= {"loss": loss, "step": step, "train": train, "put": put, "fail": fail}
    names["threes"] = list(zip(batches[::3], batches[1::3], batches[2::3], strict=True))
    names["empty"] = tuple(part[:0] for part in (batches[0][0].view(-1), batches[0][1].view(-1, module.embedding_dim)))
    exec(compile(program.code, f"<{program.title}>", "exec"), names)
    return seen


def compare(program, pair, tolerance, oracle=None):
    modules, batches = pair.modules, pair.batches(24)
    ours, dense = pair.optimizers
    seen = run(program, modules[0], ours, batches), run(program, modules[1], dense, batches, oracle)
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-4)
    pair.assert_same(tolerance)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_lazily(program, name):
    """As torch with idle rows put back after each step: bit for bit, where sums are made in the same order."""
    twins = Twins(case_named(name).make)
    compare(program, twins, 1e-5 if has(program, SUMMED) else 0.0, twins.oracle)


SPARSE = [(program, name) for program in PROGRAMS for name in TAKERS if not has(program, DENSE)]


@pytest.mark.sweep("program", "name")
@pytest.mark.parametrize(("program", "name"), SPARSE, ids=lambda it: it.title if isinstance(it, Case) else it)
def test_with_sparse_gradients(program, name):
    compare(program, sparse(TAKERS[name]), 1e-5 if has(program, SUMMED) else None)
