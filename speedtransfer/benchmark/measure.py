"""Suites of cases, and their timing: check every result first, then sample in turns, so that noise affects all alike."""

from __future__ import annotations

import gc
import importlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from speedtransfer.benchmark.results import CaseResult, GroupResult, Role
from speedtransfer.cuda import synchronize
from speedtransfer.errors import SpeedtransferError

# How much of the time goes to a group, by whether the run is a quick one.
EFFORT: dict[bool, dict[str, Any]] = {
    True: {"turns": 2, "samples": 3, "budget_s": 0.6},
    False: {"turns": 3, "samples": 7, "budget_s": 2.5},
}
CANNOT_RUN = (SpeedtransferError, torch.cuda.OutOfMemoryError, MemoryError, NotImplementedError)


class WrongResultError(SpeedtransferError, AssertionError):
    """A method returned a wrong result, so it is not timed."""


@dataclass(frozen=True)
class Case:
    """One method in a comparison, by its name in reports, such as "index_select(out=)".

    A repetition is a call of `run`, in which the clock stops when the device has finished what it queued; it has `parts` equal
    parts, such as steps, and times and `payload_bytes` (of rows moved, each counted once) are those of one. `check` is called
    once after the first `run` and raises AssertionError if the result is wrong. `before` is untimed setup before each sample,
    such as dropping cached pages; a sample is one repetition then. `warm` is called before the untimed repetition with which
    each turn begins. `memory` are bytes held ("host_bytes", "device_bytes") and `figures` other measurements ("moved_bytes",
    "loss"), which `run` and `check` may fill. `error` is why it cannot run here, if that is known in advance.
    """

    name: str
    run: Callable[[], object]
    check: Callable[[], None] | None = None
    payload_bytes: int = 0
    role: Role = "other"
    memory: dict[str, int] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    warm: Callable[[], None] | None = None
    parts: int = 1
    error: Exception | None = None

    @classmethod
    def of(cls, name: str, method: Any, role: Role = "other", **others: Any) -> Case:
        """Make a case of an object with `run` and optionally `check`, `memory`, `figures` and `before`."""
        own = ("check", "memory", "figures", "before")
        found = {key: getattr(method, key) for key in own if hasattr(method, key)}
        return cls(name, method.run, role=role, **found | others)


@dataclass(frozen=True)
class Group:
    """Cases to compare, such as "gather 131,072 rows of 512 B, uniform".

    `make` builds the data and returns the cases, or what it has measured itself. It is called just before measuring, so that
    only one group's memory is held at a time; a :class:`~speedtransfer.errors.SpeedtransferError` or lack of memory skips the
    group with its reason. `params` are what varies, for plots, to which `make` may add, and `effort` the arguments of
    :func:`measure` that differ from the defaults.
    """

    title: str
    make: Callable[[], Sequence[Case] | Sequence[CaseResult]]
    params: dict[str, Any] = field(default_factory=dict)
    effort: dict[str, Any] = field(default_factory=dict)


MIN_TABLE_BYTES = 1 << 16  # of suite `transfer`


@dataclass(frozen=True)
class Suite:
    """Groups that are measured together, as a module of its name declares them, which is imported when it is used.

    The module declares what is compared and how it is shown; whatever has a default may be left out.

    - ``groups(device, quick, rows=None, seed=0, **others)``: the list of :class:`~speedtransfer.benchmark.measure.Group` to
      compare on a compute device, with small sizes if `quick`; `rows` are those of the table, and other options are ignored;
    - ``NOTE``: what a reader of the figures should know;
    - ``BY = (key, label)``: the parameter by which groups of a series are put side by side, in tables and as lines;
    - ``series(group)``: the title of the series of a group, "" for one that stands alone; by default all groups are one series
      where there is a ``BY``, else each stands alone and has a sentence, a table and bars;
    - ``COLUMNS = {title: show}``: what the tables of a series show of a case, by default its time; without a ``BY`` what the
      table of a group shows, by default all figures;
    - ``describe(group, case)``: what is said of a case beside its time, by default its rate and share of the roof;
    - ``VALUE = (function, label)``: the figure of a case that the picture shows, by default milliseconds; None: no picture;
    - ``CURVES = {key: (title, scale)}``: which `values` of cases, by step, the picture shows as lines in place of bars;
    - ``ACROSS``: how many panels of bars stand side by side; ``LOGARITHMIC``: whether they are drawn so;
    - ``about(groups)``: further sentences.
    """

    name: str
    title: str
    package: str = "speedtransfer.benchmark"

    @property
    def module(self) -> Any:
        """The module that declares it."""
        return importlib.import_module(f"{self.package}.{self.name}")

    def groups(self, device: torch.device, quick: bool, **options: Any) -> list[Group]:
        """Make the groups of the suite."""
        found: list[Group] = self.module.groups(device, quick, **options)
        return found

    def declared(self, name: str, default: Any) -> Any:
        """Return what the module declares by a name."""
        return getattr(self.module, name, default)


