"""Compiled copies of rows touch no byte outside of their tensors: pages beside these end the process."""

from __future__ import annotations

import signal
import sys

import pytest
from forked import run_script

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
def test_copies_of_rows_beside_pages_that_nobody_may_touch(argument: str, code: int) -> None:
    ran = run_script(COPIES, argument)
    assert ran.returncode == code, ran.stderr
