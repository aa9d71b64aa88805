"""idle="exact" against dense training by torch itself: every optimizer and hyperparameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_pair import CASES, COUPLED, Exact, warmup_and_cosine
from lazy_oracle import squared_loss
from optimizer_cases import FUSED, FUSED_ON_CPU, OptimizerCase, case_named, some
from torch.optim import lr_scheduler

import speedtransfer
from speedtransfer.errors import OptimizerError
from speedtransfer.idle import History, Replay, rule_for
from speedtransfer.optim import find_handle


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [60, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_training(case: OptimizerCase, dtype: torch.dtype, steps: int) -> None:
    pair = Exact(case, dtype)
    pair.train(pair.batches(steps), *pair.schedulers(warmup_and_cosine))
    pair.assert_same()


@pytest.mark.parametrize("case", some(FUSED), ids=str)
def test_fused_optimizers(case: OptimizerCase) -> None:
    pair = Exact(case)
    pair.train(pair.batches(60))
    pair.assert_same()


# --- hyperparameters that change ----------------------------------------------------------------------------------------


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    """Cycles the learning rate up and the momentum (or first beta) down."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=101)


@pytest.mark.parametrize(
    "name", ["sgd-momentum", "sgd-momentum-weight-decay", "adamw", "nadam-decoupled", "radam", "rmsprop-momentum"]
)
def test_cycled_momentum(name: str) -> None:
    pair = Exact(case_named(name))
    pair.train(pair.batches(100), *pair.schedulers(one_cycle))
    pair.assert_same()


@pytest.mark.parametrize("name", ["adamw", "sgd-momentum-weight-decay", "asgd", "nadam-decoupled"])
def test_hyperparameters_set_by_hand(name: str) -> None:
    pair = Exact(case_named(name))
    for number, batch in enumerate(pair.batches(120)):
        for optimizer in pair.optimizers:
            (group,) = optimizer.param_groups
            if number % 17 == 3:
                group["weight_decay"] = 0.2 * (number % 3)
            if number % 23 == 5 and "betas" in group:
                group["betas"] = (0.5 + 0.4 * (number % 2), 0.9 + 0.09 * (number % 2))
            if number % 31 == 7 and "eps" in group:
                group["eps"] = 10.0 ** -(3 + number % 6)
            group["lr"] = 0.0 if number % 11 == 0 else 0.03  # a step that moves nothing still decays the moments
        pair.train([batch])
    pair.assert_same(5e-5)


def test_tensor_learning_rate() -> None:
    pair = Exact(OptimizerCase("adam", torch.optim.Adam, {"lr": torch.tensor(0.03), "foreach": False}))
    pair.train(pair.batches(60))
    pair.assert_same()


# --- weight decay that adaptive optimizers add to the gradient --------------------------------------------------------


TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-9}


def named(name: str) -> OptimizerCase:
    return next(case for case in COUPLED if case.name == name)


