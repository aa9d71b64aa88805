"""An interrupt in one of several processes: all go on as if it had not come, or raise in all, and say why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interrupt import Interrupt
from torch import nn

import speedtransfer as st
from ranks.small import ids, told
from ranks.test_wrappers import models, wrap

# The step that is interrupted in the last rank.
STEPS, ODD = 5, 2


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


def train(kind: str, then: str, path: Path, within: str, at: int) -> tuple[bool, str]:
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
    found = two(train, kind, then, tmp_path, *place)
    assert [came for came, _ in found] == [False, True]
    for _, text in found:
        assert "the processes are out of step: " in text or "after 3 steps" in text, text
