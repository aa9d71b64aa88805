"""idle="exact" against dense training by torch itself: every optimizer and hyperparameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_pair import CASES, COUPLED, Exact, warmup_and_cosine
from lazy_oracle import squared_loss
from optimizer_cases import BASE, FUSED, FUSED_ON_CPU, OptimizerCase, case_named, some

from speedtransfer.errors import OptimizerError
from speedtransfer.idle import History, Replay
from speedtransfer.optim import find_handle


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [60, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_dense_training(case: OptimizerCase, dtype: torch.dtype, steps: int) -> None:
    pair = Exact(case, dtype)
    pair.train(pair.batches(steps), *pair.schedulers(warmup_and_cosine))
    pair.assert_same()


HOW: dict[str, dict[str, Any]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
VARIANTS = [
    OptimizerCase(f"{case.name}-{how}", case.kind, {**case.kwargs, **kwargs})
    for case in COUPLED
    for how, kwargs in HOW.items()
    if how != "fused" or case.kind in FUSED_ON_CPU
]


@pytest.mark.parametrize("case", some([*FUSED, *VARIANTS]), ids=str)
def test_implementations(case: OptimizerCase) -> None:
    pair = Exact(case)
    pair.train(pair.batches(100), *pair.schedulers(warmup_and_cosine))
    pair.assert_same()


TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-9}


def history_of(pair: Exact) -> Any:
    return find_handle(pair.ours.weight).rows.lag._history


@pytest.mark.sweep
@pytest.mark.parametrize("steps", [90, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", [*COUPLED, case_named("adamw")], ids=str)
def test_equals_dense_training_with_reads_in_between(case: OptimizerCase, dtype: torch.dtype, steps: int) -> None:
    pair = Exact(case, dtype)
    schedulers, everything = pair.schedulers(warmup_and_cosine), torch.arange(60)
    for number, batch in enumerate(pair.batches(steps)):
        pair.train([batch], *schedulers)
        if number % 57 in (20, 21):
            with torch.set_grad_enabled(number % 57 == 21):
                ours, dense = (module.train(number % 57 == 21)(everything).detach() for module in pair.modules)
            torch.testing.assert_close(ours, dense, rtol=0, atol=TOLERANCE[dtype])
        if number % 83 == 30:  # rows are brought up to date in the table too; the rest stays behind
            assert torch.equal(pair.ours.table[[58, 3]], pair.ours(torch.tensor([58, 3])))
    assert isinstance(history_of(pair), Replay if case in COUPLED else History)
    pair.assert_same(TOLERANCE[dtype])


@pytest.mark.parametrize("case", some([*BASE, *COUPLED]), ids=str)
def test_state_dicts_go_both_ways(case: OptimizerCase) -> None:
    pair, fresh = Exact(case, torch.float64), Exact(case, torch.float64)
    pair.train(pair.batches(40))
    for to, source in ((0, 1), (1, 0)):
        fresh.modules[to].load_state_dict(pair.modules[source].state_dict())
        fresh.optimizers[to].load_state_dict(pair.optimizers[source].state_dict())
    fresh.train(pair.batches(40, seed=1))
    fresh.assert_same(1e-9)


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


def test_half_precision_rows() -> None:
    pair = Exact(OptimizerCase("adam", torch.optim.Adam, {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}), torch.float16)
    pair.train(pair.batches(40))
    pair.assert_same(5e-3)


@pytest.mark.parametrize("options", [{"storage_dtype": torch.bfloat16}, {"state_dtype": torch.uint8}], ids=str)
def test_rows_stored_in_a_small_form(options: dict[str, Any]) -> None:
    pair = Exact(COUPLED[0], **options)
    pair.train(pair.batches(100))
    weight, expected = pair.ours.table.torch().float(), pair.dense.weight.detach()
    assert float((weight - expected).abs().mean()) < 0.05 * float((expected - pair.start).abs().mean())
