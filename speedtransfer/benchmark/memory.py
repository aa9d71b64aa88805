"""Suite `memory`: host and GPU memory of a trained table, measured in its own process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedtransfer.benchmark.contenders import DIM, PLANES, ROW_BYTES, Contender, contenders
from speedtransfer.benchmark.environment import host_room
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.errors import HostMemoryError, check_size, format_bytes

NOTE = (
    "Peaks beyond what the process held before, after training steps that have touched every row; each kind of table in a "
    "process of its own. Of a mmap table, host memory is pages of its file, which the system may take back."
)
VALUE = (lambda case: sum(case.memory.values()) / 1e9, "GB, less is better")
LEAST = 0.95  # a table whose rows have all been touched takes at least this many times its planes
TOLERANCE = 1.05  # a large table may take this many times its planes

_ROWS, _QUICK_ROWS = 3_000_000, 100_000
_LOOKUPS = 32_768
# The buffers of a step have a fixed size, negligible for a large table. Smaller tables have a margin.
_LARGE_BYTES, _BUFFERS_BYTES = 4e9, 200e6


def describe(group: GroupResult, case: CaseResult) -> str:
    """Return the bytes of each memory."""
    return ", ".join(f"{format_bytes(size)} of the {name[:-6]}" for name, size in case.memory.items() if size)


def groups(device: torch.device, quick: bool, rows: int | None = None, **others: Any) -> list[Group]:
    """Make a group for each optimizer, `quick` for AdamW only."""
    fitting = int(host_room() / (4 * ROW_BYTES))  # the largest has weights, a gradient and two planes of state
    rows = check_size(rows or min(_QUICK_ROWS if quick else _ROWS, fitting), "rows", 1)
    return [
        Group(
            f"memory of {rows:,} x {DIM} float32 trained with {optimizer}, every row",
            functools.partial(_measured, device, optimizer, rows, quick),
            {"rows": rows, "dim": DIM, "optimizer": optimizer, "planes_bytes": PLANES[optimizer] * rows * ROW_BYTES},
        )
        for optimizer in (("AdamW",) if quick else ("AdamW", "SGD"))
    ]


def _measured(device: torch.device, optimizer: str, rows: int, quick: bool) -> list[CaseResult]:
    """Measure each contender in a process of its own; ours must take no more than its planes, within the tolerance."""
    found = []
    for contender in contenders(device, optimizer)[: 3 if quick or optimizer != "AdamW" else None]:
        case, planes = CaseResult(contender.name, contender.role, 0), contender.planes * rows * ROW_BYTES
        found.append(case)
        try:
            memory = in_process(_child, contender.name, optimizer, rows, device)
        except HostMemoryError as error:
            case.error = str(error)
            continue
        taken, most = memory[f"{contender.place}_bytes"], TOLERANCE * planes + _BUFFERS_BYTES * (planes < _LARGE_BYTES)
        # The system may drop pages of a file, and small tables are lost in other allocations.
        if contender.memory != "mmap" and planes >= _BUFFERS_BYTES and taken < LEAST * planes:
            case.error = (
                f"its planes have {format_bytes(planes)} and every row was touched, but {format_bytes(taken)} were seen to be "
                "taken: the measurement is wrong"
            )
            continue
        if contender.role == "ours":
            excess = f"{taken:,} bytes, {taken / planes - 1:.1%} beyond the {planes:,} of its planes"
            assert taken <= most, f"{contender.name} takes {excess}"
        case.memory = memory
    return found


# --- the process --------------------------------------------------------------------------------------------------------


def _child(name: str, optimizer: str, rows: int, device: torch.device) -> dict[str, int]:
    contender = next(contender for contender in contenders(device, optimizer) if contender.name == name)
    _train(contender, optimizer, 10_000, device)  # loads libraries, thread pools and compiled code
    emb, found = peak_of(lambda: _train(contender, optimizer, rows, device), device)
    if contender.memory == "pinned":
        found["host_bytes"] = with_page_locked(found["host_bytes"], emb.table.nbytes)
    return found


def peak_of(train: Callable[[], Any], device: torch.device) -> tuple[Any, dict[str, int]]:
    """Return what `train` returns, and the peaks of host and device memory in it beyond what was taken before."""
    cuda = device.type == "cuda"
    base = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    host_base = reset_peak()
    made = train()
    if cuda:
        torch.cuda.synchronize(device)
    device_bytes = torch.cuda.max_memory_allocated(device) - base if cuda else 0
    return made, {"host_bytes": max(0, peak_bytes() - host_base), "device_bytes": device_bytes}


def _train(contender: Contender, optimizer: str, rows: int, device: torch.device) -> nn.Module:
    """Step over every row once, in batches of consecutive ids; two steps are enough for a dense optimizer."""
    emb = contender.embed(rows, DIM)
    opt = contender.optimizer(emb)
    starts: Sequence[int] = range(0, rows, _LOOKUPS)
    if contender.planes > PLANES[optimizer]:  # the dense gradient
        starts = starts[:2]
    for start in starts:
        take_step(emb(torch.arange(start, min(start + _LOOKUPS, rows), device=device)).sum(), opt)
    return emb


def in_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return ``function(*arguments)``, called in a new process; raises HostMemoryError if that fails or is killed."""
    # Spawned, as CUDA does not survive a fork, and the fork server is one for the whole program, which may use it too.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            problem = "ended before it was done; the system may have killed it for its memory"
        except Exception as error:
            problem = f"failed: {' '.join(str(error).split()) or type(error).__name__}"
    raise HostMemoryError(f"the process that trains it {problem}")


def with_page_locked(seen_bytes: int, locked_bytes: int) -> int:
    """Return the memory of a process, given `seen_bytes`, with a page-locked table of `locked_bytes`.

    Page-locked memory belongs to the driver and may or may not count as the process's.
    """
    return seen_bytes if seen_bytes >= LEAST * locked_bytes else seen_bytes + locked_bytes


def reset_peak() -> int:
    """Free unused memory, reset the peak to the current memory of this process (on Linux), and return it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # Not on Linux, where this may be the peak of the parent process.
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
