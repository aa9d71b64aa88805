"""Several GPUs of one machine with tables sharded among them: what each of their processes has, and how fast they send."""

from __future__ import annotations

import dataclasses

from speedtransfer.planning.machine import Machine
from speedtransfer.ranks.cost import StepCost

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
