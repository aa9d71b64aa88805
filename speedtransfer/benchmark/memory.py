"""Suite `memory`: what a trained table really takes of the host and of the GPU, measured in a process of its own.

``python -m speedtransfer.benchmark.memory KIND OPTIMIZER ROWS DEVICE`` is that process; it prints a line of JSON.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from speedtransfer.benchmark.kinds import DIM, OURS, PLANES, ROW_BYTES, Kind, kinds
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.peak import LEAST, from_process, peak_bytes, reset_peak, with_page_locked
from speedtransfer.errors import DeviceError, HostMemoryError, SpeedtransferError, check_size, format_bytes
from speedtransfer.system import physical_bytes

NOTE = (
    "Peaks beyond what the process held before, after training steps that have touched every row; each kind of table in a "
    "process of its own. Of a mmap table, host memory is pages of its file, which the system may take back."
)
TOLERANCE = 1.05  # times its planes is the most that a large table may take

_ROWS, _QUICK_ROWS = 3_000_000, 100_000
_SHARE = 0.6  # of the memory of this machine: the largest kind has twice the weights and two planes of state
_LOOKUPS = 32_768
# The buffers of a step have a fixed size: they vanish beside a large table, and a small one cannot show the bound.
_LARGE_BYTES, _BUFFERS_BYTES = 4e9, 200e6


def groups(device: torch.device, quick: bool, **options: Any) -> list[Group]:
    """Return what the suite compares.

    Parameters
    ----------
    device : torch.device
        The compute device.
    quick : bool
        A small table, and one optimizer.
    rows : int, optional
        Of the table.
    """
    fitting = int(_SHARE * (physical_bytes() or 8e9) / (4 * ROW_BYTES))
    rows = check_size(options.get("rows") or min(_QUICK_ROWS if quick else _ROWS, fitting), "rows", 1)
    return [
        Group(
            f"memory of {rows:,} x {DIM} float32 trained with {optimizer}, every row",
            functools.partial(_cases, device, optimizer, rows, quick),
            {"rows": rows, "dim": DIM, "optimizer": optimizer, "planes_bytes": PLANES[optimizer] * rows * ROW_BYTES},
        )
        for optimizer in (("AdamW",) if quick else ("AdamW", "SGD"))
    ]


def _cases(device: torch.device, optimizer: str, rows: int, quick: bool) -> list[Case]:
    chosen = kinds(device, optimizer)
    if quick or optimizer != "AdamW":
        chosen = chosen[:3]
    found = [_Process(kind, optimizer, rows, device) for kind in chosen]
    return [Case(p.kind.name, p.run, p.check, role=p.kind.role, memory=p.memory) for p in found]


class MeasurementError(SpeedtransferError):
    """What was measured cannot be."""


class _Process:
    """Measures a kind of table at the first run; further ones, which a stopwatch asks for, do nothing."""

    def __init__(self, kind: Kind, optimizer: str, rows: int, device: torch.device) -> None:
        self.kind, self.optimizer, self.rows, self.device = kind, optimizer, rows, device
        self.memory: dict[str, int] = {}

    def run(self) -> None:
        """Fill `memory`.

        Raises
        ------
        MeasurementError
            The table cannot have taken so little: what was measured is not its memory.
        """
        if not self.memory:
            found = measured(self.kind.name, self.optimizer, self.rows, self.device)
            planes, taken = self.kind.planes * self.rows * ROW_BYTES, found[f"{self.kind.place}_bytes"]
            # The system may take pages of a file back. Small tables are less than what else comes and goes.
            if self.kind.name != OURS.format("mmap") and planes >= _BUFFERS_BYTES and taken < LEAST * planes:
                raise MeasurementError(
                    f"its planes have {format_bytes(planes)} and every row was touched, but {format_bytes(taken)} were seen "
                    "to be taken: the measurement is wrong"
                )
            self.memory.update(found)

    def check(self) -> None:
        """Raise where our table takes more than its planes, within the tolerance, of the memory that it lives in."""
        if self.kind.role == "ours":
            planes = self.kind.planes * self.rows * ROW_BYTES
            most = TOLERANCE * planes + (0 if planes >= _LARGE_BYTES else _BUFFERS_BYTES)
            taken = self.memory[f"{self.kind.place}_bytes"]
            assert taken <= most, f"takes {taken:,} bytes, {taken / planes - 1:.1%} beyond the {planes:,} of its planes"


def measured(kind: str, optimizer: str, rows: int, device: torch.device) -> dict[str, int]:
    """Return ``{"host_bytes": ..., "device_bytes": ...}`` of a table, from a process of its own.

    Raises
    ------
    HostMemoryError
        That process did not succeed: it has no room, or the system has killed it for what it took.
    """
    arguments = [kind, optimizer, str(rows), str(device)]
    return from_process("speedtransfer.benchmark.memory", arguments, "the process that trains it")


# --- the process --------------------------------------------------------------------------------------------------------


def _child(kind_name: str, optimizer: str, rows: int, device: torch.device) -> dict[str, int]:
    kind = next(kind for kind in kinds(device, optimizer) if kind.name == kind_name)
    _train(kind, optimizer, 10_000, device)  # brings libraries, thread pools, compiled copies and optimizers
    cuda = device.type == "cuda"
    base = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    host_base = reset_peak()
    emb: Any = _train(kind, optimizer, rows, device)
    host = peak_bytes() - host_base
    if kind.name == OURS.format("pinned"):
        host = with_page_locked(host, emb.table.nbytes)
    del emb
    return {"host_bytes": max(0, host), "device_bytes": torch.cuda.max_memory_allocated(device) - base if cuda else 0}


def _train(kind: Kind, optimizer: str, rows: int, device: torch.device) -> nn.Module:
    """Step over every row once, in batches of consecutive ids; a dense optimizer, which takes them all, twice."""
    emb = kind.make(rows)
    opt = kind.optimizer(list(emb.parameters()))
    starts: Sequence[int] = range(0, rows, _LOOKUPS)
    if kind.planes > PLANES[optimizer]:  # the dense gradient
        starts = starts[:2]
    for start in starts:
        emb(torch.arange(start, min(start + _LOOKUPS, rows), device=device)).sum().backward()
        opt.step()
        opt.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return emb


if __name__ == "__main__":
    try:
        print(json.dumps(_child(sys.argv[1], sys.argv[2], int(sys.argv[3]), torch.device(sys.argv[4]))))
    except (DeviceError, HostMemoryError, torch.cuda.OutOfMemoryError) as error:
        sys.exit(str(error))
