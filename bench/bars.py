"""Targets for the data path, and how the recorded suites of a device compare with each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

ROWS = 131_072
TABLE_BYTES, LARGE_BYTES = 10e9, 50e9  # of suite `transfer`, and of the step with little GPU memory, with its state
RELIABLE = 1.02  # times a roof: beating it by more means that it was measured badly
CHECKED, UNCHECKED = "speedtransfer", "speedtransfer, check=False"  # the call of a user, and that of a training step
# A scatter's check for repeated ids is a sort, which moves no rows.
JUDGED = {"gather": CHECKED, "scatter": UNCHECKED}
FEW_BLOCKS = 16  # of a launch


class Bar(NamedTuple):
    """A figure and the bar for it; `measured` is None where no result has it, `passed` where there is no bar for it.

    `caveat` is the reason why a pass does not count.
    """

    title: str
    bar: str
    measured: float | None
    passed: bool | None
    shown: str
    caveat: str = ""

    def __str__(self) -> str:
        if self.passed is None:
            return f"{'':28}  {self.title:60}  {self.shown:>9}"
        state = "not measured" if self.measured is None else self.caveat if self.passed and self.caveat else ""
        state = state or ("PASS" if self.passed else "MISS")
        return f"{state:28}  {self.title:60}  {self.shown:>9}  bar {self.bar}"


def judge(results: dict[str, dict[str, Any]]) -> list[Bar]:
    """Return every bar for the `results`, by suite, of one device."""
    from speedtransfer.benchmark.results import GroupResult

    groups = {name: [GroupResult.from_json(g) for g in result["groups"]] for name, result in results.items()}
    transfer = _Transfer(groups.get("transfer", []), results.get("transfer", {}).get("options", {}))
    found = list(transfer.of_engines(f"gather {ROWS:,} x 512 B, share of the best engine or both at once", 0.97))
    found += transfer.shares(f"scatter {ROWS:,} x 512 B, share of one D2H copy", 0.90, "scatter", 512)
    for direction in ("gather", "scatter"):
        found += transfer.speedups(f"{direction}, times the best of torch alone", 2, direction, plain=False)
        found += transfer.speedups(f"{direction}, times t[idx]", 20, direction, plain=True)
    for direction in ("gather", "scatter"):
        found += transfer.host(f"{direction} of 1,000 rows, host time a call", 30, direction)
        found.append(
            transfer.few_blocks(
                f"{direction} by {FEW_BLOCKS} blocks or fewer, time of the best launch", 1.05, direction
            )
        )
    limited, num_bytes = _gpu_limit(groups.get("step", []))
    title = f"step with 5 GB of GPU memory, {LARGE_BYTES / 1e9:.0f} GB of rows and state of a 1 GB table"
    caveat = "" if limited is None else _not_as_asked(num_bytes, LARGE_BYTES)
    return [*found, _at_most(title, 1.10, limited, "{:.2f}x", caveat), *judge_step(results, cuda=True)]


def judge_step(results: dict[str, dict[str, Any]], cuda: bool) -> list[Bar]:
    """Return the bars that hold for a CPU as well: for suite `step`."""
    from speedtransfer.benchmark.results import GroupResult
    from speedtransfer.benchmark.step import exact_and_lazy

    groups = [GroupResult.from_json(g) for g in results.get("step", {}).get("groups", [])]
    pairs = (exact_and_lazy(g) for g in groups if g.params.get("optimizer") == "AdamW")
    pair = next(filter(None, pairs), None)
    ratio = pair[0].median_s / pair[1].median_s if pair else None
    found = [_at_most("AdamW step with idle=exact, of one with lazy", 1.2 if cuda else 2.0, ratio, "{:.2f}x")]
    return [*found, _host_of_tables(groups)] if cuda else [*found, *_many_tables(groups), _small_step(groups)]


def _host_of_tables(groups: list[Any]) -> Bar:
    """Return the host time of a step of many tables, relative to one table."""
    from speedtransfer.benchmark.step import exact_and_lazy
    from speedtransfer.benchmark.step_models import MANY, ONE

    # Of many tables there is a group of exact steps alone, too.
    pairs = [(g.params["experiment"], exact_and_lazy(g)) for g in groups]
    many, one = (next((pair[1] for kind, pair in pairs if kind == name and pair), None) for name in (MANY, ONE))
    ratio = many.median_host_s / one.median_host_s if many and one else None
    return _at_most("step of 26 tables, the host's time of that of one", 3.0, ratio, "{:.2f}x")


def _small_step(groups: list[Any]) -> Bar:
    """Return the time of a lazy step of few rows, relative to SparseAdam."""
    from speedtransfer.benchmark.step import exact_and_lazy
    from speedtransfer.benchmark.step_models import SMALL

    small = next((g for g in groups if g.params["experiment"] == SMALL and exact_and_lazy(g)), None)
    sparse = next((c for c in small.ran if c.name.endswith("SparseAdam")), None) if small else None
    ratio = exact_and_lazy(small)[1].median_s / sparse.median_s if sparse else None
    return _at_most("AdamW step of few rows, of one of SparseAdam", 2.0, ratio, "{:.2f}x")


def _many_tables(groups: list[Any]) -> Iterator[Bar]:
    """Yield the time of an exact step of many tables, relative to a lazy and to a dense one."""
    from speedtransfer.benchmark.step import exact_and_lazy

    tables = next((g for g in groups if g.params["experiment"] == "many tables" and exact_and_lazy(g)), None)
    exact, lazy = exact_and_lazy(tables) if tables else (None, None)
    dense = next((c for c in tables.ran if c.name == "nn.Embedding + AdamW"), None) if tables else None
    for other, name, bar in ((lazy, "of one with lazy", 1.5), (dense, "of dense AdamW", 0.5)):
        ratio = exact.median_s / other.median_s if exact and other else None
        yield _at_most(f"AdamW step of many tables with idle=exact, {name}", bar, ratio, "{:.2f}x")


def _at_least(title: str, bar: float, value: float | None, form: str, caveat: str = "") -> Bar:
    return _bar(title, ">=", bar, value, form, lambda v: v >= bar, caveat)


def _at_most(title: str, bar: float, value: float | None, form: str, caveat: str = "") -> Bar:
    return _bar(title, "<=", bar, value, form, lambda v: v <= bar, caveat)


def _bar(
    title: str, sign: str, bar: float, value: float | None, form: str, passes: Callable[[float], bool], caveat: str
) -> Bar:
    shown = "" if value is None else form.format(value)
    return Bar(title, f"{sign} {form.format(bar)}", value, value is not None and passes(value), shown, caveat)


def _not_as_asked(num_bytes: float | None, wanted: float) -> str:
    if num_bytes is None:
        return "table of unknown size"
    return "" if num_bytes >= 0.99 * wanted else f"not as asked ({num_bytes / 1e9:.3g} GB table)"


class _Transfer:
    """Results of suite `transfer` for pinned tables and uniform ids."""

    def __init__(self, groups: list[Any], options: dict[str, Any]) -> None:
        self._groups = [g for g in groups if g.ran and g.params["memory"] == "pinned" and g.params["ids"] == "uniform"]
        self._options = options

    def shares(self, title: str, bar: float, direction: str, row_bytes: int) -> Iterator[Bar]:
        """Yield the share of the roof that the rows of a batch reach."""
        return self._of_roof(title, bar, direction, self._ways(direction, row_bytes))

    def of_engines(self, title: str, bar: float) -> Iterator[Bar]:
        """Yield the rate of a gather over that of the fastest engine, or of two that share it."""
        group = self._ways("gather", 512)
        engines = [case.median_s for case in group.ran if case.kind == "engine"] if group else []
        values = self._values(group, lambda case: min(engines) / case.median_s if engines else None)
        return _lines("gather", values, lambda v: _at_least(title, bar, v, "{:.1%}", self._caveat(group)))

    def few_blocks(self, title: str, bar: float, direction: str) -> Bar:
        """Return the time of the best launch of few blocks over that of the best of all."""
        group = self._group("launch", direction)
        launches = [case for case in group.ran if case.kind == "engine"] if group else []
        few = [case.median_s for case in launches if int(case.name.split()[-2]) <= FEW_BLOCKS]
        ratio = min(few) / min(case.median_s for case in launches) if few else None
        return _at_most(title, bar, ratio, "{:.2f}x", self._caveat(group) if group else "")

    def speedups(self, title: str, bar: float, direction: str, plain: bool) -> Iterator[Bar]:
        """Yield how many times faster we are than t[idx], or than the fastest that needs nothing but torch."""
        group = self._ways(direction, 512)
        others = [case for case in group.ran if case.role == "other"] if group else []
        others = [case for case in others if case.kind != "view"]
        others = [case for case in others if case.kind == "plain"] if plain else others
        best = min((case.median_s for case in others), default=None)
        values = self._values(group, lambda case: best and best / case.median_s)
        return _lines(direction, values, lambda v: _at_least(title, bar, v, "{:.1f}x", self._caveat(group)))

    def host(self, title: str, bar: float, direction: str) -> Iterator[Bar]:
        """Yield the host time of a call that moves few rows, in microseconds."""
        values = self._values(self._group("overhead", direction), lambda case: 1e6 * case.median_host_s)
        return _lines(direction, values, lambda v: _at_most(title, bar, v, "{:.1f} us"))

    def _of_roof(self, title: str, bar: float, direction: str, group: Any) -> Iterator[Bar]:
        def judged(value: float | None) -> Bar:
            unreliable = "roof unreliable" if value is not None and value > RELIABLE else ""
            return _at_least(title, bar, value, "{:.1%}", self._caveat(group) or unreliable)

        return _lines(direction, self._values(group, lambda case: group.share_of_roof(case)), judged)

    def _ways(self, direction: str, row_bytes: int) -> Any:
        return self._group("ways", direction, row_bytes=row_bytes, rows=ROWS)

    def _group(self, kind: str, direction: str, **params: Any) -> Any:
        wanted = {"kind": kind, "direction": direction, **params}
        return next((g for g in self._groups if wanted.items() <= g.params.items()), None)

    def _caveat(self, group: Any) -> str:
        num_bytes = group.params.get("table_bytes", self._options.get("table_bytes")) if group else None
        return _not_as_asked(num_bytes, TABLE_BYTES)

    @staticmethod
    def _values(group: Any, value: Callable[[Any], float | None]) -> dict[str, float | None]:
        return {case.name: value(case) for case in group.ran if case.name in (CHECKED, UNCHECKED)} if group else {}


def _lines(direction: str, values: dict[str, float | None], judged: Callable[[float | None], Bar]) -> Iterator[Bar]:
    """Yield the case that has a bar, and the other one without, where it was measured."""
    yield judged(values.get(JUDGED[direction]))
    for name, value in values.items():
        if name != JUDGED[direction] and value is not None:
            yield judged(value)._replace(title=f"  the same by {name}", bar="", passed=None, caveat="")


def _gpu_limit(groups: list[Any]) -> tuple[float | None, float | None]:
    """Return the step on the large table over that on the small one, and the bytes of the large one with its state."""
    from speedtransfer.benchmark.contenders import PLANES
    from speedtransfer.benchmark.step import LARGE, SMALL

    for group in groups:
        seconds = {case.name: case.median_s for case in group.ran}
        if group.params["experiment"] == "gpu limit" and {LARGE, SMALL} <= seconds.keys():
            planes = PLANES["AdamW"]
            return seconds[LARGE] / seconds[SMALL], planes * group.params["rows"] * group.params["dim"] * 4
    return None, None
