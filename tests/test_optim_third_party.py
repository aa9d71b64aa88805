"""Optimizers that nobody here has heard of: what they keep for a row is found by trial, as for those of torch."""

from __future__ import annotations

import pytest
import torch
from lazy_oracle import LazyOracle, Twins
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import speedtransfer
from speedtransfer.errors import OptimizerError


class OddConstructor(Optimizer):
    """Sign descent with momentum; parameters come last, and one hyperparameter has a name of its own."""

    def __init__(self, lr: float, beta: float, params) -> None:
        super().__init__(params, {"rate": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "m" not in state:
                        state["m"] = torch.zeros_like(p)
                        state["steps"] = 0
                    state["steps"] += 1
                    state["m"].lerp_(p.grad, 1 - group["beta"])
                    p.add_(state["m"].sign(), alpha=-group["rate"] / state["steps"])


class RowWise(Optimizer):
    """Adagrad with one accumulator a row, ``(rows,)``, and a count of its updates, ``(rows, 1)``; shared scale ``(1,)``."""

    def __init__(self, params, lr: float = 0.1, **options) -> None:
        super().__init__(params, {"lr": lr, "power": 0.5, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if p not in self.state or not state:
                    state["row_sum"] = torch.zeros(p.shape[0])
                    state["count"] = torch.zeros(p.shape[0], 1, dtype=torch.int32)
                    state["scale"] = torch.ones(1)
                state["scale"] *= 0.99
                state["row_sum"] += p.grad.square().mean(1)
                state["count"] += (p.grad != 0).any(1, keepdim=True).int()
                rate = group["lr"] * state["scale"] / (state["row_sum"] ** group["power"] + 1e-6)
                p.sub_(p.grad * rate.unsqueeze(1) / (1 + state["count"]).sqrt())


class TrustRatio(Optimizer):
    """The step of a parameter as long as the parameter: no row can know that."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=float(-group["lr"] * p.norm() / (p.grad.norm() + 1e-9)))


class SlowWeights(Optimizer):
    """Descent whose result is a slow average, which starts as a copy of the weights."""

    def __init__(self, params, lr: float = 0.1, pull: float = 0.3) -> None:
        super().__init__(params, {"lr": lr})
        self.pull = pull  # a hyperparameter kept outside the groups

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if len(state) == 0:
                        state["slow"] = p.clone()
                    p.add_(p.grad, alpha=-group["lr"])
                    state["slow"].lerp_(p, self.pull)


MAKERS = {
    "odd constructor": lambda params: OddConstructor(0.2, 0.8, params),
    "row-wise": lambda params: RowWise(params, lr=0.2, power=0.7),
    "slow weights": lambda params: SlowWeights(params, pull=0.4),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dim", [16, 5])
def test_trains_as_the_oracle(make, dim: int) -> None:
    twins = Twins(make, dim=dim)
    twins.train(twins.batches(20))
    twins.assert_same(1e-6)  # torch's pow differs in the last bit between vectors and the tail of an array


def test_planes_have_the_shape_and_start_of_their_state() -> None:
    twins = Twins(MAKERS["row-wise"])
    twins.train(twins.batches(4))
    table, state = twins.ours.table, twins.opt.state[twins.ours.weight]
    assert table.planes == ("weight", "row_sum", "count")
    assert state["row_sum"].shape == (41,)
    assert state["count"].shape == (41, 1)
    assert table.plane("count").dtype == torch.int32
    assert state["scale"].shape == (1,)
    twins = Twins(MAKERS["slow weights"])
    before = twins.ours.table.torch().clone()
    twins.train(twins.batches(4))
    assert torch.equal(twins.opt.state[twins.ours.weight]["slow"][40], before[40])


def test_one_active_row_beside_a_shared_state_of_one_value() -> None:
    twins = Twins(MAKERS["row-wise"])
    for row in (3, 3, 7):
        twins.train([(torch.tensor([row]), torch.zeros(1, twins.dim))])
    twins.assert_same(1e-6)


def test_a_norm_over_the_parameter_is_refused() -> None:
    emb = speedtransfer.Embedding(9, 4)
    opt = TrustRatio(emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        OptimizerError, match="TrustRatio is not row by row: the update of a row depends on the other rows"
    ):
        opt.step()


class PassOn(torch.optim.Adam):
    """A subclass that hides the hyperparameters behind ``**kwargs``."""

    def __init__(self, params, **kwargs) -> None:
        super().__init__(params, **kwargs)


class NeedsModel(torch.optim.SGD):
    """A constructor that a trial cannot call, with a scheduler and a scaler about."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.names = dict(model.named_parameters())
        super().__init__(model.parameters(), lr=lr, momentum=0.9)


def test_hyperparameters_behind_kwargs() -> None:
    twins = Twins(lambda params: PassOn(params, lr=0.05, amsgrad=True, betas=(0.5, 0.9)))
    twins.train(twins.batches(8))
    twins.assert_same()
    assert "max_exp_avg_sq" in twins.ours.table.planes


def test_a_constructor_that_takes_the_model() -> None:
    twins = Twins(torch.optim.SGD)
    twins.opt = NeedsModel(twins.ours, lr=0.05)
    twins.oracle = LazyOracle(NeedsModel(twins.dense, lr=0.05), twins.dense)
    calls = []
    twins.opt.register_step_pre_hook(lambda *args: calls.append(1))
    schedulers = [lr_scheduler.StepLR(opt, 3) for opt in twins.optimizers]
    twins.train(twins.batches(8), *schedulers)
    twins.assert_same()
    assert len(calls) == 8  # the trials do not count


def test_a_closure_that_is_never_called() -> None:
    twins = Twins(SlowWeights)
    ids, target = twins.batches(1)[0]
    twins.backward(ids, target)
    twins.opt.step(lambda: 1.0)
    twins.oracle.step(lambda: twins.oracle.optimizer.step(lambda: 1.0))
    twins.assert_same()  # torch takes the gradient that there is
    twins.zero_grad()
    twins.opt.step(lambda: 1.0)  # nothing to train
    twins.assert_same()


class ClearsAfterwards(torch.optim.SGD):
    """Throws the gradients away at the end of its own step."""

    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad()
        return loss


def test_a_step_that_ends_with_zero_grad() -> None:
    twins = Twins(lambda params: ClearsAfterwards(params, lr=0.05, momentum=0.9))
    twins.train(twins.batches(8))
    twins.assert_same()


class ClosureOnly(Optimizer):
    """Asks for a closure, as LBFGS does."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self, closure):
        return closure()


class Crashes(Optimizer):
    """Does not run at all on dense rows."""

    def __init__(self, params) -> None:
        super().__init__(params, {})

    def step(self, closure=None):
        raise ValueError("needs a flat buffer")


@pytest.mark.parametrize(("kind", "reason"), [(ClosureOnly, "closure"), (Crashes, "needs a flat buffer")])
def test_what_fails_on_a_few_rows_is_refused_with_its_own_words(kind: type[Optimizer], reason: str) -> None:
    emb = speedtransfer.Embedding(9, 4)
    before = emb.table.torch().clone()
    opt = kind(emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(OptimizerError, match=rf"{kind.__name__} cannot train rows of a table: .*{reason}") as caught:
        opt.step(*([lambda: None] if kind is ClosureOnly else []))
    assert "\n" not in str(caught.value)
    assert torch.equal(emb.table.torch(), before)
