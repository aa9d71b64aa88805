"""State dicts that continue in another optimizer, of torch or of a table, whatever they hold; hyperparameters edited.

Weights and state are those of a dense optimizer in float64.
"""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from cases import saved, take_step
from lazy_oracle import Twins, exact
from optimizer_cases import BASE, COUPLED, FUSED, case_named, some
from torch import Tensor, nn, optim
from weight_cases import parse
from weight_world import assert_equal, run_code

import speedtransfer as st
from speedtransfer.errors import OptimizerError

State = dict[str, Any]

# --- there and back -----------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("case", some([*BASE, *FUSED, *COUPLED]), ids=str)
def test_there_and_back(case, idle):
    """From ours to torch and from torch to ours, through a file; into a new optimizer and one that has trained already."""
    pair, again = ((Twins(case.make) if idle == "lazy" else exact(case, torch.float64)) for _ in range(2))
    for seed in range(3):
        pair.train(pair.batches(8, seed=seed))
        for to, source in ((0, 1), (1, 0)):
            again.modules[to].load_state_dict(pair.modules[source].state_dict())
            again.optimizers[to].load_state_dict(saved(pair.optimizers[source].state_dict(), weights_only=True))
        # Before any step.
        states = (optimizer.state_dict() for optimizer in again.optimizers)
        assert_equal(*states, 0.0 if idle == "lazy" else 1e-9, case.name)
        pair, again = again, pair
    pair.train(pair.batches(8, seed=4))
    pair.assert_same(1e-9 if idle == "exact" else None)


def trained(steps):
    twins = Twins(case_named("adamw").make)
    twins.train(twins.batches(steps))
    return twins


def test_planes_never_pass_through_the_device_of_the_parameter(monkeypatch):
    sizes = []
    usual = torch.optim.Optimizer._process_value_according_to_param_policy

    def cast(param, value, *args, **kwargs):
        sizes.append(value.numel())
        return usual(param, value, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(cast))
    state, ours = copy.deepcopy(trained(3).dense_opt.state_dict()), trained(2)
    loaded = state["state"][0]["exp_avg"]
    ours.opt.load_state_dict(state)
    # Nothing of the size of the table.
    assert max(sizes) == 1
    # It is not copied, and is the caller's.
    assert ours.opt.state[ours.ours.weight]["exp_avg"] is loaded
    before = loaded.clone()
    ours.train(ours.batches(1))
    assert torch.equal(loaded, before)


# --- state that is read and written between steps -------------------------------------------------------------------------


WRITES = {
    "zero_": Tensor.zero_,
    "some rows": lambda value: value[1:9].mul_(0.5),
    "rows of a mask": lambda value: value.__setitem__(torch.arange(60) % 3 == 0, 0.25),
    "foreach": lambda value: torch._foreach_mul_([value], 0.5),
    "numpy": lambda value: np.multiply(value.numpy(), 0.5, out=value.numpy()),
    "data": lambda value: setattr(value, "data", value * 0.5),
}
# An array of state of which a cache has rows cannot be written.
CACHED = [(write, {"cache_rows": 7}) for write in WRITES if write != "numpy"]


@pytest.mark.parametrize(("write", "options"), [*((write, {}) for write in WRITES), *CACHED], ids=str)
@pytest.mark.parametrize("name", ["adamw", "adamax", "sgd-momentum", "adam-weight-decay", "rmsprop-centered"])
def test_state_is_read_and_written_as_in_torch(name, write, options):
    """Rows take the steps that they have missed by the state of before; a tensor that was taken earlier is that of now."""
    pair, kept = exact(case_named(name), torch.float64, **options), list[list[Tensor]]()
    for seed in range(3):
        pair.train(pair.batches(6, seed=seed))
        seen = list[list[float]]()
        for module, optimizer in zip(pair.modules, pair.optimizers, strict=True):
            state = optimizer.state[module.weight]
            found = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            kept.append(found)
            for value in found if seed != 1 else kept[len(kept) - 3]:
                seen.append([float(value.norm()), *value[3].tolist(), value.dim()])
                WRITES[write](value)
            assert all(value is state_value for value, state_value in zip(found, kept[-1], strict=True))
        half = len(seen) // 2
        assert torch.tensor(seen[:half]).allclose(torch.tensor(seen[half:]), rtol=1e-9, atol=1e-12)
    pair.train(pair.batches(6, seed=4))
    pair.assert_same(1e-9)


