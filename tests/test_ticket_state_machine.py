"""Any sequence of calls on a module whose rows are read ahead gives, to the bit, what it gives on a twin without."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as some
from hypothesis.stateful import rule
from ticket_machine import DIM, OPTIMIZERS, ROW, Side, TicketMachine, held_fetch

import speedtransfer as st
from speedtransfer.rows import Rows

# --- writes, as (side, row) -------------------------------------------------------------------------------------------


def by_scatter(side: Side, row: int) -> None:
    side.emb.table.scatter([row], torch.full((1, DIM), -1.0).to(side.emb.table.dtype))


@torch.no_grad()
def to_the_weight(side: Side, row: int) -> None:
    side.emb.weight[row] *= 0.5


def to_weight_data(side: Side, row: int) -> None:
    # Of encoded rows it is a copy.
    if side.emb._handle.rows.plain:
        side.emb.weight.data[row].fill_(0.25)


def to_the_view(side: Side, row: int) -> None:
    side.emb.table.torch()[row].fill_(1)


def to_the_state(side: Side, row: int) -> None:
    for values in side.optimizer.state.get(side.emb.weight, {}).values():
        # A state of 8 bits is shown by a placeholder.
        if type(values) is torch.Tensor and values.dim() == 2:
            values[row].mul_(0.5)


def of_all_rows(side: Side, row: int) -> None:
    torch.manual_seed(row)
    side.emb.reset_parameters()


WRITES = (by_scatter, to_the_weight, to_weight_data, to_the_view, to_the_state, of_all_rows)


class WritingMachine(TicketMachine):
    """Rows, state and whole modules change while rows are being read."""

    @rule(write=some.sampled_from([*WRITES[:2], *WRITES]), row=ROW)
    def write(self, write, row):
        self.both(lambda side: write(side, row))

    @rule(lr=some.sampled_from([0.01, 0.3]))
    def change_learning_rate(self, lr):
        for side in self.sides:
            side.optimizer.param_groups[0]["lr"] = lr

    @rule(what=some.sampled_from(["state dict", "module alone", "optimizer", "checkpoint", "copy", "pickle"]))
    def put_in_place(self, what):
        """Load what was taken before, or take it; or go on with something new in the place of the old."""
        getattr(self, {"module alone": "_state_dict", "pickle": "_copy"}.get(what, f"_{what.replace(' ', '_')}"))(what)

    def _state_dict(self, what: str) -> None:
        def load(side: Side) -> None:
            if side.saved is None:
                side.saved = copy.deepcopy((side.emb.state_dict(), side.optimizer.state_dict()))
                return
            side.emb.load_state_dict(side.saved[0])
            if what == "state dict":
                side.optimizer.load_state_dict(copy.deepcopy(side.saved[1]))
            side.saved = None

        self.both(load)

    def _optimizer(self, what: str) -> None:
        for side in self.sides:
            # Its state goes with it, before there is another.
            side.optimizer = None
            side.optimizer = OPTIMIZERS[self.config["optimizer"]](side.emb.parameters())

    def _checkpoint(self, what: str) -> None:
        there, before = Path(self.folder.name, "checkpoint0").exists(), random.getstate()
        for number, side in enumerate(self.sides):
            path = Path(self.folder.name, f"checkpoint{number}")
            (st.load_checkpoint if there else st.save_checkpoint)(path, side.emb, side.optimizer, progress=False)
        # Loading sets it; what is drawn for this test must not repeat itself.
        random.setstate(before)

    def _copy(self, what: str) -> None:
        def copied(side: Side) -> None:
            both = side.emb, side.optimizer
            side.emb, side.optimizer = copy.deepcopy(both) if what == "copy" else pickle.loads(pickle.dumps(both))

        # The copies know nothing of losses that the others have looked up.
        self.step_and_begin_anew()
        self.both(copied)


MODERATE = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def run(profile, monkeypatch):
    monkeypatch.setattr(Rows, "fetch", held_fetch)
    case = WritingMachine.TestCase
    case.settings = profile
    case().runTest()


def test_any_sequence_of_calls(monkeypatch):
    run(MODERATE, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_calls(monkeypatch):
    run(settings(MODERATE, max_examples=500, stateful_step_count=20, derandomize=False), monkeypatch)
