"""Steps by the kernel of step.cu, run on the CPU: the bits of torch's own optimizers, step by step."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import raising
from cpu_kernels import launch_by_cpu
from lazy_oracle import Twins
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from speedtransfer.engines import HostEngine, cache_kernels
from speedtransfer.errors import DeviceError
from speedtransfer.optim import fused_step
from speedtransfer.optim.fused_step import SWITCH
from speedtransfer.optim.probe import outcomes

Make = Callable[[Any], Optimizer]

OPTIMIZERS = {
    "sgd": lambda params: SGD(params, 0.1),
    "sgd-maximize": lambda params: SGD(params, 0.1, weight_decay=0.03, maximize=True),
    "sgd-momentum": lambda params: SGD(params, 0.1, momentum=0.9),
    "sgd-dampening": lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.4, weight_decay=0.03, maximize=True),
    "sgd-nesterov": lambda params: SGD(params, 0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd-integers": lambda params: SGD(params, 1, momentum=1, dampening=1, weight_decay=1),
    "adam": lambda params: Adam(params, 0.01),
    "adam-decay": lambda params: Adam(params, 0.01, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1, maximize=True),
    "adam-amsgrad": lambda params: Adam(params, 0.01, betas=(0.3, 0.9), amsgrad=True),
    "adam-no-betas": lambda params: Adam(params, 0.01, betas=(0.0, 0.0), eps=0.1),
    "adamw-decay": lambda params: AdamW(params, 0.01, (0.95, 0.97), weight_decay=0.3, amsgrad=True, maximize=True),
}
NUM_ROWS = 23
CACHED = [{}, {"cache_rows": 9}, {"cache_rows": NUM_ROWS, "cache_counts": torch.ones(NUM_ROWS)}]

# torch's CPU code without vectors, which it takes on a machine that has none, does not fuse products with sums.
fuses = pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch has no vectors here")


@pytest.fixture
def launches(monkeypatch):
    """Run the kernel on the CPU; return a list as long as there were launches."""
    launch_by_cpu(monkeypatch, cache_kernels)
    return launch_by_cpu(monkeypatch, fused_step)


@pytest.fixture
def exact_roots(monkeypatch):
    """Round square roots as CUDA and IEEE do: torch takes those of the MKL, whose last bit may be another."""
    monkeypatch.setattr(Tensor, "sqrt", lambda values: torch.from_numpy(np.sqrt(values.detach().numpy())))


@pytest.fixture
def switched_on(launches, monkeypatch):
    """Let tables on the CPU take the fused way; return the launches so far, those of the check left out."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(HostEngine, "runs_kernels", True)
    monkeypatch.setattr(HostEngine, "update", lambda self, *given: given[-1](None), raising=False)
    assert fused_step._check(torch.device("cpu"))
    for asked in ("is_trusted", "_has_bits_of_torch"):
        monkeypatch.setattr(fused_step, asked, lambda *args: True)
    launches.clear()
    return launches


def bits(values):
    return values.detach().contiguous().view(torch.int32)


