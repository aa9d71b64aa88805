"""What a plan consists of, without the ways to show it."""

from __future__ import annotations

from dataclasses import dataclass, field

from speedtransfer.planning.configurations import Option
from speedtransfer.planning.forms import Bytes, Form
from speedtransfer.planning.machine import Machine
from speedtransfer.planning.workload import Workload


@dataclass(frozen=True)
class CacheSize:
    """What a cache of hot rows on the device would serve.

    Attributes
    ----------
    rows : int
        Rows of all tables together that it keeps: `cache_rows`.
    num_bytes : int
        What these take on the device, with their state.
    share : float
        Of the distinct rows of a step, the part that it serves: those that are used most, for good.
    up, down : float
        Bytes that a step still moves over the bus.
    step_s : float or None
        Of a step of the configuration with the cache, estimated; None where that is not known.
    """

    rows: int
    num_bytes: int
    share: float
    up: float
    down: float
    step_s: float | None


@dataclass(frozen=True)
class Findings:
    """The attributes of :class:`speedtransfer.planning.plan_result.Plan`, which documents them."""

    workload: Workload
    machine: Machine
    here: bool
    bytes: dict[Form, Bytes]
    options: tuple[Option, ...]
    best: Option | None
    smallest: Option | None
    cache: tuple[CacheSize, ...] = field(default=())
    dense_bytes: float = 0.0
