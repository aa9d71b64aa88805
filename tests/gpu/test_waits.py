"""A warm training step never makes the host wait: every form of bench/warm_steps.py, on every memory.

Where one does still, `KNOWN` has how often: a number that falls must be lowered there.
"""

import contextlib
import gc
import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu.tools import hold, synchronizing

try:
    import fakegpu  # the emulated GPU, which lists every call
except ImportError:
    fakegpu = None

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    _warm_steps = importlib.import_module("warm_steps")

FORMS = {name: form for name, form in _warm_steps.FORMS.items() if form.memory == "pinned"}
SIZES = _warm_steps.Sizes(rows=2_600, lookups=832, dim=8)
MANY = 3  # tables, where there are many
WARM = 6  # more steps than there are batches and staging buffers

# How often torch waits in a step of each form: on pinned memory, on device memory, and on pageable and mmap memory, whose rows
# the host moves, so that it must know which.
KNOWN = {
    "lazy": (1, 1, 1),
    "lazy, foreach": (1, 1, 1),
    "lazy, SGD with momentum": (1, 1, 1),
    "lazy, int8 and uint8 state": (4, 4, 4),
    "lazy, bfloat16": (1, 1, 1),
    "lazy, looked up twice": (3, 3, 3),
    "lazy, padding_idx": (1, 1, 1),
    "lazy, max_norm": (2, 2, 2),
    "lazy, EmbeddingBag": (1, 1, 1),
    "lazy, GradScaler": (1, 1, 1),
    "exact": (2, 2, 2),
    "exact, foreach": (2, 2, 2),
    "exact, SGD with momentum": (1, 1, 1),
    "exact, int8 and uint8 state, foreach": (5, 5, 5),
    "exact, looked up twice": (6, 6, 6),
    "exact, GradScaler": (4, 4, 4),
    "word2vec skip-gram": (3, 3, 3),
    "lazy, 26 tables": (MANY, MANY, MANY),
    "exact, 26 tables": (2 * MANY, 2 * MANY, 2 * MANY),
    "lazy, 26 in one": (0, 0, 1),
    "exact, 26 in one": (0, 0, 1),
    "evaluation": (1, 0, 1),
    "evaluation, exact": (2, 2, 2),
}
STAGED = 8  # further waits at most, for each lookup in a table: a staging buffer is filled again once its copy is done


@pytest.fixture(autouse=True)
def _no_garbage():
    """Page-locked memory that garbage collection finds is freed, and that waits for the device."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("memory", ["pinned", "device", "pageable", "mmap"])
@pytest.mark.parametrize("name", FORMS)
def test_a_warm_step_waits_as_often_as_known(device, tmp_path, name, memory):
    form = replace(FORMS[name], memory=memory)
    form = replace(form, tables=MANY) if getattr(form, "tables", 1) > 1 else form
    step = form.build(SIZES, device, tmp_path)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    staged = memory in ("pageable", "mmap")
    known = KNOWN.get(name, (0, 0, 0))[2 if staged else memory == "device"]
    with synchronizing("warn") as of_torch, recorded() as waits:
        step()
    assert len(of_torch) == known, of_torch
    # Those of streams, events and CuPy are no operations of torch.
    lookups = getattr(form, "tables", 2) * getattr(form, "lookups", 1)
    assert len(waits) <= known + (STAGED * lookups if staged else 0), waits
    if not known and not staged:
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


def test_the_list_has_forms_only():
    assert set(KNOWN) <= set(FORMS)
