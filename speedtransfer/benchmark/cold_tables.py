"""The same rows in a file and in memory, and batches of ids of which no two want the same page of the file."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.cold_pages import PAGE, TableFiles, read_page_by_page
from speedtransfer.nn import Embedding
from speedtransfer.tables import plane_chunks

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
