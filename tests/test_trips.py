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


def traced(function: Callable[[], object]) -> tuple[int, int]:
    """Return how often functions of ours were called, and how deep below the first of them an engine is."""
    calls = depth = to_engine = 0

    def note(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls, depth, to_engine
        code = frame.f_code
        # Comprehensions are functions in some versions of Python only.
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if event == "call":
            calls, depth = calls + 1, depth + 1
            if code.co_filename.startswith(ENGINES) and code.co_name in ("gather", "scatter"):
                to_engine = max(to_engine, depth - 1)
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls, to_engine


@pytest.mark.parametrize(
    ("idle", "ids", "most"), [("lazy", "rows", 88), ("exact", "rows", 125), ("lazy", "known", 180)]
)
def test_a_step(idle: str, ids: str, most: int) -> None:
    emb = st.Embedding(5000, 32, memory="pageable", idle=idle, vocabulary=st.Vocabulary() if ids == "known" else None)
    opt = torch.optim.AdamW(emb.parameters(), lr=1e-3)

    def step() -> None:
        emb(IDS).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(4):
        step()
    calls, to_engine = traced(step)
    assert 0 < to_engine <= 10
    assert calls <= most


def test_a_lookup_without_gradients() -> None:
    emb = st.Embedding(5000, 16, memory="pageable")
    with torch.no_grad():
        few, many = traced(lambda: emb(IDS)), traced(lambda: emb(IDS.repeat(5)))
    # One call of torch, by the table itself.
    assert few[1] == 0 < few[0] <= 12
    assert 0 < many[1] <= 8
    assert many[0] <= 26
