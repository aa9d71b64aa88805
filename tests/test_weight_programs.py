"""Random programs of training, reading and writing: ``torch.nn.Embedding`` and ours end equal. See weight_programs.py."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from weight_programs import SETTINGS, VOCABULARY, draw, run, shrink
from weight_world import Setting

import speedtransfer

LENGTH = 16


def check(seed: int) -> None:
    """Run the program of a seed; show what is left of it without the statements that do not matter."""
    setting, watch = SETTINGS[seed % len(SETTINGS)], seed // len(SETTINGS) % 2 == 0
    program = draw(seed, LENGTH)
    outcome = run(program, setting, watch)
    if outcome.kind == "differs":
        program = shrink(program[: outcome.at + 1], setting, watch, "differs")
        outcome = run(program, setting, watch)
        pytest.fail(f"seed {seed}, {setting}, watch={watch}:\n" + "\n".join(program) + f"\n-> {outcome.text}")


@pytest.mark.parametrize("part", range(4))
def test_programs(part: int) -> None:
    for seed in range(part, 2 * len(SETTINGS), 4):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_programs(part: int) -> None:
    for seed in range(1000 + part * 250, 1250 + part * 250):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_every_statement(setting: Setting) -> None:
    """Each statement once after training, and training after it."""
    around = ["opt.zero_grad(); backward(loss(1)); opt.step()"] * 2
    for statement in VOCABULARY:
        for watch in (False, True):
            program = [*around, "backward(loss(2))", statement.format(k=3), "backward(loss(4))", "opt.step()", *around]
            outcome = run(program, setting, watch)
            assert outcome.kind != "differs", (statement, watch, outcome.at, outcome.text)


def test_programs_that_differ_are_told() -> None:
    """The comparison sees a step that one of the two does not take, and shortens the program to what shows it."""
    missed = "opt.step() if type(emb) is nn.Embedding else None"
    program = ["backward(loss(1))", "out = emb(ids(2))", missed, "emb.weight.sum()"]
    outcome = run(program, SETTINGS[0], True)
    assert outcome.kind == "differs"
    assert "emb.weight" in outcome.text
    assert shrink(program, SETTINGS[0], True, "differs") == ["backward(loss(1))", missed]


# --- what programs have found -----------------------------------------------------------------------------------------------


def pair() -> tuple[nn.Embedding, speedtransfer.Embedding]:
    torch.manual_seed(0)
    theirs = nn.Embedding(9, 3)
    return theirs, speedtransfer.Embedding.from_pretrained(theirs.weight.detach().clone(), freeze=False)


IDS, MORE = torch.tensor([1, 2, 2]), torch.tensor([2, 5])


@pytest.mark.parametrize("use", ["step", "whole", "hooks", "fails", "closure", "closure fails", "held", "state dict"])
def test_tables_are_freed_at_once(use: str, no_gc: None) -> None:
    """No cycle keeps a table until the next garbage collection."""

    def train() -> list[weakref.ref[Any]]:
        emb = pair()[1]
        opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
        emb(IDS).sum().backward()
        opt.step()
        if use == "whole":
            emb.weight.pow(2).sum().backward()
            emb.weight.data.mul_(2)
        elif use == "hooks":
            emb.weight.register_hook(lambda grad: grad * 2)
            emb(IDS).sum().backward()
        elif use == "held":
            opt.zero_grad(set_to_none=False)
            held = emb.weight.grad
            emb(MORE).sum().backward()
            assert held is emb.weight.grad
        elif use == "state dict":
            opt.load_state_dict(opt.state_dict())
            emb.load_state_dict(emb.state_dict())
        elif use == "closure":
            opt.step(lambda: 1.0)
        elif use == "closure fails":
            with pytest.raises(ZeroDivisionError):
                opt.step(lambda: 1 / 0)
        elif use == "fails":
            opt.param_groups[0]["betas"] = ("on purpose", 0.9)
            emb(IDS).sum().backward()
            with pytest.raises((TypeError, ValueError)):
                opt.step()
        opt.zero_grad()
        return [weakref.ref(emb.table), weakref.ref(emb.weight)]

    train()  # what torch makes once a process
    assert [reference() for reference in train()] == [None, None]
