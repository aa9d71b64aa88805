"""Suite `ranks`: the same training steps in one process and in several. What do they cost, and how much is sent?

All cases of a group take the same batches, each process its part; the model but the table is under `DistributedDataParallel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from speedtransfer.benchmark.environment import Room, host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.ranks_worker import (
    BY_HAND,
    DENSE,
    ORDINARY,
    SHARDED,
    SHARED,
    SPARSE,
    Sizes,
    Worker,
    batches_of,
    part_of,
)
from speedtransfer.benchmark.report import TextTable, pivots, sent, show_time
from speedtransfer.benchmark.results import CaseResult, GroupResult, Role, case_names, noise, sorted_by
from speedtransfer.benchmark.world import World
from speedtransfer.drawing import INK, legend_below, line, line_style, plain_numbers, tidy
from speedtransfer.errors import check_size, format_bytes
from speedtransfer.ranks.cost import ddp_dense_step, ddp_sparse_step
from speedtransfer.units import format_ratio, format_seconds

NOTE = (
    "Processes of one machine with gloo, and the threads of torch divided among them: on one CPU several processes are not "
    "faster, and this shows what their messages cost, not what several machines or GPUs gain. The batch of all processes "
    "together is the same in every case. Bytes are those that one process sends for the table in a step: of this library "
    "counted, of torch.nn computed; the gradients of the other parameters come on top, alike in all. Tables are on the CPU, "
    "whatever the device. After the first steps each case is compared with one process: ours with lazy AdamW written by hand, "
    "torch.nn with itself."
)
ONE = "speedtransfer, one process"
SENT, COMPUTED = "sent_bytes", "computed_sent_bytes"
TOLERANCE = 2e-3  # error of a value, relative to the largest change: float32 sums in another order

_FULL = {"rows": 1_000_000, "dim": 64, "examples": 4096, "fields": 16}
_QUICK = {"rows": 20_000, "dim": 16, "examples": 256, "fields": 8}
_EXPONENT = 1.05
_RANKS, _QUICK_RANKS = (1, 2, 4), (1, 2)
_STEPS, _QUICK_STEPS = 4, 2
# Planes in each process: weights, AdamW's state, a dense gradient, and DistributedDataParallel's copy of it.
_PLANES = {SPARSE: 3, DENSE: 5}


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each number of processes; tables are always on the CPU."""
    base = _QUICK if quick else _FULL
    rows = check_size(rows or base["rows"], "rows", 1)
    sizes = Sizes(rows, base["dim"], base["examples"], base["fields"], _EXPONENT, seed)
    steps = _QUICK_STEPS if quick else _STEPS
    effort = {"turns": 2, "samples": 2, "budget_s": 6.0} if quick else {"turns": 4, "samples": 3, "budget_s": 60.0}
    lookups = f"{sizes.examples:,} x {sizes.fields} lookups by Zipf's law in {rows:,} x {sizes.dim} float32"
    return [
        Group(
            f"AdamW step, {lookups}, {ranks} process{'es' * (ranks > 1)}",
            functools.partial(_cases, sizes, ranks, steps),
            {**sizes._asdict(), "ranks": ranks},
            effort=effort,
        )
        for ranks in (_QUICK_RANKS if quick else _RANKS)
    ]


def _cases(sizes: Sizes, ranks: int, steps: int) -> list[Case]:
    one = World(1, Worker)
    world = one if ranks == 1 else World(ranks, Worker)
    chosen: list[tuple[str, str, Role, World]] = [(ONE, ORDINARY, "ours", one)]
    for method in (SHARDED, SHARED, ORDINARY) if ranks > 1 else (SHARDED,):
        chosen.append((f"speedtransfer, {method}", method, "ours", world))
    chosen += [(method, method, "other", world) for method in (SPARSE, DENSE)]
    room, found = Room({"host": host_room()}), []
    for name, method, role, where in chosen:
        training = _Steps(method, where, one, sizes, steps)
        found.append(Case.of(name, training, role, parts=steps, error=room.take(training.held_bytes)))
    return found