@fuses
@pytest.mark.sweep("name")
@pytest.mark.parametrize("width", [1, 4, 7, 64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_kernel_against_torch(name, width, launches, exact_roots):
    """From any values of weights and state; every other step takes state that was read along, and notes its number."""
    torch.manual_seed(width)
    dense = nn.Parameter(torch.randn(NUM_ROWS, width))
    optimizer = OPTIMIZERS[name]([dense])
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    planes = {}
    # Rows further apart than they are wide, and not where lanes of 16 bytes could be moved.
    stored = torch.full((NUM_ROWS, width + 3), 7.0)
    weight = stored[:, 1 : width + 1]
    weight.copy_(dense.detach())
    last = torch.zeros(NUM_ROWS, 2, dtype=torch.int32)[:, 1:]
    for number in range(40):
        dense.grad = torch.randn(NUM_ROWS, width) * 10.0 ** torch.randint(-12, 4, (NUM_ROWS, 1))
        if number == 0:
            optimizer.step()
            weight.copy_(dense.detach())
            planes = {key: v.clone() for key, v in optimizer.state[dense].items() if v is not None and v.dim()}
        else:
            (group,) = optimizer.param_groups
            plan = fused_step._PLANS[type(optimizer)](group, optimizer.state[dense], dict.fromkeys(planes, ""))
            assert plan is not None
            ids = torch.tensor([*torch.randperm(NUM_ROWS), NUM_ROWS, NUM_ROWS, -1])
            exists = ids.clamp(0, NUM_ROWS - 1)
            rows, grad = weight[exists], dense.grad[exists]
            padding = rows[NUM_ROWS:].clone()
            states, noted = list(planes.values()), [[], None, 0]
            if number % 2:
                noted = [[plane[exists] for plane in states], last, number]
            fused_step._queue(plan, ids, grad, rows, weight, states, *noted)
            assert (last == number - 1 + number % 2).all()
            optimizer.step()
            assert torch.equal(bits(rows[:NUM_ROWS]), bits(weight[ids[:NUM_ROWS]]))
            assert torch.equal(rows[NUM_ROWS:], padding)
        schedule.step()
        assert torch.equal(bits(weight), bits(dense)), number
        for key, plane in planes.items():
            assert torch.equal(bits(plane), bits(optimizer.state[dense][key])), (number, key)
    assert (stored[:, 0] == 7).all()
    assert (stored[:, width + 1 :] == 7).all()
    assert len(launches) == 39


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
@pytest.mark.parametrize("number", [0.0, 1.0, 12.0, 1e4, 2.0**24])
def test_corrections_made_by_the_kernel(number, betas, launches, monkeypatch):
    """Where the number of the step is on the device: the same from the first step to the last that float32 can count."""
    torch.manual_seed(0)
    (group,) = Adam([nn.Parameter(torch.zeros(1))], 0.1, betas).param_groups
    grad, planes = torch.randn(5, 4), {"exp_avg": torch.randn(5, 4), "exp_avg_sq": torch.rand(5, 4)}
    plan = fused_step._plan_adam(group, {"step": torch.tensor(number), **planes}, dict.fromkeys(planes, ""))
    assert plan is not None
    expected, found = torch.zeros(2, 5, 4)
    states = [[plane.clone() for plane in planes.values()] for _ in range(2)]
    fused_step._queue(plan, torch.arange(5), grad, torch.zeros(5, 4), expected, states[0])
    assert plan.steps is not None
    plan.steps.add_(1)
    monkeypatch.setattr(fused_step.FusedStep, "on_device", property(lambda plan: [plan.steps]))
    plan = plan._replace(rate=-0.1, root_correction=1.0)
    fused_step._queue(plan, torch.arange(5), grad, torch.zeros(5, 4), found, states[1])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


def test_the_check_notices_a_wrong_kernel(launches, monkeypatch):
    cpu = torch.device("cpu")
    assert fused_step._check(cpu)
    launch = fused_step.launch_over
    for wrong in range(12):
        calls = iter(range(99))

        def spoilt(*args, wrong=wrong, calls=calls, **given):
            if next(calls) != wrong:
                launch(*args, **given)

        monkeypatch.setattr(fused_step, "launch_over", spoilt)
        assert not fused_step._check(cpu)


def twins(make, **options):
    # A trial of the optimizer makes the first step read its rows again.
    outcomes._known.clear()
    return Twins(make, num_rows=NUM_ROWS, size=8, **options)


@fuses
@pytest.mark.sweep
@pytest.mark.parametrize("cached", CACHED)
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_has_the_bits_of_torch(name, idle, cached, switched_on, exact_roots):
    pair = twins(OPTIMIZERS[name], idle=idle, **cached)
    pair.train(pair.batches(12), *pair.schedulers(lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.97**step)))
    pair.assert_same()
    # The first step makes the state.
    assert len(switched_on) == 11


@fuses
def test_beside_other_parameters_and_hooks(switched_on, exact_roots):
    pair, seen = twins(OPTIMIZERS["adam"]), ([], [])
    for module, optimizer, weights in zip(pair.modules, pair.optimizers, seen, strict=True):
        torch.manual_seed(5)
        linear = nn.Linear(4, 4)
        linear.weight.grad = torch.ones(4, 4)
        optimizer.add_param_group({"params": linear.parameters(), "lr": 0.1})
        look = lambda *_, module=module, weights=weights: weights.append(module.weight[3].detach().clone())  # noqa: E731
        optimizer.register_step_pre_hook(look)
    pair.train(pair.batches(12))
    pair.assert_same()
    assert all(map(torch.equal, *seen))
    assert torch.equal(*(optimizer.param_groups[1]["params"][0] for optimizer in pair.optimizers))


@pytest.mark.parametrize("cached", CACHED[::2])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_it_counts_as_the_ordinary_way(idle, cached, switched_on, monkeypatch):
    counted = []
    for switch in ("1", "0"):
        monkeypatch.setenv(SWITCH, switch)
        pair = twins(OPTIMIZERS["adam"], idle=idle, **cached)
        pair.train(pair.batches(6))
        counted.append((pair.ours.table.stats(), pair.ours._handle.rows.state_dict()))
    assert counted[0] == counted[1]
    assert len(switched_on) == 5


def test_the_rows_of_a_lookup_become_the_new_ones(switched_on):
    pair = twins(OPTIMIZERS["adam"])
    pair.train(pair.batches(12))
    pair.opt.zero_grad()
    table, active = pair.ours.table, pair.ours.activate(torch.tensor([3, 4, 3]))
    version, table_version = active.rows._version, table.version
    active.rows.sum().backward()
    pair.opt.step()
    assert torch.equal(active.rows.detach(), table.gather(active.ids))
    # A graph that has saved them, or the weight, raises in its backward.
    assert active.rows._version > version
    assert table.version > table_version + 1
    assert len(switched_on) == 12


ORDINARY = {
    "subclass": (type("Mine", (Adam,), {}), {}),
    "lr-tensor": (lambda params: Adam(params, torch.tensor(0.01)), {}),
    "double": (Adam, {"dtype": torch.float64}),
    "state": (Adam, {"state_dtype": torch.bfloat16}),
    "storage": (Adam, {"storage_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_the_ordinary_way(name, switched_on):
    make, options = ORDINARY[name]
    pair = twins(make, **options)
    pair.train(pair.batches(6))
    assert switched_on == []


def a_step_of_somebody_else(patch, seen):
    before = Adam.step
    patch.setattr(Adam, "step", functools.wraps(before)(lambda *args: (seen.append(1), before(*args))[1]))


KEEPS = [
    (lambda patch, seen: patch.setenv(SWITCH, "0"), 0),
    (lambda patch, seen: patch.setattr(fused_step, "is_capturing", lambda: True), 0),
    (lambda patch, seen: patch.setattr(fused_step, "is_trusted", lambda *args: False), 0),
    # Of both sides.
    (lambda patch, seen: register_optimizer_step_pre_hook(lambda *args: seen.append(1)), 12),
    (a_step_of_somebody_else, 12),
]


@pytest.mark.parametrize(("what", "calls"), KEEPS)
def test_what_keeps_it_from_the_kernel(what, calls, switched_on):
    """What would look at the rows meanwhile, too."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        hook = what(patch, seen)
        pair = twins(OPTIMIZERS["adam"])
        pair.train(pair.batches(6))
    if hook is not None:
        hook.remove()
    pair.assert_same()
    assert switched_on == []
    assert len(seen) == calls


SWITCHED = [("sgd-momentum", "momentum", "lazy"), ("sgd-momentum", "momentum", "exact")]
SWITCHED += [(name, "weight_decay", "exact") for name in ("adam", "sgd")]


@fuses
@pytest.mark.parametrize(("name", "key", "idle"), SWITCHED)
def test_a_hyperparameter_switched_off_and_on(name, key, idle, switched_on, exact_roots):
    """Rows of idle="exact" catch up before steps of another kind; those of SGD miss none as long as it is nothing but that."""
    pair = twins(OPTIMIZERS[name], idle=idle)
    for number, batch in enumerate(pair.batches(12)):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0][key] = 0.0 if number % 8 < 4 else 0.9
        pair.train([batch])
    pair.assert_same()
    # Not the first step, and with momentum those whose state is not the planes.
    assert 0 < len(switched_on) < 11 + (key == "weight_decay")


@pytest.mark.parametrize("error", [DeviceError, ValueError])
@pytest.mark.parametrize("options", [{"idle": "lazy"}, {"idle": "exact"}, {"idle": "exact", "cache_rows": 9}], ids=str)
def test_a_step_that_fails(error, options, switched_on, monkeypatch):
    """It leaves the table, the state and the gradient as they were, and can be made again."""

    pair = twins(OPTIMIZERS["adam"], **options)
    pair.train(pair.batches(12))
    pair.zero_grad()
    pair.backward(*pair.batches(1, seed=1)[0])
    emb, optimizer = pair.ours, pair.opt

    def everything():
        state = optimizer.state_dict()["state"][0]
        return [emb.table.torch().clone(), emb.weight.grad.to_dense().clone(), *copy.deepcopy(state).values()]

    before = everything()
    with monkeypatch.context() as patch:
        if error is DeviceError:
            patch.setattr(fused_step, "launch_over", raising(DeviceError("no launch")))
        else:
            patch.setitem(optimizer.param_groups[0], "betas", (0.9,))
        with pytest.raises(error):
            optimizer.step()
    assert all(map(torch.equal, everything(), before))
    pair.step()
    assert len(switched_on) == 12
    assert float(optimizer.state[emb.weight]["step"]) == 13
