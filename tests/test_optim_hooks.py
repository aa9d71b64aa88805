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

ROWS, DIM = 41, 6
Act = Callable[[], object]


class Run:
    """A model with one embedding of ours, or of torch (``idle="torch"``), its optimizer, and what was seen of its weight.

    `act` is called at a `moment` of each step.
    """

    def __init__(self, idle: str, optimizer: str, moment: str, act: Callable[[Run], object]) -> None:
        torch.manual_seed(3)
        self.emb: Any = nn.Embedding(ROWS, DIM, dtype=torch.float64)
        if idle != "torch":
            rows = self.emb.weight.detach().clone()
            self.emb = speedtransfer.Embedding.from_pretrained(rows, freeze=False, idle=idle)
        self.model = nn.ModuleDict({"emb": self.emb, "lin": nn.Linear(DIM, DIM, dtype=torch.float64)})
        self.opt = case_named(optimizer).make(self.model.parameters())
        self.seen: list[Tensor] = []
        # The number of rows that the optimizer had in each step; torch calls this at the end of the step proper.
        self.stepped: list[int] = []
        (weight,) = self.emb.parameters()
        self.opt._optimizer_step_code = lambda: self.stepped.append(len(weight))  # type: ignore[method-assign]
        self._train(moment, lambda: act(self))

    def _train(self, moment: str, act: Act) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda epoch: (epoch and moment == "scheduler" and act(), 0.9**epoch)[1]
        )
        hooks, register = MOMENTS.get(moment, ()), []
        for number, (ids, target) in enumerate(skewed_batches(ROWS, DIM, 8, size=8, dtype=torch.float64)):
            # Late: ours is there then.
            if number == (moment.startswith("late")):
                register = [hook(self, act) for hook in hooks]

            def backward(ids: Tensor = ids, target: Tensor = target) -> Tensor:
                self.opt.zero_grad()
                out = self.emb(ids)
                if moment == "output":
                    out.register_hook(lambda grad: act())
                if moment == "closure":
                    act()
                loss = squared_loss(self.model["lin"](out), target)
                loss.backward()
                if moment in ("backward", "closure"):
                    act()
                return loss

            if moment == "closure":
                self.opt.step(backward)
            else:
                backward()
                self.opt.step()
            scheduler.step()
        for handle in register:
            handle.remove()


MOMENTS: dict[str, list[Callable[[Run, Act], Any]]] = {
    "before step": [lambda run, act: run.opt.register_step_pre_hook(lambda *_: act())],
    "after step": [lambda run, act: run.opt.register_step_post_hook(lambda *_: act())],
    "hooks of all optimizers": [
        lambda run, act: register_optimizer_step_pre_hook(lambda opt, *_: act() if opt is run.opt else None),
        lambda run, act: register_optimizer_step_post_hook(lambda opt, *_: act() if opt is run.opt else None),
    ],
}
MOMENTS["late"] = [*MOMENTS["before step"], *MOMENTS["after step"]]
ALWAYS = [*MOMENTS, "backward", "closure", "scheduler"]
MOMENTS["gradient"] = [lambda run, act: run.emb.weight.register_hook(lambda grad: act())]
MOMENTS["accumulated"] = [lambda run, act: run.emb.weight.register_post_accumulate_grad_hook(lambda param: act())]
READS = [*ALWAYS, "output", "gradient", "accumulated"]


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


def assert_same(one: Run, two: Run, tolerance: float) -> None:
    for name in ("emb", "lin"):
        weights = [run.model[name].weight.detach() for run in (one, two)]
        torch.testing.assert_close(*weights, rtol=tolerance, atol=tolerance)


@pytest.mark.sweep("moment", "idle", strength=2)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adagrad"])
@pytest.mark.parametrize("idle", ["exact", "lazy"])
@pytest.mark.parametrize("moment", READS)
def test_a_look_at_the_weight_changes_nothing(moment: str, idle: str, optimizer: str) -> None:
    """Neither numbers nor that steps are made with the rows of the batches alone; what is seen is that of torch."""
    ours, never, dense = (
        Run(side, optimizer, moment, act) for side, act in ((idle, look), (idle, lambda run: None), ("torch", look))
    )
    assert ours.stepped == never.stepped
    assert max(ours.stepped) < ROWS
    assert_same(ours, never, 1e-12)
    if idle == "exact":
        assert_same(ours, dense, 1e-9)
        torch.testing.assert_close(ours.seen, dense.seen)


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adagrad"])
@pytest.mark.parametrize("moment", ALWAYS)
def test_what_hooks_write_is_trained_on(moment: str, optimizer: str) -> None:
    assert_same(*(Run(idle, optimizer, moment, write) for idle in ("exact", "torch")), 1e-9)


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


@pytest.mark.parametrize("where", ["pre", "post"])
def test_a_look_in_a_step_within_a_step(decaying: Twins, where: str) -> None:
    emb, seen = decaying.ours, list[bool]()
    register = getattr(decaying.opt, f"register_step_{where}_hook")
    register(lambda *_: seen.append(torch.equal(emb.weight, emb.table.torch())))
    decaying.train(decaying.batches(1))
    assert seen == [True, True]
    ids = decaying.batches(1)[0][0].unique()
    assert torch.equal(emb.weight[ids], decaying.dense.weight[ids])


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
