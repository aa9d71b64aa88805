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
from third_party import STYLES
from torch import nn

import speedtransfer as st
from speedtransfer.errors import OptimizerError, StorageError

# Some, and one that is fused; all, and all that are fused, are slow.
ALL = [*some(BASE), *some(FUSED, ["adamw-fused"])]
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


@pytest.mark.parametrize("case", ALL, ids=str)
def test_resuming_is_going_on(case: OptimizerCase, tmp_path: Path) -> None:
    resume(case, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad", "rmsprop-centered", "nadam-decoupled"])
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


@pytest.mark.parametrize(
    ("case", "steps"),
    [pytest.param(*case.values, 10, marks=case.marks) for case in ALL]
    + [(case_named(name), 0) for name in ("adagrad-initial", "adamw")],
    ids=str,
)
def test_checkpoints_cross_over_and_training_continues_equal(case: OptimizerCase, steps: int, tmp_path: Path) -> None:
    """Ours into torch, torch into ours; Adagrad has state before it steps."""
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


def test_one_form_into_another(tmp_path: Path) -> None:
    wide, small = st.Embedding(300, 20), st.Embedding(300, 20, storage_dtype=torch.int8)
    st.save_checkpoint(tmp_path / "wide", wide)
    st.load_checkpoint(tmp_path / "wide", small)
    step = wide.table.torch().abs().amax(1, keepdim=True) / 127
    assert ((small.state_dict()["weight"] - wide.table.torch()).abs() <= step).all()
    half = st.Embedding(300, 20, storage_dtype=torch.bfloat16)
    st.save_checkpoint(tmp_path / "small", small)
    st.load_checkpoint(tmp_path / "small", half)
    assert torch.equal(half.table.torch(), small.state_dict()["weight"].bfloat16())


def test_files_hold_the_small_form(tmp_path: Path) -> None:
    emb = st.Embedding(50, 4, **INT8)
    optimizer = torch.optim.Adam(emb.parameters())
    emb(torch.arange(50)).sum().backward()
    optimizer.step()
    st.save_checkpoint(tmp_path / "checkpoint", emb, optimizer)
    kinds = [
        value.dtype
        for kind in ("model", "optimizer")
        for value in load_file(*(tmp_path / "checkpoint").glob(f"{kind}-*")).values()
    ]
    assert kinds.count(torch.int8) == 1
    assert kinds.count(torch.uint8) == 2


def test_an_encoding_of_another_version(tmp_path: Path) -> None:
    emb = st.Embedding(50, 4, storage_dtype=torch.int8)
    st.save_checkpoint(tmp_path, emb)
    resign(tmp_path, lambda content: content["model"]["entries"]["weight"].update(encoding="int7-row"))
    before = emb.table.torch().clone()
    with pytest.raises(StorageError, match="encoded as 'int7-row'"):
        st.load_checkpoint(tmp_path, emb)
    assert torch.equal(emb.table.torch(), before)


@pytest.mark.parametrize("maker", ["odd constructor", "counts", "decayed average"])
def test_optimizers_of_others(maker: str, tmp_path: Path) -> None:
    def fresh(seed: int) -> tuple[st.Embedding, Any]:
        torch.manual_seed(seed)
        emb = st.Embedding(30, 8, idle="lazy")
        return emb, STYLES[maker][0]([emb.weight])

    def train(emb: st.Embedding, optimizer: Any, start: int) -> None:
        for step in range(start, start + 12):
            optimizer.zero_grad()
            (
                emb(torch.randint(0, 29, (9,), generator=torch.Generator().manual_seed(step))) - 1
            ).square().sum().backward()
            optimizer.step()

    emb, optimizer = fresh(0)
    train(emb, optimizer, 0)
    st.save_checkpoint(tmp_path / "checkpoint", emb, optimizer)
    train(emb, optimizer, 12)
    other, other_optimizer = fresh(1)
    st.load_checkpoint(tmp_path / "checkpoint", other, other_optimizer)
    train(other, other_optimizer, 12)
    assert torch.equal(other.table.torch(), emb.table.torch())


class OfSomebody(torch.optim.SGD):
    """What it does to idle rows nobody has said."""


def test_refused_before_anything_changes(tmp_path: Path) -> None:
    """Exact idle rows have no rule for the optimizer of the checkpoint."""
    lazy = st.Embedding(30, 8, idle="lazy")
    optimizer = OfSomebody(lazy.parameters(), lr=0.1, momentum=0.9)
    lazy(torch.arange(5)).sum().backward()
    optimizer.step()
    st.save_checkpoint(tmp_path / "checkpoint", lazy, optimizer)
    exact = st.Embedding(30, 8, idle="exact")
    before = exact.table.torch().clone()
    with pytest.raises(OptimizerError, match="OfSomebody"):
        st.load_checkpoint(tmp_path / "checkpoint", exact, OfSomebody(exact.parameters(), lr=0.1, momentum=0.9))
    assert torch.equal(exact.table.torch(), before)


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


def test_state_that_is_no_longer_used_stays(tmp_path: Path) -> None:
    run = Run(case_named("adamw-amsgrad"))
    run.epochs(1)
    run.optimizer.param_groups[0]["amsgrad"] = False
    run.epochs(1)
    run.save(tmp_path)
    expected = run.digest()
    other = Run(case_named("adamw-amsgrad"), 1)
    other.load(tmp_path)
    assert other.digest() == expected
    assert other.optimizer.state[other.model.words.weight].keys() >= {"max_exp_avg_sq"}
    for each in (run, other):
        seed_all(1)
        each.optimizer.param_groups[0]["amsgrad"] = True
        each.epochs(1)
    assert run.digest() == other.digest()