class _Steps:
    """Training steps by one method in the processes of `world`, compared with one process."""

    def __init__(self, method: str, world: World, one: World, sizes: Sizes, steps: int) -> None:
        self.method, self.world, self.one, self.sizes, self.steps = method, world, one, sizes, steps
        self.figures = dict[str, float]()

    @property
    def held_bytes(self) -> int:
        """Bytes of the table, its state and gradients in all processes."""
        copies = 1 if self.method in (SHARDED, SHARED) else self.world.ranks
        return copies * _PLANES.get(self.method, 3) * self.sizes.rows * self.sizes.dim * 4

    def run(self) -> None:
        self.world.call("steps", self.method, self.sizes, self.steps)

    def check(self) -> None:
        """Compare rows and parameters with those of one process; then record how many bytes a step sends."""
        ids = torch.cat([ids.flatten() for ids, _ in batches_of(self.sizes)]).unique()
        answers = self.world.call("state", self.method, ids)
        assert len({number for _, number in answers}) == 1, "the processes have different rows or parameters"
        if self.world.ranks > 1 or self.method not in (SPARSE, DENSE):
            reference = self.method if self.method in (SPARSE, DENSE) else BY_HAND
            wanted, before = (self._of_one(reference, steps, ids) for steps in (self.steps, 0))
            whats = "rows", "other parameters"
            for what, *arrays in zip(whats, answers[0][0], wanted, before, strict=True):
                check_close(what, *map(torch.from_numpy, arrays))
        self._record_bytes()

    def _of_one(self, method: str, steps: int, ids: Tensor) -> Any:
        """Return rows and parameters after `steps` steps of a new model in one process."""
        self.one.call("steps", method, self.sizes, steps)
        state = self.one.call("state", method, ids)[0][0]
        self.one.call("forget", method)
        return state

    def _record_bytes(self) -> None:
        ranks, row_bytes = self.world.ranks, self.sizes.dim * 4
        if ranks == 1:
            return
        if self.method == SPARSE:
            parts = [part_of(ids, rank, ranks) for ids, _ in batches_of(self.sizes) for rank in range(ranks)]
            unique = sum(len(part.unique()) for part in parts) / len(parts)
            self.figures[COMPUTED] = ddp_sparse_step(unique, row_bytes, ranks).sent
        elif self.method == DENSE:
            self.figures[COMPUTED] = ddp_dense_step(self.sizes.rows, row_bytes, ranks).sent
        else:
            before = sum(self.world.call("sent"))
            self.run()
            self.figures[SENT] = (sum(self.world.call("sent")) - before) / ranks / self.steps


def check_close(what: str, values: Tensor, right: Tensor, start: Tensor) -> None:
    """Raise AssertionError unless `values` are `right`, within `TOLERANCE` of the largest change from `start`."""
    largest = float((right - start).abs().max())
    assert largest > 0, f"no {what} have moved in one process"
    error = float((values - right).abs().max()) / largest
    assert error <= TOLERANCE, f"{what} are off by {error:.2g} of the largest move in one process"


# --- report -------------------------------------------------------------------------------------------------------------


def sent_bytes(case: CaseResult) -> float | None:
    """Return the counted or computed bytes that a process sends in a step."""
    return case.figures.get(SENT, case.figures.get(COMPUTED))


def sentences(groups: list[GroupResult]) -> list[str]:
    """Compare time and bytes of each method in several processes with one process."""
    found = []
    for group in groups:
        one = group.ours
        for case in group.ran:
            if group.params["ranks"] == 1 or case is one:
                continue
            text = f"{group.params['ranks']} processes, {case.name}: {format_seconds(case.median_s)} a step"
            if one is not None:
                ratio = format_ratio(case.median_s / one.median_s)
                text += f", {ratio} the {format_seconds(one.median_s)} of one process"
            count = sent_bytes(case)
            if count is not None:
                text += f"; a process sends {format_bytes(count)}"
                text += " (computed)" if COMPUTED in case.figures else ""
            found.append(text + noise(case, one))
    return found


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the time of a step and the bytes sent, by the number of processes."""
    groups = sorted_by(groups, "ranks")
    ranks = [group.params["ranks"] for group in groups]
    figure = make_figure(11, 5.2)
    time, sent = figure.subplots(1, 2)
    for number, name in enumerate(case_names(groups)):
        cases = [group.by_name.get(name) for group in groups]
        style = line_style(number, any(case is not None and case.role == "ours" for case in cases))
        line(time, ranks, [group.milliseconds(name) for group in groups], name, style)
        # A process alone sends nothing, for which a logarithmic axis has no place.
        line(sent, ranks, [((case and sent_bytes(case)) or 0) / 1e6 or None for case in cases], name, style)
    time.set(yscale="log", ylabel="milliseconds a step")
    sent.set(yscale="log", ylabel="MB that a process sends in a step")
    time.set_title("The same batch in all processes together", fontsize=11, color=INK)
    sent.set_title("For the table; of torch.nn computed", fontsize=11, color=INK)
    for axes in (time, sent):
        axes.set_xlabel("processes")
        axes.set_xticks(ranks, [str(count) for count in ranks])
        tidy(axes)
    plain_numbers(time)
    if sent.lines:
        plain_numbers(sent)
    legend_below(figure, time)
    return figure


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return the time of a step and the bytes sent, by the number of processes."""
    columns = {"a step": show_time, "sent a step by a process": lambda group, case: sent(case)}
    return pivots("processes", groups, "ranks", columns)