def test_state_of_other_dtypes_that_somebody_puts_in():
    pair = exact(case_named("sgd-momentum"), torch.float32)
    pair.train(pair.batches(3))
    own = {"visits": torch.arange(60).view(60, 1) + 2**30 + 1, "wide": torch.full((60, 2), 1 / 3, dtype=torch.float64)}
    for module, optimizer in zip(pair.modules, pair.optimizers, strict=True):
        optimizer.state[module.weight] |= {name: value[: module.weight.shape[0]].clone() for name, value in own.items()}
    pair.train(pair.batches(3, seed=1))
    ours, theirs = (opt.state[module.weight] for module, opt in zip(pair.modules, pair.optimizers, strict=True))
    for name in own:
        assert torch.equal(ours[name], theirs[name])
        assert ours[name].dtype == theirs[name].dtype


def test_state_has_no_memory_of_its_own():
    twins = trained(3)
    value = twins.opt.state[twins.ours.weight]["exp_avg"]
    with pytest.raises(OptimizerError, match="write into it with copy_"):
        value.resize_(3, 2)
    with pytest.raises(OptimizerError, match="pass values of that shape"):
        value.data = torch.zeros(2, 2)
    assert type(value * 1) is type(copy.deepcopy(value)) is type(saved(value)) is Tensor


# --- a few rows, trained by torch and by a table ------------------------------------------------------------------------

ROWS = 10


def made(make, kind, options):
    torch.manual_seed(0)
    module = make(ROWS, 2, dtype=torch.float64)
    return module, kind(module.parameters(), **{"lr": 0.02, **options})


def train(module, optimizer, steps, edits=None, seed=1):
    """Train rows 0 to 7, some at the steps of the edits of the group, one step before or never in between.

    The loss is linear, so that no difference grows by itself.
    """
    draw, edits = torch.Generator().manual_seed(seed), edits or {}
    for step in range(steps):
        optimizer.param_groups[0].update(edits.get(step, {}))
        ids = [1]
        ids += [0] if step in (0, 1) else []
        ids += [2] if step in edits or step == 0 else []
        ids += [3] if step + 1 in edits else []
        ids += [4, 5] if step == steps - 1 else []
        ids += [5, 6, 7] if step == 0 else []
        ids += [6] if step % 7 == 3 else []
        slope = torch.randn(len(ids), 2, generator=draw, dtype=torch.float64) * 1e-3
        take_step(optimizer, (module(torch.tensor(ids)) * slope).sum())


# How far the rows went, and the state of the optimizer; or the error.
Outcome = tuple[Tensor, State] | Exception


def outcome(module, optimizer, use):
    before = module.weight.detach().clone()
    try:
        use()
    except Exception as error:
        return error
    return module.weight.detach() - before, optimizer.state_dict()["state"].get(0, {})


