"""Rows moved by the host: compiled copies against the reference, threads, forks, and a numba that does not work."""

import multiprocessing
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from engine_cases import any_bits
from forked import run_script
from test_engines import OnCpu

from speedtransfer import jit
from speedtransfer.engines import HostEngine, host
from speedtransfer.errors import RowIndexError


@pytest.fixture
def always_compiled(monkeypatch):
    """Use the compiled copies for a handful of rows too, on more threads than there are rows."""
    for name in ("_COMPILED_BYTES", "_STREAMING_BYTES"):
        monkeypatch.setattr(host, name, 1)
    monkeypatch.setattr(jit, "THREAD_BYTES", 1)


class OnHost(OnCpu):
    @pytest.fixture
    def engine(self):
        return HostEngine("cpu")


class TestHost(OnHost):
    pass


class TestCompiled(OnHost):
    @pytest.fixture(autouse=True)
    def compiled(self, always_compiled):
        pass


@pytest.mark.sweep
class TestByTorch(OnHost):
    @pytest.fixture(autouse=True)
    def by_torch(self, monkeypatch):
        monkeypatch.setattr(host, "_move", lambda *rows: False)


@pytest.mark.parametrize("streaming", [1, 1 << 40])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("row_bytes", [1, 16, 64, 79, 128, 512, 4100])
def test_every_copy_on_every_number_of_threads(always_compiled, monkeypatch, threads, row_bytes, streaming):
    monkeypatch.setattr(host, "_STREAMING_BYTES", streaming)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    content, index = any_bits((301, row_bytes), torch.uint8), np.random.default_rng(0).permutation(301)[:257]
    # Rows on a cache line, on a lane of 16 bytes, and nowhere in particular.
    for offset in (0, 16, 3):
        memory = torch.zeros(301 * row_bytes + 192, dtype=torch.uint8)
        start = -memory.data_ptr() % 64 + offset
        plane = memory[start : start + content.numel()].view(content.shape).copy_(content)
        before = memory.clone()
        rows = torch.zeros(257 * row_bytes + 128, dtype=torch.uint8)
        at = -rows.data_ptr() % 64 + offset
        out = rows[at : at + 257 * row_bytes].view(257, row_bytes)
        host.gather_rows([plane], torch.from_numpy(index), [out])
        assert torch.equal(out, content[index])
        assert not rows[:at].any()
        assert not rows[at + 257 * row_bytes :].any()
        new = any_bits((257, row_bytes), torch.uint8, seed=1)
        host.scatter_rows([plane], torch.from_numpy(index), [new])
        before[start : start + content.numel()].view(content.shape)[index] = new
        assert torch.equal(memory, before)


def _gather_in_a_child(content, index, answer):
    out = torch.empty(len(index), content.shape[1], dtype=content.dtype)
    host.gather_rows([content], index, [out])
    answer.put(
        bool((out.numpy() == content.numpy()[index.numpy()]).all())
    )  # torch's own threads hang in a forked process


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own(always_compiled, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    content, index = any_bits((500, 64), torch.uint8), torch.randperm(500)
    host.gather_rows([content], index, [torch.empty_like(content)])  # this process has its threads by now
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    child = context.Process(target=_gather_in_a_child, args=(content, index, answer))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answer.get() is True


def test_an_error_in_a_thread_is_raised_after_all_have_stopped(always_compiled, monkeypatch):
    running = []

    def copy(*arguments):
        running.append(arguments[-2])
        raise RuntimeError("no memory there")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(host, "_gather_copy", lambda compiled, *places: copy)
    with pytest.raises(RuntimeError, match="no memory there"):
        host.gather_rows([torch.zeros(9, 8)], torch.arange(9), [torch.zeros(9, 8)])
    assert sorted(running) == [0, 3, 6]


def test_a_numba_that_does_not_work_is_told_before_anything_is_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "speedtransfer.engines.host_copies", None)  # importing it raises ImportError
    monkeypatch.delattr("speedtransfer.engines.host_copies", raising=False)
    monkeypatch.setattr(host, "_COMPILED_BYTES", 1)
    jit.compiled_module.cache_clear()
    try:
        content = torch.zeros(50, 8)
        with pytest.raises(ImportError, match=r"numba, by which .* cannot be used .*; run: pip install"):
            host.scatter_rows([content], torch.tensor([3, 4]), [torch.ones(2, 8)])
        assert not content.any()
    finally:
        jit.compiled_module.cache_clear()


