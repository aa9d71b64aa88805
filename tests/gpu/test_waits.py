"""A warm training step never makes the host wait: every form of bench/warm_steps.py, on every memory.

Where one does still, `KNOWN` has how often: a number that falls must be lowered there.
"""

import contextlib
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu.tools import fakegpu, hold, no_garbage, synchronizing  # noqa: F401 - one is a fixture

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    _warm_steps = importlib.import_module("warm_steps")

FORMS = {name: form for name, form in _warm_steps.FORMS.items() if form.memory == "pinned"}
SIZES = _warm_steps.Sizes(rows=2_600, lookups=832, dim=8)
MANY = 3  # tables, where there are many
WARM = 6  # more steps than there are batches and staging buffers

# How often the host waits for ids in a step on pageable and mmap memory, whose rows it moves, where it is not once. On pinned
# and on device memory it never waits.
STAGED = {
    "lazy, ids on the host": 0,
    "lazy, looked up twice": 2,
    "exact, looked up twice": 2,
    "lazy, max_norm": 2,
    **{name: 0 for name in FORMS if name.startswith("word2vec")},
    "lazy, 26 tables": MANY,
    "exact, 26 tables": MANY,
    "evaluation": 0,
}


MEMORIES = "pinned", "device", "pageable", "mmap"
# A cache of every row is one of a table in pinned memory.
CASES = [(n, m) for n in FORMS for m in MEMORIES if m == "pinned" or not getattr(FORMS[n], "cached", False)]


@pytest.mark.parametrize(("name", "memory"), CASES)
def test_how_often_a_warm_step_waits(device, tmp_path, name, memory):
    form = replace(FORMS[name], memory=memory)
    form = replace(form, tables=MANY) if getattr(form, "tables", 1) > 1 else form
    step = form.build(SIZES, device, tmp_path)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    staged = memory in ("pageable", "mmap")
    known = STAGED.get(name, 1) if staged else 0
    with synchronizing("warn") as of_torch, recorded() as waits:
        step()
    assert len(of_torch) == known, of_torch
    # Those of streams, events and CuPy are no operations of torch: the host waits for rows that it is to write.
    written = getattr(form, "tables", 2)
    assert len(waits) <= (2 * known + written if staged else 0), waits
    # The emulator does bags at once, those of n-grams too.
    if not staged and (fakegpu is None or not (getattr(form, "bag", False) or "n-grams" in name)):
        check_the_host_is_done_first(step)


@contextlib.contextmanager
def recorded():
    """Give a list of every wait of the host, where the GPU is emulated."""
    waits = []
    with fakegpu.recorded() if fakegpu else contextlib.nullcontext([]) as calls:
        yield waits
    # A copy that waits is followed by a wait for its stream: one wait.
    waits += [call for before, call in zip(["", *calls], calls, strict=False) if is_wait(call) and not is_wait(before)]


def is_wait(call):
    return call.startswith("wait: ")


def check_the_host_is_done_first(step):
    """On a stream that is held back, the whole step must be queued before any of it has run."""
    if fakegpu is not None and not fakegpu.LAZY:
        return  # everything is done at once
    mine = torch.cuda.Stream()
    with torch.cuda.stream(mine):
        step()  # its memory is another stream's so far
        torch.cuda.synchronize()
        held = hold(mine)
        step()
        assert not held.query(), "it was waited for"
    mine.synchronize()
