"""Rank machines for tables: by the best configuration on each, estimated; several GPUs share the rows out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from speedtransfer.planning.configurations import Option, estimated, make_options
from speedtransfer.planning.footprint import DEVICE, PAGEABLE, PINNED, check_machine
from speedtransfer.planning.forms import Form, is_exact, state_planes
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.prices import Price
from speedtransfer.planning.rank import STEPS, Ranking, StepTime, rank
from speedtransfer.planning.recommendation import best_option
from speedtransfer.planning.several import exchange_seconds, one_of
from speedtransfer.planning.workload import Load, Workload
from speedtransfer.ranks.cost import sharded_step
from speedtransfer.ranks.row_counts import RowCounts, expected_counts, row_form
from speedtransfer.ranks.zipf import expected_unique


def rank_machines(
    workload: Workload,
    forms: Sequence[Form],
    machines: Sequence[Machine],
    *,
    dense_s: float = 0.0,
    by: str = "time",
    devices: int | None = None,
    prices: Mapping[str, Price] | None = None,
    steps: float = STEPS,
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
    by, devices, prices, steps
        As of :func:`speedtransfer.planning.rank.rank`.

    Raises
    ------
    InvalidValueError
        As `rank`.
    """

    def estimate(machine: Machine) -> StepTime:
        if machine.devices == 1:
            return _step_time(_options(workload, forms, machine, dense_s))
        shares = [_distinct_share(table, workload.zipf, machine.devices) for table in workload.tables]
        owned = replace(workload, tables=tuple(map(_shard, workload.tables, shares, [machine.devices] * len(shares))))
        options = [option for option in _options(owned, forms, one_of(machine), dense_s) if option.is_table]
        step = _step_time(options)
        best = best_option(options)
        if step.seconds is None or best is None:
            return step
        counts = [
            _counts(workload, table, best.form, share, machine.devices)
            for table, share in zip(workload.tables, shares, strict=True)
        ]
        cost = sharded_step(counts, machine.devices, training=workload.trainer.make is not None)
        return StepTime(step.seconds + exchange_seconds(machine, cost))

    return rank(machines, estimate, by=by, devices=devices, prices=prices, steps=steps)


def _options(workload: Workload, forms: Sequence[Form], machine: Machine, dense_s: float) -> list[Option]:
    check_machine(machine)
    return [estimated(option, workload, machine) for option in make_options(workload, forms, machine, dense_s)]


def _step_time(options: Sequence[Option]) -> StepTime:
    """Return the time of the best configuration; where none fits, why the smallest of each memory does not."""
    best = best_option(options)
    if best is None:
        of_tables = sorted((option for option in options if option.is_table), key=lambda option: -option.total_bytes)
        reasons = {option.memory: option.reason for option in of_tables if option.memory in (DEVICE, PINNED, PAGEABLE)}
        reasons = reasons if PINNED not in reasons else {memory: reasons[memory] for memory in (DEVICE, PINNED)}
        return StepTime(None, "; ".join(f"{memory}: {reason}" for memory, reason in reasons.items()))
    seconds = best.ahead_s or best.step_s
    return StepTime(seconds, "" if seconds else f"a rate that rows in {best.memory!r} memory need is not known")


def _distinct_share(table: Load, zipf: float, ranks: int) -> float:
    """Return the distinct rows that all processes look up over the sum of those of each."""
    together = sum(expected_unique(rows, zipf, ranks * count) for rows, count in table.features)
    return together / (ranks * sum(expected_unique(rows, zipf, count) for rows, count in table.features))


def _counts(workload: Workload, table: Load, form: Form, share: float, ranks: int) -> RowCounts:
    of_row = row_form(
        table.dim,
        **form.arguments,
        state_planes=state_planes(workload),
        idle="exact" if is_exact(workload) else "lazy",
    )
    return expected_counts(of_row, table.unique, share, ranks)


def _shard(table: Load, share: float, ranks: int) -> Load:
    """Return what one process owns of a table: of a step it updates the rows that any process looks up."""
    rows = math.ceil(table.rows / ranks)
    return replace(table, rows=rows, features=((rows, table.lookups),), unique=min(share * table.unique, rows))