def assert_as(dense, ours, tolerance=1e-9):
    """Each row by itself, as some edits send a few of them far away; an error where torch raises."""
    if isinstance(dense, Exception):
        # Of torch where it is the same one, else ours.
        assert isinstance(ours, (type(dense), OptimizerError, st.errors.InvalidValueError)), ours
        return
    assert not isinstance(ours, Exception), ours
    way = dense[0].abs().amax(1, keepdim=True)
    assert ((ours[0] - dense[0]).abs() <= tolerance * way.clamp_min(1e-3)).all()
    assert ours[1].keys() == dense[1].keys()
    for name, value in dense[1].items():
        if isinstance(value, Tensor):
            atol = tolerance * float(value.abs().max())
            torch.testing.assert_close(ours[1][name], value, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
        else:
            assert type(ours[1][name]) is type(value)


# --- state dicts that are not quite what the optimizer would save: as in torch, or errors where torch raises -------------

_SGD = {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
ONES = torch.ones(10, 2, dtype=torch.float64)


# By name: class, hyperparameters when it is saved and when it is loaded, what is in the state of each parameter then.
LOADED = {
    "amsgrad off": (optim.Adam, {"amsgrad": True}, {"amsgrad": False}, dict),
    "amsgrad on": (optim.Adam, {}, {"amsgrad": True}, dict),
    "momentum off": (optim.RMSprop, {"momentum": 0.9}, {"momentum": 0.0, "weight_decay": 0.1}, dict),
    "SGD momentum off": (optim.SGD, _SGD, {"momentum": 0.0}, dict),
    "SGD momentum on": (optim.SGD, {}, _SGD, dict),
    "a plane of others": (optim.Adam, {}, {}, lambda state: state | {"third": state["exp_avg"] + 1}),
    "a number of others": (optim.Adagrad, {}, {}, lambda state: state | {"third": torch.tensor(2.0)}),
    "a plane in a dict": (optim.NAdam, {}, {}, lambda state: state | {"third": {"a": state["exp_avg"] + 1}}),
    "SGD from Adam": (optim.SGD, {}, {"momentum": 0.9}, lambda _: {"step": torch.tensor(3.0), "exp_avg": ONES}),
    "no second moments": (optim.Adam, {}, {}, lambda state: {k: v for k, v in state.items() if k != "exp_avg_sq"}),
    "no step": (optim.Adam, {}, {}, lambda state: {k: v for k, v in state.items() if k != "step"}),
    "None": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": None}),
    "SGD empty": (optim.SGD, _SGD, _SGD, lambda state: {}),
    "single precision": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": state["exp_avg"].float()}),
    "transposed": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": state["exp_avg"].t().contiguous().t()}),
    "fewer rows": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": state["exp_avg"][1:]}),
    "no rows": (optim.Adam, {}, {}, lambda state: state | {"exp_avg": torch.tensor(0.5)}),
    "step float": (optim.NAdam, {}, {}, lambda state: state | {"step": 5.0, "mu_product": 0.3}),
    "step of one": (optim.Adam, {}, {}, lambda state: state | {"step": torch.tensor([5.0])}),
}


def outcome_of_loading(make, saver, case):
    kind, before, options, change = LOADED[case]
    module, optimizer = made(saver, kind, before)
    train(module, optimizer, 5, seed=0)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    saved["state"][0] = change(saved["state"].get(0, {}))
    saved["param_groups"][0].update(options)
    module, optimizer = made(make, kind, options)
    module.load_state_dict(weights)
    found = outcome(module, optimizer, lambda: (optimizer.load_state_dict(saved), train(module, optimizer, 8)))
    if isinstance(found, Exception) and optimizer.state:
        with pytest.raises(type(found)):
            # It does not go on as if nothing had been.
            train(module, optimizer, 1)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("case", LOADED)
@pytest.mark.parametrize("saver", [nn.Embedding, st.Embedding])
def test_loaded_state(case, saver):
    assert_as(outcome_of_loading(nn.Embedding, nn.Embedding, case), outcome_of_loading(st.Embedding, saver, case))


def _swap(module, optimizer):
    """Train with other state meanwhile, and then go on with that of before, of which nobody has made a copy."""
    kept = optimizer.state_dict()
    other = copy.deepcopy(kept)
    for value in other["state"][0].values():
        value.mul_(0.5 if value.dim() else 1)
    optimizer.load_state_dict(other)
    train(module, optimizer, 4)
    optimizer.load_state_dict(kept)


def _note_gradient(module, optimizer):
    """Keep the last gradient, as it is, with the state: of a fused step a wrong size would be memory that is not its own."""
    for row in range(4):
        (module(torch.tensor([row, 5])) * 1e-3).sum().backward()
        optimizer.state[module.weight]["before"] = module.weight.grad
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("way", [_swap, _note_gradient])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Rprop, optim.RMSprop])
def test_state_is_replaced(kind, way, layout):
    found = []
    for make in (nn.Embedding, functools.partial(st.Embedding, layout=layout)):
        pair = made(make, kind, {})
        found.append(outcome(*pair, lambda pair=pair: (train(*pair, 5), way(*pair), train(*pair, 4, seed=2))))
    assert_as(*found)


