"""Tables in files of which no page is in memory, beside the same in memory: drop pages, see that they are gone, read some.

No rights are needed: pages of a file are written to the disk, unmapped and dropped one file at a time, and the rest of the
machine keeps what it has read. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.benchmark.environment import set_variable
from speedtransfer.errors import SpeedtransferError
from speedtransfer.jit import compiled_module
from speedtransfer.nn import Embedding
from speedtransfer.tables import Table, page_advice, plane_chunks

PAGE = mmap.PAGESIZE
_PAGEOUT = 21  # MADV_PAGEOUT, which Python does not know by name
_MOST_LEFT = 0.01  # of the pages of a file that may stay in memory: more would be read from there
_ATTEMPTS = 20


class PagesStayError(SpeedtransferError):
    """Pages of files cannot be dropped here, so that nothing can be measured without them."""


def read_page_by_page(table_bytes: int) -> contextlib.AbstractContextManager[None]:
    """Have files that are mapped within treated as on a machine with a quarter of their memory, whatever this one has.

    `table_bytes` are those of the smallest plane.
    """
    return set_variable("SPEEDTRANSFER_HOST_BYTES", str(max(1, table_bytes // 4)))


class TableFiles:
    """The files that the planes of a table lie in, also those without a name.

    Parameters
    ----------
    table : Table
        In a file, made within `read_page_by_page`.

    Raises
    ------
    PagesStayError
        A plane lies in no file that is read page by page, or the system does not tell which.
    """

    def __init__(self, table: Table) -> None:
        self.names = table.planes
        self._maps = dict[str, tuple[mmap.mmap, int]]()
        self._places = dict[str, tuple[int, int]]()  # where the first row begins, and the distance of rows, in bytes
        self.descriptors = dict[str, int]()
        weakref.finalize(self, _close, self.descriptors)
        for name in self.names:
            plane = table.stored(name)
            found = page_advice.map_of(plane)
            block, start = found if found is not None else (None, 0)
            if not isinstance(block, mmap.mmap):
                raise PagesStayError(f"plane {name!r} lies in no file that is read page by page; this needs Linux")
            self._maps[name] = block, start
            self._places[name] = plane.data_ptr() - start, plane.stride(0) * plane.element_size()
            self.descriptors[name] = _opened_again(start)

    def drop(self) -> None:
        """Write every page to the disk and let go of it.

        Raises
        ------
        PagesStayError
            Pages are in memory all the same, as on file systems that live there.
        """
        for _ in range(_ATTEMPTS):
            for name, (block, _) in self._maps.items():
                # Dirty pages would stay, and so would those that are mapped; what was only read ahead is not.
                block.flush()
                block.madvise(_PAGEOUT)
                os.posix_fadvise(self.descriptors[name], 0, 0, os.POSIX_FADV_DONTNEED)
            left = self.share_in_memory()
            if left <= _MOST_LEFT:
                return
            # Some are held for a moment, by the system or by a read that nobody waits for.
            time.sleep(0.01)
        raise PagesStayError(
            f"{left:.0%} of the pages in {tempfile.gettempdir()!r} stay in memory after they were dropped, so that no disk "
            "would be measured; name a folder on a disk by TMPDIR"
        )

    def share_in_memory(self) -> float:
        """Return the share of the pages of all files that are in memory."""
        counted = [pages_in_memory(block, start) for block, start in self._maps.values()]
        return sum(inside for inside, _ in counted) / max(1, sum(total for _, total in counted))

    def pages(self, rows: Tensor, planes: Sequence[str]) -> list[tuple[int, np.ndarray]]:
        """Return the pages in which `rows` (n,) begin, for `read_pages`: a descriptor and (n,) page numbers for each plane."""
        index = rows.numpy()
        return [
            (self.descriptors[name], (self._places[name][0] + index * self._places[name][1]) // PAGE) for name in planes
        ]


def pages_in_memory(block: mmap.mmap, start: int) -> tuple[int, int]:
    """Return how many pages of a map at address `start` are in memory, and how many it has.

    Raises
    ------
    PagesStayError
        The system does not tell.
    """
    found = bytearray(-(-len(block) // PAGE))
    room = (ctypes.c_ubyte * len(found)).from_buffer(found)
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(block)), room):
        raise PagesStayError("the system does not tell which pages are in memory (mincore); this needs Linux")
    return int((np.frombuffer(found, dtype=np.uint8) & 1).sum()), len(found)


def read_pages(wanted: Sequence[tuple[int, np.ndarray]], threads: int) -> None:
    """Read pages of files, (n,) numbers of a descriptor, by one `pread` each: as fast as the disk gives single pages.

    So many threads read at once.
    """
    jobs = [(descriptor, part) for descriptor, pages in wanted for part in np.array_split(pages, threads)]

    compiled = compiled_module("speedtransfer.benchmark.page_reads")

    def read(job: tuple[int, np.ndarray]) -> None:
        descriptor, pages = job
        room = bytearray(PAGE)
        if compiled is not None:
            compiled.read(descriptor, pages, ctypes.addressof(ctypes.c_ubyte.from_buffer(room)), PAGE)
            return
        for page in pages.tolist():
            os.preadv(descriptor, [room], page * PAGE)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, jobs))


def _opened_again(start: int) -> int:
    """Return a descriptor of the file that is mapped at address `start`, which may have lost its name or never had one."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        inodes = [line.split()[4] for line in lines if int(line.partition("-")[0], 16) == start]
    for name in os.listdir("/proc/self/fd") if inodes else ():
        # The map has a descriptor of its own.
        with contextlib.suppress(OSError):
            if str(os.stat(f"/proc/self/fd/{name}").st_ino) == inodes[0]:
                descriptor = os.open(f"/proc/self/fd/{name}", os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                return descriptor
    raise PagesStayError("the file of a plane cannot be opened again to drop its pages; this needs Linux and its /proc")


def _close(descriptors: dict[str, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


DIM = 64


class ColdTables:
    """An embedding of `rows` x `DIM` in a file and one in memory, trained with AdamW.

    Each is made at its first use. The file has no name by then: nothing stays behind, whatever happens. `options` are further
    arguments of the embedding in a file.
    """

    def __init__(self, rows: int, seed: int, **options: Any) -> None:
        self.rows, self._options = rows, options
        self.in_flight: Iterator[Tensor] | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._pages = torch.empty(0, dtype=torch.int64)

    @functools.cached_property
    def in_file(self) -> tuple[Embedding, torch.optim.Optimizer]:
        """The table in a file, its pages all written."""
        with (
            tempfile.TemporaryDirectory(prefix="speedtransfer-bench-", ignore_cleanup_errors=True) as folder,
            read_page_by_page(4 * DIM * self.rows),
        ):
            return _made(self.rows, memory="mmap", path=Path(folder, "table.npy"), **self._options)

    @functools.cached_property
    def in_memory(self) -> tuple[Embedding, torch.optim.Optimizer]:
        """The table in memory."""
        return _made(self.rows, memory="pageable")

    @functools.cached_property
    def files(self) -> TableFiles:
        """The files of the first."""
        return TableFiles(self.in_file[0].table)

    def drop_pages(self) -> None:
        """Let go of all pages of the file, once nobody reads there any more."""
        if self.in_flight is not None:
            with torch.no_grad():
                for ids in self.in_flight:
                    self.in_file[0](ids)
            self.in_flight = None
        self.files.drop()

    def ids(self, *shape: int) -> Tensor:
        """Draw ids: uniform, but no two of a call lie in a page, as long as there are pages."""
        per_page, wanted = PAGE // (4 * DIM), torch.Size(shape).numel()
        if len(self._pages) < wanted:
            pages = max(1, self.rows // per_page)
            orders = [torch.randperm(pages, generator=self._generator) for _ in range(-(-wanted // pages))]
            self._pages = torch.cat(orders)
        chosen, self._pages = self._pages[:wanted], self._pages[wanted:]
        # The last row of a page may reach into the next: a header lies before the first.
        within = torch.randint(per_page - 1, (wanted,), generator=self._generator)
        return (chosen * per_page + within).clamp_(max=self.rows - 1).view(shape)


class _Unfilled(Embedding):
    def reset_parameters(self) -> None:
        """Leave the rows to who makes it: they are filled with the state, chunk by chunk."""


def _made(rows: int, **options: Any) -> tuple[Embedding, torch.optim.Optimizer]:
    emb = _Unfilled(rows, DIM, device="cpu", idle="lazy", **options)
    optimizer = torch.optim.AdamW(emb.parameters(), fused=True)
    # The first step adds the planes of state.
    emb(torch.arange(min(2, rows))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(0)
    # Planes are written to below, and a cache must hold nothing newer.
    emb.table.wait()
    for name in emb.table.planes:
        plane = emb.table.stored(name)
        for part in plane_chunks(plane):
            plane[part] = torch.randn(plane[part].shape, generator=generator).mul_(0.05).square_()
    return emb, optimizer
