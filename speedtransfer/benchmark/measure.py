"""Times competing ways to do the same thing: correctness first, then samples in turns, so that noise meets all alike."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

import torch

from speedtransfer.errors import SpeedtransferError

Role = Literal["ours", "other", "roof"]


@dataclass(frozen=True)
class Case:
    """One way to do what its group is about.

    Attributes
    ----------
    name : str
        As a reader knows it: "index_select(out=)".
    run : callable
        One repetition. What it queues on the compute device counts: the clock stops when the device is done.
    check : callable, optional
        Called once after a first `run`; raises AssertionError where the result is wrong.
    payload_bytes : int
        Bytes of rows that a repetition moves, each counted once; 0 where the figure is a time only.
    role : {"ours", "other", "roof"}
    memory : dict of str to int, optional
        Bytes held, for cases that are about room ("host_bytes", "device_bytes").
    """

    name: str
    run: Callable[[], object]
    check: Callable[[], None] | None = None
    payload_bytes: int = 0
    role: Role = "other"
    memory: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Cases that are compared.

    Attributes
    ----------
    title : str
        What they do: "gather 131,072 rows of 512 B, uniform".
    make : callable
        Builds the data and returns the cases; called when the group's turn comes, so that one group's memory is held
        at a time. A :class:`~speedtransfer.errors.SpeedtransferError` or out-of-memory error skips the group with its reason.
    params : dict
        What varies, for plots: ``{"direction": "gather", "row_bytes": 512, ...}``.
    """

    title: str
    make: Callable[[], Sequence[Case]]
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class CaseResult:
    """Samples of one case. `samples_s` are seconds of one repetition, `host_s` those until its calls had returned."""

    name: str
    role: Role
    payload_bytes: int
    samples_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    error: str = ""

    @property
    def median_s(self) -> float:
        """Median seconds of a repetition."""
        return median(self.samples_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile of the seconds."""
        if len(self.samples_s) < 2:
            return self.samples_s[0], self.samples_s[0]
        low, _, high = quantiles(self.samples_s, n=4, method="inclusive")
        return low, high

    @property
    def gb_per_s(self) -> float | None:
        """Payload per second in 1e9 bytes; None where there is no payload."""
        return self.payload_bytes / self.median_s / 1e9 if self.payload_bytes else None


@dataclass
class GroupResult:
    """What :func:`measure` found for a group; `skipped` is the reason where it could not run."""

    title: str
    params: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    skipped: str = ""

    @property
    def ours(self) -> CaseResult | None:
        """The first case of this library that ran."""
        return next((c for c in self.cases if c.role == "ours" and c.samples_s), None)

    @property
    def roof(self) -> CaseResult | None:
        """The case that nothing can beat, where the group has one."""
        return next((c for c in self.cases if c.role == "roof" and c.samples_s), None)

    def share_of_roof(self, case: CaseResult) -> float | None:
        """Return the bandwidth of `case` over that of the roof."""
        roof, rate = self.roof, case.gb_per_s
        return rate / roof.gb_per_s if roof is not None and rate is not None and roof.gb_per_s else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GroupResult:
        """Return what `to_json` was made of."""
        return cls(data["title"], data["params"], [CaseResult(**case) for case in data["cases"]], data["skipped"])


def measure(
    group: Group,
    device: torch.device,
    turns: int = 3,
    samples: int = 7,
    min_sample_s: float = 2e-3,
    budget_s: float = 10.0,
) -> GroupResult:
    """Check and time the cases of `group`.

    Every case gets `turns` turns of `samples` samples. A sample repeats the case until it lasts about `min_sample_s`, and is
    divided by the repetitions.

    Parameters
    ----------
    group : Group
    device : torch.device
        The compute device, waited for before and after each sample.
    turns, samples : int
        Fewer are taken of a case once it has used its share of `budget_s`, but at least one a turn.
    min_sample_s : float
    budget_s : float
        About how long the whole group may take.

    Raises
    ------
    AssertionError
        A case gives a wrong result: no time is worth showing then.
    """
    result = GroupResult(group.title, group.params)
    try:
        cases = list(group.make())
    except (SpeedtransferError, torch.cuda.OutOfMemoryError) as error:
        result.skipped = " ".join(str(error).split())
        return result
    found = [CaseResult(case.name, case.role, case.payload_bytes, memory=dict(case.memory)) for case in cases]
    result.cases = found
    repeats = [
        _prepare(case, case_result, device, min_sample_s) for case, case_result in zip(cases, found, strict=True)
    ]
    share_s = budget_s / max(1, len(cases)) / turns
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(turns):
            for case, case_result, number in zip(cases, found, repeats, strict=True):
                if number:
                    _sample(case, case_result, number, device, samples, share_s)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return result


def synchronize(device: torch.device) -> None:
    """Wait for the compute device: a kernel that is queued is not done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cycle(values: Iterable[Any]) -> Callable[[], Any]:
    """Return a function that gives one of `values` after the other: data that has just been used sits in a cache."""
    turn = itertools.cycle(values)
    return lambda: next(turn)


def _prepare(case: Case, result: CaseResult, device: torch.device, min_sample_s: float) -> int:
    """Run a case once, check it, and return how often a sample repeats it; 0 where it cannot run here."""
    try:
        case.run()
        synchronize(device)
    except (SpeedtransferError, torch.cuda.OutOfMemoryError, NotImplementedError) as error:
        result.error = " ".join(str(error).split())
        return 0
    if case.check is not None:
        case.check()
    start = time.perf_counter()
    case.run()
    synchronize(device)
    return max(1, min(1000, round(min_sample_s / max(time.perf_counter() - start, 1e-9))))


def _sample(case: Case, result: CaseResult, number: int, device: torch.device, samples: int, share_s: float) -> None:
    case.run()  # caches and clocks as the case leaves them, not as its neighbour did
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(number):
            case.run()
        called = time.perf_counter()
        synchronize(device)
        done = time.perf_counter()
        result.samples_s.append((done - start) / number)
        result.host_s.append((called - start) / number)
        if done - begin > share_s:
            return
