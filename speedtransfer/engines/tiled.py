"""Whole stretches of page-locked planes moved by the copy engine: for a batch that touches a large part of a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import StreamOrder, keep_until_done, resolve_cuda, to_device
from speedtransfer.engines.bounds import check_host_index
from speedtransfer.engines.reference import put_rows, select_rows


class TiledEngine:
    """One copy a tile of consecutive rows, wanted or not; the device picks the wanted ones.

    The copy engine moves contiguous memory at the full rate of the bus, and no kernel takes multiprocessors from training.
    It pays where the rows between the wanted ones are few. `scatter` must not touch the others, so it copies each run of
    consecutive ids by itself: right for any index, fast for long runs only.

    Order: as in :class:`~speedtransfer.engines.mapped.MappedEngine`, by events. The host waits for an `index` on the device.

    Parameters
    ----------
    device : torch.device
        The compute device, on CUDA.
    tile_bytes : int
        Room for a tile on the device; a tile has one row at least.

    Raises
    ------
    DeviceError
        There is no CUDA.
    """

    name = "tiled"

    def __init__(self, device: torch.device | str, tile_bytes: int = 64 << 20) -> None:
        self.device = resolve_cuda(device, "the tiled engine")
        self.tile_bytes = tile_bytes
        self._order = StreamOrder(self.device)

    def gather(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], check: bool = False) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        host_index = index.cpu()
        if check and planes:
            check_host_index(host_index, planes[0].shape[0])
        if not len(index) or not planes:
            return
        if not all(plane.is_contiguous() for plane in planes):
            self._order.wait()  # torch has the host pack such rows, at once: what is queued must be done
        row_bytes = max(plane.shape[1] * plane.element_size() for plane in planes)
        ids = host_index.numpy()
        order = None if bool((ids[1:] >= ids[:-1]).all()) else np.argsort(ids, kind="stable")
        ids = ids if order is None else ids[order]
        with torch.no_grad(), torch.cuda.device(self.device), self._order.reading() as stream:
            on_device = to_device(torch.from_numpy(ids), self.device)
            places = None if order is None else to_device(torch.from_numpy(order), self.device)
            for start, stop in tiles(ids, max(1, self.tile_bytes // max(1, row_bytes))):
                first, last = int(ids[start]), int(ids[stop - 1])
                picks = on_device[start:stop] - first
                for plane, out in zip(planes, rows, strict=True):
                    tile = plane[first : last + 1].to(self.device, non_blocking=True)
                    if places is None:
                        select_rows([tile], picks, [out[start:stop]])
                    else:
                        picked = tile.new_empty(len(picks), plane.shape[1])
                        select_rows([tile], picks, [picked])
                        put_rows([out], places[start:stop], [picked])
            keep_until_done((index, *planes, *rows), stream)

    def scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        ids = index.cpu().numpy()
        if not all(plane.is_contiguous() for plane in planes):
            self._order.wait()
        with torch.no_grad(), torch.cuda.device(self.device), self._order.writing() as stream:
            for start, stop in runs(ids):
                for plane, source in zip(planes, rows, strict=True):
                    first = int(ids[start])
                    narrow = source[start:stop].to(plane.dtype)
                    plane[first : first + stop - start].copy_(narrow, non_blocking=True)
                    keep_until_done((narrow,), stream)
            keep_until_done((index, *planes, *rows), stream)

    def wait(self) -> None:
        """Block the host until every gather and scatter so far is done."""
        self._order.wait()


def tiles(ids: np.ndarray, tile_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the stretches ``start, stop`` of sorted `ids` (n,) that span at most `tile_rows` rows, greedily."""
    start = 0
    while start < len(ids):
        stop = int(np.searchsorted(ids, ids[start] + tile_rows, side="left"))
        yield start, stop
        start = stop


def runs(ids: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the stretches ``start, stop`` of `ids` (n,) in which each id is one more than the one before."""
    edges = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    for start, stop in itertools.pairwise(edges):
        if start < stop:
            yield start, stop
