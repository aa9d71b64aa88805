"""Suite `ngram`: a training step of a GPT with hashed n-gram tables. What do the tables cost, and how much of it is hidden?

The same model without tables, with tables of this library (lazy and exact idle rows; rows read on lookup, from the beginning
of the step, or during the previous batch) and with those of torch.nn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.environment import Room, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.ngram_training import (
    AHEAD,
    AT_BEGIN,
    DENSE,
    HEADS,
    LR,
    NO_TABLES,
    SPARSE,
    Sizes,
    Training,
    plain_rows,
    token_batches,
)
from speedtransfer.benchmark.report import bar_panels
from speedtransfer.benchmark.results import CaseResult, GroupResult, noise
from speedtransfer.drawing import COLOURS, PALE
from speedtransfer.errors import check_size
from speedtransfer.nn import Embedding
from speedtransfer.nn.sizing import table_size
from speedtransfer.units import format_ratio, format_seconds, format_share

NOTE = (
    "Tokens are drawn independently of each other, which makes more different n-grams than a text has. Weights of the model "
    "are float32, computed in bfloat16 on CUDA. Prefetch: from the beginning of the step on, for a layer in the middle of the "
    "model; a batch ahead: from the end of the forward pass of the batch before. Tables of torch.nn are on the compute "
    "device, in float32. After the first step rows are compared with those of torch.nn that has no others."
)
OURS = "speedtransfer, idle={}"
PLAIN = (DENSE, SPARSE)
LAZY, EXACT = "lazy", "exact"

_QUICK = Sizes(vocabulary=500, width=32, layers=2, heads=2, batch=4, context=16, rows=500, dim=8, parts=2)
_CPU = Sizes(vocabulary=8192, width=128, layers=4, heads=4, batch=16, context=64, rows=50_000, dim=16, parts=1)
# A GPT of the smallest published size, 65,536 tokens a step.
_CUDA = Sizes(vocabulary=50_304, width=768, layers=12, heads=12, batch=64, context=1024, rows=131_072, dim=160, parts=2)
_LARGE_ROWS = 100_000_000
_SMALL_FORM: dict[str, Any] = {"storage_dtype": torch.bfloat16, "state_dtype": torch.uint8}
_BATCHES = 5
_DEVICE_SHARE = 0.5  # share of the device's free memory for the tables of a group


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make all groups of the suite; `rows` is the total of the tables, on CUDA of the large ones."""
    cuda = device.type == "cuda"
    base = _QUICK if quick else _CUDA if cuda else _CPU
    if rows is not None:
        # At least sixteen different primes.
        rows = check_size(rows, "rows", 400)
    found = [_group(base if rows is None or cuda else _with_rows(base, rows), (LAZY, EXACT), {}, device, seed)]
    if cuda:
        large = base if quick and rows is None else _with_rows(base, rows or _fitting(base.dim))
        # One group each, as the host may have room for one such table only.
        found += [_group(large, (idle,), _SMALL_FORM, device, seed) for idle in (LAZY, EXACT)]
    return found


