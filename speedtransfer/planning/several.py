"""Several GPUs of one machine with a table sharded among them: what each of their processes has, and what they send."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from speedtransfer.planning.machine import Machine
from speedtransfer.planning.rank import Estimator, StepTime
from speedtransfer.ranks.cost import StepCost, sharded_step
from speedtransfer.ranks.row_counts import RowForm, expected_counts

CALL_S = 50e-6  # of a collective call; a round number, and no machine's
_SHARED = ("host_bytes", "pinned_bytes", "disk_bytes", "host_bytes_per_s", "disk_bytes_per_s")


def one_of(machine: Machine) -> Machine:
    """Return what each of the processes of a machine has, one for each GPU: its GPU, its link and its share of the rest.

    Host memory has to feed all links at once: none is faster than its share of the host's bandwidth.
    """
    share = dict[str, float | None]()
    for name in _SHARED:
        value = getattr(machine, name)
        share[name] = None if value is None else value / machine.devices
    host = share["host_bytes_per_s"]
    for name in ("link_up_bytes_per_s", "link_down_bytes_per_s"):
        rate = getattr(machine, name)
        share[name] = rate if rate is None or host is None else min(rate, host)
    return dataclasses.replace(machine, devices=1, **share)  # type: ignore[arg-type]


def peer_bytes_per_s(machine: Machine) -> float:
    """Return what each GPU can send to the others: its own figure, or by way of host memory, down one link and up the other.

    Raises
    ------
    InvalidValueError
        Neither is known of the machine.
    """
    if machine.peer_bytes_per_s is not None:
        return machine.peer_bytes_per_s
    one = one_of(machine)
    return 1 / (1 / one.figure("link_down_bytes_per_s") + 1 / one.figure("link_up_bytes_per_s"))


def exchange_seconds(machine: Machine, cost: StepCost, call_s: float = CALL_S) -> float:
    """Return the time of what the processes send one another in a step, nothing overlapping."""
    return cost.calls * call_s + cost.sent / peer_bytes_per_s(machine)


def sharded(
    make: Callable[[int, float], Estimator],
    form: RowForm,
    rows: int,
    unique: float,
    distinct_share: Callable[[int], float],
    *,
    training: bool = True,
    call_s: float = CALL_S,
) -> Estimator:
    """Return the estimate of a table that is sharded among the GPUs of a machine, each of which takes a batch a step.

    With one GPU it is that of the table itself. With several, each process owns a share of the rows and reads, for all of
    them, the rows that it owns; ids, rows and gradients are sent as :func:`speedtransfer.ranks.cost.sharded_step` counts them.

    Parameters
    ----------
    make : callable
        ``make(rows, unique)``: the estimate for a table of so many rows in one process, of which a step reads `unique`.
    form : RowForm
        Bytes of a row as processes hold and send it.
    rows : int
    unique : float
        Distinct rows that the batch of each GPU looks up.
    distinct_share : callable
        ``distinct_share(ranks)``: distinct rows of all processes over the sum of those of each.
    training : bool
    call_s : float
        Latency of a collective call, seconds.
    """

    def estimate(machine: Machine) -> StepTime:
        ranks = machine.devices
        if ranks == 1:
            return make(rows, unique)(machine)
        counts = expected_counts(form, unique, distinct_share(ranks), ranks)
        owned = math.ceil(rows / ranks)
        step = make(owned, min(counts.served, owned))(one_of(machine))
        if step.seconds is None:
            return step
        cost = sharded_step([counts], ranks, training=training)
        return StepTime(step.seconds + exchange_seconds(machine, cost, call_s))

    return estimate
