"""Rows moved by plain torch, where the planes live on the compute device: it defines what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from speedtransfer.cuda import StreamOrder, check_not_capturing, keep_until_done, to_device
from speedtransfer.dtypes import INTEGER_OF_SIZE
from speedtransfer.engines.base import check_host_index


class ReferenceEngine:
    """`torch.index_select` and `Tensor.index_copy_` over planes on the compute device, the CPU included.

    Order: on the CPU a call has happened when it returns. On CUDA calls are queued on the current stream; events order
    them between streams (see :class:`~speedtransfer.cuda.StreamOrder`), and ``record_stream`` keeps the allocator from
    reusing the memory of `index` and `rows` before the stream is done with it.

    Parameters
    ----------
    device : torch.device
        The compute device, where the planes are as well.
    """

    name = "reference"
    runs_kernels = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.takes_padding = self.device.type == "cuda"
        self._order = StreamOrder(self.device) if self.takes_padding else None
        if self._order is not None:
            self._order.wait_when_gone(self)

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``; `check` waits for `index`."""
        if check is not False:
            if self._order is not None:
                check_not_capturing(
                    "looking at an index on the host (engine 'reference')", "use table.engine = 'mapped'"
                )
            check_host_index((index if check is True else check).cpu(), planes)
        if self._order is None:
            select_rows(planes, index, rows)
            return
        there = to_device(index, self.device)
        with self._order.reading() as stream:
            _select_padded(planes, there, rows)
            keep_until_done((index, *rows), stream)

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        if self._order is None:
            put_rows(planes, index, rows)
            return
        there = to_device(index, self.device)
        with self._order.writing() as stream:
            _put_padded(planes, there, rows)
            keep_until_done((index, *rows), stream)

    def wait(self, writes_only: bool = False) -> None:
        """Block until the planes are up to date: nothing to do on the CPU."""
        if self._order is not None:
            self._order.wait(writes_only)


def select_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Fill ``rows[i]`` with ``planes[i][index]``, in the dtype of ``rows[i]``, all on one device and without gradients."""
    for plane, out in zip(planes, rows, strict=True):
        if out.dtype != plane.dtype:
            out.copy_(plane.index_select(0, index))
        elif plane.dtype in SELECTED:
            torch.index_select(plane, 0, index, out=out)
        else:
            torch.index_select(as_integers(plane), 0, index, out=as_integers(out))


def put_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Set ``planes[i][index]`` to ``rows[i]``, in the dtype of ``planes[i]``, all on one device and without gradients."""
    for plane, source in zip(planes, rows, strict=True):
        if source.requires_grad:
            source = source.detach()
        if source.dtype != plane.dtype:
            source = source.to(plane.dtype)
        if source.numel() < _FEW_VALUES and plane.dtype in SELECTED:
            plane.index_copy_(0, index, source)
        else:
            word = _widest_word(plane, source)
            plane.view(word).index_copy_(0, index, source.view(word))


def _select_padded(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """As :func:`select_rows`; entries of `index` equal to the number of rows give zeros."""
    if not planes or not len(index):
        return
    num_rows = planes[0].shape[0]
    if num_rows:
        select_rows(planes, index.clamp(max=num_rows - 1), rows)
    padding = (index == num_rows).unsqueeze(1)
    for out in rows:
        as_integers(out).masked_fill_(padding, 0)


def _put_padded(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """As :func:`put_rows`; entries of `index` equal to the number of rows write nothing.

    What they do write is what is written there anyway: the first row once more, or, where all are padding, the last row of the
    plane as it is. So the host need not know how many they are.
    """
    if not planes or not len(index) or not planes[0].shape[0]:
        return
    num_rows = planes[0].shape[0]
    padding = index == num_rows
    first = index[:1].clamp(max=num_rows - 1)
    values = []
    for plane, source in zip(planes, rows, strict=True):
        bits = as_integers(source.detach().to(plane.dtype))
        again = torch.where(padding[:1].unsqueeze(1), as_integers(plane).index_select(0, first), bits[:1])
        values.append(torch.where(padding.unsqueeze(1), again, bits).view(plane.dtype))
    put_rows(planes, torch.where(padding, first, index), values)


def as_integers(rows: Tensor) -> Tensor:
    """Return `rows` as integers where there are some of their size: torch cannot choose among rows of every dtype."""
    return rows.view(INTEGER_OF_SIZE.get(rows.element_size(), rows.dtype))


def _widest_word(*tensors: Tensor) -> torch.dtype:
    """Return the widest dtype that every row of `tensors`, all of one dtype, is a whole and aligned number of.

    `index_copy_` costs the CPU by the element: a row of float32 as complex128 takes half the time.
    """
    size, bits = tensors[0].element_size(), 0
    for tensor in tensors:
        if tensor.stride(1) != 1:
            return tensors[0].dtype
        bits |= (tensor.stride(0) | tensor.shape[1] | int(tensor.storage_offset())) * size | tensor.data_ptr()
    for dtype, wide in _WORDS:
        if wide % size == 0 and bits % wide == 0:
            return dtype
    return tensors[0].dtype


# Dtypes whose rows torch moves everywhere as they are; others (float8, unsigned integers) move as integers of their size.
SELECTED = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16}
SELECTED |= {torch.int32, torch.int64, torch.bool}
_FEW_VALUES = 1 << 14  # fewer are written before a wider word has been found
_WORDS = ((torch.complex128, 16), *sorted(((d, s) for s, d in INTEGER_OF_SIZE.items()), key=lambda word: -word[1]))
