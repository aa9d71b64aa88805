"""How far a row travels: our own function calls in a warm training step, counted, so that no corridor grows back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import speedtransfer as st

PACKAGE = str(Path(st.__file__).parent)
ENGINES = str(Path(st.__file__).parent / "engines")
IDS = torch.arange(64) * 50


class Trip:
    """Counts calls of our own functions, and how deep below the first of them an engine is."""

    def __init__(self) -> None:
        self.calls = self.depth = self.to_engine = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name.startswith("<"):
            return  # comprehensions are functions in some versions of Python only
        if event == "call":
            self.calls += 1
            self.depth += 1
            if frame.f_code.co_filename.startswith(ENGINES) and frame.f_code.co_name in ("gather", "scatter"):
                self.to_engine = max(self.to_engine, self.depth - 1)
        elif event == "return":
            self.depth -= 1


def traced(function: Callable[[], object]) -> Trip:
    trip = Trip()
    sys.setprofile(trip)
    try:
        function()
    finally:
        sys.setprofile(None)
    return trip


@pytest.mark.parametrize(
    ("idle", "ids", "calls"), [("lazy", "rows", 88), ("exact", "rows", 125), ("lazy", "known", 180)]
)
def test_a_step(idle: str, ids: str, calls: int) -> None:
    emb = st.Embedding(5000, 32, memory="pageable", idle=idle, vocabulary=st.Vocabulary() if ids == "known" else None)
    opt = torch.optim.AdamW(emb.parameters(), lr=1e-3)

    def step() -> None:
        emb(IDS).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(4):
        step()
    trip = traced(step)
    assert 0 < trip.to_engine <= 10
    assert trip.calls <= calls


def test_a_lookup_without_gradients() -> None:
    emb = st.Embedding(5000, 16, memory="pageable")
    with torch.no_grad():
        few, many = traced(lambda: emb(IDS)), traced(lambda: emb(IDS.repeat(5)))
    # One call of torch, by the table itself.
    assert few.to_engine == 0
    assert 0 < few.calls <= 12
    assert 0 < many.to_engine <= 8
    assert many.calls <= 26


def test_a_gather_with_steps_pending() -> None:
    """Catching up goes straight to the rows, and not through the public calls of the table again."""
    emb = st.Embedding(5000, 32, memory="pageable", idle="exact")
    opt = torch.optim.AdamW(emb.parameters(), lr=1e-3)
    for start in (0, 10, 0):
        emb(IDS + start).sum().backward()
        opt.step()
        opt.zero_grad()
    trip = traced(lambda: emb.table.gather(IDS[:3]))
    assert 0 < trip.to_engine <= 10
    assert trip.calls <= 70
