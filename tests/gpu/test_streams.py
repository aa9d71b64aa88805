"""What is waited for: a producer that was held back, and nothing else; the host for nothing that it need not know.

A test calls a few times before it holds a stream back, with the same shapes: what is loaded or allocated first may wait.
"""

import contextlib
import subprocess
import sys

import pytest
import torch
from engine_cases import any_bits, cached

import speedtransfer as st
from gpu.tools import DEVICE_ENGINES, ENGINES, WAYS, check_same, hold, no_garbage, store_in  # noqa: F401
from speedtransfer.cuda.status import load_cupy
from speedtransfer.engines import MappedEngine, StagedEngine

WARM = [True] * 9 + [False]  # more calls than a staging engine has buffers, then the one that counts


@pytest.fixture(params=WAYS, ids="-".join)
def way(request, device, tmp_path):
    """An engine, and what copies a CPU tensor to where it can have planes."""
    memory, name = request.param
    return ENGINES[name](device), store_in(memory, device, tmp_path)


@contextlib.contextmanager
def not_waiting(*streams):
    """Expect that all `streams` are held back still when the body is done."""
    held = [hold(stream) for stream in streams]
    yield
    assert not any(event.query() for event in held), "it was waited for"


class TestNothingElse:
    @pytest.mark.parametrize("direction", ["gather", "scatter"])
    def test_work_of_another_stream(self, way, device, direction):
        (engine, store), mine, other = way, torch.cuda.Stream(), torch.cuda.Stream()
        content = any_bits((1000, 64), torch.float32)
        plane, index = store(content), torch.arange(999, -1, -1, device=device)
        rows = content.flip(0).to(device)
        torch.cuda.synchronize()
        for warm in WARM:
            with contextlib.nullcontext() if warm else not_waiting(other):
                with torch.cuda.stream(mine):
                    getattr(engine, direction)([plane], index, [rows])
                mine.synchronize()
                engine.wait()
        check_same([rows, plane], [content.flip(0), content])

    def test_gathers_of_two_streams(self, device):
        """They read the same planes: neither waits for the other."""
        table = st.Table(1000, 64, memory="pinned", device=device).normal_()
        mine, other = torch.cuda.Stream(), torch.cuda.Stream()
        index = torch.arange(1000, device=device)
        for warm in WARM:
            torch.cuda.synchronize()
            with torch.cuda.stream(other):
                held = None if warm else hold(other)
                theirs = table.gather(index)
            with torch.cuda.stream(mine):
                ours = table.gather(index)
            mine.synchronize()
            assert held is None or not held.query()
        other.synchronize()
        check_same([ours, theirs], [table.torch(), table.torch()])


def test_staged_copies_run_on(device):
    """The host gathers and is done, before the device has even begun: its copies need not be, and are in order."""
    engine, mine = StagedEngine(device), torch.cuda.Stream()
    content, index, rows = torch.randn(1000, 64), torch.arange(1000), torch.zeros(1000, 64, device=device)
    with torch.cuda.stream(mine):
        for warm in WARM:
            plane = content.clone()
            torch.cuda.synchronize()
            with contextlib.nullcontext() if warm else not_waiting(mine):
                engine.gather([plane], index, [rows])
                plane.zero_()  # it is the caller's again
    mine.synchronize()
    check_same([rows], [content])


def test_a_buffer_that_grows_frees_nothing(device, monkeypatch):
    """CUDA waits for the device when page-locked memory is freed."""
    engine, plane, side = StagedEngine(device), torch.randn(30_000, 64), torch.cuda.Stream()
    freed, runtime = [], load_cupy().cuda.runtime
    free = runtime.freeHost
    monkeypatch.setattr(runtime, "freeHost", lambda pointer: [freed.append(pointer), free(pointer)][1])
    for count in (1, 10, 100, 1000, 10_000, 30_000):
        index = torch.arange(count)
        engine.gather([plane], index, [torch.zeros(count, 64, device=device)])
        engine.gather([plane], index.to(device), [torch.zeros(count, 64, device=device)])
    assert freed == []
    with torch.cuda.stream(side):
        engine.gather([plane], index, [rows := torch.zeros(count, 64, device=device)])
    del engine
    assert freed
    side.synchronize()
    check_same([rows], [plane])


