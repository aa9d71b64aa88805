"""Rows moved by kernels that reach across the bus into page-locked planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from speedtransfer.device import load_kernel, require_mapped, resolve_cuda, torch_stream
from speedtransfer.engines.order import StreamOrder, keep_until_done

MAX_PLANES = 16  # of one launch, as in rows.cu
_PLANE = np.dtype([(name, np.int64) for name in ("plane", "rows", "stride_bytes", "row_bytes", "lane_bytes")])
_MOVE = np.dtype(
    [("index", np.int64), ("num_rows", np.int64), ("num_planes", np.int64), ("planes", _PLANE, MAX_PLANES)]
)


class MappedEngine:
    """Kernels on the compute device read and write planes in page-locked host memory (or in device memory).

    Order: every call is one kernel on the current stream (several where there are more than 16 planes). Events order
    the calls between streams, on the device (see :class:`~speedtransfer.engines.order.StreamOrder`). ``record_stream``
    keeps the memory of `index` and `rows`, which torch's allocator could give away early when they come from another
    stream; page-locked planes are not freed before the device is idle (see :func:`speedtransfer.device.pinned_empty`).

    Parameters
    ----------
    device : torch.device
        The compute device, on CUDA.
    max_blocks : int, optional
        The largest launch, in blocks of `threads`. Fewer leave more of the device to training. By default two for each
        multiprocessor.
    threads : int
        Threads of a block.

    Raises
    ------
    DeviceError
        There is no CUDA, or the device cannot address host memory.
    """

    name = "mapped"

    def __init__(self, device: torch.device | str, max_blocks: int | None = None, threads: int = 256) -> None:
        self.device = resolve_cuda(device, "the mapped engine")
        require_mapped(self.device)
        self.max_blocks = max_blocks or 2 * torch.cuda.get_device_properties(self.device).multi_processor_count
        self.threads = threads
        self._gather = load_kernel("rows.cu", "gather_rows", self.device)
        self._scatter = load_kernel("rows.cu", "scatter_rows", self.device)
        self._order = StreamOrder(self.device)

    def gather(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        with self._order.reading() as stream, torch_stream(self.device):
            self._launch(self._gather, planes, index, rows)
            keep_until_done((index, *planes, *rows), stream)

    def scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        with self._order.writing() as stream, torch_stream(self.device):
            self._launch(self._scatter, planes, index, rows)
            keep_until_done((index, *planes, *rows), stream)

    def wait(self) -> None:
        """Block the host until every gather and scatter so far is done."""
        self._order.wait()

    def _launch(self, kernel: object, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        for start in range(0, len(planes), MAX_PLANES):
            part = slice(start, start + MAX_PLANES)
            move = pack_move(planes[part], index, rows[part])
            if move is not None:
                blocks = min(self.max_blocks, -(-len(index) * 32 // self.threads))
                kernel((blocks,), (self.threads,), (move,))  # type: ignore[operator]


def pack_move(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> np.ndarray | None:
    """Return the argument of the kernels in rows.cu, ``struct Move``, as one NumPy record; None where nothing moves.

    Parameters
    ----------
    planes, rows : sequence of Tensor
        At most ``MAX_PLANES``; (num_rows, width_i) and (n, width_i).
    index : Tensor
        (n,) int64.
    """
    packed = []
    for plane, out in zip(planes, rows, strict=True):
        item = plane.element_size()
        row_bytes, stride_bytes = plane.shape[1] * item, plane.stride(0) * item
        # The widest lane that divides every address: the lowest bit that any of them has.
        bits = plane.data_ptr() | out.data_ptr() | row_bytes | stride_bytes | 16
        if row_bytes:
            packed.append((plane.data_ptr(), out.data_ptr(), stride_bytes, row_bytes, bits & -bits))
    if not packed or not len(index):
        return None
    move = np.zeros(1, _MOVE)
    move["index"], move["num_rows"], move["num_planes"] = index.data_ptr(), len(index), len(packed)
    move["planes"][0, : len(packed)] = packed
    return move
