"""Planes in files that are read in place and never written: those of published tables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from speedtransfer.encoding import LOW, SCALE
from speedtransfer.engines import Engine
from speedtransfer.errors import StorageError
from speedtransfer.tables import files, page_advice, spans
from speedtransfer.tables.memories import Memory, PageableMemory
from speedtransfer.tables.parts import Parts, PartsEngine
from speedtransfer.tables.sources import Source
from speedtransfer.untrusted import open_file, storage_error

# The planes of the scales of float8 rows, and of the last 8 bits of rows of 24.
SCALES, LOW_BITS = "weight" + SCALE, "weight" + LOW


class OpenedMemory(Memory):
    """Tensors in files, mapped to be read. Processes that open the same files share their pages.

    A plane that is one tensor of one file is a tensor over the map; where torch writes to it all the same, this process gets
    a copy of the page. One of several tensors is `Parts`, of which there is no tensor over all rows.

    Parameters
    ----------
    device : torch.device
    sources : mapping of str to sequence of Source
        Of each plane, "weight" first: the tensors that have its rows one after the other, ``(rows, width)`` or ``(rows,)``;
        or one value for all rows of each part of the weights, or for all rows.
    """

    name = "mmap"
    refuses_writes = read_only = True

    def __init__(self, device: torch.device, sources: Mapping[str, Sequence[Source]]) -> None:
        super().__init__(device)
        # Whatever the current folder is later.
        self.sources = {
            name: tuple(source._replace(path=source.path.absolute()) for source in found)
            for name, found in sources.items()
        }
        self.files = list(dict.fromkeys(source.path for found in self.sources.values() for source in found))
        self.path = self.files[0] if len(self.files) == 1 else None
        self._facts = _facts_of(self.files)

    def open(self) -> dict[str, Tensor]:
        """Map the files and return the planes; of one in parts a placeholder without memory."""
        found = dict[str, Tensor]()
        counts = [source.shape[0] for source in self.sources["weight"]]
        for name, sources in self.sources.items():
            constant = name != "weight" and all(torch.Size(source.shape).numel() == 1 for source in sources)
            opened: Tensor | Parts = _constant(sources, counts) if constant else _mapped(sources)
            if isinstance(opened, Parts):
                self.in_parts[name] = opened
                found[name] = opened.placeholder
            else:
                found[name] = opened
        return found

    def reopened(self) -> OpenedMemory:
        """Return a memory over the same files, for a copy of the table; raise `StorageError` where they have changed since."""
        if _facts_of(self.files) != self._facts:
            raise StorageError(
                f"{self._about()} changed since it was opened, so that a copy would have other rows; open it again"
            )
        made = OpenedMemory(self.device, self.sources)
        made.layout = self.layout
        return made

    def wrap(self, engine: Engine) -> Engine:  # noqa: D102
        return PartsEngine(engine, list(self.in_parts.values())) if self.in_parts else engine

    def refuse_write(self, what: str) -> NoReturn:  # noqa: D102
        remedy = (
            "open the file with writable=True, or "
            if self.path and not self.in_parts and len(self.sources) == 1
            else ""
        )
        raise StorageError(
            f"the rows of {what} are read in place from {self._about()} and cannot be changed; {remedy}copy them: "
            "Embedding.from_pretrained(table, memory='pageable'), or table.save(path)"
        )

    def anonymous_copy(self) -> Memory:  # noqa: D102
        copy = PageableMemory(self.device)
        copy.layout = self.layout
        return copy

    def _allocate(self, plane: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        self.refuse_write("this table")

    def _about(self) -> str:
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{str(self.files[0])!r}{more}"


def _mapped(sources: Sequence[Source]) -> Tensor | Parts:
    """Return a plane, ``(num_rows, width)``, over the memory of files."""
    dtype, shape = sources[0].dtype, sources[0].shape
    width, num_rows = shape[1] if len(shape) > 1 else 1, sum(source.shape[0] for source in sources)
    row_bytes = width * dtype.itemsize
    if not num_rows * width:
        return PageableMemory(torch.device("cpu")).allocate("weight", num_rows, width, dtype)
    filled = [source for source in sources if source.shape[0]]
    pieces = [spans.Piece(source.path, source.offset, source.shape[0] * row_bytes) for source in filled]
    if not spans.AVAILABLE:
        if len(pieces) > 1:
            raise StorageError(
                f"rows in {len(pieces)} tensors cannot be mapped as one table on this system; join them in one file"
            )
        return files.map_tensor(pieces[0].path, pieces[0].offset, (num_rows, width), dtype, "c")[0]
    if len(pieces) == 1 and pieces[0].offset % dtype.itemsize == 0:
        try:
            span = _advised(spans.Span(pieces, writable=True))
            return span.tensor(span.addresses[0], pieces[0].num_bytes).view(dtype).view(num_rows, width)
        except StorageError:
            # Where the system counts every page that might be copied (vm.overcommit_memory=2) it may refuse a map that can
            # be written to. As parts no tensor over the other kind is ever handed out.
            pass
    span = _advised(spans.Span(pieces, writable=False))
    return Parts.in_span(span, span.addresses, [source.shape[0] for source in filled], width, dtype)


def _advised(span: spans.Span) -> spans.Span:
    page_advice.expect_random_rows_of(span, span.address)
    return span


def _constant(sources: Sequence[Source], counts: Sequence[int]) -> Tensor | Parts:
    """Return a plane of one value a part, or for all rows; the values are read."""
    if not sum(counts):
        return PageableMemory(torch.device("cpu")).allocate(SCALES, 0, 1, sources[0].dtype)
    values = []
    for source in sources:
        with open_file(source.path) as file:
            file.seek(source.offset)
            values.append(file.read(source.dtype.itemsize))
    with torch.inference_mode(False):
        places = torch.frombuffer(bytearray(b"".join(values)), dtype=sources[0].dtype).view(-1, 1)
    counts = counts if len(sources) == len(counts) else [sum(counts)]
    filled = [place for place, count in enumerate(counts) if count]
    return Parts(places, sources[0].dtype, [counts[place] for place in filled], filled, 0)


def _facts_of(paths: Sequence[Path]) -> list[tuple[int, ...]]:
    """Return what shows that a file was changed or replaced."""
    found = list[tuple[int, ...]]()
    for path in paths:
        with storage_error(f"cannot read {str(path)!r}", "check the path"):
            stat = os.stat(path)
        found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found
