"""Functions compiled by numba, and threads to run them on."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from speedtransfer.once import once
from speedtransfer.workers import Task, workers

THREAD_BYTES = 1 << 20  # work for which one more thread is worth waking
_ANNOUNCED_S = 1.0

log = logging.getLogger(__name__)

Part = tuple[Callable[..., None], tuple[Any, ...]]  # a compiled function, and its arguments but the range of rows


@once
def compiled_module(name: str) -> Any:
    """Return the module `name`, which imports numba: where it is used first, as that takes a second.

    Raises
    ------
    ImportError
        There is no numba, or none that works here.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever a numba says that does not fit the rest of the installation
        raise ImportError(
            f"numba, by which rows are moved and stepped on the host, cannot be used ({type(error).__name__}: {error}); run: "
            "pip install --upgrade speedtransfer numba"
        ) from error


def compile_function(function: Any, **options: Any) -> Any:
    """Compile at the first call, without the GIL; the result is kept on disk where numba finds a folder for it."""
    from numba import njit

    _announce_compiling()
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no such folder
        return njit(**options)(function)


@once
def _announce_compiling() -> None:
    """Log it, once a process, when numba has compiled functions of this package for a second; it tells of no others."""
    from numba.core import event

    begun, before_s, told = list[tuple[float, bool]](), 0.0, False

    class Compiling(event.Listener):
        def on_start(self, begins: Any) -> None:
            nonlocal told
            function = begins.data["dispatcher"].py_func
            # One function has others compiled.
            begun.append((time.monotonic(), bool(begun) or function.__module__.startswith("speedtransfer.")))
            if begun[0][1] and not told and before_s + time.monotonic() - begun[0][0] > _ANNOUNCED_S:
                told = True
                log.warning(
                    "numba compiles functions that this process uses for the first time, which takes some seconds; it keeps "
                    "them for the next process where it may write (NUMBA_CACHE_DIR)"
                )

        def on_end(self, ends: Any) -> None:
            nonlocal before_s
            since, ours = begun.pop()
            if ours and not begun:
                before_s += time.monotonic() - since

    event.register("numba:compile", Compiling())


class _Own(threading.local):
    """Whether a thread is to have no help."""

    alone = False


_own = _Own()


@contextlib.contextmanager
def on_this_thread() -> Iterator[None]:
    """Let `run_on_threads` of this thread have no other ones: they are for those who train."""
    _own.alone = True
    try:
        yield
    finally:
        _own.alone = False


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
    threads = 1 if _own.alone else max(1, min(torch.get_num_threads(), num_bytes // THREAD_BYTES))
    if threads == 1:
        _run(parts, 0, count, memory)
        return
    edges = [count * part // threads for part in range(threads + 1)]
    others = list[Task[None]]()
    try:
        for start, stop in itertools.pairwise(edges[1:]):
            # With the tensors: the copies know addresses only, and whoever is interrupted here lets go of the memory.
            # Not numba's own threads, which would abort a process that forks, as data loaders do.
            others.append(workers("rows", torch.get_num_threads()).submit(_run, parts, start, stop, memory))
        _run(parts, edges[0], edges[1], memory)
    finally:
        for other in others:
            other.wait()
    for other in others:
        other.result()


def _run(parts: list[Part], start: int, stop: int, memory: tuple[Tensor, ...]) -> None:
    for copy, places in parts:
        copy(*places, start, stop)
