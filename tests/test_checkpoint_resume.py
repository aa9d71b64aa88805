"""Interrupted and resumed is as never interrupted, bit for bit, also with small rows; torch and we load each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Run, seed_all
from lazy_oracle import Twins
from optimizer_cases import BASE, FUSED, OptimizerCase, case_named, some
from safetensors.torch import load_file
from test_checkpoint_fuzz import resign
from torch import nn

import speedtransfer as st
from speedtransfer.errors import StorageError

INT8 = {"storage_dtype": torch.int8, "state_dtype": torch.uint8}
FORMS: dict[str, dict[str, Any]] = {
    "exact": {"idle": "exact"},
    "bfloat16": {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "float16": {"storage_dtype": torch.float16},
    "int8": INT8,
    "exact int8": {"idle": "exact", **INT8},
    "float8_e4m3fn": {"storage_dtype": torch.float8_e4m3fn, "scale_block": 3},
    "exact float8_e5m2": {"idle": "exact", "storage_dtype": torch.float8_e5m2, "state_dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", [*some(BASE), *some(FUSED, ["adamw-fused"])], ids=str)
def test_resuming_is_going_on(case: OptimizerCase, tmp_path: Path) -> None:
    resume(case, tmp_path)


def resume(case: OptimizerCase, tmp_path: Path, **options: Any) -> None:
    whole, first, second = (Run(case, seed, **options) for seed in (0, 0, 1))
    seed_all(7)
    whole.epochs(4)
    seed_all(7)
    first.epochs(2)
    first.save(tmp_path, extra={"epoch": 2})
    halfway = first.digest()
    # Something to be overwritten.
    second.epochs(1)
    assert second.load(tmp_path) == {"epoch": 2}
    assert second.digest() == halfway
    second.epochs(2)
    assert second.losses[-8:] == whole.losses[-8:]
    assert second.digest() == whole.digest()


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad"])
def test_resuming_small_forms(name: str, form: str, tmp_path: Path) -> None:
    if "exact" not in form:
        resume(case_named(name), tmp_path, **FORMS[form])
        return
    # Saving takes the steps that rows have missed, which rounds.
    run, resumed = Run(case_named(name), **FORMS[form]), Run(case_named(name), 9, **FORMS[form])
    run.epochs(2)
    run.save(tmp_path)
    resumed.load(tmp_path)
    for each in (run, resumed):
        seed_all(1)
        each.epochs(2)
    assert resumed.digest() == run.digest()


@pytest.mark.parametrize(("name", "steps"), [("adagrad-initial", 0), ("adamw", 0), ("adamw-amsgrad", 10)])
def test_checkpoints_cross_over_and_training_continues_equal(name: str, steps: int, tmp_path: Path) -> None:
    """Ours into torch, torch into ours; Adagrad has state before it steps."""
    case = case_named(name)
    twins = Twins(case.make)
    batches = twins.batches(20)
    twins.train(batches[:steps])
    st.save_checkpoint(tmp_path / "ours", twins.ours, twins.opt)
    st.save_checkpoint(tmp_path / "dense", twins.dense, twins.dense_opt)
    twins.assert_same()  # Adagrad has made its first state when it was saved before a step
    twins.make = lambda params: case.make(params, lr=0.5)
    twins.use(st.Embedding(twins.num_rows, twins.dim, idle="lazy"), nn.Embedding(twins.num_rows, twins.dim))
    st.load_checkpoint(tmp_path / "dense", twins.ours, twins.opt)
    st.load_checkpoint(tmp_path / "ours", twins.dense, twins.dense_opt)
    if steps:
        twins.assert_same()
    twins.train(batches[steps:])
    twins.assert_same()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "exact"])
def test_read_by_a_dense_model_and_back(form: str, tmp_path: Path) -> None:
    case = case_named("adamw")
    run, dense, back = Run(case, **FORMS[form]), Run(case, seed=1, library=nn), Run(case, seed=2, **FORMS[form])
    run.epochs(2)
    run.save(tmp_path / "one")
    dense.load(tmp_path / "one")
    for key, value in run.model.state_dict().items():
        assert torch.equal(value.to(dense.model.state_dict()[key].dtype), dense.model.state_dict()[key]), key
    states = [r.optimizer.state_dict()["state"] for r in (run, dense)]
    for number, entry in states[0].items():
        for key, value in entry.items():
            torch.testing.assert_close(value, states[1][number][key], rtol=0, atol=0, check_dtype=False)
    dense.save(tmp_path / "two")
    back.load(tmp_path / "two")
    again = back.model.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in run.model.state_dict().items())


def test_one_form_into_another_and_an_encoding_of_another_version(tmp_path: Path) -> None:
    wide, small = st.Embedding(300, 20), st.Embedding(300, 20, storage_dtype=torch.int8)
    st.save_checkpoint(tmp_path / "wide", wide)
    st.load_checkpoint(tmp_path / "wide", small)
    step = wide.table.torch().abs().amax(1, keepdim=True) / 127
    assert ((small.state_dict()["weight"] - wide.table.torch()).abs() <= step).all()
    half = st.Embedding(300, 20, storage_dtype=torch.bfloat16)
    st.save_checkpoint(tmp_path / "small", small)
    assert {value.dtype for value in load_file(*(tmp_path / "small").glob("model-*")).values()} >= {torch.int8}
    st.load_checkpoint(tmp_path / "small", half)
    assert torch.equal(half.table.torch(), small.state_dict()["weight"].bfloat16())
    resign(tmp_path / "small", lambda content: content["model"]["entries"]["weight"].update(encoding="int7-row"))
    before = small.table.torch().clone()
    with pytest.raises(StorageError, match="encoded as 'int7-row'"):
        st.load_checkpoint(tmp_path / "small", small)
    assert torch.equal(small.table.torch(), before)


def test_two_optimizers(tmp_path: Path) -> None:
    def make() -> tuple:
        run = Run(case_named("sgd"))
        rows = torch.optim.Adam([run.model.words.weight, run.model.bag.weight], lr=0.1)
        dense = torch.optim.SGD([*run.model.dense.parameters(), *run.model.norm.parameters()], lr=0.1, momentum=0.9)
        return run.model, rows, dense

    def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        for step in range(3):
            model(torch.arange(step, 12 + step).view(4, 3)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    first, second = make(), make()
    train(*first)
    st.save_checkpoint(tmp_path, first[0], first[1], dense=first[2])
    train(*first)
    st.load_checkpoint(tmp_path, second[0], second[1], dense=second[2])
    train(*second)
    for key, value in first[0].state_dict().items():
        assert torch.equal(value, second[0].state_dict()[key]), key