def test_small_calls_do_not_import_numba_and_rows_move_while_python_leaves():
    code = """
import atexit, sys, torch, speedtransfer as st
small = st.Table(100, 8)
small.scatter([1], torch.ones(1, 8))
small.gather([1])
print("numba" in sys.modules)
table = st.Table(200_000, 16, memory="pageable", device="cpu").fill_(2)
index = torch.arange(200_000)
table.gather(index)
atexit.register(lambda: print(float(table.gather(index).sum())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (["False", "6400000.0"], "")


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("bad", [-1, 20, 1 << 40])
def test_an_index_that_was_changed_after_it_was_checked(always_compiled, width, bad):
    """The copies address nothing outside of the plane, and nothing is written."""
    plane, index = torch.zeros(20, width), torch.tensor([1, bad, 3])
    with pytest.raises(RowIndexError, match=rf"index\[1\] is {bad} but"):
        host.gather_rows([plane], index, [torch.zeros(3, width)])
    with pytest.raises(RowIndexError, match=rf"index\[1\] is {bad} but"):
        host.scatter_rows([plane], index, [torch.ones(3, width)])
    assert not plane.any()


@pytest.mark.parametrize("name", ["gather", "gather_streaming_lines", "scatter", "scatter_streaming_lines"])
def test_an_index_that_changes_while_it_is_read(name):
    """What another thread does after all checks: the loop moves the other rows, and says which was none."""
    from speedtransfer.engines import host_copies

    memory = np.ones((2, 6, 16), dtype=np.float32)
    at = np.zeros((2, 6 * 64 + 64), dtype=np.uint8)
    planes = [row[-row.ctypes.data % 64 :][: 6 * 64].view(np.float32).reshape(6, 16) for row in at]
    planes[0][:] = memory[0]
    plane, rows = planes if name.startswith("gather") else planes[::-1]
    fault = np.full(2, -1)
    arguments = plane.ctypes.data, 64, rows.ctypes.data, 64, 6
    getattr(host_copies, name)(*arguments, np.array([0, 1 << 50, 2, -(1 << 50), 4, 5]), fault, 0, 6)
    assert fault.tolist() == [3, -(1 << 50)]
    assert planes[1].sum(axis=1).tolist() == [16.0, 0.0, 16.0, 0.0, 16.0, 16.0]


# --- pages beside the tensors end the process ---------------------------------------------------------------------------

COPIES = r"""
import ctypes, math, mmap, sys
import torch
from speedtransfer.engines import HostEngine

protect = ctypes.CDLL(None).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
kept = []

def guarded(shape, dtype, at_end):
    size, page = math.prod(shape) * dtype.itemsize, mmap.PAGESIZE
    pages = -(-size // page) + 2
    block = mmap.mmap(-1, pages * page)
    kept.append(block)
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    for at in (0, pages - 1):
        assert protect(start + at * page, page, 0) == 0
    offset = (pages - 1) * page - size if at_end else page
    return torch.frombuffer(block, dtype=torch.uint8, count=size, offset=offset).view(dtype).view(shape)

if sys.argv[1:] == ["beyond"]:
    rows = guarded((5000, 16), torch.float32, True)
    ctypes.memmove(rows.data_ptr() + rows.nbytes, rows.data_ptr(), 1)

engine = HostEngine(torch.device("cpu"))
for at_end in (True, False):
    for width in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 257):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            plane = guarded((5000, width), dtype, at_end)
            values = torch.arange(plane.numel()).remainder(251).view(plane.shape).to(dtype)
            plane.copy_(values)
            every = torch.arange(len(plane))
            for ids in (every, every.flip(0), torch.tensor([0, len(plane) - 1]).repeat(3000)):
                index, rows = guarded(ids.shape, torch.int64, at_end), guarded((len(ids), width), dtype, at_end)
                index.copy_(ids)
                engine.gather([plane], index, [rows])
                assert torch.equal(rows, values[ids])
                if len(ids) == len(plane):
                    plane.zero_()
                    engine.scatter([plane], index, [rows])
                    assert torch.equal(plane, values)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="protects pages by mprotect")
@pytest.mark.parametrize(("argument", "code"), [("within", 0), ("beyond", -signal.SIGSEGV)])
def test_copies_of_rows_beside_pages_that_nobody_may_touch(argument, code):
    ran = run_script(COPIES, argument)
    assert ran.returncode == code, ran.stderr
