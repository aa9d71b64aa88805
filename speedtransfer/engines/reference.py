"""Rows moved by plain torch, where the planes live on the compute device: it defines what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtransfer.device import INTEGER_OF_SIZE
from speedtransfer.engines.order import StreamOrder, keep_until_done


class ReferenceEngine:
    """`torch.index_select` and `Tensor.index_copy_` over planes on the compute device, the CPU included.

    Order: on the CPU a call has happened when it returns. On CUDA calls are queued on the current stream; events order
    them between streams (see :class:`~speedtransfer.engines.order.StreamOrder`), and ``record_stream`` keeps the
    allocator from giving the memory of a tensor to somebody else before the stream is done with it.

    Parameters
    ----------
    device : torch.device
        The compute device, where the planes are as well.
    """

    name = "reference"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._order = StreamOrder(self.device) if self.device.type == "cuda" else None

    def gather(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        if self._order is None:
            select_rows(planes, index, rows)
            return
        with self._order.reading() as stream:
            select_rows(planes, index, rows)
            keep_until_done((index, *planes, *rows), stream)

    def scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        if self._order is None:
            put_rows(planes, index, rows)
            return
        with self._order.writing() as stream:
            put_rows(planes, index, rows)
            keep_until_done((index, *planes, *rows), stream)

    def wait(self) -> None:
        """Block until the planes are up to date: nothing to do on the CPU."""
        if self._order is not None:
            self._order.wait()


@torch.no_grad()
def select_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Fill ``rows[i]`` with ``planes[i][index]``, all on one device."""
    for plane, out in zip(planes, rows, strict=True):
        torch.index_select(as_integers(plane), 0, index, out=as_integers(out))


@torch.no_grad()
def put_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Set ``planes[i][index]`` to ``rows[i]``, all on one device."""
    for plane, source in zip(planes, rows, strict=True):
        as_integers(plane).index_copy_(0, index, as_integers(source))


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of `tensor` as integers of the same size: torch moves those for every dtype, float8 included."""
    return tensor.view(INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype))
