"""Deltas with the state of optimizers: a copy goes on as the trainer does, and a base and deltas make the full checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import digest
from torch import nn

import speedtransfer as st

ROWS, DIM = 60, 8
ADAMW, SGD = torch.optim.AdamW, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def vocabulary(**options: Any) -> Any:
    return {"vocabulary": st.Vocabulary(max_capacity=30, seed=1, **options), "idle": "lazy"}


# Options of the embedding, and the optimizer.
CASES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any], Any]]] = {
    "sgd": (lambda: {"idle": "lazy"}, SGD),
    "sgd exact": (lambda: {"idle": "exact"}, SGD),
    "adamw exact": (lambda: {"idle": "exact"}, ADAMW),
    "adamw lazy": (lambda: {"idle": "lazy"}, ADAMW),
    "adagrad": (lambda: {}, torch.optim.Adagrad),
    "amsgrad": (lambda: {"idle": "lazy"}, lambda params: ADAMW(params, amsgrad=True)),
    "rows": (lambda: {"idle": "lazy", "layout": "rows"}, ADAMW),
    "cached": (lambda: {"idle": "lazy", "cache_rows": 8}, ADAMW),
    "bfloat16": (lambda: {"idle": "lazy", "storage_dtype": torch.bfloat16}, ADAMW),
    "int8": (lambda: {"idle": "lazy", "storage_dtype": torch.int8}, ADAMW),
    "8-bit state": (lambda: {"idle": "lazy", "state_dtype": torch.uint8}, ADAMW),
    "8-bit state exact": (lambda: {"idle": "exact", "state_dtype": torch.uint8}, ADAMW),
    "vocabulary": (lambda: vocabulary(evict="lru"), ADAMW),
    "vocabulary exact": (lambda: {**vocabulary(evict="lru"), "idle": "exact"}, ADAMW),
    "vocabulary counts": (lambda: vocabulary(evict="lfu", admit=2), SGD),
}


class Net(nn.Module):
    """A table of options, one that grows, one of several features, and the rest."""

    def __init__(self, options: dict[str, Any], grows: bool = True) -> None:
        torch.manual_seed(0)
        super().__init__()
        rows = 8 if "vocabulary" in options else ROWS
        self.emb = st.Embedding(rows, DIM, **options)
        table = st.Table(10, DIM, memory="pageable", max_rows=200 if grows else 10).normal_()
        self.more = st.Embedding.from_pretrained(table, freeze=False, idle="lazy")
        self.many = st.MultiEmbedding([20, 10], 4, idle="lazy")
        self.head = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.emb(ids).to(torch.float32) + self.more(ids % self.more.num_embeddings)
        return self.head(rows) + self.many(torch.stack([ids % 20, ids % 10], 1)).sum(1)


class World:
    """A model in training."""

    def __init__(self, name: str) -> None:
        options, optimizer = CASES[name]
        self.net: Any = Net(options())
        self.opt = optimizer(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 3)

    def steps(self, count: int, seed: int, first: int = 0) -> None:
        torch.manual_seed(seed)
        for _ in range(count):
            self.opt.zero_grad()
            self.net(torch.randint(first, first + 40, (5,))).square().sum().backward()
            self.opt.step()
            self.scheduler.step()

    def save(self, path: Path) -> None:
        st.save_checkpoint(path, self.net, self.opt, scheduler=self.scheduler)

    def load(self, path: Path) -> None:
        st.load_checkpoint(path, self.net, self.opt, scheduler=self.scheduler)

    def save_delta(self, path: Path, since: Any) -> Any:
        return st.save_delta(path, self.net, since, self.opt, scheduler=self.scheduler)

    def apply(self, path: Path, known: Any) -> Any:
        return st.apply_delta(path, self.net, known, self.opt, scheduler=self.scheduler)

    def digest(self) -> str:
        state = self.net.state_dict()
        if "emb.vocabulary.ids" in state:
            # By which vocabularies are told apart, and ids of before of rows that are free.
            del state["emb.vocabulary.origin"]
            state["emb.vocabulary.ids"] = state["emb.vocabulary.ids"] * (state["emb.vocabulary.last_use"] >= 0)
        return digest([state, self.opt.state_dict(), self.scheduler.state_dict()])


def files_of(folder: Path) -> dict[str, Any]:
    """Return all that a manifest says but for the names of files."""
    content = json.loads((folder / "manifest.json").read_text())
    for facts in content["files"].values():
        del facts["name"]
    return {name: value for name, value in content.items() if name != "sha256"}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_copy_goes_on_and_base_and_deltas_are_the_checkpoint(name: str, steps_before: int, tmp_path: Path) -> None:
    one, copy = World(name), World(name)
    one.steps(steps_before, 1)
    one.save(tmp_path / "base")
    mark, known, deltas = st.mark(one.net, one.opt), None, list[Path]()
    copy.load(tmp_path / "base")
    assert st.mark(copy.net, copy.opt).fingerprints == mark.fingerprints
    for number in range(3):
        one.steps(2, 2 + number, 10 * number)
        if number == 1:
            one.net.more.table.grow(25)
        deltas.append(tmp_path / f"{number}.safetensors")
        mark = one.save_delta(deltas[-1], mark)
        known = copy.apply(deltas[-1], known if number % 2 else None)
        assert known.fingerprints == mark.fingerprints == st.mark(copy.net, copy.opt).fingerprints
        assert copy.digest() == one.digest()
    one.save(tmp_path / "full")
    st.merge(tmp_path / "base", deltas, tmp_path / "merged")
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "full")
    merged = World(name)
    merged.net.more.table.grow(25)
    merged.load(tmp_path / "merged")
    for each in (one, copy, merged):
        each.steps(3, 9, 20)
    assert copy.digest() == merged.digest() == one.digest()
