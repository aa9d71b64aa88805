"""A child of fork reads the rows that it shares with its parent as they were, and changes none: to write raises."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from in_child import FORKS, in_child, plain
from torch import Tensor, nn
from torch.utils.data import DataLoader

import speedtransfer as st
from speedtransfer.errors import DeviceError
from speedtransfer.rows import LAST_STEP
from speedtransfer.tables import forks

pytestmark = FORKS
ROWS, DIM = 60, 4
EVERY = torch.arange(ROWS)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cached": {"cache_rows": 10},
    "records": {"layout": "rows"},
    "int8": {"storage_dtype": torch.int8},
    "small state": {"state_dtype": torch.uint8},
}


class Training:
    """A model that trains, most of whose rows have missed steps."""

    def __init__(self, memory: str, folder: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.path = folder / f"{memory}.safetensors"
        path = self.path if memory == "mmap" else None
        self.emb = st.Embedding(ROWS, DIM, memory=memory, path=path, **options)
        self.model = nn.ModuleDict({"emb": self.emb})
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step(EVERY)
        for number in range(5):
            self.step(torch.arange(number, ROWS, 9))
        # Names the weight.
        self.model.state_dict(keep_vars=True)

    def step(self, ids: Tensor) -> None:
        self.opt.zero_grad()
        self.emb(ids).sin().sum().backward()
        self.opt.step()
        self.opt.zero_grad()

    def stored(self) -> list[Tensor]:
        table = self.emb.table
        table.wait()
        return [table.stored(name).clone().view(torch.uint8) for name in table.planes]


def checkpoint(run: Training) -> Any:
    """Save in this process, and return what a new model reads."""
    path = run.path.with_name("checkpoint")
    st.save_checkpoint(path, run.model, run.opt)
    model = nn.ModuleDict({"emb": nn.Embedding(ROWS, DIM)})
    opt = torch.optim.AdamW(model.parameters())
    st.load_checkpoint(path, model, opt)
    return model["emb"].weight.detach(), opt.state_dict()["state"]


def saved(run: Training) -> Tensor:
    path = run.path.with_name("saved.safetensors")
    run.emb.table.save(path)
    return st.Table.load(path, memory="pageable").torch()


@torch.no_grad()
def without_gradients(read: Callable[[nn.Parameter], Tensor], run: Training) -> Tensor:
    return read(run.emb.weight)


def trained_copy(run: Training) -> Tensor:
    twin = copy.deepcopy(run.emb)
    twin(torch.tensor([1, 2])).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    return twin.weight.detach()


READS: dict[str, Callable[[Training], Any]] = {
    "state dict": lambda run: run.model.state_dict()["emb.weight"],
    "state dict of the optimizer": lambda run: run.opt.state_dict()["state"],
    "norm": lambda run: run.emb.weight.norm(),
    "a row": lambda run: without_gradients(lambda weight: weight[50], run),
    "rows": lambda run: without_gradients(lambda weight: weight[40:].clone(), run),
    "data": lambda run: run.emb.weight.data + 0,
    "lookup": lambda run: run.emb(EVERY),
    "frozen lookup": lambda run: without_gradients(lambda weight: F.embedding(EVERY, weight), run),
    "ticket": lambda run: run.emb(run.emb.prefetch(EVERY)),
    "gather": lambda run: run.emb.table.gather([55, 3, 55], ["weight", "exp_avg"]),
    "view": lambda run: torch.tensor(run.emb.table.numpy()),
    "checkpoint": checkpoint,
    "save": saved,
    "deepcopy": lambda run: copy.deepcopy(run.model)["emb"].weight,
    "copy of the table": lambda run: copy.deepcopy(run.emb.table).torch(),
    "pickle": lambda run: pickle.loads(pickle.dumps(run.emb)).weight,
    "dense": lambda run: st.to_dense(run.model)["emb"].weight,
    "copy that trains": trained_copy,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_reads_what_it_would_of_its_own_copy(tmp_path: Path, kind: str) -> None:
    def read(run: Training) -> Any:
        return {name: plain(function(run)) for name, function in READS.items()}

    run, twin = (Training(memory, tmp_path, **KINDS[kind]) for memory in ("mmap", "pageable"))
    before = run.stored()
    got, want = in_child(lambda: read(run)), in_child(lambda: read(twin))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.stored(), before, strict=True))
    for name, values in got.items():
        # A row alone, and a lookup, are read without being rounded anew, and a copy rounds with other numbers.
        rounded = kind == "int8" and name in ("a row", "lookup", "frozen lookup", "ticket", "copy that trains")
        torch.testing.assert_close(
            values, want[name], rtol=0, atol=0.05 if rounded else 0, msg=lambda m, n=name: f"{n}: {m}"
        )


WRITES: dict[str, Callable[[Training], Any]] = {
    "step": lambda run: run.step(torch.tensor([1, 2])),
    "step of all rows": lambda run: run.step(EVERY),
    "data": lambda run: run.emb.weight.data.zero_(),
    "a value": lambda run: run.emb.weight.data.__setitem__((3, 0), 1.0),
    "a row": lambda run: without_gradients(lambda weight: weight[3].zero_(), run),
    "detached": lambda run: run.emb.weight.detach()[2:5].fill_(0),
    "in place by a function": lambda run: without_gradients(lambda weight: F.relu(weight, inplace=True), run),
    "other data": lambda run: setattr(run.emb.weight, "data", torch.ones(ROWS, DIM)),
    "another weight": lambda run: setattr(run.emb, "weight", nn.Parameter(torch.ones(ROWS, DIM))),
    "init": lambda run: nn.init.normal_(run.emb.weight),
    "reset_parameters": lambda run: run.emb.reset_parameters(),
    "load_state_dict": lambda run: run.model.load_state_dict({"emb.weight": torch.ones(ROWS, DIM)}),
    "load_checkpoint": lambda run: (checkpoint(run), st.load_checkpoint(run.path.with_name("checkpoint"), run.model)),
    "scatter": lambda run: run.emb.table.scatter([1], torch.ones(1, DIM)),
    "assignment": lambda run: run.emb.table.__setitem__(slice(2), torch.ones(2, DIM)),
    "unchecked": lambda run: run.emb.table.scatter(torch.tensor([1]), torch.ones(1, DIM), check=False),
    "zero": lambda run: run.emb.table.zero_(),
    "plane": lambda run: run.emb.table.add_plane("more"),
    "growth": lambda run: run.emb.table.grow(ROWS + 1),
    "max_norm": lambda run: F.embedding(EVERY, run.emb.weight, max_norm=0.01),
    "another optimizer": lambda run: (
        run.emb(EVERY[:2]).sum().backward(),
        torch.optim.SGD(run.model.parameters(), lr=1.0).step(),
    ),
}


def test_a_child_writes_to_nothing(tmp_path: Path) -> None:
    run = Training("mmap", tmp_path)
    before = run.stored()

    def refusals() -> dict[str, str]:
        found = {}
        for name, write in WRITES.items():
            try:
                write(run)
                found[name] = "not refused"
            except DeviceError as error:
                found[name] = str(error)
        return found

    for name, said in in_child(refusals).items():
        assert "rows of emb.weight are memory='mmap' of the process that this one was forked" in said, (name, said)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.stored(), before, strict=True))


def test_rows_that_the_parent_has_written_since(tmp_path: Path) -> None:
    """They are newer than the clock of the child, which gives them no steps; others are as of the fork."""
    run = Training("mmap", tmp_path)
    want = in_child(lambda: plain(run.emb(EVERY)))
    (go, tell), written = os.pipe(), torch.tensor([7, 50])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        with torch.no_grad(), os.fdopen(writing, "wb") as file:
            pickle.dump(
                plain([run.emb(EVERY), run.emb.weight.data + 0, torch.stack([run.emb.weight[i] for i in range(ROWS)])]),
                file,
            )
        os._exit(0)
    for _ in range(3):
        run.step(written)
    want[written] = plain(run.emb(written))
    os.write(tell, b"x")
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        for got in pickle.load(file):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
    os.waitpid(child, 0)


def test_a_row_that_the_parent_is_writing(tmp_path: Path) -> None:
    """Its new weight must not be given the steps that the row had missed until then."""
    run = Training("mmap", tmp_path)
    table, row, new = run.emb.table, torch.tensor([50]), torch.full((1, DIM), 2.0)
    (go, tell), (reading, writing) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        with torch.no_grad(), os.fdopen(writing, "wb") as file:
            pickle.dump(plain(run.emb(row)), file)
        os._exit(0)
    os.close(writing)
    assert forks.turns is not None
    forks.turns.begin()
    table.write(row, {"weight": new})
    os.write(tell, b"x")
    time.sleep(0.1)
    table.write(row, {LAST_STEP: torch.full((1, 1), 6, dtype=torch.int32)})
    forks.turns.end()
    with os.fdopen(reading, "rb") as file:
        assert (pickle.load(file) == 2).all()
    os.waitpid(child, 0)


def test_a_child_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent may have been killed while it wrote."""
    run = Training("mmap", tmp_path)
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.01)
    in_child(lambda: None)
    assert forks.turns is not None
    forks.turns.begin()
    try:
        assert in_child(lambda: plain(run.emb(EVERY))).shape == (ROWS, DIM)
    finally:
        forks.turns.end()


