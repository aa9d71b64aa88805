"""Processes that do not do the same are told so, by name and in all, and never hang for longer than the group's timeout."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interrupt import Interrupt
from torch import nn

import speedtransfer as st
from ranks.run import DeadRankError
from ranks.small import DIM, ROWS, Pair, ids, rows_of, table, told
from ranks.test_uses import Raising
from ranks.test_wrappers import models, wrap

STEPS = 5


def train(kind: str, what: str) -> None:
    """Train; in the third step rank 1 does something else."""
    model: nn.Module = models(kind)[0]
    emb = model.emb
    if kind == "replicas":
        model = wrap(model)
    params = list(emb.parameters())
    rate = torch.tensor(0.1) if what == "rate in a tensor" else 0.1
    opt: torch.optim.Optimizer = torch.optim.AdamW(params, lr=rate)
    if what == "optimizer" and dist.get_rank():
        opt = torch.optim.Adam(params, lr=rate)
    for step in range(STEPS):
        odd = step == 2 and dist.get_rank() == 1
        if odd and what == "lookup":
            continue
        if odd and what == "rate":
            opt.param_groups[0]["lr"] = 0.2
        if odd and what == "rate in a tensor":
            opt.param_groups[0]["lr"].fill_(0.2)
        if odd and what == "frozen":
            emb.weight.requires_grad_(False)
        if not (odd and what == "zero_grad"):
            opt.zero_grad()
        loss = model(ids(step)).square().sum()
        if odd and what == "one lookup more":
            emb(ids(step))
        if odd and what == "backward that raises":
            assert "no gradient" in told(Raising.apply(loss).backward)
            continue
        loss.backward()
        if not (odd and what == "step"):
            opt.step()


# What is said by all; "" where it may also end by the group's timeout: other messages of the group were under way.
TOLD = {
    ("sharded", "lookup"): "out of step",
    ("sharded", "one lookup more"): "out of step|differ where one looks up",
    ("sharded", "frozen"): "without gradients",
    ("sharded", "backward that raises"): "out of step: rank 0: brings gradients .* rank 1: looks up rows",
    ("shared", "backward that raises"): "1 failed backwards",
    ("shared", "frozen"): "out of step|differ",
    ("shared", "step"): "out of step: rank 0: makes a step .* rank 1: brings gradients|out of step",
    ("sharded", "step"): "after 3 steps .* after 2 steps",
    ("replicas", "step"): "after 3 steps .* after 2 steps",
    **{(kind, "zero_grad"): "with a gradient" for kind in ("sharded", "shared", "replicas")},
    **{(kind, "rate"): "'lr': 0.1,.*'lr': 0.2," for kind in ("sharded", "shared", "replicas")},
    **{(kind, "rate in a tensor"): "'lr': 0.1.*'lr': 0.2" for kind in ("sharded", "shared", "replicas")},
    **{(kind, "optimizer"): "by AdamW .* by Adam " for kind in ("sharded", "shared", "replicas")},
}


@pytest.mark.sweep("kind", "what")
@pytest.mark.parametrize(("kind", "what"), TOLD)
def test_told_in_all(two, kind, what):
    found = two.fails(train, kind, what, timeout=2 if what == "lookup" else 5, limit=30, fresh=False)
    if what == "lookup":
        # The one that goes on alone at the end waits.
        assert any("Error" in type(each).__name__ for each in found)
        return
    for each in found:
        assert type(each).__name__ in ("ProcessGroupError", "DifferenceError"), found
        assert re.search(TOLD[kind, what], str(each)), each
        assert re.search(r"; (give all the same|each must make the same)", str(each))
        assert "rank 0" in str(each)
        assert "rank 1" in str(each)


class Two(nn.Module):
    """Two tables, of which a batch may lack one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tables = nn.ModuleList([table(kind), table(kind)])
        self.out = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, ids: torch.Tensor, count: int = 2) -> torch.Tensor:
        return self.out(sum(emb(ids) for emb in self.tables[:count])).square().sum()


