"""Gather rows of planes that lie in several places: each row id becomes the place of its row in one strided tensor.

The parts of a plane are mapped into one range of addresses (`spans`). A tensor over all of it, whose rows begin every so many
bytes, has each row of the plane among its own, most of which overlap. So an engine that knows nothing of parts moves the rows
of all of them in one call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from speedtransfer import buffers
from speedtransfer.engines import Engine
from speedtransfer.engines.base import check_host_index
from speedtransfer.errors import DeviceError
from speedtransfer.tables.page_advice import read_ahead, read_ahead_of_rows
from speedtransfer.tables.spans import Span


class Parts:
    """A plane whose rows lie in several places, to be read.

    Parameters
    ----------
    places : Tensor
        ``(n, width)``, all rows that begin where one of the plane may; or as many bytes, uint8, where they are not aligned.
    dtype : torch.dtype
        Of the plane.
    counts : sequence of int
        The rows of each part, none of them 0.
    firsts : sequence of int
        The place of the first row of each part.
    step : int
        How many places the next row of a part is on; 0: all rows of a part are one.
    """

    def __init__(
        self, places: Tensor, dtype: torch.dtype, counts: Sequence[int], firsts: Sequence[int], step: int
    ) -> None:
        self.places, self.dtype, self.step = places, dtype, step
        self._starts = [0, *itertools.accumulate(counts)]
        self._firsts = list(firsts)
        self._bounds = np.array(self._starts[1:-1], dtype=np.int64)
        self._shifts = np.array(
            [first - start * step for start, first in zip(self._starts, firsts, strict=False)], dtype=np.int64
        )
        # Published tables are split evenly: a division finds the part sooner than a search.
        self._each = counts[0] if all(n == counts[0] for n in counts[:-1]) else 0
        width = places.shape[1] * places.element_size() // dtype.itemsize
        # What the table has in the place of the plane: to read it raises.
        self.placeholder = torch.empty((self._starts[-1], width), dtype=dtype, device="meta")

    @classmethod
    def in_span(
        cls, span: Span, addresses: Sequence[int], counts: Sequence[int], width: int, dtype: torch.dtype
    ) -> Parts:
        """Return the plane of `width` values a row with `counts` rows from each of `addresses` on, which ascend."""
        row_bytes = width * dtype.itemsize
        gaps = [address - addresses[0] for address in addresses]
        stride = math.gcd(row_bytes, *gaps)
        end = gaps[-1] + counts[-1] * row_bytes
        data = span.tensor(addresses[0], end)
        if stride % dtype.itemsize == 0 and addresses[0] % dtype.itemsize == 0:
            data = data.view(dtype)
        size = data.element_size()
        places = data.as_strided(((end - row_bytes) // stride + 1, row_bytes // size), (stride // size, 1))
        return cls(places, dtype, counts, [gap // stride for gap in gaps], row_bytes // stride)

    def places_of(self, ids: np.ndarray, padded: bool) -> np.ndarray:
        """Return where the rows `ids` (n,) int64 lie in `places`.

        `padded`: some may be the number of rows, which becomes the number of places.
        """
        if len(self._shifts) == 1:
            found = ids * self.step + self._shifts[0]
        else:
            part = ids // self._each if self._each else np.searchsorted(self._bounds, ids, side="right")
            # The last part may be larger, and padding would have a part of its own.
            np.minimum(part, len(self._shifts) - 1, out=part)
            found = self._shifts[part]
            found += ids * self.step if self.step != 1 else ids
        if padded:
            found[ids == self._starts[-1]] = len(self.places)
        return found

    def rows(self, start: int, stop: int) -> Tensor:
        """Return a copy of the rows from `start` to `stop`, ``(n, width)``, as they are stored."""
        out = torch.empty((stop - start, self.placeholder.shape[1]), dtype=self.dtype, device="cpu")
        target = out.view(self.places.dtype) if out.numel() else out
        for begin, end, first in zip(self._starts, self._starts[1:], self._firsts, strict=False):
            low, high = max(begin, start), min(end, stop)
            if low >= high:
                continue
            at = first + (low - begin) * self.step
            # Contiguous, as the rows of a part are.
            size, (stride, _) = (high - low, self.places.shape[1]), self.places.stride()
            offset = self.places.storage_offset() + at * stride
            source = self.places.as_strided(size, (self.step * stride, 1), offset)
            read_ahead(source)
            target[low - start : high - start].copy_(source)
        return out


class PartsEngine:
    """An engine around another one, for a table some of whose planes are `Parts`; they are read and never written.

    Parameters
    ----------
    inner : Engine
        One that reads planes on the host.
    parts : sequence of Parts
    """

    takes_padding = False
    runs_kernels = False

    def __init__(self, inner: Engine, parts: Sequence[Parts]) -> None:
        self.inner, self.name, self.device = inner, inner.name, inner.device
        self._parts = {id(part.placeholder): part for part in parts}

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        index = index.cpu()
        if check is not False:
            check_host_index(index if check is True else check.cpu(), planes)
        whole = list[tuple[Tensor, Tensor]]()
        for plane, out in zip(planes, rows, strict=True):
            parts = self._parts.get(id(plane))
            if parts is not None:
                self._gather_parts(parts, index, out)
            elif plane.shape[1]:
                whole.append((plane, out))
        if whole:
            self.inner.gather([plane for plane, _ in whole], index, [out for _, out in whole])

    def _gather_parts(self, parts: Parts, index: Tensor, out: Tensor) -> None:
        places = torch.from_numpy(parts.places_of(index.numpy(), self.device.type == "cuda"))
        read_ahead_of_rows([parts.places], places)
        if parts.places.dtype == parts.dtype:
            self.inner.gather([parts.places], places, [out])
        elif out.dtype == parts.dtype:
            self.inner.gather([parts.places], places, [out.view(torch.uint8)])
        else:
            stored = buffers.empty(tuple(out.shape), parts.dtype, out.device)
            self.inner.gather([parts.places], places, [stored.view(torch.uint8)])
            out.copy_(stored)

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Raise: a table that is read in place refuses writes before."""
        raise DeviceError("rows in parts are read and not written; copy the table (memory='pageable')")

    def wait(self, writes_only: bool = False) -> None:
        """Block until the engine inside is done."""
        self.inner.wait(writes_only)
