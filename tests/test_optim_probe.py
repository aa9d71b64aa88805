"""The probe: what an optimizer keeps for a row and starts from, whether its update is row by row; what is tried again."""

import functools

import pytest
import torch
from cases import take_step
from interrupt import Interrupt
from lazy_oracle import Twins
from optimizer_cases import BASE, REFUSED, case_named
from third_party import REFUSED_STYLES, RowOptimizer
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.flop_counter import FlopCounterMode

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import probe_optimizer
from speedtransfer.optim.probe import Trial, outcomes


def probe(make, dim=3, dtype=torch.float32, lr=None):
    param = nn.Parameter(torch.ones(4, dim, dtype=dtype))
    opt = make([param])
    if lr is not None:
        opt.param_groups[0]["lr"] = lr
    made = len(opt.state)
    found = probe_optimizer(opt, opt.param_groups[0], param)
    assert torch.equal(param, torch.ones_like(param))
    assert len(opt.state) == made
    return found


STARTS = {("adagrad-initial", "sum"): 0.3, ("rprop", "step_size"): 0.03, ("asgd", "ax"): None}


@pytest.mark.parametrize("case", BASE, ids=str)
def test_planes_and_their_starts(case):
    specs = probe(case.make)
    assert set(specs) == set(case.planes)
    for name, spec in specs.items():
        assert (spec.tail, spec.dtype) == ((3,), torch.float32)
        start = STARTS.get((case.name, name), 0.0)
        assert spec.initial == (None if start is None else pytest.approx(start, rel=1e-6))


class Draws(SGD):
    def step(self, closure=None):
        torch.rand(3)
        return super().step(closure)


def test_a_trial_leaves_everything_alone_also_random_numbers_that_the_optimizer_draws():
    state = torch.get_rng_state()
    assert set(probe(functools.partial(Draws, lr=0.1, momentum=0.9))) == {"momentum_buffer"}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_decay_that_is_a_whole_number_hides_no_start():
    sgd = functools.partial(SGD, lr=1, momentum=1, dampening=1, weight_decay=1)
    assert probe(sgd)["momentum_buffer"].initial == 0


@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_training_under_another_default_device(idle, tmp_path):
    case, weights = case_named("sgd-momentum-weight-decay"), []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        emb = speedtransfer.Embedding(9, 4, idle=idle, storage_dtype=torch.bfloat16, state_dtype=torch.uint8)
        opt = case.make(emb.parameters(), foreach=False)
        for ids in (torch.tensor([1, 2]), torch.tensor([2, 3])):
            loss = emb(ids).sum()
            with torch.device(device):
                take_step(opt, loss)
        with torch.device(device):
            speedtransfer.save_checkpoint(tmp_path / device, emb, opt)
            emb.table.zero_()
            speedtransfer.load_checkpoint(tmp_path / device, emb, opt)
        weights.append(emb.table.torch().clone())
    assert torch.equal(*weights)


@pytest.mark.parametrize("at", [1, 301, 601])
def test_a_lack_of_memory_is_no_verdict(at):
    """It comes out of the step, and the next one tries the optimizer anew."""
    emb = speedtransfer.Embedding(9, 4, idle="lazy")
    optimizer = type("Mine", (AdamW,), {})(emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    assert Interrupt(at, MemoryError, "by_rows").during(optimizer.step)
    optimizer.step()


# --- what would train rows otherwise than dense torch is refused: by name, with the reason, and in time -----------------


@pytest.mark.parametrize("kind", [case.kind for case, _ in REFUSED if case.name in ("adafactor", "muon")])
@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-2])
def test_dependence_between_rows_shows_at_any_learning_rate_and_precision(kind, dtype, lr):
    with pytest.raises(OptimizerError, match="not row by row"):
        probe(kind, 16, dtype, lr)


def test_an_optimizer_around_another_is_refused_before_any_trial():
    class Around(torch.optim.Optimizer):
        def __init__(self, params):
            self.base = torch.optim.SGD([dense, *params], lr=1.0)
            super().__init__(self.base.param_groups, {})

        def step(self, closure=None):
            self.base.step()

    dense = nn.Parameter(torch.zeros(3))
    dense.grad = torch.ones(3)
    with pytest.raises(OptimizerError, match="Around wraps SGD"):
        probe(Around)
    assert not dense.any()


EVERY_REFUSED = REFUSED_STYLES | {case.kind: reason for case, reason in REFUSED}


@pytest.mark.sweep("kind")
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("dim", [16, 5, 2])
@pytest.mark.parametrize("kind", EVERY_REFUSED, ids=lambda kind: kind.__name__)
def test_refused_at_the_first_step(kind, dim, scale):
    emb = speedtransfer.Embedding(9, dim)
    before = emb.table.torch().clone()
    opt = kind(emb.parameters())
    loss = (scale * emb(torch.tensor([1, 2])).square()).sum()
    loss.backward()
    with pytest.raises(OptimizerError, match=EVERY_REFUSED[kind]) as caught:
        opt.step(lambda: loss)
    message = str(caught.value)
    assert message.startswith(kind.__name__)
    assert "use " in message
    assert "\n" not in message
    assert torch.equal(emb.table.torch(), before)
    assert emb.table.planes == ("weight",)
    assert not opt.state