def train_wrapped(kind: str, what: str) -> None:
    net = Two("one" if kind == "replicas" else kind)
    model = wrap(net, find_unused_parameters=what == "lookup")
    opt = torch.optim.AdamW(net.parameters())
    for step in range(STEPS):
        odd = step == 2 and dist.get_rank() == 1
        opt.zero_grad()
        loss = model(ids(step), 1 if odd and what == "lookup" else 2)
        if odd and what == "all":
            continue
        if not (odd and what == "backward"):
            loss.backward()
        if not (odd and what == "step"):
            opt.step()


# Who leaves out all of a step in a table whose lookups send nothing is one step behind, and not known to be out of step.
WRAPPED = [("sharded", what) for what in ("lookup", "backward", "step", "all")]
WRAPPED += [(kind, what) for kind in ("shared", "replicas") for what in ("backward", "step")]


@pytest.mark.parametrize(("kind", "what"), WRAPPED)
def test_told_beside_the_messages_of_ddp(two, kind, what):
    begin = time.monotonic()
    found = two.fails(train_wrapped, kind, what, timeout=60, limit=50, fresh=False)
    # None of them waits for the time limit of the group.
    assert time.monotonic() - begin < 40
    for each in found:
        assert type(each).__name__ in ("ProcessGroupError", "DifferenceError"), found
        assert "rank 0: " in str(each)
        assert "rank 1: " in str(each)
        assert "out of step" in str(each) or what in ("step", "all")


def calls_of_steps(kind: str) -> list[int]:
    found = []
    for around in (lambda net: net, wrap):
        net = Two(kind)
        model, traffic = around(net), net.tables[0]._handle.owners.exchange.traffic
        opt = torch.optim.AdamW(net.parameters())
        for step in range(3):
            before = traffic.calls
            opt.zero_grad()
            model(ids(step)).backward()
            opt.step()
        found.append(traffic.calls - before)
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_no_more_messages_under_ddp(two, kind):
    for alone, wrapped in two(calls_of_steps, kind):
        assert alone == wrapped > 0


def bad_ids(kind: str) -> tuple[list[str], float]:
    pair = Pair(kind)
    pair.train(0)
    messages = []
    for bad in (torch.tensor([ROWS]), torch.tensor([-1]), torch.tensor([0.5]), [ROWS]):
        for alone in (True, False):
            use = bad if dist.get_rank() == 1 or not alone else ids()
            messages.append(told(lambda use=use: pair.emb(torch.as_tensor(use))))
    pair.train(1, 2)
    return messages, pair.distance()


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_bad_ids_on_one_rank_or_all_then_good_steps(two, kind):
    (first, error), (second, other) = two(bad_ids, kind)
    assert max(error, other) < 1e-12
    assert all(("RowIndexError" in said or "InvalidTypeError" in said) and ";" in said for said in second)
    # A lookup in a shared table sends nothing.
    alone = ["rank 1 refused its ids (its own message says why)" if kind == "sharded" else ""] * 4
    assert all(wanted in said for wanted, said in zip(alone, first[::2], strict=True))
    assert all("RowIndexError" in said or "InvalidTypeError" in said for said in first[1::2])


def bad_bags(kind: str) -> list[str]:
    options = {"memory": "shared"} if kind == "shared" else {}
    emb = st.EmbeddingBag(ROWS, DIM, process_group=dist.group.WORLD, **options)
    good, flat = (torch.arange(6), torch.tensor([0, 3])), torch.arange(6)
    cases = [
        (flat, torch.tensor([0, 9])),
        (flat, torch.tensor([1, 2])),
        (flat.view(2, 3), torch.tensor([0])),
        (flat, None),
    ]
    found = []
    for case in cases:
        found.append(told(lambda case=case: emb(*(case if dist.get_rank() == 1 else good))))
    emb(*good).sum().backward()
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_bad_offsets_are_found_by_the_rank_that_has_them(two, kind):
    first, second = two(bad_bags, kind)
    assert first == [""] * 4
    assert all(second)


# What rank 0 and rank 1 give.
DIFFERENT = {
    "rows": {"num_embeddings": (ROWS, ROWS + 1)},
    "dim": {"embedding_dim": (DIM, DIM + 1)},
    "dtype": {"dtype": (torch.float32, torch.float64)},
    "idle": {"idle": ("lazy", "exact")},
    "storage": {"storage_dtype": (None, torch.int8)},
    "comm": {"comm_dtype": (None, torch.int8)},
    "bad option": {"comm_dtype": (None, torch.float16)},
}


