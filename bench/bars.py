"""The bars that the data path is held to, and what the recorded suites of a device say about each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

ROWS = 131_072
TABLE_BYTES = 50e9


class Bar(NamedTuple):
    """A figure and the bar for it; `measured` is None where no result has it."""

    title: str
    bar: str
    measured: float | None
    passed: bool
    shown: str

    def __str__(self) -> str:
        state = "not measured" if self.measured is None else "PASS" if self.passed else "MISS"
        return f"{state:12}  {self.title:60}  {self.shown:>9}  bar {self.bar}"


def judge(results: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return every bar for the `results`, by suite, of one device."""
    from speedtransfer.benchmark.measure import GroupResult

    groups = {name: [GroupResult.from_json(g) for g in result["groups"]] for name, result in results.items()}
    transfer = _Transfer(groups.get("transfer", []))
    limited, table = _gpu_limit(groups.get("step", []))
    found = [
        _at_least(f"gather {ROWS:,} x 512 B, share of one H2D copy", 0.90, transfer.share("gather", 512)),
        _at_least(f"gather {ROWS:,} x 256 B, share of one H2D copy", 0.70, transfer.share("gather", 256)),
        _at_least(f"scatter {ROWS:,} x 512 B, share of one D2H copy", 0.85, transfer.share("scatter", 512)),
    ]
    for direction in ("gather", "scatter"):
        found.append(_times(f"{direction}, times the best of torch alone", 2, transfer.speedup(direction, plain=False)))
        found.append(_times(f"{direction}, times t[idx]", 20, transfer.speedup(direction, plain=True)))
    found.append(_at_least("both at once, share of two plain copies at once", 0.90, transfer.both()))
    for direction in ("gather", "scatter"):
        host, device = transfer.overhead(direction)
        found.append(_at_most(f"{direction} of 1,000 rows, host time a call", 30, host and 1e6 * host, "{:.1f} us"))
        found.append(_at_most(f"{direction} of 1,000 rows, on the device, of an empty launch", 2, device, "{:.2f}x"))
    found.append(_at_most(f"step with 5 GB of GPU memory, {table} of a 1 GB one", 1.10, limited, "{:.2f}x"))
    return found


def _at_least(title: str, bar: float, value: float | None) -> Bar:
    return _bar(title, ">=", bar, value, "{:.1%}", lambda v: v >= bar)


def _times(title: str, bar: float, value: float | None) -> Bar:
    return _bar(title, ">=", bar, value, "{:.1f}x", lambda v: v >= bar)


def _at_most(title: str, bar: float, value: float | None, form: str) -> Bar:
    return _bar(title, "<=", bar, value, form, lambda v: v <= bar)


def _bar(title: str, sign: str, bar: float, value: float | None, form: str, passes: Callable[[float], bool]) -> Bar:
    shown = "" if value is None else form.format(value)
    return Bar(title, f"{sign} {form.format(bar)}", value, value is not None and passes(value), shown)


class _Transfer:
    """What suite `transfer` says about pinned tables and uniform ids."""

    def __init__(self, groups: list[Any]) -> None:
        self._groups = [g for g in groups if g.ran and g.params["memory"] == "pinned" and g.params["ids"] == "uniform"]

    def _group(self, kind: str, direction: str, **params: Any) -> Any:
        wanted = {"kind": kind, "direction": direction, **params}
        return next((g for g in self._groups if wanted.items() <= g.params.items()), None)

    def share(self, direction: str, row_bytes: int) -> float | None:
        group = self._group("ways", direction, row_bytes=row_bytes, rows=ROWS)
        return group and group.ours and group.share_of_roof(group.ours)

    def speedup(self, direction: str, plain: bool) -> float | None:
        """Return how many times faster we are than t[idx], or than the fastest that needs nothing but torch."""
        group = self._group("ways", direction, row_bytes=512, rows=ROWS)
        others = [case for case in group.ran if case.role == "other"] if group and group.ours else []
        others = [case for case in others if "CuPy" not in case.name and "UVA" not in case.name]
        others = [case for case in others if case.name.startswith("t[idx]")] if plain else others
        return min(case.median_s for case in others) / group.ours.median_s if others else None

    def both(self) -> float | None:
        group = self._group("both", "both")
        return group and group.ours and group.share_of_roof(group.ours)

    def overhead(self, direction: str) -> tuple[float | None, float | None]:
        """Return the host seconds of a call, and its device seconds over those of an empty launch."""
        group = self._group("overhead", direction)
        if not group or not group.ours:
            return None, None
        empty = next((case.device_s for case in group.ran if case.name == "empty launch"), None)
        return group.ours.median_host_s, group.ours.device_s / empty if group.ours.device_s and empty else None


def _gpu_limit(groups: list[Any]) -> tuple[float | None, str]:
    """Return the step on the large table over that on the small one, and what the large one is called."""
    from speedtransfer.benchmark.step import LARGE, SMALL

    for group in groups:
        seconds = {case.name: case.median_s for case in group.ran}
        if group.params["experiment"] == "gpu limit" and {LARGE, SMALL} <= seconds.keys():
            size = group.params["rows"] * group.params["dim"] * 4
            short = "" if size >= 0.99 * TABLE_BYTES else " (50 GB and its state do not fit)"
            return seconds[LARGE] / seconds[SMALL], f"{size / 1e9:.1f} GB table{short}"
    return None, f"{TABLE_BYTES / 1e9:.0f} GB table"