def _with_rows(sizes: Sizes, rows: int) -> Sizes:
    return sizes._replace(rows=max(2, rows // HEADS))


def _fitting(dim: int) -> int:
    """Return the rows of a large table, limited by the host's memory."""
    row_bytes = table_size(1, dim, **_SMALL_FORM, idle=EXACT).row_bytes
    return min(_LARGE_ROWS, int(host_room() / row_bytes))


def _group(sizes: Sizes, idle: tuple[str, ...], form: dict[str, Any], device: torch.device, seed: int) -> Group:
    rows = sizes.hash().num_rows
    stored = "float32" if not form else "bfloat16, 8-bit state"
    title = f"AdamW step, {sizes.about()}, {HEADS} rows a token in {rows:,} x {sizes.dim} {stored}"
    title += "" if len(idle) > 1 else f", idle={idle[0]}"
    params = {**sizes._asdict(), "rows": rows, "tokens": sizes.tokens, "form": stored, "idle": "/".join(idle)}
    effort = {"turns": 4, "samples": 3, "budget_s": 90.0}
    return Group(title, functools.partial(_cases, sizes, idle, form, device, seed), params, effort=effort)


def _cases(sizes: Sizes, idle: tuple[str, ...], form: dict[str, Any], device: torch.device, seed: int) -> list[Case]:
    tables: list[tuple[str, dict[str, Any] | None]] = [(OURS.format(one), {"idle": one, **form}) for one in idle]
    if not form:
        tables += [(name, None) for name in PLAIN]
    found = [Case.of(NO_TABLES, _Steps(Training(sizes, NO_TABLES, None, device), "", seed), check=None)]
    device_bytes = _DEVICE_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0.0
    room = Room({"host": host_room(), "device": device_bytes})
    for name, options in tables:
        training = Training(sizes, name, options, device)
        error = room.take(training.table_bytes, "host" if options is not None or device.type == "cpu" else "device")
        if options is None:
            found.append(Case.of(name, _Steps(training, "", seed), error=error))
        else:
            # The same table, as reading ahead is a matter of the step.
            for ahead in ("", AT_BEGIN, AHEAD):
                found.append(Case.of(name + ahead, _Steps(training, ahead, seed), "ours", error=error))
    return found


class _Steps:
    """Training steps with rows read ahead as `ahead` says, and their own batches."""

    def __init__(self, training: Training, ahead: str, seed: int) -> None:
        self.training, self.ahead = training, ahead
        self.figures = dict[str, float]()
        self._seed, self._turn = 100 * seed + training.cases, self._windows()
        training.cases += 1

    def _windows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a batch and the following one, endlessly."""
        training = self.training
        pool = token_batches(training.sizes, _BATCHES, self._seed, training.device)
        while True:
            yield from zip(pool, [*pool[1:], pool[0]], strict=True)

    def run(self) -> None:
        windows, following = next(self._turn)
        self.training.step(windows, self.ahead, following)

    def check(self) -> None:
        """Compare the rows after the first step with torch.nn, or rows read ahead with the table; then run other batches.

        Rows get memory when they are first touched, and become idle.
        """
        if not self.ahead:
            self._check_rows()
        else:
            self._check_ahead()
        for _ in range(_BATCHES - 1):
            self.run()
        self._record_bytes()

    @torch.no_grad()
    def _check_ahead(self) -> None:
        ngrams = self.training.ngrams
        tokens = next(self._turn)[0][:, :-1]
        expected = ngrams(tokens)
        ngrams.prefetch(tokens)
        assert torch.equal(ngrams(tokens), expected), "rows read ahead are not those of the table"

    def _check_rows(self) -> None:
        training = self.training
        assert training.first is not None
        ids, rows = plain_rows(training.sizes, training.name, training.first, training.device)
        with torch.no_grad():
            found = training.ngrams.embedding(ids).float()
        # Adam's first step is the sign of the gradient, which is arbitrary for gradients near zero. Small formats round.
        tolerance = 2e-3 * LR if not training.options or len(training.options) == 1 else 2e-2 * LR
        right = ((found - rows).abs() <= tolerance).float().mean()
        assert rows.abs().max() > 0.5 * LR, "torch.nn has moved no row"
        assert right > 0.99, f"{1 - right:.2%} of the values are not those of torch.nn"

    def _record_bytes(self) -> None:
        embedding = self.training.ngrams.embedding
        if isinstance(embedding, Embedding):
            table = embedding.table
            table.wait()
            table.reset_stats()
            self.run()
            table.wait()
            stats = table.stats()
            self.figures["moved_bytes"] = stats.gathered_bytes + stats.scattered_bytes


# --- report -------------------------------------------------------------------------------------------------------------


def added_share(case: CaseResult, base: CaseResult) -> float:
    """Return the relative increase in time of a step by its tables."""
    return case.median_s / base.median_s - 1


def sentences(groups: list[GroupResult]) -> list[str]:
    """Describe each group."""
    return [_sentence(group) for group in groups if group.ours is not None]


def _sentence(group: GroupResult) -> str:
    base, ours = group.by_name.get(NO_TABLES), [case for case in group.ran if case.role == "ours"]
    others = [case for case in group.ran if case.role == "other" and case is not base]
    text = f"{group.title}: "
    if base is None:
        text += ", ".join(f"{case.name} {format_seconds(case.median_s)}" for case in [*ours, *others])
    else:
        text += f"{format_seconds(base.median_s)} without tables; more with "
        text += ", ".join(f"{case.name} {_added(case, base)}" for case in [*ours, *others])
    best = min(ours, key=lambda case: case.median_s)
    ratios = [f"{format_ratio(case.median_s / best.median_s)} of {case.name}" for case in others]
    text += f"; {best.name} is " + ", ".join(ratios).replace(" of ", " the speed of ", 1) if ratios else ""
    return text + noise(*group.ran)


def _added(case: CaseResult, base: CaseResult) -> str:
    share = added_share(case, base)
    # Digits of a smaller or negative share would mean nothing.
    return format_share(share) if share >= 0.001 else "nothing"


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw a bar for each method, with the time it adds to a step without tables; a panel for each group."""

    def text(group: GroupResult, case: CaseResult) -> str:
        base = group.by_name.get(NO_TABLES)
        return "" if base is None or case is base else f", {_added(case, base)} more"

    def colour(group: GroupResult, case: CaseResult) -> str:
        return COLOURS[0] if case.role == "ours" else COLOURS[6] if case.name == NO_TABLES else PALE

    return bar_panels(make_figure, groups, text, colour)