def different_tables(kind: str, what: str) -> None:
    options = {"process_group": dist.group.WORLD, **({"memory": "shared"} if kind == "shared" else {})}
    different = {name: values[dist.get_rank()] for name, values in DIFFERENT[what].items()}
    st.Embedding(**{"num_embeddings": ROWS, "embedding_dim": DIM, **options, **different})


@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_different_tables_are_refused_where_they_are_made(two, kind, what):
    found = two.fails(different_tables, kind, what, timeout=10, fresh=False)
    if what == "bad option":
        assert "rank 1 failed where it makes a table" in str(found[0])
        assert "comm_dtype is torch.float16" in str(found[1])
        return
    for each in found:
        assert type(each).__name__ in ("ProcessGroupError", "DifferenceError"), found
        assert "makes a table" in str(each)


def dies(kind: str, where: str) -> float:
    emb = table(kind)
    opt = torch.optim.Adam(emb.parameters())
    for step in range(3):
        last = where if step == 2 and dist.get_rank() == 1 else ""
        loss = emb(ids(step)).sum()
        if last == "backward":
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            loss.backward()
            if last == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            opt.step()
            rows_of(emb)
            if kind == "shared":
                dist.barrier()
        except RuntimeError:
            return time.monotonic() - start
    return -1.0


@pytest.mark.parametrize(("kind", "where"), [("sharded", "step"), ("shared", "backward")])
def test_a_rank_that_dies_has_the_others_raise_soon(two, kind, where):
    alive, died = two.fails(dies, kind, where, timeout=20)
    assert isinstance(died, DeadRankError)
    assert isinstance(alive, Exception) or 0 <= alive < 10


# --- an interrupt in one of several processes: all go on as if it had not come, or raise in all ---------------------------

# The step that is interrupted in the last rank.
ODD = 2


class Run:
    """A table of several processes in training."""

    def __init__(self, kind: str) -> None:
        self.model: nn.Module = models(kind)[0]
        self.emb = self.model.emb
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        if kind == "replicas":
            self.model = wrap(self.model)

    def step(self, number: int) -> None:
        self.opt.zero_grad()
        self.model(ids(number)).square().sum().backward()
        self.opt.step()

    def go_on(self) -> None:
        for number in range(ODD + 1, STEPS):
            self.step(number)


THEN: dict[str, Any] = {
    "go on": lambda run, path: run.go_on(),
    "look up": lambda run, path: run.emb(ids(0)),
    "save": lambda run, path: st.save_checkpoint(path, run.model, run.opt),
    "full_state_dict": lambda run, path: st.full_state_dict(run.model),
}


def interrupted(kind: str, then: str, path: Path, within: str, at: int) -> tuple[bool, str]:
    """Train with an interrupt in the last process; return whether it came there, and what was raised afterwards."""
    run, interrupt, came = Run(kind), Interrupt(at, within=within), False
    for number in range(ODD):
        run.step(number)

    def rest() -> None:
        nonlocal came
        if dist.get_rank() == dist.get_world_size() - 1:
            came = interrupt.during(lambda: run.step(ODD))
        else:
            run.step(ODD)
        THEN[then](run, path)

    text = told(rest)
    return came, text


# Within which function, and at which of its points.
PLACES = [("_enter", 4), ("adam", 3)]
CASES = [("sharded", then) for then in THEN] + [("shared", "go on"), ("shared", "save"), ("replicas", "go on")]


@pytest.mark.parametrize(("kind", "then"), CASES)
def test_a_step_that_one_process_has_not_made_is_told_in_all(two, kind: str, then: str, tmp_path: Path) -> None:
    place = PLACES[CASES.index((kind, then)) % len(PLACES)]
    found = two(interrupted, kind, then, tmp_path, *place)
    assert [came for came, _ in found] == [False, True]
    for _, text in found:
        assert "the processes are out of step: " in text or "after 3 steps" in text, text