DEAD_STREAM = """
import gc, sys
import cupy, torch
import speedtransfer as st

memory, engine, path = sys.argv[1:]
table = st.Table(1000, 16, memory=memory, device="cuda", path=path or None)
table.engine = engine
index = torch.arange(100, device="cuda")
torch.cuda.synchronize()
theirs = cupy.cuda.Stream(non_blocking=True)
stream = torch.cuda.ExternalStream(theirs.ptr)
rows = torch.ones(100, 16, device="cuda")
with torch.cuda.stream(stream):
    table.gather(index, check=False)
    table.gather(index)
    table.scatter(index, rows, check=False)
    table.gather(index, out=rows)
stream.synchronize()
del stream, theirs
gc.collect()
del index, rows
gc.collect()
del table
gc.collect()
assert len([torch.zeros(1000, 16, device="cuda") for _ in range(10)]) == 10
torch.cuda.synchronize()
print("done")
"""


@pytest.mark.parametrize("way", [*WAYS, ("mmap", "staged")], ids="-".join)
def test_what_was_used_on_a_stream_that_has_died_since(way, tmp_path):
    """torch's allocator must not be left with it: what it asks when memory is freed would end the process."""
    memory, engine = way
    path = str(tmp_path / "t.safetensors") if memory == "mmap" else ""
    command = [sys.executable, "-c", DEAD_STREAM, memory, engine, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


@pytest.mark.parametrize("engine", DEVICE_ENGINES)
@pytest.mark.parametrize("what", ["table", "plane", "table of an engine that lives on"])
def test_memory_of_planes_is_not_given_away_early(device, engine, what):
    """They were made on one stream and are used on another, which is held back when they go."""
    side, index = torch.cuda.Stream(), torch.arange(5000, device=device)
    table = st.Table(5000, 16, memory="device", device=device).fill_(3)
    table.add_plane("m", 16, fill=3)
    by_hand = ENGINES[engine](device)
    table.engine = by_hand if what == "table of an engine that lives on" else engine
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        hold(side, 50)
        rows = table.gather(index, "m" if what == "plane" else "weight")
    if what == "plane":
        table.drop_plane("m")
    else:
        del table
    thieves = [torch.zeros(5000, 16, device=device) for _ in range(4)]
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert rows.eq(3).all()
    assert len(thieves) == 4


class TestCache:
    """Its tensors, made on one stream and used on another."""

    ids = torch.arange(8)

    def test_made_on_a_stream_that_is_held_back(self, device):
        one, two, plane = torch.cuda.Stream(), torch.cuda.Stream(), torch.randn(30, 4).pin_memory()
        index, rows = (self.ids + 22).to(device), torch.zeros(8, 4, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            hold(one, 50)
            engine = cached(8, inner=MappedEngine(device), device=device)
        with torch.cuda.stream(two):
            for _ in range(2):
                engine.gather([plane], index, [rows])
        two.synchronize()
        check_same([rows], [plane[22:]])
        assert engine.counts()["cache_hits"] == 8

    def test_rows_that_leave_while_another_stream_goes_on(self, device):
        """Which they were is known until they are written."""
        one, two, plane = torch.cuda.Stream(), torch.cuda.Stream(), torch.zeros(30, 4).pin_memory()
        engine = cached(8, "lfu", inner=MappedEngine(device), device=device)
        groups = [(self.ids + start).to(device) for start in (0, 8, 16)]
        rows = [torch.full((8, 4), 1.0 + number, device=device) for number in range(3)]
        torch.cuda.synchronize()
        for number, (index, values) in enumerate(zip(groups, rows, strict=True)):
            with torch.cuda.stream(two if number % 2 else one):
                for _ in range(3):
                    engine.gather([plane], index, [torch.empty_like(values)])
                engine.scatter([plane], index, [values])
            with torch.cuda.stream(one if number % 2 else two):
                thieves = [torch.full((8,), 29, device=device) for _ in range(30)]
        engine.wait()
        check_same([plane], [torch.cat([*(values.cpu() for values in rows), torch.zeros(6, 4)])])
        assert len(thieves) == 30
