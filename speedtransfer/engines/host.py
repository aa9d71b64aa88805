"""Rows moved by the threads of the host, near the speed of its memory: compiled copies where numba is there, else torch's."""

from __future__ import annotations

import concurrent.futures
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.engines.bounds import check_host_index
from speedtransfer.engines.reference import put_rows, select_rows

_COMPILED_BYTES = 1 << 18  # a call of fewer is done before a compiled one would have begun
_COMPILED_KEYS = 1 << 13  # the same of a sort
_THREAD_BYTES = 1 << 20  # what a thread more is worth waking for
_STREAMING_BYTES = 1 << 24  # results up to this are better left in the cache, for whoever reads them next

_Part = tuple[Callable[..., None], tuple[Any, ...]]  # a compiled copy and its arguments but the range of rows


@functools.cache
def has_numba() -> bool:
    """Tell whether numba (extra ``fast``) is installed; it is not imported before rows are worth it."""
    return importlib.util.find_spec("numba") is not None


class HostEngine:
    """Planes on the host, and the CPU as the compute device. A call has happened when it returns.

    Parameters
    ----------
    device : torch.device
        The CPU.
    """

    name = "host"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def gather(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], check: bool = False) -> None:
        """Fill ``rows[i]`` (n, width_i) with the rows `index` (n,) of ``planes[i]``."""
        if check and planes:
            check_host_index(index, planes[0].shape[0])
        gather_rows(planes, index, rows)

    def scatter(self, planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
        """Write ``rows[i]`` (n, width_i) to the rows `index` (n,) of ``planes[i]``."""
        scatter_rows(planes, index, rows)

    def wait(self) -> None:
        """Return at once: nothing is ever under way."""


def gather_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Fill ``rows[i]`` with ``planes[i][index]``, all on the CPU, on as many threads as torch uses."""
    if not _move(planes, index, rows, _gather_copy):
        select_rows(planes, index, rows)


def scatter_rows(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor]) -> None:
    """Set ``planes[i][index]`` to ``rows[i]``, all on the CPU, on as many threads as torch uses."""
    if not _move(planes, index, rows, _scatter_copy):
        put_rows(planes, index, rows)


def sort_keys(keys: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return `keys` (n,) int64, none negative, sorted by their bits from `low` to below `high`; equal ones keep their order.

    The bits below `low` must grow with the position, those from `high` on be zero.
    """
    if len(keys) < _COMPILED_KEYS or not has_numba():
        return np.sort(keys)
    from speedtransfer.engines import compiled

    return compiled.sort_by_bits(keys, low, high)


def _move(planes: Sequence[Tensor], index: Tensor, rows: Sequence[Tensor], choose: Callable[..., Any]) -> bool:
    """Move the rows by compiled copies; False, and nothing done, where those are not the way."""
    num_bytes = sum(tensor.nbytes for tensor in rows)
    if num_bytes < _COMPILED_BYTES or not has_numba():
        return False
    if any(plane.dtype != dense.dtype for plane, dense in zip(planes, rows, strict=True)):
        return False
    ids, parts = index.numpy(), list[_Part]()
    for plane, dense in zip(planes, rows, strict=True):
        item = plane.element_size()
        places = plane.data_ptr(), plane.stride(0) * item, dense.data_ptr(), dense.shape[1] * item
        if dense.numel():
            parts.append((choose(*places, num_bytes), (*places, ids)))
    threads = max(1, min(torch.get_num_threads(), num_bytes // _THREAD_BYTES))
    edges = [len(ids) * part // threads for part in range(threads + 1)]
    others = [_pool(torch.get_num_threads()).submit(_run, parts, *edges[i : i + 2]) for i in range(1, threads)]
    try:
        _run(parts, edges[0], edges[1])
    finally:
        for other in others:  # they write to this call's memory: never leave one behind
            other.result()
    # torch has not seen the writes: views and saved tensors are told, as after an operation in place.
    for tensor in planes if choose is _scatter_copy else rows:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    return True


def _run(parts: list[_Part], start: int, stop: int) -> None:
    for copy, places in parts:
        copy(*places, start, stop)


def _gather_copy(plane: int, stride_bytes: int, rows: int, row_bytes: int, num_bytes: int) -> Callable[..., None]:
    from speedtransfer.engines import compiled

    if num_bytes >= _STREAMING_BYTES:
        if not (rows | row_bytes) % compiled.LINE_BYTES:
            return compiled.gather_streaming_lines
        if not (rows | row_bytes) % 16:
            return compiled.gather_streaming
    return compiled.gather


def _scatter_copy(plane: int, stride_bytes: int, rows: int, row_bytes: int, num_bytes: int) -> Callable[..., None]:
    from speedtransfer.engines import compiled

    # A line written in part would have to be read first: there only whole ones stream.
    if not (plane | stride_bytes | row_bytes) % compiled.LINE_BYTES:
        return compiled.scatter_streaming_lines
    return compiled.scatter


@functools.cache
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """Return the threads that help; numba's own pool would abort a process that forks, as data loaders do."""
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="speedtransfer")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of the threads
