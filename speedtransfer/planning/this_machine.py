"""This machine: what is left of its memories now, and its rates where they are asked for, measured in a second or so each."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedtransfer.cuda import cuda_status, pinned_empty, synchronize
from speedtransfer.engines.calibration import load
from speedtransfer.errors import SpeedtransferError, StorageError, format_bytes
from speedtransfer.page_cache import PAGE, PagesStayError, drop_pages, read_pages
from speedtransfer.planning.machine import Machine
from speedtransfer.system import available_bytes, physical_bytes

CPU = torch.device("cpu")
COPY_BYTES = 256 << 20
_BUDGET_S = 0.3
_FEWEST = 3
# A file of this size, or of what a slow disk writes within the budget.
_FILE_BYTES, _PIECE_BYTES = 256 << 20, 16 << 20
_READERS = 64  # reads that the disk has at a time
_FIRST_PAGES = 1024  # that show how many can be read in time


def this_machine(path: str | Path | None = None, *, rates: Collection[str] = ()) -> Machine:
    """Return this machine: its free memories and disk now and, where asked for, its rates, measured in about a second each.

    `path` is a folder on the disk where files of tables would be, by default the current one; for its rate a file without a
    name is written there. The link's rate to the GPU is also known, without measuring, where `speedtransfer calibrate` has
    measured it. What could not be found out is None, and `notes` say why.
    """
    figures, sources, notes = dict[str, Any](), dict[str, str](), list[str]()

    def add(names: str, find: Callable[[], float | tuple[float, ...]], what: str) -> None:
        """Add the figures that `find` returns, by their names with spaces between, or a note that it could not."""
        try:
            values = find()
            several = values if isinstance(values, tuple) else (values,)
            figures.update(zip(names.split(), map(float, several), strict=True))
        except (SpeedtransferError, OSError, RuntimeError, MemoryError) as error:
            why = (getattr(error, "strerror", None) or str(error)).strip() or type(error).__name__
            notes.append(f"{what} is not known: {why.splitlines()[0]}")

    folder = Path.cwd() if path is None else Path(path)
    add("host_bytes", lambda: _free_on_host(notes), "host memory")
    add("disk_bytes", lambda: shutil.disk_usage(folder).free, f"disk room at {str(folder)!r}")
    status = cuda_status()
    if status.available:
        device, calibrated = torch.device("cuda", 0), load(torch.device("cuda", 0))
        figures["device"] = status.devices[0]
        add("device_bytes", lambda: _free_on(device, notes), f"the memory of {device}")
        if "device" in rates:
            add("device_bytes_per_s", lambda: device_bytes_per_s(device), f"the bandwidth of {device}")
        if "link" in rates:
            names = "link_up_bytes_per_s link_down_bytes_per_s"
            add(names, lambda: link_bytes_per_s(device), f"the link to {device}")
        if calibrated is not None and calibrated.copy_bytes_per_s > 0:
            figures["link_up_bytes_per_s"] = calibrated.copy_bytes_per_s
            sources["link_up_bytes_per_s"] = "measured by `speedtransfer calibrate`"
    else:
        notes.append(f"no GPU is used: {status.reason}")
    if "host" in rates:
        add("host_bytes_per_s", host_bytes_per_s, "the bandwidth of host memory")
    if "disk" in rates:
        add("disk_bytes_per_s", lambda: disk_bytes_per_s(folder), f"the disk at {str(folder)!r}")
    sources = {name: "measured" for name in figures if name != "device"} | sources
    devices = max(1, len(status.devices)) if status.available else 1
    return Machine("this machine", **figures, devices=devices, sources=sources, notes=tuple(notes))


def _free_on_host(notes: list[str]) -> float:
    free, whole = available_bytes(), physical_bytes()
    if not whole:
        raise StorageError("the system does not say")
    notes.append(
        f"{format_bytes(free)} of {format_bytes(whole)} of host memory are free; the rest is held by this process and others"
    )
    return float(free)


def _free_on(device: torch.device, notes: list[str]) -> float:
    """Return what is free on a GPU, with what torch holds in this process and does not use."""
    free, total = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device)
    idle = kept - torch.cuda.memory_allocated(device)
    notes.append(
        f"{format_bytes(free + idle)} of {format_bytes(total)} of cuda:{device.index} are free; torch holds "
        f"{format_bytes(kept - idle)} in this process, and others and CUDA itself {format_bytes(total - free - kept)}"
    )
    return float(free + idle)


# --- rates --------------------------------------------------------------------------------------------------------------


def host_bytes_per_s() -> float:
    """Return the bandwidth of host memory: bytes read and written by copies of torch's threads; needs 512 MiB of it."""
    if available_bytes() < 4 * COPY_BYTES:
        raise StorageError(f"{format_bytes(available_bytes())} of memory are left, too few for a copy to measure")
    source, target = (torch.ones(COPY_BYTES // 4, dtype=torch.float32, device="cpu") for _ in range(2))
    return 2 * COPY_BYTES / _best_seconds(lambda: target.copy_(source))


def device_bytes_per_s(device: torch.device) -> float:
    """Return the bandwidth of a GPU's memory: bytes read and written by a copy within it; needs 512 MiB of it."""
    source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * COPY_BYTES / _best_seconds(lambda: target.copy_(source), device)


def link_bytes_per_s(device: torch.device) -> tuple[float, float]:
    """Return the rates of one large copy from page-locked memory to a GPU, and of one back."""
    host = pinned_empty(COPY_BYTES, device)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    up = _best_seconds(lambda: there.copy_(host, non_blocking=True), device)
    down = _best_seconds(lambda: host.copy_(there, non_blocking=True), device)
    return COPY_BYTES / up, COPY_BYTES / down


def disk_bytes_per_s(folder: Path) -> float:
    """Return the rate of reads of single pages in random order, many at a time, from a file without a name in `folder`.

    Its pages are written and dropped from memory first; if they stay, as on file systems that live there, that raises
    `PagesStayError`. A disk, or the host of a virtual machine, may have a cache of its own.
    """
    if not hasattr(os, "posix_fadvise"):
        raise PagesStayError(
            "pages of files cannot be dropped here, so that no disk would be measured; this needs Linux"
        )
    with tempfile.TemporaryFile(dir=folder) as file:
        pages = _write(file.fileno()) // PAGE
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        with mmap.mmap(file.fileno(), pages * PAGE) as block:
            drop_pages([(file.fileno(), block)], "run in a folder on a disk")
        order = np.random.default_rng(0).permutation(pages).astype(np.int64)
        # The first pages compile the reads; the next ones show how many can be read in time.
        _seconds_of_reads(file.fileno(), order[:_READERS])
        first = order[_READERS:][:_FIRST_PAGES]
        a_page = _seconds_of_reads(file.fileno(), first) / len(first)
        rest = order[_READERS + len(first) :][: max(_FIRST_PAGES, int(_BUDGET_S / a_page))]
        return len(rest) * PAGE / _seconds_of_reads(file.fileno(), rest)


def _seconds_of_reads(descriptor: int, pages: np.ndarray) -> float:
    start = time.perf_counter()
    read_pages([(descriptor, pages)], _READERS)
    return time.perf_counter() - start


def _write(descriptor: int) -> int:
    """Write and flush pieces of a file until it is as large as wanted or the time is up; return its bytes."""
    piece = np.random.default_rng(0).bytes(_PIECE_BYTES)
    begin, size = time.perf_counter(), 0
    while size < _FILE_BYTES and (size < 2 * _PIECE_BYTES or time.perf_counter() - begin < _BUDGET_S):
        size += os.write(descriptor, piece)
        os.fsync(descriptor)
    return size


def _best_seconds(call: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the least seconds of a call, after a first one, of as many as fit the budget."""

    def seconds() -> float:
        start = time.perf_counter()
        call()
        synchronize(device)
        return time.perf_counter() - start

    seconds()
    begin, found = time.perf_counter(), list[float]()
    while len(found) < _FEWEST or time.perf_counter() - begin < _BUDGET_S:
        found.append(seconds())
    return min(found)