class Reading:
    """Collates ids with their rows, in a worker."""

    def __init__(self, emb: st.Embedding) -> None:
        self.emb = emb

    @torch.no_grad()
    def __call__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        return torch.tensor(ids), torch.stack([self.emb.weight[i] for i in ids])


def test_workers_of_a_loader_read_while_the_parent_trains(tmp_path: Path) -> None:
    run, twin = (Training(memory, tmp_path) for memory in ("mmap", "pageable"))
    for one in (run, twin):
        loader = DataLoader(range(ROWS), 10, collate_fn=Reading(one.emb), num_workers=1, multiprocessing_context="fork")
        for ids, rows in loader:
            assert rows.shape == (10, DIM)
            one.step(ids)
    torch.testing.assert_close(run.emb.weight, twin.emb.weight, rtol=0, atol=0)


def test_what_a_child_makes_is_its_own(tmp_path: Path) -> None:
    def train() -> Any:
        run = Training("mmap", tmp_path)
        run.emb.table[[1]] = torch.ones(1, DIM)
        # A child of the child shares it.
        with pytest.raises(DeviceError):
            in_child(lambda: run.emb.table.zero_())
        return plain(run.emb.weight)

    assert (in_child(train)[1] == 1).all()


def test_a_copy_of_the_child_is_trained_by_it(tmp_path: Path) -> None:
    run = Training("pageable", tmp_path)
    before = run.stored()

    def train() -> Any:
        run.step(torch.tensor([1, 50]))
        return plain(run.emb.weight)

    got = in_child(train)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.stored(), before, strict=True))
    run.step(torch.tensor([1, 50]))
    torch.testing.assert_close(got, plain(run.emb.weight), rtol=0, atol=0)
