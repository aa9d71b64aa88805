"""Suite `exchange`: gradients sent whole, in fewer bits, or seldom. How many bytes and seconds until a model is as good?

All methods of a group train the same model on the same batches, each process its part, until the loss is that of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from speedtransfer.benchmark.exchange_worker import (
    ALL_REDUCE,
    BLOCK_MOMENTUM,
    COMM_DTYPES,
    EIGHT_BITS,
    FP16,
    LOCAL_SGD,
    NO_ERRORS,
    ONE_BIT,
    PERIOD,
    POWER_RANK,
    POWER_SGD,
    ROWS,
    ROWS_BFLOAT16,
    ROWS_INT8,
    WARMUP,
    Sizes,
    Worker,
)
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.report import Show, TextTable, pivots
from speedtransfer.benchmark.results import CaseResult, GroupResult, Role, case_names, noise, split_by
from speedtransfer.benchmark.world import World
from speedtransfer.drawing import INK, bars_beside, tidy
from speedtransfer.errors import SpeedtransferError, format_bytes
from speedtransfer.units import format_count, format_ratio, format_seconds

GRADIENTS, TABLE = "gradients", "rows of a table"
SENT, STEPS, LOSS = "sent_bytes", "steps", "loss"
METHODS = {
    GRADIENTS: (ALL_REDUCE, FP16, EIGHT_BITS, POWER_SGD, ONE_BIT, NO_ERRORS, LOCAL_SGD, BLOCK_MOMENTUM),
    TABLE: tuple(COMM_DTYPES),
}
SLACK = 0.01  # by which the loss that is reached may be above that of one process: methods round
NOTE = (
    "Processes of one machine: with gloo the times show what compressing costs, not what a slow network gains. Batches are "
    "sorted, so that each process sees inputs of its own. The loss to reach is that of one process with the whole batches and "
    f"{SLACK:.0%} more; it is looked at every {PERIOD} steps. Methods that keep errors or average models begin with {WARMUP} "
    "steps of all-reduce. Network: SGD with one learning rate and no momentum, so that block momentum also gains what a "
    "higher rate would. Table: AdamW, sharded rows. Bytes are those that one process sends, counted at each call of "
    "torch.distributed as a ring sends them, and of tables by their counters. Seconds are of training alone."
)
TOLERANCE = 0.01  # relative difference of the loss of all-reduce from that of one process: sums in another order

_FULL, _QUICK = Sizes(256, 4096, 64, 128, 0.1, 0.03, 0), Sizes(32, 256, 8, 64, 0.1, 0.03, 0)
_STEPS, _QUICK_STEPS = 256, 32
_MOST = 3  # a method may take this many times the steps of one process
_RANKS, _QUICK_RANKS = (2, 4), (2,)


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make groups for a network and a table; processes use NCCL if there is a GPU for each, else gloo on the CPU."""
    sizes = (_QUICK if quick else _FULL)._replace(seed=seed)
    steps = _QUICK_STEPS if quick else _STEPS
    # Each sample is a whole training.
    effort = {"turns": 1, "samples": 1, "budget_s": 1.0} if quick else {"turns": 2, "samples": 2, "budget_s": 40.0}
    about = {GRADIENTS: f"a network {sizes.width} wide", TABLE: f"a sharded table of {sizes.rows:,} x {sizes.dim}"}
    return [
        Group(
            f"train {about[kind]} to the loss of {steps} steps of one process, {ranks} processes",
            functools.partial(_cases, kind, sizes, ranks, steps, device),
            {**sizes._asdict(), "kind": kind, "ranks": ranks, "most": _MOST * steps},
            effort=effort,
        )
        for kind in METHODS
        for ranks in (_QUICK_RANKS if quick else _RANKS)
    ]


class UnreachedError(SpeedtransferError):
    """A method does not reach the loss of one process in the allowed number of steps."""


def _cases(kind: str, sizes: Sizes, ranks: int, steps: int, device: torch.device) -> list[Case]:
    cuda = device.type == "cuda" and torch.cuda.device_count() >= ranks
    target = (1 + SLACK) * loss_of_one(kind, sizes, steps)
    world = World(ranks, Worker, cuda)

    def case(method: str) -> Case:
        role: Role = "ours" if kind == TABLE or method in (ONE_BIT, BLOCK_MOMENTUM) else "other"
        return Case.of(method, ToLoss(method, world, sizes, target, steps), role)

    return [case(method) for method in METHODS[kind]]


def loss_of_one(kind: str, sizes: Sizes, steps: int) -> float:
    """Return the loss after `steps` steps of one process with the whole batches."""
    one = World(1, Worker)
    one.call("begin", METHODS[kind][0], sizes)
    one.call("steps", steps)
    (loss,) = one.call("loss")
    one.end()
    return float(loss)


