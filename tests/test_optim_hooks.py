"""Code that looks at the weight at any moment of a step sees all rows, as in torch, and changes nothing about the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_oracle import Twins, skewed_batches, squared_loss
from optimizer_cases import case_named
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import speedtransfer

ROWS, DIM, STEPS = 41, 6, 8
Look = Callable[[], object]


class Run:
    """A model with one embedding of ours, or of torch (``idle="torch"``), its optimizer, and what was seen of its weight."""

    def __init__(self, idle: str, optimizer: str) -> None:
        torch.manual_seed(3)
        self.emb: Any = nn.Embedding(ROWS, DIM, dtype=torch.float64)
        if idle != "torch":
            rows = self.emb.weight.detach().clone()
            self.emb = speedtransfer.Embedding.from_pretrained(rows, freeze=False, idle=idle)
        self.model = nn.ModuleDict({"emb": self.emb, "lin": nn.Linear(DIM, DIM, dtype=torch.float64)})
        self.opt = case_named(optimizer).make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.opt, self._factor)
        self.seen: list[Tensor] = []
        # The number of rows that the optimizer had in each step; torch calls this at the end of the step proper.
        self.stepped: list[int] = []
        (weight,) = self.emb.parameters()
        self.opt._optimizer_step_code = lambda: self.stepped.append(len(weight))  # type: ignore[method-assign]
        # What tests do at some moments.
        self.in_factor: Look = lambda: None
        self.in_loss: Callable[[Tensor], object] = lambda out: None
        self.after_backward: Look = lambda: None
        self.uses_closure = False
        self.handles: list[Any] = []

    def _factor(self, epoch: int) -> float:
        if epoch:
            self.in_factor()
        return 0.9**epoch

    def _backward(self, ids: Tensor, target: Tensor) -> Tensor:
        self.opt.zero_grad()
        out = self.emb(ids)
        self.in_loss(out)
        loss = squared_loss(self.model["lin"](out), target)
        loss.backward()
        self.after_backward()
        return loss

    def train(self, steps: int = STEPS, seed: int = 0) -> None:
        for ids, target in skewed_batches(ROWS, DIM, steps, seed, size=8, dtype=torch.float64):
            if self.uses_closure:
                self.opt.step(lambda ids=ids, target=target: self._backward(ids, target))
            else:
                self._backward(ids, target)
                self.opt.step()
            self.scheduler.step()
        while self.handles:
            self.handles.pop().remove()


# --- what code does with the weight -------------------------------------------------------------------------------------


def look(run: Run) -> None:
    """Read the weight, as the module has it and as the optimizer does."""
    for weight in (run.emb.weight, run.opt.param_groups[0]["params"][0]):
        assert weight.shape == (ROWS, DIM)
        run.seen.append(weight.detach().norm())
    run.seen.append(run.emb.weight.pow(2).sum().detach())


def write(run: Run) -> None:
    with torch.no_grad():
        run.opt.param_groups[0]["params"][0].clamp_(-0.7, 0.7)
        run.emb.weight.mul_(0.99)


# --- when it does it ----------------------------------------------------------------------------------------------------


def before_step(run: Run, act: Look) -> None:
    run.opt.register_step_pre_hook(lambda *_: act())


def after_step(run: Run, act: Look) -> None:
    run.opt.register_step_post_hook(lambda *_: act())


def around_step_late(run: Run, act: Look) -> None:
    # Ours is there now.
    run.train(1, seed=1)
    before_step(run, act)
    after_step(run, act)


def after_backward(run: Run, act: Look) -> None:
    run.after_backward = act


def in_closure(run: Run, act: Look) -> None:
    run.uses_closure = True
    run.in_loss = lambda out: act()
    run.after_backward = act


def in_scheduler(run: Run, act: Look) -> None:
    run.in_factor = act


def in_hooks_of_all_optimizers(run: Run, act: Look) -> None:
    # Registered after ours.
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        run.handles.append(register(lambda opt, *_: act() if opt is run.opt else None))


def in_gradient_hook(run: Run, act: Look) -> None:
    run.emb.weight.register_hook(lambda grad: act())


def after_accumulating(run: Run, act: Look) -> None:
    run.emb.weight.register_post_accumulate_grad_hook(lambda param: act())


def in_output_hook(run: Run, act: Look) -> None:
    run.in_loss = lambda out: out.register_hook(lambda grad: act())


MOMENTS = [in_hooks_of_all_optimizers, before_step, after_step, around_step_late, after_backward]
MOMENTS += [in_closure, in_scheduler]
READS = [(moment, look) for moment in [*MOMENTS, in_gradient_hook, after_accumulating, in_output_hook]]
OPTIMIZERS = ["adamw", "sgd-momentum", "adagrad"]


def assert_same(one: Run, two: Run, tolerance: float) -> None:
    for name in ("emb", "lin"):
        weights = [run.model[name].weight.detach() for run in (one, two)]
        torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance)


@pytest.mark.sweep("when", "idle", strength=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("idle", ["exact", "lazy"])
@pytest.mark.parametrize("when", READS, ids=lambda when: "-".join(part.__name__ for part in when))
def test_a_look_at_the_weight_changes_nothing(when: Any, idle: str, optimizer: str) -> None:
    """Neither numbers nor that steps are made with the rows of the batches alone; what is seen is that of torch."""
    moment, act = when
    ours, never, dense = Run(idle, optimizer), Run(idle, optimizer), Run("torch", optimizer)
    for run in (ours, dense):
        moment(run, lambda run=run: act(run))
    moment(never, lambda: None)
    for run in (ours, never, dense):
        run.train()
    assert ours.stepped == never.stepped
    assert max(ours.stepped) < ROWS
    assert_same(ours, never, 1e-12)
    if idle == "exact":
        assert_same(ours, dense, 1e-9)
        torch.testing.assert_close(ours.seen, dense.seen)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_hooks_write_is_trained_on(moment: Any, optimizer: str) -> None:
    runs = Run("exact", optimizer), Run("torch", optimizer)
    for run in runs:
        moment(run, lambda run=run: write(run))
        run.train()
    assert_same(*runs, 1e-9)


@pytest.mark.parametrize("idle", ["exact", "lazy"])
def test_gradients_clipped_in_a_hook_before_the_step(idle: str) -> None:
    def clip(run: Run) -> None:
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)

    hooked, plain, dense = Run(idle, "adamw"), Run(idle, "adamw"), Run("torch", "adamw")
    for run in (hooked, dense):
        for act in (look, clip, look):
            before_step(run, lambda run=run, act=act: act(run))
    plain.after_backward = lambda: clip(plain)
    for run in (hooked, plain, dense):
        run.train()
    assert hooked.stepped == plain.stepped
    assert_same(hooked, plain, 1e-12)
    if idle == "exact":
        assert_same(hooked, dense, 1e-9)


# --- optimizers that call the step of the class they are made of ------------------------------------------------------


class Decaying(torch.optim.SGD):
    """Changes the weights before and after the step of its base."""

    def step(self, closure: Any = None) -> Any:
        self._multiply(0.9)
        loss = super().step(closure)
        self._multiply(1.05)
        return loss

    @torch.no_grad()
    def _multiply(self, factor: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(factor)


@pytest.fixture
def decaying() -> Twins:
    # From now on torch calls hooks for the inner step too.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return Twins(lambda params: Decaying(params, lr=0.05, momentum=0.9))


def test_a_step_within_a_step(decaying: Twins) -> None:
    decaying.train(decaying.batches(8))
    decaying.assert_same()


@pytest.mark.parametrize("where", ["pre", "post"])
def test_a_look_in_a_step_within_a_step(decaying: Twins, where: str) -> None:
    emb, opt = decaying.ours, decaying.opt
    seen: list[bool] = []
    register = getattr(opt, f"register_step_{where}_hook")
    register(lambda *_: seen.append(torch.equal(emb.weight, emb.table.torch())))
    before = emb.weight.detach().clone()
    decaying.train(decaying.batches(1))
    assert seen == [True, True]
    ids = decaying.batches(1)[0][0].unique()
    assert torch.equal(emb.weight[ids], decaying.dense.weight[ids])
    assert not torch.equal(emb.weight[ids], before[ids])


def test_a_step_within_a_step_that_fails(decaying: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = decaying.batches(6)
    decaying.train(batches[:3])
    before, multiply = decaying.ours.table.torch().clone(), Decaying._multiply
    decaying.zero_grad()
    decaying.backward(*batches[3])
    with monkeypatch.context() as patched:
        # After the inner step.
        patched.setattr(Decaying, "_multiply", lambda opt, factor: multiply(opt, factor) if factor < 1 else [].pop())
        with pytest.raises(IndexError):
            decaying.opt.step()
    assert torch.equal(decaying.ours.table.torch(), before)
    decaying.train(batches[3:])
    decaying.assert_same()
