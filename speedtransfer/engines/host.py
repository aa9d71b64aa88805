"""Rows moved by the threads of the host, near the speed of its memory: compiled copies where numba is there, else torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.engines.base import check_host_index, out_of_range
from speedtransfer.engines.reference import put_rows, select_rows
from speedtransfer.jit import Part, compiled_module, run_on_threads

_COPIES = "speedtransfer.engines.host_copies"
# Below this size torch is as fast: compiled copies gain by asking for rows ahead that are in no cache.
_COMPILED_BYTES = 1 << 15
_NARROW_BYTES = 16  # rows of one word, which torch writes faster
_STREAMING_BYTES = 1 << 24  # smaller results are better left in the cache for the next reader


class HostEngine:
    """Planes on the host, and the CPU as the compute device. A call has happened when it returns.

    Parameters
    ----------
    device : torch.device
        The CPU.
    """

    name = "host"
    runs_kernels = False
    takes_padding = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def gather(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        check: bool | Tensor = False,
        unsorted: bool = False,
    ) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        if check is not False:
            check_host_index(index if check is True else check, planes)
        gather_rows(planes, index, rows)

    def scatter(
        self,
        planes: Sequence[Tensor],
        index: Tensor,
        rows: Sequence[Tensor],
        unsorted: bool = False,
        behind: bool = False,
    ) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        scatter_rows(planes, index, rows)

    def wait(self, writes_only: bool = False) -> None:
        """Return at once: nothing is ever under way."""


def gather_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Fill ``rows[i]`` with ``planes[i][index]``, all on the CPU, on as many threads as torch uses."""
    num_bytes = sum([tensor.nbytes for tensor in rows])
    if num_bytes < _COMPILED_BYTES or not _move(planes, index, rows, num_bytes):
        select_rows(planes, index, rows)


def scatter_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Set ``planes[i][index]`` to ``rows[i]``, all on the CPU, on as many threads as torch uses."""
    num_bytes = sum([tensor.nbytes for tensor in rows])
    narrow = num_bytes < _COMPILED_BYTES or all(row.shape[1] * row.element_size() <= _NARROW_BYTES for row in rows)
    if narrow or not _move(planes, index, rows, num_bytes, writes=True):
        put_rows(planes, index, rows)


def _move(
    planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], num_bytes: int, writes: bool = False
) -> bool:
    """Move the rows by compiled copies; False, and nothing done, where those are not the way."""
    if any(plane.dtype != dense.dtype for plane, dense in zip(planes, rows, strict=True)):
        return False
    compiled = compiled_module(_COPIES)
    if writes:
        # Ids of a training step come back from the caller, who can have changed them: then nothing is written.
        check_host_index(index, planes)
    ids, fault, parts = index.numpy(), np.full(2, -1), list[Part]()
    for plane, dense in zip(planes, rows, strict=True):
        item = plane.element_size()
        places = plane.data_ptr(), plane.stride(0) * item, dense.data_ptr(), dense.shape[1] * item
        if dense.numel():
            parts.append((_copy_for(compiled, *places, num_bytes, writes), (*places, plane.shape[0], ids, fault)))
    run_on_threads(parts, len(ids), num_bytes, (*planes, *rows))
    place, row = fault.tolist()
    if place >= 0:
        raise out_of_range(f"index[{place}]", row, planes[0].shape[0])
    # torch has not seen the writes: views and saved tensors are told, as after an operation in place.
    for tensor in planes if writes else rows:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return True


def _copy_for(
    compiled: Any, plane: int, stride_bytes: int, rows: int, row_bytes: int, num_bytes: int, writes: bool
) -> Callable[..., None]:
    """Return the compiled copy for rows of a plane; one of whole lines that are written, or of a large result, streams."""
    if writes:
        # A line written in part would have to be read first: there only whole ones stream.
        in_lines = not (plane | stride_bytes | row_bytes) % compiled.LINE_BYTES
        return compiled.scatter_streaming_lines if in_lines else compiled.scatter
    streams = num_bytes >= _STREAMING_BYTES and not (rows | row_bytes) % compiled.LINE_BYTES
    return compiled.gather_streaming_lines if streams else compiled.gather