class ToLoss:
    """Training by one method to a `target` loss: the first run finds the number of steps, others take as many."""

    def __init__(self, method: str, world: World, sizes: Sizes, target: float, steps: int) -> None:
        self.method, self.world, self.sizes, self.target, self.steps = method, world, sizes, target, steps
        self.figures = dict[str, float]()
        self._losses: list[float] = []

    def before(self) -> None:
        """Make a new model in all processes."""
        self.world.call("begin", self.method, self.sizes)

    def run(self) -> None:
        """Train to the loss."""
        if STEPS in self.figures:
            self.world.call("steps", int(self.figures[STEPS]))
        else:
            self._search()

    def _search(self) -> None:
        while not self._losses or self._losses[-1] > self.target:
            if PERIOD * len(self._losses) >= _MOST * self.steps:
                raise UnreachedError(
                    f"did not come to a loss of {self.target:.4g} in {_MOST * self.steps} steps; the lowest is "
                    f"{min(self._losses):.4g}"
                )
            self.world.call("steps", PERIOD)
            losses = self.world.call("loss")
            assert len(set(losses)) == 1, "the processes have different models"
            self._losses.append(losses[0])
        steps = PERIOD * len(self._losses)
        sent = sum(self.world.call("sent")) / self.world.ranks / steps
        self.figures |= {STEPS: float(steps), SENT: sent, LOSS: self._losses[-1]}

    def check(self) -> None:
        """Raise AssertionError unless all-reduce trains like one process and a repeated training gives the same loss."""
        if self.method in (ALL_REDUCE, ROWS):
            one = loss_of_one(TABLE if self.method == ROWS else GRADIENTS, self.sizes, int(self.figures[STEPS]))
            off = abs(self.figures[LOSS] - one)
            assert off <= TOLERANCE * one, f"the loss is {self.figures[LOSS]:.6g} but that of one process {one:.6g}"
        self.before()
        self.run()
        assert self.world.call("loss")[0] == self.figures[LOSS], "the same steps give another loss"


# --- report -------------------------------------------------------------------------------------------------------------


_SHORT = {
    FP16: "float16",
    EIGHT_BITS: "8 bits",
    POWER_SGD: f"PowerSGD, rank {POWER_RANK}",
    ONE_BIT: "1 bit (st)",
    LOCAL_SGD: f"local SGD, {PERIOD} steps",
    BLOCK_MOMENTUM: "block momentum (st)",
    ROWS: "float32 (st)",
    ROWS_BFLOAT16: "bfloat16 (st)",
    ROWS_INT8: "int8 (st)",
}


def sent_in_all(case: CaseResult) -> float:
    """Return the bytes that a process sends in all steps."""
    return case.figures[SENT] * case.figures[STEPS]


def sentences(groups: list[GroupResult]) -> list[str]:
    """Compare bytes, steps and time to the loss, for each group."""
    return [_sentence(group) for group in groups]


def _sentence(group: GroupResult) -> str:
    base, *others = group.ran
    text = (
        f"{group.title}: {base.name} {format_bytes(sent_in_all(base))} sent by a process in {base.figures[STEPS]:,.0f} "
    )
    text += f"steps and {format_seconds(base.median_s)}"
    for case in others:
        ratios = sent_in_all(case) / sent_in_all(base), case.median_s / base.median_s
        text += f"; {case.name} {format_ratio(ratios[0])} the bytes, {case.figures[STEPS]:,.0f} steps, "
        text += f"{format_ratio(ratios[1])} the time"
    return text + "".join(f"; {case.name} {case.error}" for case in group.cases if case.error) + noise(*group.ran)


_Value = Callable[[CaseResult], float]
_MEASURES: tuple[tuple[str, _Value, Callable[[float], str]], ...] = (
    ("sent by a process", sent_in_all, format_bytes),
    ("steps", lambda case: case.figures[STEPS], format_count),
    ("time", lambda case: case.median_s, format_seconds),
)


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw bytes, steps and seconds to the loss, a bar for each number of processes."""
    parts = split_by(groups, "kind")
    names = {kind: case_names(part) for kind, part in parts.items()}
    heights = [0.8 + sum(0.21 * len(parts[kind]) + 0.06 for _ in names[kind]) for kind in parts]
    figure = make_figure(7, 0.5 + sum(heights))
    panels = figure.subplots(len(parts), len(_MEASURES), squeeze=False, height_ratios=heights)
    for row, (kind, part) in zip(panels, parts.items(), strict=True):
        for axes, (title, value, show) in zip(row, _MEASURES, strict=True):
            _bars(axes, part, names[kind], value, show)
            axes.set_title(title, fontsize=10, color=INK, loc="left")
            if axes is not row[0]:
                axes.set_yticklabels([])
        row[0].set_title(f"{kind}:\nsent by a process", fontsize=10, color=INK, loc="left")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=10)
    return figure


def _bars(axes: Any, groups: list[GroupResult], names: list[str], value: _Value, show: Callable[[float], str]) -> None:
    for number, group in enumerate(groups):
        values = {place: value(group.by_name[name]) for place, name in enumerate(names) if name in group.by_name}
        label = f"{group.params['ranks']} processes"
        bars_beside(axes, number, len(groups), values, [show(v) for v in values.values()], label, 8.5)
    tidy(axes)
    axes.grid(visible=False)
    axes.set_yticks(range(len(names)), [_SHORT.get(name, name) for name in names], parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xticks([])
    axes.margins(x=0.35)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=10)


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return bytes, steps and time to the loss, by the number of processes."""

    def column(value: _Value, show: Callable[[float], str]) -> Show:
        return lambda group, case: show(value(case))

    columns = {title + " until then" * (value is sent_in_all): column(value, show) for title, value, show in _MEASURES}
    return [
        table._replace(title=f"{kind}, {table.title}")
        for kind, part in split_by(groups, "kind").items()
        for table in pivots("processes", part, "ranks", columns)
    ]
