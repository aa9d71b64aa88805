"""Pages of files: which are in memory, and reads of single ones, many at a time."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from speedtransfer.errors import SpeedtransferError
from speedtransfer.jit import compiled_module

PAGE = mmap.PAGESIZE


class PagesStayError(SpeedtransferError):
    """Pages of files cannot be dropped from memory here."""


def pages_in_memory(block: mmap.mmap, start: int) -> tuple[int, int]:
    """Return how many pages of a map at address `start` are in memory, and how many it has."""
    found = bytearray(-(-len(block) // PAGE))
    room = (ctypes.c_ubyte * len(found)).from_buffer(found)
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(block)), room):
        raise PagesStayError("the system does not report which pages are in memory (mincore); this needs Linux")
    return int((np.frombuffer(found, dtype=np.uint8) & 1).sum()), len(found)


def read_pages(wanted: Sequence[tuple[int, np.ndarray]], threads: int) -> None:
    """Read pages of files, given by descriptor and page numbers (n,), by one `pread` each on several threads."""
    jobs = [(descriptor, part) for descriptor, pages in wanted for part in np.array_split(pages, threads)]
    compiled = compiled_module("speedtransfer.page_calls")

    def read(job: tuple[int, np.ndarray]) -> None:
        descriptor, pages = job
        room = bytearray(PAGE)
        compiled.read(descriptor, pages, ctypes.addressof(ctypes.c_ubyte.from_buffer(room)), PAGE)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, jobs))
