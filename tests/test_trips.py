"""How far a row travels: our own function calls in a warm training step, counted, so that no corridor grows back."""

import sys
from pathlib import Path

import pytest
import torch
from cases import take_step

import speedtransfer as st

PACKAGE = str(Path(st.__file__).parent)
IDS = torch.arange(64) * 50


def calls_of(function):
    calls = 0

    def note(frame, event, arg):
        nonlocal calls
        code = frame.f_code
        # Comprehensions are functions in some versions of Python only.
        calls += event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ("idle", "ids", "most"), [("lazy", "rows", 88), ("exact", "rows", 122), ("lazy", "known", 180)]
)
def test_a_step(idle, ids, most):
    emb = st.Embedding(5000, 32, memory="pageable", idle=idle, vocabulary=st.Vocabulary() if ids == "known" else None)
    opt = torch.optim.AdamW(emb.parameters(), lr=1e-3)

    def step():
        take_step(opt, emb(IDS).sum())

    for _ in range(4):
        step()
    assert 0 < calls_of(step) <= most


def test_a_lookup_without_gradients():
    emb = st.Embedding(5000, 16, memory="pageable")
    with torch.no_grad():
        # Of few rows one call of torch, by the table itself.
        assert 0 < calls_of(lambda: emb(IDS)) <= 12
        assert 0 < calls_of(lambda: emb(IDS.repeat(5))) <= 26
