"""Rank machines for tables: by the best configuration on each, estimated; several GPUs share the rows out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from speedtransfer.planning.configurations import Option, best_option, estimated, make_options
from speedtransfer.planning.footprint import DEVICE, PAGEABLE, PINNED, check_machine
from speedtransfer.planning.forms import Form, is_exact, state_planes
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.rank import Ranking, StepTime, rank
from speedtransfer.planning.workload import Load, Workload
from speedtransfer.ranks.cost import StepCost, sharded_step
from speedtransfer.ranks.row_counts import RowCounts, expected_counts, row_form
from speedtransfer.ranks.zipf import expected_unique

CALL_S = 50e-6  # of a collective call; a round number, and no machine's
_SHARED = ("host_bytes", "pinned_bytes", "disk_bytes", "host_bytes_per_s", "disk_bytes_per_s")


def rank_machines(
    workload: Workload, forms: Sequence[Form], machines: Sequence[Machine], *, dense_s: float = 0.0, **options: Any
) -> Ranking:
    """Return machines in the order of what they give for a workload, each with the configuration that is best on it.

    A step is one with rows read ahead, where that can be. On several GPUs each takes a batch, and the rows of every table are
    shared out (``process_group=``), so that torch's own modules are left out there.

    Parameters
    ----------
    workload : Workload
    forms : sequence of Form
        How rows and state may be stored.
    machines : sequence of Machine
    dense_s : float
        Seconds of a step of the rest of the model.
    options
        Of :func:`rank`.
    """

    def estimate(machine: Machine) -> StepTime:
        if machine.devices == 1:
            return _step_time(_options(workload, forms, machine, dense_s))
        ranks = machine.devices
        shares = [_distinct_share(table, workload.zipf, ranks) for table in workload.tables]
        owned = [_shard(table, share, ranks) for table, share in zip(workload.tables, shares, strict=True)]
        found = _options(replace(workload, tables=tuple(owned)), forms, one_of(machine), dense_s)
        found = [option for option in found if option.is_table]
        step, best = _step_time(found), best_option(found)
        if step.seconds is None or best is None:
            return step
        pairs = zip(workload.tables, shares, strict=True)
        counts = [_counts(workload, table, best.form, share, ranks) for table, share in pairs]
        cost = sharded_step(counts, ranks, training=workload.trainer.make is not None)
        return StepTime(step.seconds + exchange_seconds(machine, cost))

    return rank(machines, estimate, **options)


def one_of(machine: Machine) -> Machine:
    """Return what each of the processes of a machine has, one for each GPU: its GPU, its link and its share of the rest.

    Host memory has to feed all links at once: none is faster than its share of the host's bandwidth.
    """
    share: dict[str, Any] = {name: value / machine.devices for name in _SHARED if (value := getattr(machine, name))}
    host = share.get("host_bytes_per_s")
    for name in ("link_up_bytes_per_s", "link_down_bytes_per_s"):
        rate = getattr(machine, name)
        share[name] = rate if rate is None or host is None else min(rate, host)
    return replace(machine, devices=1, **share)


def exchange_seconds(machine: Machine, cost: StepCost) -> float:
    """Return the time of what the processes send one another in a step, nothing overlapping.

    Without a figure of its own it goes by way of host memory: down one link and up the other.
    """
    peer = machine.peer_bytes_per_s
    if peer is None:
        one = one_of(machine)
        peer = 1 / (1 / one.figure("link_down_bytes_per_s") + 1 / one.figure("link_up_bytes_per_s"))
    return cost.calls * CALL_S + cost.sent / peer


def _options(workload: Workload, forms: Sequence[Form], machine: Machine, dense_s: float) -> list[Option]:
    check_machine(machine)
    return [estimated(option, workload, machine) for option in make_options(workload, forms, machine, dense_s)]


def _step_time(options: Sequence[Option]) -> StepTime:
    """Return the time of the best configuration; where none fits, why the smallest of each memory does not."""
    best = best_option(options)
    if best is None:
        of_tables = sorted((option for option in options if option.is_table), key=lambda option: -option.total_bytes)
        reasons = {option.memory: option.reason for option in of_tables if option.memory in (DEVICE, PINNED, PAGEABLE)}
        if PINNED in reasons:
            del reasons[PAGEABLE]
        return StepTime(None, "; ".join(f"{memory}: {reason}" for memory, reason in reasons.items()))
    seconds = best.ahead_s or best.step_s
    return StepTime(seconds, "" if seconds else f"a rate that rows in {best.memory!r} memory need is not known")


def _distinct_share(table: Load, zipf: float, ranks: int) -> float:
    """Return the distinct rows that all processes look up over the sum of those of each."""
    together = sum(expected_unique(rows, zipf, ranks * count) for rows, count in table.features)
    return together / (ranks * sum(expected_unique(rows, zipf, count) for rows, count in table.features))


def _counts(workload: Workload, table: Load, form: Form, share: float, ranks: int) -> RowCounts:
    idle = "exact" if is_exact(workload) else "lazy"
    of_row = row_form(table.dim, **form.arguments, state_planes=state_planes(workload), idle=idle)
    return expected_counts(of_row, table.unique, share, ranks)


def _shard(table: Load, share: float, ranks: int) -> Load:
    """Return what one process owns of a table: of a step it updates the rows that any process looks up."""
    rows = math.ceil(table.rows / ranks)
    return replace(table, rows=rows, features=((rows, table.lookups),), unique=min(share * table.unique, rows))
