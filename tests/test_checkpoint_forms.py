"""Checkpoints of rows that lag behind, and of rows and state in small forms: resumed bit for bit, and read by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import Run
from optimizer_cases import case_named
from safetensors.torch import load_file
from test_checkpoint_fuzz import resign
from third_party import STYLES
from torch import nn

import speedtransfer as st
from speedtransfer.errors import OptimizerError, StorageError

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


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "adagrad", "rmsprop-centered", "nadam-decoupled"])
def test_resumed_bit_for_bit(name: str, form: str, tmp_path: Path) -> None:
    path, case = tmp_path / "checkpoint", case_named(name)
    run = Run(case, **FORMS[form])
    run.epochs(2)
    run.save(path)
    run.epochs(2)
    resumed = Run(case, seed=9, **FORMS[form])
    resumed.epochs(1)  # something to be overwritten
    resumed.load(path)
    resumed.epochs(2)
    assert resumed.digest() == run.digest()


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


def test_coupled_decay_comes_with_a_checkpoint(tmp_path: Path) -> None:
    """Hyperparameters under which rows take their steps one by one, loaded where they took them at once."""
    pairs = []
    for decay in (0.1, 0.0):
        torch.manual_seed(0)
        emb = st.Embedding(30, 8)
        pairs.append((emb, torch.optim.Adam(emb.parameters(), lr=0.05, weight_decay=decay)))

    def train(emb: st.Embedding, optimizer: torch.optim.Optimizer, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(10):
            emb(torch.randint(0, 30, (3,), generator=draw)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for pair in pairs:
        train(*pair, seed=1)
    st.save_checkpoint(tmp_path / "checkpoint", *pairs[0])
    st.load_checkpoint(tmp_path / "checkpoint", *pairs[1])
    for pair in pairs:
        train(*pair, seed=2)
    assert torch.equal(pairs[0][0].table.torch(), pairs[1][0].table.torch())
