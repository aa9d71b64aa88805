"""Measured samples, by case and group, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from statistics import median, quantiles
from typing import Any, Literal

Role = Literal["ours", "other", "roof"]

NOISY = 1.5  # a third quartile above this many times the first marks a figure as noisy


@dataclass
class CaseResult:
    """Samples of one :class:`~speedtransfer.benchmark.measure.Case`, in seconds of one repetition.

    `host_s` are seconds until its calls had returned; `error` says why a case did not run. `figures` are shown in tables;
    `values` are several numbers by name, such as losses by step or scores by seed, for pictures.
    """

    name: str
    role: Role
    payload_bytes: int
    samples_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    error: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

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
        low, high = self.quartiles_s if self.samples_s else (1.0, 1.0)
        return high > NOISY * low

    @property
    def median_host_s(self) -> float:
        """Median seconds until the calls of a repetition had returned."""
        return median(self.host_s)

    @property
    def gb_per_s(self) -> float | None:
        """Payload per second in 1e9 bytes; None without payload."""
        return self.payload_bytes / self.median_s / 1e9 if self.payload_bytes and self.samples_s else None


@dataclass
class GroupResult:
    """Results of a group; `skipped` is the reason why it could not run."""

    title: str
    params: dict[str, Any]
    cases: list[CaseResult] = field(default_factory=list)
    skipped: str = ""

    @property
    def ran(self) -> list[CaseResult]:
        """The cases that have samples or other figures."""
        return [case for case in self.cases if not case.error and (case.samples_s or case.figures or case.memory)]

    @property
    def by_name(self) -> dict[str, CaseResult]:
        """The cases that ran, by name."""
        return {case.name: case for case in self.ran}

    @property
    def roof(self) -> CaseResult | None:
        """The fastest plain copy, an upper bound for every method."""
        return min((case for case in self.ran if case.role == "roof"), key=lambda case: case.median_s, default=None)

    def share_of_roof(self, case: CaseResult) -> float | None:
        """Return the bandwidth of `case` divided by that of the roof."""
        roof, rate = self.roof, case.gb_per_s
        return rate / roof.gb_per_s if roof is not None and rate is not None and roof.gb_per_s else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GroupResult:
        """Restore the result of :meth:`to_json`, also of earlier versions, which had more fields."""
        known = {each.name for each in fields(CaseResult)}
        cases = [CaseResult(**{key: value for key, value in case.items() if key in known}) for case in data["cases"]]
        return cls(data["title"], data["params"], cases, data["skipped"])


def case_names(groups: Iterable[GroupResult]) -> list[str]:
    """Return the distinct names of all cases that ran."""
    return list(dict.fromkeys(case.name for group in groups for case in group.ran))


def to_text(value: Any, pad: str = "") -> str:
    """Return plain data as JSON with a line for each case: what holds no more than flat lists and dicts is on one."""
    if _depth(value) <= 1:
        return json.dumps(value)
    inner = f"{pad} "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {to_text(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(f"{inner}{line}" for line in lines) + f"\n{pad}}}"
    lines = [json.dumps(one) if _depth(one) <= 3 else to_text(one, inner) for one in value]
    return "[\n" + ",\n".join(f"{inner}{line}" for line in lines) + f"\n{pad}]"


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)
