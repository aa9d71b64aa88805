"""Estimate the time of a training step of tables from the figures of a machine, where it cannot be measured.

docs/plan.md has the parts of a step. Without reading ahead they follow each other; only a host that queues its work ("device"
and "pinned") is done meanwhile. With :func:`speedtransfer.prefetch` the slowest of them decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from speedtransfer.planning.footprint import (
    DENSE,
    DEVICE,
    FLOAT32,
    MMAP,
    PINNED,
    SPARSE,
    Form,
    active_bytes,
    bytes_of,
    footprint,
    is_exact,
    moved,
    page_bytes,
    size_of,
    state_planes,
)
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.workload import Workload
from speedtransfer.ranks.zipf import expected_cached, expected_unique


class HostCost(NamedTuple):
    """Microseconds of the host for the first table of a step, and for each other one, and kernels launched for each."""

    first_us: float
    other_us: float
    first_launches: float
    other_launches: float


# As bench/launches.py has counted them for 1 and for 26 tables (tests/test_planning_estimate.py compares): CPU time of the
# host on an emulated device, without its driver, to which `LAUNCH_US` a kernel is added. Encoded rows take `CODEC_US` more.
HOST: Mapping[str, HostCost] = {
    DENSE: HostCost(360, 86, 30, 22),
    "lazy": HostCost(963, 340, 20, 5.5),
    "exact": HostCost(1085, 478, 21, 6.5),
    "frozen": HostCost(261, 261, 14, 14),
}
CODEC_US, LAUNCH_US = 133.0, 2.5


@dataclass(frozen=True)
class Estimate:
    """Seconds of the parts of a step.

    `queued`: the host queues its work and goes on, so that its calls and the work of the device overlap. `both_ways_s`: of
    `up_s`, what one kernel reads while it writes. `measured_s` takes the place of all but the disk where a step was measured.
    """

    host_s: float = 0.0
    up_s: float = 0.0
    down_s: float = 0.0
    copies_s: float = 0.0
    compute_s: float = 0.0
    disk_s: float = 0.0
    queued: bool = False
    both_ways_s: float = 0.0
    measured_s: float = 0.0

    @property
    def seconds(self) -> float:
        """A step without reading ahead."""
        rest = self.up_s + self.down_s - self.both_ways_s + self.copies_s + self.compute_s + self.disk_s
        return max(self.host_s, rest) if self.queued else self.host_s + rest + self.measured_s

    @property
    def ahead_s(self) -> float:
        """A step while the rows of the next are read: both directions of the bus, the disk and the device work at once."""
        return max(self.host_s, self.up_s, self.down_s, self.copies_s, self.compute_s, self.disk_s)

    @property
    def bound(self) -> str:
        """Which part is the longest: "host", "bus", "copies", "compute" or "disk"; "" for what was measured."""
        parts = {"host": self.host_s, "bus": self.up_s + self.down_s - self.both_ways_s, "": self.measured_s}
        parts |= {name: getattr(self, f"{name}_s") for name in ("copies", "compute", "disk")}
        return max(parts, key=parts.__getitem__)


def estimate_step(workload: Workload, form: Form, memory: str, machine: Machine) -> Estimate | None:
    """Return the time of a step in one of the memories, or of a module of torch; None where a rate for it is not known."""
    gpu = machine.device is not None
    near = machine.device_bytes_per_s if gpu else machine.host_bytes_per_s
    up_rate, down_rate = machine.link_up_bytes_per_s, machine.link_down_bytes_per_s
    host_rate = machine.host_bytes_per_s
    if near is None:
        return None
    active = active_bytes(workload, gpu)
    if memory in (DENSE, SPARSE):
        touched = 4 * active
        if memory == DENSE and workload.trainer.make is not None:
            # Weights and state are read and written; the gradient is filled with zeros and read.
            whole = bytes_of(workload, Form())
            touched += 2 * (whole.weight + whole.state) + 2 * whole.weight
        return Estimate(host_s=_host_s(workload, DENSE, Form()), compute_s=touched / near, queued=gpu)
    up, down, weight = moved(workload, form)
    kind = "frozen" if workload.trainer.make is None else "exact" if is_exact(workload) else "lazy"
    host_s = _host_s(workload, kind, form)
    compute_s = 4 * active / near
    of_disk = disk_bytes(workload, form, machine) if memory == MMAP else 0.0
    if of_disk and machine.disk_bytes_per_s is None:
        return None
    disk_s = of_disk / (machine.disk_bytes_per_s or 1.0)
    if not gpu or memory == DEVICE:
        # Rows are read from the table and written to it by the same memory that they are computed in.
        return Estimate(host_s=host_s, compute_s=compute_s + (up + down) / near, disk_s=disk_s, queued=gpu)
    if up_rate is None or down_rate is None:
        return None
    if memory == PINNED:
        state = up - weight if _is_one_kernel(workload, form) else 0.0
        both_ways_s = min(state / up_rate, down / down_rate)
        return Estimate(host_s, up / up_rate, down / down_rate, 0.0, compute_s, queued=True, both_ways_s=both_ways_s)
    if host_rate is None:
        return None
    return Estimate(host_s, up / up_rate, down / down_rate, 2 * (up + down) / host_rate, compute_s, disk_s)


def _is_one_kernel(workload: Workload, form: Form) -> bool:
    """Tell whether one kernel reads and writes the state of a step, by the optimizer's class (docs/gpu.md has the details)."""
    make = workload.trainer.make
    if make is None or is_exact(workload) or form != Form():
        return False
    return type(make([nn.Parameter(torch.zeros(2, 2, device="cpu"))])) in (SGD, Adam, AdamW)


def _host_s(workload: Workload, kind: str, form: Form) -> float:
    cost, more = HOST[kind], len(workload.tables) - 1
    codec = CODEC_US if form.storage != FLOAT32 or (form.state != FLOAT32 and state_planes(workload)) else 0.0
    launches = cost.first_launches + more * cost.other_launches
    return 1e-6 * (cost.first_us + more * cost.other_us + codec * (more + 1) + LAUNCH_US * launches)


def disk_bytes(workload: Workload, form: Form, machine: Machine) -> float:
    """Return the bytes that a step reads from files, and writes to them, beyond what the page cache holds.

    The cache is taken to hold the pages of the most frequent rows, as many as host memory has room for.
    """
    need = footprint(workload, form, MMAP, machine)
    room = max(0.0, (machine.host_bytes or 0.0) - need.host)
    share = min(1.0, room / max(1.0, need.disk))
    total = 0.0
    if share == 1.0:
        return total
    for table in workload.tables:
        pages = page_bytes(workload, table, form)
        # A page holds the rows beside it, too, which are as rare as any.
        rows_held = share * size_of(workload, table, form).row_bytes / pages
        missed = 1 - served_share(workload, [rows_held])[0]
        total += missed * table.unique * pages * (1 + (workload.trainer.make is not None))
    return total


def served_share(workload: Workload, shares: list[float]) -> list[float]:
    """Return for each of `shares` which share of the distinct rows of a step is among that share of the most frequent rows.

    The sum of ``1 - (1 - p) ** n`` over the most frequent rows, over that of all; p is the probability of a row by the Zipf
    law and n the number of lookups.
    """
    served, whole = [0.0] * len(shares), 0.0
    for table in workload.tables:
        for rows, count in table.features:
            whole += expected_unique(rows, workload.zipf, count)
            found = expected_cached(rows, workload.zipf, count, [min(rows, round(share * rows)) for share in shares])
            served = [before + more for before, more in zip(served, found, strict=True)]
    return [part / whole if whole else 1.0 for part in served]