# --- hyperparameters edited between steps while rows are idle -----------------------------------------------------------

STEPS = 26
_OF_ALL = {"maximize": [True], "foreach": [True, False], "differentiable": [True], "capturable": [True]}
_RATE, _DECAYS = {"lr": [0.1, 0.0]}, {"weight_decay": [0.0, 0.2]}
_ADAM = {
    "lr": [0.5, 0.0, torch.tensor(0.1, dtype=torch.float64)],
    "betas": [(0.0, 0.999), (0.99, 0.999), (0.9, 0.1), (0.5, 0.9)],
    "eps": [1e-2, 1.0, 1e-12],
    "weight_decay": [0.0, 0.1],
    "amsgrad": [False, True],
    "fused": [True],
    "decoupled_weight_decay": [True, False],
    "momentum_decay": [0.1, 0.0],
}
_SGD = {"momentum": [0.0, 0.5], "dampening": [0.5], "nesterov": [True, False], "fused": [True]}
_RMSPROP = {"alpha": [0.5, 0.9], "eps": [1e-2, 1e-12], "momentum": [0.0, 0.5], "centered": [True, False]}
_RPROP = {"etas": [(0.3, 1.5)], "step_sizes": [(1e-3, 1e-2), (1e-2, 1.0), (1e-9, 1e-4)]}
_ADAGRAD = {"lr_decay": [0.0, 0.5], "eps": [1e-2], "fused": [True]}
_ASGD = {"lambd": [0.2, 0.0], "alpha": [0.2, 2.0], "t0": [0, 20]}
_DECAY, _DECOUPLED = {"weight_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}
_CENTERED = {"centered": True, "momentum": 0.9}
_MOMENTUM = {"momentum": 0.9, **_DECAY}
# By class: hyperparameters to begin with, and values that those of the group are set to.
EDITS = {
    "SGD": ([{}, _MOMENTUM, {**_MOMENTUM, "nesterov": True}], {**_RATE, **_DECAYS, **_SGD}),
    "Adam": ([{}, {"amsgrad": True}, _DECAY, {"amsgrad": True, **_DECAY}], _ADAM),
    "AdamW": ([{"amsgrad": True}, {"betas": (0.9, 0.9), **_DECAY}], _ADAM),
    "NAdam": ([{}, _DECAY, _DECOUPLED], _ADAM),
    "RAdam": ([{"betas": (0.9, 0.99)}, _DECAY, _DECOUPLED], _ADAM),
    "Adamax": ([{}, _DECAY, {"eps": 1e-2}], _ADAM),
    "RMSprop": ([{}, _CENTERED, {**_CENTERED, **_DECAY}], {**_RATE, **_DECAYS, **_RMSPROP}),
    "Adadelta": ([{"lr": 1.0}, {"lr": 1.0, **_DECAY}], {**_RATE, **_DECAYS, "rho": [0.5, 0.99, 0.0], "eps": [1e-2]}),
    "Adagrad": ([{}, {"lr_decay": 0.1, **_DECAY}], {**_RATE, **_DECAYS, **_ADAGRAD}),
    "Rprop": ([{}, {"lr": 100.0}], {"lr": [0.1], **_RPROP}),
    "ASGD": ([{"t0": 5}, {"lambd": 0.1, "t0": 3, **_DECAY}], {**_RATE, **_DECAYS, **_ASGD}),
}
for _, _edits in EDITS.values():
    _edits.update(_OF_ALL)
# Steps before which the value is set, and those before which it is set back. Row 2 wakes at each.
PLANS = {
    "once": ([7], []),
    "back": ([7], [15]),
    "a step": ([7], [8]),
    "again": ([7, 13], [12]),
    "late": ([1], [STEPS - 1]),
}


def _group_of(kind, start):
    return getattr(optim, kind)([nn.Parameter(torch.zeros(1))], **{"lr": 0.02, **start}).param_groups[0]


def edits_of(kind, key):
    """Return the edits of a hyperparameter: what the group begins with, the hyperparameter, the value, the plan."""
    starts, edits = EDITS[kind]
    groups = [(start, group) for start in starts for group in [_group_of(kind, start)] if key in group]
    changes = [(start, value) for start, group in groups for value in edits[key] if value is not group[key]]
    return [(start, key, value, plan) for start, value in changes for plan in PLANS]


def check(kind, start, edits, steps=STEPS, tolerance=1e-9):
    pairs = [made(make, getattr(optim, kind), start) for make in (nn.Embedding, st.Embedding)]
    assert_as(*(outcome(*pair, lambda pair=pair: train(*pair, steps, edits)) for pair in pairs), tolerance)


def check_edit(kind, start, key, value, plan):
    there, back = PLANS[plan]
    original = _group_of(kind, start)[key]
    edits = {step: {key: value} for step in there} | {step: {key: original} for step in back}
    try:
        # Torch's corrections of bias are in single precision then; see `docs/optimizers.md`.
        check(kind, start, edits, tolerance=1e-5 if key == "differentiable" else 1e-9)
    except Exception as error:
        raise AssertionError(f"{kind} of {start}, {key} becomes {value}, {plan}: {error}") from error


@pytest.mark.parametrize("kind", EDITS)
def test_as_dense(kind):
    """Each hyperparameter in one way: with another start, value and plan than the one before."""
    for number, key in enumerate(EDITS[kind][1]):
        # What all optimizers have takes half of them.
        if (key in _OF_ALL and (number + [*EDITS].index(kind)) % 2) or not (every := edits_of(kind, key)):
            continue
        check_edit(kind, *every[number * 7 % len(every)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", EDITS)
def test_every_edit_as_dense(kind):
    for key in EDITS[kind][1]:
        for edit in edits_of(kind, key):
            check_edit(kind, *edit)


def test_state_that_no_factor_describes():
    """Norms above eps, the mean of the gradients while `centered` is off, step sizes between two bounds."""
    check("Adamax", {}, {7: {"eps": 1.0}, 15: {"eps": 1e-8}})
    check("RMSprop", {"centered": True}, {7: {"centered": False}, 15: {"centered": True}})
    check("Rprop", {}, {7: {"step_sizes": (1e-9, 1e-4)}, 8: {"step_sizes": (1e-6, 50)}})
    # Second moments of rows that were trained meanwhile are larger than their largest so far.
    for edits in ({1: False, 23: True}, {9: False, 10: True}, {1: False, 20: True, 21: False, 24: True}):
        check("Adam", {"amsgrad": True}, {step: {"amsgrad": value} for step, value in edits.items()})
    # What steps add to a row becomes negligible, and matters again: each divides by less than the one before.
    check("Adam", {"eps": 1e-30}, {330: {"betas": (0.9, 0.01)}}, 360)


# --- of two tables ----------------------------------------------------------------------------------------------------


def two(kind, dtype=torch.float64):
    """Return two modules with an optimizer, and what steps with rows `k` and `k + 1` of them."""
    torch.manual_seed(0)
    a, b = (kind(6, 2, dtype=dtype) for _ in range(2))
    opt = optim.Adam([a.weight, b.weight], lr=0.1)

    def steps(*rows):
        for k in rows:
            take_step(opt, a(torch.tensor([k])).square().sum() + b(torch.tensor([k + 1])).square().sum())

    steps(0, 1, 2)
    return a, b, opt, steps


# Each is run on tables of torch and on ours; its value is compared.
PROGRAMS = parse(
    "two tables",
    """
# state exchanged
opt.state[a.weight], opt.state[b.weight] = opt.state[b.weight], opt.state[a.weight]
steps(0, 3)
x, y = opt.state[a.weight], opt.state[b.weight]
x["exp_avg"], y["exp_avg"] = y["exp_avg"], x["exp_avg"]
steps(1, 2)
[a.weight, b.weight]

# state kept over a load
before = copy.deepcopy(opt.state_dict())
steps(4)
kept = opt.state[a.weight]["exp_avg"]
opt.load_state_dict(before)
steps(3)
seen = kept.clone()
kept.zero_()
steps(3)
[seen, a.weight, b.weight]

# the gradient of another, once for all: as asynchronous actor-critics have it, of a shared model and a local one
b.weight.grad, opt = None, torch.optim.SGD([b.weight], lr=0.1, momentum=0.9)
for k in range(4):
    a.load_state_dict(b.state_dict())
    a.zero_grad(set_to_none=False)
    a(torch.tensor([k, k + 1])).square().sum().backward()
    if b.weight.grad is None:
        b.weight.grad = a.weight.grad
    opt.step()
[b.weight]

# the memory of another
b = type(a).from_pretrained(a.weight.detach(), freeze=False)
opts, seen = [torch.optim.SGD([each.weight], lr=0.1, momentum=0.9) for each in (a, b)], []
for k in range(4):
    take_step(opts[1], b(torch.tensor([k])).square().sum())
    seen.append(a(torch.arange(6)))
    if k > 1:
        take_step(opts[0], a(torch.tensor([5 - k])).square().sum())
[*seen, a.weight, b.weight]
""",
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
def test_of_two_tables(program):
    found = []
    for kind in (st.Embedding, nn.Embedding):
        names = dict(zip(("a", "b", "opt", "steps"), two(kind), strict=True))
        found.append(run_code(program.id, program.code, names | {"copy": copy, "torch": torch, "take_step": take_step}))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.detach().clone(), theirs.detach(), rtol=0, atol=1e-7)


def test_two_tables_in_one_memory_are_not_trained_by_one_optimizer():
    rows = torch.ones(6, 2)
    a, b = (st.Embedding.from_pretrained(part, freeze=False) for part in (rows[:4], rows[2:]))
    opt = optim.SGD([a.weight, b.weight], lr=0.1)
    with pytest.raises(OptimizerError, match=r"in the memory of .*, and the step of the one would overwrite"):
        take_step(opt, a(torch.tensor([0])).sum() + b(torch.tensor([0])).sum())
    assert torch.equal(rows, torch.ones(6, 2))


def test_state_of_8_bits_is_read_and_written():
    a, _, opt, steps = two(functools.partial(st.Embedding, state_dtype=torch.uint8), torch.float32)
    held = opt.state[a.weight]["exp_avg"]
    part, before = held[1:3], held.clone()
    held[4] = 0.25
    part.mul_(0)
    assert (before.dtype, held.is_contiguous(), held.stride()) == (torch.float32, True, (2, 1))
    assert torch.equal(opt.state_dict()["state"][0]["exp_avg"][:, 0] == 0.25, torch.arange(6) == 4)
    steps(1)
    # A part of it is that of now, too.
    assert part.ne(0).any(1).tolist() == [True, False]
    assert torch.equal(held[1:3], part)
    # A step of all rows, which is made in the memory of the table only where the state is that memory too.
    take_step(opt, a.weight.square().sum())
    assert held.ne(0).all()
    a.double()
    with pytest.raises(OptimizerError, match="the table of this state is gone"):
        held.clone()
    assert part.ne(0).all()