# Those of the command; bench/store.py adds experiments.
SUITES = {
    suite.name: suite
    for suite in (
        Suite("transfer", "Rows to the compute device and back"),
        Suite("step", "A training step, by the size of the table"),
        Suite("memory", "Memory that a table takes"),
        Suite("precision", "A training step, by how the table is stored"),
        Suite("lookup", "Frozen lookups of a few ids"),
        Suite("prefetch", "Waiting for rows of a file, and how much of it is hidden"),
        Suite("cache", "Rows that a cache of hot rows serves"),
    )
}


def measure(
    group: Group,
    device: torch.device,
    turns: int = 3,
    samples: int = 7,
    min_sample_s: float = 2e-3,
    budget_s: float = 10.0,
) -> GroupResult:
    """Check and time the cases of `group`.

    Every case gets `turns` turns of `samples` samples, at least one a turn, within its share of `budget_s` for the whole
    group. A sample repeats the case for about `min_sample_s` and divides by the repetitions; the device is synchronized
    before and after it.

    Raises
    ------
    WrongResultError
        A case of ours, or a roof, gives a wrong result. Another's becomes its `error`.
    """
    result = GroupResult(group.title, group.params)
    try:
        made = list(group.make())
    except CANNOT_RUN as error:
        result.skipped = _reason(error)
        return result
    if made and isinstance(made[0], CaseResult):
        result.cases = [case for case in made if isinstance(case, CaseResult)]
        return result
    cases = [case for case in made if isinstance(case, Case)]
    result.cases = [CaseResult(case.name, case.role, case.payload_bytes) for case in cases]
    pairs = list(zip(cases, result.cases, strict=True))
    numbers = [_prepare(case, found, device, min_sample_s, group.title) for case, found in pairs]
    share_s = budget_s / max(1, len(cases)) / turns
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(turns):
            for (case, found), number in zip(pairs, numbers, strict=True):
                if number:
                    _sample(case, found, number, device, samples, share_s)
            gc.collect(1)  # what the turn has made: a full collection looks at all of torch
    finally:
        if collecting:
            gc.enable()
    for case, found in pairs:
        found.memory, found.figures = dict(case.memory), dict(case.figures)
    return result


def cycle(values: Iterable[Any]) -> Callable[[], Any]:
    """Return a function that returns the next of `values` at each call, so that timed data is not in a cache already."""
    turn = itertools.cycle(values)
    return lambda: next(turn)


def _prepare(case: Case, result: CaseResult, device: torch.device, min_sample_s: float, title: str) -> int:
    """Run a case once, check it, and return how often a sample repeats it; 0 where it is not timed."""
    try:
        if case.error is not None:
            raise case.error
        if case.before is not None:
            case.before()
        case.run()
        synchronize(device)
    except Exception as error:
        # A rival may raise anything, for instance if its installation is broken; an unexpected error of ours is a bug.
        if case.role != "other" and not isinstance(error, CANNOT_RUN):
            raise
        result.error = _reason(error)
        return 0
    try:
        if case.check is not None:
            case.check()
    except AssertionError as error:
        result.error = f"gives a wrong result ({_reason(error)})"
        if case.role == "other":
            return 0
        raise WrongResultError(f"{title}: {case.name} {result.error}, so nothing is timed; please report it") from error
    if case.before is not None:
        return 1
    start = time.perf_counter()
    case.run()
    synchronize(device)
    return max(1, min(1000, round(min_sample_s / max(time.perf_counter() - start, 1e-9))))


def _sample(case: Case, result: CaseResult, number: int, device: torch.device, samples: int, share_s: float) -> None:
    if case.warm is not None:
        case.warm()
    if case.before is None:
        case.run()  # warms caches and clocks, which the previous case left in its own state
        synchronize(device)
    deadline = time.perf_counter() + share_s
    for _ in range(samples):
        if case.before is not None:
            case.before()
            synchronize(device)
        start = called = time.perf_counter()
        runs = 0
        while runs < number and (called < deadline or not runs):  # on a busy machine a run may take 100 times as long
            case.run()
            runs += 1
            called = time.perf_counter()
        synchronize(device)
        done = time.perf_counter()
        result.samples_s.append(round((done - start) / runs / case.parts, 9))
        result.host_s.append(round((called - start) / runs / case.parts, 9))
        if done > deadline:
            return


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
