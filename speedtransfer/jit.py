"""Functions compiled by numba, and threads to run them on. Without numba, or with one that fails, there are none."""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import itertools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.once import once

THREAD_BYTES = 1 << 20  # work for which one more thread is worth waking

log = logging.getLogger(__name__)

Part = tuple[Callable[..., None], tuple[Any, ...]]  # a compiled function, and its arguments but the range of rows


@once
def available() -> bool:
    """Whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def compiled_module(name: str) -> Any:
    """Return the module `name`, which imports numba; None where numba is missing or does not work."""
    return _imported(name) if available() else None


@once
def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a numba says that does not fit the rest of the installation
        log.warning("numba cannot be used (%s: %s), so torch does its work, slower", type(error).__name__, error)
        return None


def compile_function(function: Any) -> Any:
    """Compile at the first call, without the GIL; the result is kept on disk where numba finds a folder for it."""
    from numba import njit

    try:
        return njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no such folder
        return njit(nogil=True, error_model="numpy")(function)


def run_on_threads(parts: list[Part], count: int, num_bytes: int, memory: tuple[Tensor, ...]) -> None:
    """Run compiled functions over `count` rows, stretches of them on as many threads as torch uses, and wait for all.

    Parameters
    ----------
    parts : list of (function, arguments)
        Each is called without the GIL as ``function(*arguments, start, stop)``.
    count, num_bytes : int
        Rows, and the bytes of all that is done to them, which say how many threads are worth waking.
    memory : tuple of Tensor
        What the functions know only the addresses of.
    """
    threads = max(1, min(torch.get_num_threads(), num_bytes // THREAD_BYTES))
    if threads == 1:
        _run(parts, 0, count, memory)
        return
    edges = [count * part // threads for part in range(threads + 1)]
    others = list[concurrent.futures.Future[None]]()
    try:
        for start, stop in itertools.pairwise(edges[1:]):
            try:
                # With the tensors: the copies know addresses only, and whoever is interrupted here lets go of the memory.
                others.append(_pool(torch.get_num_threads()).submit(_run, parts, start, stop, memory))
            except RuntimeError:  # Python is on its way out, or the system has no thread left
                _run(parts, start, stop, memory)
        _run(parts, edges[0], edges[1], memory)
    finally:
        concurrent.futures.wait(others)
    for other in others:
        other.result()


def _run(parts: list[Part], start: int, stop: int, memory: tuple[Tensor, ...]) -> None:
    for copy, places in parts:
        copy(*places, start, stop)


@once
def _pool(threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """Return the threads that help; numba's own pool would abort a process that forks, as data loaders do."""
    return concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="speedtransfer")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # type: ignore[attr-defined]