def history_of(pair: Exact) -> Any:
    return find_handle(pair.ours.weight).rows.lag._history


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [90, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", COUPLED, ids=str)
def test_equals_dense_training_with_evaluation_in_between(case: OptimizerCase, dtype: torch.dtype, steps: int) -> None:
    pair = Exact(case, dtype)
    schedulers, everything = pair.schedulers(warmup_and_cosine), torch.arange(60)
    for number, batch in enumerate(pair.batches(steps)):
        pair.train([batch], *schedulers)
        if number % 57 == 20:
            with torch.no_grad():
                ours, dense = (module.eval()(everything) for module in pair.modules)
            torch.testing.assert_close(ours, dense, rtol=0, atol=TOLERANCE[dtype])
        if number % 83 == 30:  # rows are brought up to date in the table too
            assert torch.equal(pair.ours.table[[58, 3]], pair.ours(torch.tensor([58, 3])))
    assert isinstance(history_of(pair), Replay)
    pair.assert_same(TOLERANCE[dtype])


@pytest.mark.sweep
@pytest.mark.parametrize("kwargs", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("case", some([case for case in COUPLED if case.name != "adam-coupled-small"]), ids=str)
def test_implementations(case: OptimizerCase, kwargs: dict[str, Any]) -> None:
    if "fused" in kwargs and case.kind not in FUSED_ON_CPU:
        pytest.skip("torch has no fused one on the CPU")
    pair = Exact(OptimizerCase(case.name, case.kind, {**case.kwargs, **kwargs}))
    pair.train(pair.batches(120), *pair.schedulers(warmup_and_cosine))
    pair.assert_same(2e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", some(COUPLED, ["adam-coupled", "adadelta-coupled"]), ids=str)
def test_by_torch(case: OptimizerCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replay, "_catch_up_compiled", lambda *rows: False)
    pair = Exact(case, dtype)
    pair.train(pair.batches(100), *pair.schedulers(warmup_and_cosine))
    pair.assert_same(TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", COUPLED, ids=str)
def test_compiled_and_torch_agree(case: OptimizerCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any width that have missed different numbers of steps; state as training leaves it."""
    for dim in (1, 7, 16, 65):
        torch.manual_seed(dim)
        param = torch.nn.Parameter(torch.randn(50, dim, dtype=dtype))
        optimizer = case.make([param])
        (group,) = optimizer.param_groups
        rule = rule_for(optimizer, group, dtype)
        replay = Replay(rule)
        for _ in range(70):
            param.grad = torch.randn_like(param)
            optimizer.step()
            replay.record(rule.numbers(group, optimizer.state[param]))
        state = {n: v for n, v in optimizer.state[param].items() if v.dim()}
        last = torch.randint(0, 71, (50, 1), dtype=torch.int32)
        results = []
        for compiled in (True, False):
            if not compiled:
                monkeypatch.setattr(Replay, "_catch_up_compiled", lambda *rows: False)
            rows = {n: v.detach().clone() for n, v in {"weight": param, **state}.items()}
            replay.catch_up(rows, last)
            results.append(rows)
        monkeypatch.undo()
        for name, values in results[0].items():
            error = 1e-5 if dtype == torch.float32 else 1e-13
            torch.testing.assert_close(values, results[1][name], rtol=error, atol=error)
            assert torch.equal(values[last.flatten() == 70], {"weight": param, **state}[name][last.flatten() == 70])


@pytest.mark.parametrize("case", some(COUPLED, ["adam-coupled", "rmsprop-coupled-centered"]), ids=str)
def test_state_dicts_go_both_ways(case: OptimizerCase) -> None:
    pair, fresh = Exact(case, torch.float64), Exact(case, torch.float64)
    pair.train(pair.batches(40))
    for to, source in ((0, 1), (1, 0)):
        fresh.modules[to].load_state_dict(pair.modules[source].state_dict())
        fresh.optimizers[to].load_state_dict(pair.optimizers[source].state_dict())
    fresh.train(pair.batches(40, seed=1))
    fresh.assert_same(1e-9)


@pytest.mark.parametrize("name", ["adam-coupled", "rmsprop-coupled-centered"])
def test_checkpoints_resume(name: str, tmp_path: Any) -> None:
    pair, fresh = Exact(named(name)), Exact(named(name))
    pair.train(pair.batches(40))
    speedtransfer.save_checkpoint(tmp_path / "saved", pair.ours, pair.opt)
    speedtransfer.load_checkpoint(tmp_path / "saved", fresh.ours, fresh.opt)
    for one in (pair, fresh):
        one.train(pair.batches(40, seed=1))
    assert torch.equal(pair.ours.table.torch(), fresh.ours.table.torch())
    pair.assert_same(5e-6)


@pytest.mark.parametrize("name", ["adam-coupled", "adagrad-coupled", "rmsprop-coupled-momentum"])
def test_steps_that_are_remembered_are_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtransfer.idle.lag._MAX_REPLAYED", 16)
    pair = Exact(named(name))
    pair.train(pair.batches(130), *pair.schedulers(warmup_and_cosine))
    assert history_of(pair).length < 16
    pair.assert_same(5e-6)


# --- weight decay that comes and goes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["adam", "adam-amsgrad", "nadam-decoupled", "radam", "rmsprop-centered", "adadelta", "adagrad"]
)
def test_weight_decay_that_changes(name: str) -> None:
    """Every row takes the steps of one kind before there is one of the other."""
    pair = Exact(case_named(name), torch.float64)
    kinds = []
    for number, batch in enumerate(pair.batches(120)):
        for optimizer in pair.optimizers:
            (group,) = optimizer.param_groups
            if number % 20 == 0:
                group["weight_decay"] = 0.02 * (number // 20 % 3)
                group["decoupled_weight_decay"] = False
        pair.train([batch])
        kinds.append(type(history_of(pair)))
    assert set(kinds) == {History, Replay}
    pair.assert_same(1e-9)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_amsgrad_turned_on_late_is_refused(weight_decay: float) -> None:
    pair = Exact(OptimizerCase("adam", torch.optim.Adam, {"lr": 0.05, "weight_decay": weight_decay}))
    pair.train(pair.batches(10))
    before = pair.ours.table.torch().clone()
    pair.opt.param_groups[0]["amsgrad"] = True
    ids, target = pair.batches(1)[0]
    squared_loss(pair.ours(ids), target).backward()
    with pytest.raises(OptimizerError, match="amsgrad became True"):
        pair.opt.step()
    assert torch.equal(pair.ours.table.torch(), before)


# --- steps that are none, forms of storage ------------------------------------------------------------------------------


def test_half_precision_rows() -> None:
    pair = Exact(OptimizerCase("adam", torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}), torch.float16)
    pair.train(pair.batches(40))
    pair.assert_same(5e-3)


@pytest.mark.parametrize("options", [{"storage_dtype": torch.bfloat16}, {"state_dtype": torch.uint8}], ids=str)
def test_rows_stored_in_a_small_form(options: dict[str, Any]) -> None:
    pair = Exact(named("adam-coupled"), **options)
    pair.train(pair.batches(100))
    weight, expected = pair.ours.table.torch().float(), pair.dense.weight.detach()
    assert float((weight - expected).abs().mean()) < 0.05 * float((expected - pair.start).abs().mean())
