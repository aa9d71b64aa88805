"""Rows moved by the host: compiled copies against the reference, threads, forks, and a numba that does not work."""

import ctypes
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from engine_cases import any_bits
from in_child import forks, in_child
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


@pytest.mark.usefixtures("always_compiled")
class TestCompiled(OnHost):
    pass


@pytest.mark.sweep
class TestByTorch(OnHost):
    @pytest.fixture(autouse=True)
    def by_torch(self, monkeypatch):
        monkeypatch.setattr(host, "_move", lambda *rows, **how: False)


def guarded(num_bytes):
    """Return memory that ends at a page that nobody may touch: reading beyond it ends the process."""
    page = mmap.PAGESIZE
    pages = -(-num_bytes // page)
    block = mmap.mmap(-1, (pages + 1) * page)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(ctypes.addressof(ctypes.c_char.from_buffer(block)) + pages * page, page, 0) == 0
    return torch.frombuffer(block, dtype=torch.uint8, count=num_bytes, offset=pages * page - num_bytes)


@pytest.mark.parametrize("streaming", [1, 1 << 40])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("row_bytes", [1, 16, 64, 79, 128, 512, 4100])
def test_every_copy_on_every_number_of_threads(always_compiled, monkeypatch, threads, row_bytes, streaming):
    monkeypatch.setattr(host, "_STREAMING_BYTES", streaming)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    content, new = any_bits((301, row_bytes), torch.uint8), any_bits((257, row_bytes), torch.uint8, seed=1)
    index = torch.from_numpy(np.random.default_rng(0).permutation(301))
    # Rows on a cache line, on a lane of 16 bytes, nowhere in particular, and beside memory that nobody may touch.
    for offset in (0, 16, 3, *([None] if sys.platform == "linux" else [])):
        memory, rows = torch.zeros(301 * row_bytes + 192, dtype=torch.uint8), torch.zeros(257 * row_bytes + 128).byte()
        start, at = (-part.data_ptr() % 64 + (offset or 0) for part in (memory, rows))
        if offset is None:
            start, at, memory, rows = 0, 0, guarded(301 * row_bytes), guarded(257 * row_bytes)
        plane = memory[start : start + content.numel()].view(content.shape).copy_(content)
        before, out = memory.clone(), rows[at : at + new.numel()].view(new.shape)
        host.gather_rows([plane], index[:257], [out])
        assert torch.equal(out, content[index[:257]])
        assert not rows[:at].any()
        assert not rows[at + new.numel() :].any()
        host.scatter_rows([plane], index[:257], [out.copy_(new)])
        before[start : start + content.numel()].view(content.shape)[index[:257]] = new
        assert torch.equal(memory, before)


@forks
def test_a_forked_process_has_threads_of_its_own(always_compiled, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    content, index = any_bits((500, 64), torch.uint8), torch.randperm(500)

    def gathered():
        out = torch.empty_like(content)
        host.gather_rows([content], index, [out])
        return out.numpy()

    expected = gathered()  # this process has its threads by now
    np.testing.assert_array_equal(in_child(gathered), expected)
    np.testing.assert_array_equal(expected, content.numpy()[index.numpy()])


def test_an_error_in_a_thread_is_raised_after_all_have_stopped(always_compiled, monkeypatch):
    running = []

    def copy(*arguments):
        running.append(arguments[-2])
        raise RuntimeError("no memory there")

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(host, "_copy_for", lambda compiled, *places: copy)
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


TRAINING = """
import atexit, sys, torch, speedtransfer as st
st.Table(100, 8).gather([1])
print("numba" in sys.modules)
emb = st.Embedding(10_000, 64)
opt = torch.optim.AdamW(emb.parameters())
for start in range(3):
    emb(torch.arange(start, start + 2000)).sum().backward()
    opt.step()
    opt.zero_grad()
atexit.register(lambda: print(len(emb.table.gather(range(9999)))))
"""


@pytest.mark.slow
def test_compiling_is_announced_once_and_only_where_it_takes_long(tmp_path):
    """The second process finds what the first has compiled; a small call needs no numba; rows move while Python leaves."""
    said = []
    for _ in range(2):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", TRAINING]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert ran.stdout == "False\n9999\n"
        said.append(ran.stderr.count("numba compiles functions"))
        assert len(ran.stderr.splitlines()) == said[-1]
    assert said == [1, 0]


@pytest.mark.parametrize("width", [5, 16])
@pytest.mark.parametrize("bad", [-1, 20, 1 << 40])
def test_an_index_that_was_changed_after_it_was_checked(always_compiled, width, bad):
    """The copies address nothing outside of the plane, and nothing is written."""
    plane, index = torch.zeros(20, width), torch.tensor([1, bad, 3])
    for move in (host.gather_rows, host.scatter_rows):
        with pytest.raises(RowIndexError, match=rf"index\[1\] is {bad} but"):
            move([plane], index, [torch.ones(3, width)])
    assert not plane.any()
