"""Pages of files: which are in memory, dropping them, and reads of single ones, many at a time."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from speedtransfer.errors import SpeedtransferError
from speedtransfer.jit import compiled_module

PAGE = mmap.PAGESIZE
_PAGEOUT = 21  # MADV_PAGEOUT, which Python lacks
_MOST_LEFT = 0.01  # share of the pages that may stay in memory
_ATTEMPTS = 20


class PagesStayError(SpeedtransferError):
    """Pages of files cannot be dropped from memory here."""


def share_in_memory(blocks: Iterable[mmap.mmap]) -> float:
    """Return the share of the pages of all maps that are in memory."""
    found = []
    for block in blocks:
        # Without a reference to the map, which could not be closed.
        start = np.frombuffer(block, dtype=np.uint8).ctypes.data
        found.append(np.empty(-(-len(block) // PAGE), dtype=np.uint8))
        room = found[-1].ctypes.data_as(ctypes.c_void_p)
        if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(block)), room):
            raise PagesStayError("the system does not report which pages are in memory (mincore); this needs Linux")
    return float((np.concatenate(found) & 1).mean())


def drop_pages(files: Sequence[tuple[int, mmap.mmap]], remedy: str) -> None:
    """Write all pages of files, given by descriptor and map, to the disk and drop them.

    Works without privileges, on Linux; raises PagesStayError with `remedy` if pages stay, as on a file system in memory.
    """
    for _ in range(_ATTEMPTS):
        for descriptor, block in files:
            # Dirty pages and mapped ones would stay; posix_fadvise drops those that were only read ahead.
            block.flush()
            block.madvise(_PAGEOUT)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left = share_in_memory(block for _, block in files)
        if left <= _MOST_LEFT:
            return
        # Pages may be held briefly by the system or by a read in progress.
        time.sleep(0.01)
    raise PagesStayError(
        f"{left:.0%} of the pages stay in memory after they were dropped, so that no disk would be measured; {remedy}"
    )


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
