"""What would train rows otherwise than dense torch is refused at its first step: by name, with the reason, and in time."""

from __future__ import annotations

import itertools

import pytest
import torch
from lazy_oracle import Twins
from refused_styles import REFUSED_STYLES
from third_party import RowOptimizer

import speedtransfer
from speedtransfer.errors import OptimizerError

WIDTHS, SCALES = (16, 6, 5, 2), (1e-3, 1.0, 30.0)


@pytest.mark.parametrize("kind", REFUSED_STYLES, ids=lambda kind: kind.__name__)
def test_refused_at_the_first_step(kind: type[RowOptimizer]) -> None:
    number = list(REFUSED_STYLES).index(kind)
    check_refused(kind, WIDTHS[number % 4], SCALES[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED_STYLES, ids=lambda kind: kind.__name__)
def test_refused_at_any_width_and_scale(kind: type[RowOptimizer]) -> None:
    for dim, scale in itertools.product(WIDTHS, SCALES):
        check_refused(kind, dim, scale)


def check_refused(kind: type[RowOptimizer], dim: int, scale: float) -> None:
    emb = speedtransfer.Embedding(9, dim)
    before = emb.table.torch().clone()
    opt = kind(emb.parameters())
    (scale * emb(torch.tensor([1, 2])).square()).sum().backward()
    with pytest.raises(OptimizerError, match=REFUSED_STYLES[kind]) as caught:
        opt.step()
    message = str(caught.value)
    assert message.startswith(kind.__name__)
    assert "use " in message
    assert "\n" not in message
    assert torch.equal(emb.table.torch(), before)
    assert emb.table.planes == ("weight",)
    assert not opt.state


class Late(RowOptimizer):
    """Averages from a step on that no trial reaches."""

    def update(self, p, g, state, group) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(g, alpha=group["lr"])
        if state["step"] > 40:
            state.setdefault("average", p.clone()).lerp_(p, 0.1)


def test_state_later_than_any_trial_is_refused_when_it_comes() -> None:
    twins = Twins(Late)
    batches = twins.batches(41)
    twins.train(batches[:40])
    twins.assert_same()
    before = twins.ours.table.torch().clone()
    for _ in range(2):  # and again: the row of the step is not lost in silence
        with pytest.raises(
            OptimizerError, match="Late made state 'average' that it did not make in a trial of 24 steps"
        ):
            twins.train(batches[40:])
        assert torch.equal(twins.ours.table.torch(), before)


class Widens(RowOptimizer):
    """Computes its state in double precision once the rate is small."""

    def update(self, p, g, state, group) -> None:
        m = state.get("m", torch.zeros_like(p))
        state["m"] = m.lerp(g.to(m.dtype), 0.1) if group["lr"] > 1e-4 else m.double()
        p.sub_(state["m"].to(p.dtype), alpha=group["lr"])


def test_state_that_changes_its_dtype_is_refused() -> None:
    twins = Twins(Widens)
    twins.train(twins.batches(2))
    before = twins.ours.table.torch().clone()
    twins.opt.param_groups[0]["lr"] = 1e-5
    with pytest.raises(OptimizerError, match=r"state 'm' became \(\d+, 16\) torch.float64 for \d+ rows but its plane"):
        twins.train(twins.batches(1))
    assert torch.equal(twins.ours.table.torch(), before)


class Global(RowOptimizer):
    """Walks over its parameters by an attribute, and takes the model, so that a trial must copy it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.everything = list(model.parameters())
        super().__init__(model.parameters())

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.everything:
                if p.grad is not None:
                    p.sub_(p.grad)


def test_a_trial_cannot_move_the_parameters_of_the_model() -> None:
    model = torch.nn.ModuleList([speedtransfer.Embedding(9, 4), torch.nn.Linear(4, 1)])
    opt = Global(model)
    before = [p.detach().clone() for p in model[1].parameters()]
    model[1](model[0](torch.tensor([1, 2]))).sum().backward()
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(OptimizerError, match="a trial moved no row"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model[1].parameters(), before, strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
