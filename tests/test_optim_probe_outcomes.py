"""What a trial has shown is used again for optimizers of torch that are the same, and for no others."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import probe_optimizer
from speedtransfer.optim.probe import Trial, leaves_idle_rows, outcomes

Make = Callable[[nn.Parameter], Optimizer]


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Forget what is known, and list the classes of the optimizers that trials step."""
    monkeypatch.setattr(outcomes, "_known", {})
    made: list[type] = []
    step = Trial.step

    def counted(self: Trial, grad: torch.Tensor) -> Any:
        made.append(type(self.optimizer))
        return step(self, grad)

    monkeypatch.setattr(Trial, "step", counted)
    return made


def probe(make: Make, dtype: torch.dtype = torch.float32, dim: int = 4, sparse: bool = False) -> Any:
    param = nn.Parameter(torch.zeros(9, dim, dtype=dtype))
    optimizer = make(param)
    return probe_optimizer(optimizer, optimizer.param_groups[0], param, sparse)


def plain(param: nn.Parameter) -> Optimizer:
    return AdamW([param])


def test_the_same_optimizer_is_tried_once(steps: list[type]) -> None:
    first = probe(plain)
    # The first optimizer of a class may have wrapped its step.
    probe(plain)
    count = len(steps)
    again = probe(plain)
    assert len(steps) == count > 0
    assert (again, again.shared, again.gradient) == (first, first.shared, first.gradient)
    # Each has its own.
    again.clear()
    assert set(probe(plain)) == {"exp_avg", "exp_avg_sq"}


def test_whether_idle_rows_are_left_alone_is_tried_once() -> None:
    for momentum, alone in ((0.0, True), (0.9, False)):
        param = nn.Parameter(torch.zeros(9, 4))
        opt = SGD([param], lr=0.1, momentum=momentum)
        assert [leaves_idle_rows(opt, opt.param_groups[0], param) for _ in range(2)] == [alone, alone]
        probe_optimizer(opt, opt.param_groups[0], param)


def with_method(param: nn.Parameter) -> Optimizer:
    optimizer = plain(param)
    optimizer._init_group = types.MethodType(AdamW._init_group, optimizer)  # type: ignore[attr-defined]
    return optimizer


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_mode() -> Any:
    with Mode():
        return probe(plain)


@pytest.mark.parametrize(
    "other",
    [
        *(
            lambda options=options: probe(lambda p: AdamW([p], **options))
            for options in (
                {"lr": 0.5},
                {"lr": torch.tensor(1e-3)},
                {"betas": (0.8, 0.9)},
                {"amsgrad": True},
                {"weight_decay": 0},
                {"weight_decay": -0.0},
                {"foreach": True},
            )
        ),
        lambda: probe(lambda p: Adam([p])),
        lambda: probe(lambda p: type("Mine", (AdamW,), {})([p])),
        lambda: probe(with_method),
        lambda: probe(plain, torch.float64),
        lambda: probe(plain, dim=5),
        lambda: probe(plain, sparse=True),
        in_a_mode,
    ],
)
def test_another_is_tried_itself(other: Callable[[], Any], steps: list[type]) -> None:
    for _ in range(2):
        probe(plain)
    count = len(steps)
    other()
    assert len(steps) > count


def test_rows_of_another_form_have_other_planes() -> None:
    for dtype, dim in ((torch.float32, 4), (torch.float64, 4), (torch.float32, 5)):
        found = probe(plain, dtype, dim)["exp_avg"]
        assert (found.tail, found.dtype) == ((dim,), dtype)


def test_an_instance_with_a_method_of_its_own_is_tried_each_time(steps: list[type]) -> None:
    for _ in range(2):
        count = len(steps)
        probe(with_method)
        assert len(steps) > count


def test_a_subclass_is_tried_each_time() -> None:
    mean = [False]

    class Mine(AdamW):
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                if mean[0]:
                    param.grad = param.grad - param.grad.mean()
            return super().step(closure)

    assert set(probe(lambda p: Mine([p]))) == {"exp_avg", "exp_avg_sq"}
    mean[0] = True
    with pytest.raises(OptimizerError, match="not row by row"):
        probe(lambda p: Mine([p]))
    mean[0] = False
    probe(lambda p: Mine([p]))


def by_mean(params: list[Any], grads: list[Any], *args: Any, lr: Any, **kwargs: Any) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.sub_(lr * grad.mean())


def step_by_mean(self: Optimizer, closure: Any = None) -> None:
    with torch.no_grad():
        params = self.param_groups[0]["params"]
        by_mean(params, [param.grad for param in params], lr=0.1)


def patch_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SGD, "step", step_by_mean)


def patch_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_single_tensor_sgd", "_multi_tensor_sgd"):
        monkeypatch.setattr(sys.modules["torch.optim.sgd"], name, by_mean)


def patch_code(monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = SGD.step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    # The code object of a function without free variables.
    monkeypatch.setattr(step, "__code__", step_by_mean.__code__)
    monkeypatch.setitem(step.__globals__, "by_mean", by_mean)


@pytest.mark.parametrize("patch", [patch_step, patch_functions, patch_code])
@pytest.mark.parametrize("patched_first", [False, True])
def test_a_step_that_was_replaced_is_tried(patch: Any, patched_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def sgd(param: nn.Parameter) -> Optimizer:
        return SGD([param], lr=0.1)

    if not patched_first:
        assert [probe(sgd), probe(sgd)] == [{}, {}]
    with monkeypatch.context() as patches:
        patch(patches)
        for _ in range(2):
            with pytest.raises(OptimizerError, match="not row by row"):
                probe(sgd)
    assert probe(sgd) == {}


def test_failures_are_not_remembered_and_what_is_known_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(OptimizerError, match="closure"):
            probe(lambda p: torch.optim.LBFGS([p]))
    assert not outcomes._known
    monkeypatch.setattr(outcomes, "_LIMIT", 2)
    for rate in (0.1, 0.2, 0.3, 0.4):
        # State that begins with the rate is tried for each.
        found = probe(lambda p, rate=rate: torch.optim.Rprop([p], lr=rate), dim=int(rate * 10))
        assert found["step_size"].initial == pytest.approx(rate)
    assert 0 < len(outcomes._known) <= 2


@pytest.mark.filterwarnings("ignore:it is not known what Mine does")
def test_tables_of_a_step_are_tried_once(steps: list[type]) -> None:
    """A subclass, which may do something else next time, a rate in a tensor or for each group; hooks do not matter."""

    class Mine(AdamW):
        pass

    def count(make: Callable[[list[Any]], Optimizer], tables: int) -> int:
        embs, before = [speedtransfer.Embedding(9, 4) for _ in range(tables)], len(steps)
        opt = make([emb.weight for emb in embs])
        opt.register_step_pre_hook(lambda *_: None)
        torch.stack([emb(torch.tensor([1, 2])) for emb in embs]).sum().backward()
        opt.step()
        return len(steps) - before

    assert count(Mine, 9) == count(Mine, 1) > 0
    assert count(lambda params: AdamW(params, lr=torch.tensor(0.5)), 1) > 0
    assert count(lambda params: AdamW(params, lr=torch.tensor(0.5)), 9) == 0
    rates = count(lambda params: SGD([{"params": [p], "lr": 0.1 + i} for i, p in enumerate(params)], lr=7), 9)
    assert 0 < rates <= 2 * count(lambda params: SGD(params, lr=7, momentum=0.1), 1)
