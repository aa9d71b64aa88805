"""Tables in files without a page in memory, and the same tables in memory; the rest of the page cache stays."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from speedtransfer.benchmark.contenders import UnfilledEmbedding
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.nn import Embedding
from speedtransfer.page_cache import PAGE, PagesStayError, drop_pages
from speedtransfer.tables import page_advice, plane_chunks


class _File(NamedTuple):
    """The file of a plane: a descriptor of it, its map, offset and distance of rows in bytes."""

    descriptor: int
    block: mmap.mmap
    offset: int
    stride: int


def _opened_again(start: int) -> int:
    """Open the file mapped at address `start` again, which may have no name."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        inodes = [line.split()[4] for line in lines if int(line.partition("-")[0], 16) == start]
    for name in os.listdir("/proc/self/fd") if inodes else ():
        # The map holds a descriptor of the file.
        with contextlib.suppress(OSError):
            if str(os.stat(f"/proc/self/fd/{name}").st_ino) == inodes[0]:
                descriptor = os.open(f"/proc/self/fd/{name}", os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                return descriptor
    raise PagesStayError("the file of a plane cannot be opened again to drop its pages; this needs Linux and its /proc")


DIM = 64
_CHUNK = 1 << 14  # rows with values of their own


class ColdTables:
    """An embedding of `rows` x `DIM` in a file and one in memory, trained with AdamW and made when first used.

    The file has no name, so nothing is left behind in any event. `options` are further arguments of the embedding in a file.
    """

    def __init__(self, rows: int, seed: int, **options: Any) -> None:
        self.rows, self._options = rows, options
        self.in_flight: Iterator[Tensor] | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self._pages = torch.empty(0, dtype=torch.int64)

    @functools.cached_property
    def in_file(self) -> tuple[Embedding, torch.optim.Optimizer]:
        """The table in a file, with all pages written."""
        with (
            tempfile.TemporaryDirectory(prefix="speedtransfer-bench-", ignore_cleanup_errors=True) as folder,
            # Files are read page by page that are large beside the host's memory.
            patch.dict(os.environ, SPEEDTRANSFER_HOST_BYTES=str(DIM * self.rows)),
        ):
            return _made(self.rows, memory="mmap", path=Path(folder, "table.npy"), **self._options)

    @functools.cached_property
    def in_memory(self) -> tuple[Embedding, torch.optim.Optimizer]:
        """The table in memory."""
        return _made(self.rows, memory="pageable")

    @functools.cached_property
    def files(self) -> list[_File]:
        """The files of the planes of the first table, which have no name."""
        table, found = self.in_file[0].table, list[_File]()
        for name in table.planes:
            plane = table.stored(name)
            block, start = page_advice.map_of(plane) or (None, 0)
            if not isinstance(block, mmap.mmap):
                raise PagesStayError(f"plane {name!r} lies in no file that is read page by page; this needs Linux")
            descriptor = _opened_again(start)
            weakref.finalize(self, os.close, descriptor)
            stride = plane.stride(0) * plane.element_size()
            found.append(_File(descriptor, block, plane.data_ptr() - start, stride))
        return found

    def drop_pages(self) -> None:
        """Drop all pages of the files, after reads in progress; raises PagesStayError if pages stay."""
        if self.in_flight is not None:
            with torch.no_grad():
                for ids in self.in_flight:
                    self.in_file[0](ids)
            self.in_flight = None
        where = f"{tempfile.gettempdir()!r} is no folder on a disk; name one by TMPDIR"
        drop_pages([(file.descriptor, file.block) for file in self.files], where)

    def pages(self, rows: Tensor) -> list[tuple[int, np.ndarray]]:
        """Return a descriptor and the page numbers (n,) in which `rows` (n,) begin, for each plane, for `read_pages`."""
        return [(file.descriptor, (file.offset + rows.numpy() * file.stride) // PAGE) for file in self.files]

    def ids(self, *shape: int) -> Tensor:
        """Draw uniform ids, no two of a call in one page as long as there are enough pages."""
        per_page, wanted = PAGE // (4 * DIM), torch.Size(shape).numel()
        if len(self._pages) < wanted:
            pages = max(1, self.rows // per_page)
            orders = [torch.randperm(pages, generator=self._generator) for _ in range(-(-wanted // pages))]
            self._pages = torch.cat(orders)
        chosen, self._pages = self._pages[:wanted], self._pages[wanted:]
        # The last row of a page may reach into the next one, as the file begins with a header.
        within = torch.randint(per_page - 1, (wanted,), generator=self._generator)
        return (chosen * per_page + within).clamp_(max=self.rows - 1).view(shape)


def _made(rows: int, **options: Any) -> tuple[Embedding, torch.optim.Optimizer]:
    emb = UnfilledEmbedding(rows, DIM, device="cpu", idle="lazy", **options)
    optimizer = torch.optim.AdamW(emb.parameters(), fused=True)
    fill(emb, optimizer)
    return emb, optimizer


def fill(emb: Embedding, optimizer: torch.optim.Optimizer, used: Tensor | None = None) -> None:
    """Write all rows and their state, with the values that the rows `used` of a larger table have, if given."""
    # The first step adds the planes of state.
    take_step(emb(torch.zeros(1, dtype=torch.int64)).sum(), optimizer)
    # Planes are overwritten below, and a cache must hold nothing newer.
    emb.table.wait()
    values = torch.rand(_CHUNK, emb.embedding_dim, generator=torch.Generator().manual_seed(0)).mul_(1e-3)
    planes = [plane for plane in map(emb.table.stored, emb.table.planes) if plane.shape[1] == emb.embedding_dim]
    # All planes of a row at once: they may share its page.
    for part in plane_chunks(planes[0]):
        numbers = torch.arange(part.start, part.stop) if used is None else used[part]
        for plane in planes:
            plane[part] = values[numbers % _CHUNK]
    emb.table.flush()
