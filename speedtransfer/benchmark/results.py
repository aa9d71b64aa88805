"""What was measured: the samples of each case, and groups of them, as plain data and back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

from speedtransfer.benchmark.units import format_ratio

Role = Literal["ours", "other", "roof"]

DEFAULT, UNCHECKED = "speedtransfer", "speedtransfer, check=False"  # our call with all checks, and as training makes it
NOISY = 1.5  # times the first quartile is the most that the third may be of figures that mean something
_KINDS = {
    "checked": f"^{DEFAULT}$",
    "unchecked": f"^{UNCHECKED}$",
    "engine": "^engine",
    "view": "^CuPy|UVA",
    "plain": r"^t\[idx\]",
    "empty": "^empty launch$",
    "exact": "idle=exact",
    "ahead": "^prefetch",
}


@dataclass
class CaseResult:
    """Samples of one case. `samples_s` are seconds of one repetition, `host_s` those until its calls had returned.

    `device_s` is what one repetition keeps the device busy, for cases that queue their work; `error` why a case did not run;
    `kind` is that of its :class:`~speedtransfer.benchmark.measure.Case`.
    """

    name: str
    role: Role
    payload_bytes: int
    samples_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    device_s: float | None = None
    error: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    kind: str = ""

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
    def noisy(self) -> bool:
        """Whether the samples differ too much to rely on their median."""
        low, high = self.quartiles_s
        return high > NOISY * low

    @property
    def median_host_s(self) -> float:
        """Median seconds until the calls of a repetition had returned."""
        return median(self.host_s)

    @property
    def gb_per_s(self) -> float | None:
        """Payload per second in 1e9 bytes; None where there is no payload."""
        return self.payload_bytes / self.median_s / 1e9 if self.payload_bytes else None


@dataclass
class GroupResult:
    """What :func:`~speedtransfer.benchmark.measure.measure` found; `skipped` is the reason why a group could not run."""

    title: str
    params: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    skipped: str = ""

    @property
    def ran(self) -> list[CaseResult]:
        """The cases that have samples."""
        return [case for case in self.cases if case.samples_s]

    @property
    def by_name(self) -> dict[str, CaseResult]:
        """The cases that have samples, by name."""
        return {case.name: case for case in self.ran}

    @property
    def ours(self) -> CaseResult | None:
        """The first case of this library that ran."""
        return next((case for case in self.ran if case.role == "ours"), None)

    @property
    def unchecked(self) -> CaseResult | None:
        """The call of this library that moves rows and checks nothing, as training makes it; `ours` where there is none."""
        return next((case for case in self.ran if case.kind == "unchecked"), self.ours)

    @property
    def roof(self) -> CaseResult | None:
        """The fastest of the plain copies that no way can be expected to beat, where the group has one."""
        return min((case for case in self.ran if case.role == "roof"), key=lambda case: case.median_s, default=None)

    def share_of_roof(self, case: CaseResult) -> float | None:
        """Return the bandwidth of `case` over that of the roof."""
        roof, rate = self.roof, case.gb_per_s
        return rate / roof.gb_per_s if roof is not None and rate is not None and roof.gb_per_s else None

    def milliseconds(self, name: str) -> float | None:
        """Return the median milliseconds of a case; None where it did not run."""
        case = self.by_name.get(name)
        return None if case is None else 1e3 * case.median_s

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GroupResult:
        """Return what `to_json` was made of."""
        cases = [CaseResult(**{"kind": kind_of(case["name"]), **case}) for case in data["cases"]]
        return cls(data["title"], data["params"], cases, data["skipped"])


def kind_of(name: str) -> str:
    """Return what a case called `name` is: for results that were recorded before they told."""
    return next((kind for kind, pattern in _KINDS.items() if re.search(pattern, name)), "")


def case_names(groups: Iterable[GroupResult]) -> list[str]:
    """Return the names of all cases that ran, each once."""
    return list(dict.fromkeys(case.name for group in groups for case in group.ran))


def split_by(groups: Iterable[GroupResult], key: str) -> dict[Any, list[GroupResult]]:
    """Return the groups by what they have for `key` among their params."""
    parts: dict[Any, list[GroupResult]] = {}
    for group in groups:
        parts.setdefault(group.params.get(key), []).append(group)
    return parts


def sorted_by(groups: Iterable[GroupResult], key: str) -> list[GroupResult]:
    """Return the groups in the order of what they have for `key` among their params."""
    return sorted(groups, key=lambda group: group.params[key])


def noise(*cases: CaseResult | None) -> str:
    """Return " (noisy)" where one of `cases` is."""
    return " (noisy)" if any(case is not None and case.noisy for case in cases) else ""


def times_the_speed(ours: CaseResult, others: list[CaseResult]) -> str:
    """Return "; 2.00x the speed of this, 30.0x of that"."""
    ratios = [f"{format_ratio(case.median_s / ours.median_s)} the speed of {case.name}" for case in others]
    return f"; {', '.join([*ratios[:1], *(r.replace('the speed of', 'of') for r in ratios[1:])])}" if ratios else ""