class Late(RowOptimizer):
    """Averages from a step on that no trial reaches."""

    def update(self, p, g, state, group):
        state["step"] = state.get("step", 0) + 1
        p.sub_(g, alpha=group["lr"])
        if state["step"] > 40:
            state.setdefault("average", p.clone()).lerp_(p, 0.1)


def test_state_that_changes_later_than_any_trial_is_refused_when_it_does():
    twins = Twins(Late)
    batches = twins.batches(41)
    twins.train(batches[:40])
    twins.assert_same()
    before = twins.ours.table.torch().clone()
    for _ in range(2):  # and again: the row of the step is not lost in silence
        with pytest.raises(OptimizerError, match="Late made state 'average' that it did not make in a trial of 24"):
            twins.train(batches[40:])
        assert torch.equal(twins.ours.table.torch(), before)


class Global(RowOptimizer):
    """Walks over its parameters by an attribute, and takes the model, so that a trial must copy it."""

    def __init__(self, model):
        self.everything = list(model.parameters())
        super().__init__(model.parameters())

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.everything:
                if p.grad is not None:
                    p.sub_(p.grad)


def test_a_trial_cannot_move_the_parameters_of_the_model():
    model = nn.ModuleList([speedtransfer.Embedding(9, 4), nn.Linear(4, 1)])
    opt = Global(model)
    before = [p.detach().clone() for p in model[1].parameters()]
    model[1](model[0](torch.tensor([1, 2]))).sum().backward()
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(OptimizerError, match="a trial moved no row"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model[1].parameters(), before, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


def test_the_first_step_of_a_kind_takes_the_rows_that_the_lookup_has_read():
    """A trial hides the gradient, and the rows with it: read again, those that `max_norm` has written would be rounded."""

    def trained(**unlike_others):
        torch.manual_seed(0)
        emb = speedtransfer.Embedding(20, 8, max_norm=1.0, storage_dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(emb.parameters(), lr=0.1, **unlike_others)
        emb(torch.arange(10)).square().sum().backward()
        optimizer.step()
        return emb.table.torch().clone()

    # The second is not tried again.
    assert torch.equal(trained(betas=(0.731, 0.8)), trained(betas=(0.731, 0.8)))


# --- what a trial has shown is used again for optimizers of torch that are the same, and for no others --------------------


@pytest.fixture
def steps(monkeypatch):
    """Forget what is known, and list the classes of the optimizers that trials step."""
    monkeypatch.setattr(outcomes, "_known", {})
    made = []
    step = Trial.step

    def counted(self, grad):
        made.append(type(self.optimizer))
        return step(self, grad)

    monkeypatch.setattr(Trial, "step", counted)
    return made


def test_the_same_optimizer_is_tried_once(steps):
    first = probe(AdamW)
    # The first optimizer of a class may have wrapped its step.
    probe(AdamW)
    count = len(steps)
    again = probe(AdamW)
    assert len(steps) == count > 0
    assert (again, again.shared, again.gradient) == (first, first.shared, first.gradient)
    # Each has its own.
    again.clear()
    assert set(probe(AdamW)) == {"exp_avg", "exp_avg_sq"}


OTHERS = [
    (AdamW, {"lr": 0.5}, {}),
    (AdamW, {"lr": torch.tensor(1e-3)}, {}),
    (AdamW, {"betas": (0.8, 0.9)}, {}),
    (AdamW, {"weight_decay": -0.0}, {}),
    (AdamW, {"foreach": True}, {}),
    (torch.optim.Adam, {}, {}),
    (type("Mine", (AdamW,), {}), {}, {}),
    (AdamW, {}, {"dtype": torch.float64}),
    (AdamW, {}, {"dim": 5}),
]


def test_another_is_tried_itself(steps):
    for kind, options, table in OTHERS:
        outcomes._known.clear()
        for _ in range(2):
            probe(AdamW)
        count = len(steps)
        probe(functools.partial(kind, **options), **table)
        assert len(steps) > count, (kind, options, table)
    count = len(steps)
    with FlopCounterMode(display=False):
        probe(AdamW)
    assert len(steps) > count


def step_by_mean(self, closure=None):
    with torch.no_grad():
        for param in self.param_groups[0]["params"]:
            param.sub_(0.1 * param.grad.mean())


@pytest.mark.usefixtures("steps")
def test_a_step_that_was_replaced_is_tried(monkeypatch):
    sgd = functools.partial(SGD, lr=0.1)
    assert [probe(sgd), probe(sgd)] == [{}, {}]
    with monkeypatch.context() as patches:
        patches.setattr(SGD, "step", step_by_mean)
        for _ in range(2):
            with pytest.raises(OptimizerError, match="not row by row"):
                probe(sgd)
    assert probe(sgd) == {}


@pytest.mark.usefixtures("steps")
def test_failures_are_not_remembered_and_what_is_known_stays_small(monkeypatch):
    for _ in range(2):
        with pytest.raises(OptimizerError, match="closure"):
            probe(torch.optim.LBFGS)
    assert not outcomes._known
    monkeypatch.setattr(outcomes, "_LIMIT", 2)
    for rate in (0.1, 0.2, 0.3, 0.4):
        # State that begins with the rate is tried for each.
        found = probe(functools.partial(torch.optim.Rprop, lr=rate), dim=int(rate * 10))
        assert found["step_size"].initial == pytest.approx(rate)
    assert 0 < len(outcomes._known) <= 2
