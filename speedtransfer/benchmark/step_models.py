"""Steps of models: one small table, many tables, a table used as a whole, and a DeepFM; ours, torch's, and rows by hand.

They show what a table costs apart from its rows. Ids are uniform, so that rows are idle for long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.benchmark.kinds import OURS
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.models import (
    IDS,
    ROWS,
    SMALL_IDS,
    SMALL_ROWS,
    SMALL_WIDTH,
    TABLES,
    WHOLE_IDS,
    WHOLE_WIDTH,
    WIDTH,
    AdamWByHand,
    DeepFM,
    Embed,
    ManyTables,
    OneTable,
    TableByHand,
    WholeTable,
)
from speedtransfer.benchmark.results import Role
from speedtransfer.nn import Embedding

SMALL, MANY, ONE, WHOLE, DEEPFM = "small step", "many tables", "one table", "whole table", "DeepFM"
BY_HAND = "rows by hand, unchecked"
_POOL = 64  # batches, taken in turn
_CHECKED = 9  # steps that weights are compared over, where idle rows are trained too


# --- ways to train them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """One way to make and train the tables of a model."""

    name: str
    role: Role
    embed: Embed
    optimizer: Callable[[nn.Module], Any]  # makes what trains a model
    dense: Callable[[nn.Module], torch.optim.Optimizer]  # makes what trains a model of dense tables alike
    exact: bool  # rows that a step does not touch are trained, too
    kind: str = ""  # of the case


def _training(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: optimizer(model.parameters(), **options)


def _way(name: str, role: Role, embed: Embed, exact: bool, optimizer: Callable[..., Any], **options: Any) -> _Way:
    trains, dense = (_training(optimizer, **{how: True}, **options) for how in ("fused", "foreach"))
    return _Way(name, role, embed, trains, dense, exact)


def _ours(device: torch.device, idle: str, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> _Way:
    memory = "pinned" if device.type == "cuda" else "pageable"
    name = OURS.format(memory) + (f", idle={idle}" if idle != "lazy" else "")
    embed = functools.partial(Embedding, device=device, memory=memory, idle=idle)
    made = _way(name, "ours", embed, idle == "exact", optimizer, **options)
    return replace(made, kind="exact" * made.exact)


def _dense(device: torch.device, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> _Way:
    embed = functools.partial(nn.Embedding, device=device)
    return _way(f"nn.Embedding + {optimizer.__name__}", "other", embed, True, optimizer, **options)


def _sparse(device: torch.device) -> _Way:
    embed = functools.partial(nn.Embedding, sparse=True, device=device)
    still = _training(torch.optim.AdamW, weight_decay=0)
    name = "nn.Embedding(sparse=True) + SparseAdam"
    return _Way(name, "other", embed, _training(torch.optim.SparseAdam), still, exact=False)


def _by_hand(device: torch.device) -> _Way:
    embed = functools.partial(TableByHand, device=device)
    return _Way(BY_HAND, "other", embed, AdamWByHand, _training(torch.optim.AdamW), exact=False)


# --- groups ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A model with tables of `rows` rows, and its batches: integers below `rows` in the shape `batch`."""

    model: Callable[[Embed, int], nn.Module]
    rows: int
    batch: tuple[int, ...]
    history: int
    device: torch.device
    seed: int

    def group(self, experiment: str, title: str, ways: list[_Way], **params: int) -> Group:
        """Return the ways to train it as a group."""
        title += f", after {self.history:,} steps" if self.history else ""
        params = {"rows": self.rows, **params, "history": self.history}
        return Group(title, lambda: self._cases(ways), {"experiment": experiment, **params})

    def _cases(self, ways: list[_Way]) -> list[Case]:
        draw = torch.Generator().manual_seed(self.seed)
        pool = list(torch.randint(0, self.rows, (_POOL, *self.batch), generator=draw).to(self.device))
        return [Case.of(way.name, _Step(self, way, pool), way.role, kind=way.kind) for way in ways]

    def build(self, embed: Embed) -> nn.Module:
        """Return the model, its first weights by the seed."""
        torch.manual_seed(self.seed)
        return self.model(embed, self.rows).to(self.device)


def groups(device: torch.device, rows: int, seed: int, history: int, quick: bool = False) -> Iterator[Group]:
    """Yield a group for a small step, two for many tables (on CUDA one for one such table), and one each for a table used as a
    whole and a DeepFM; with `quick` the small step only.

    Tables have `rows` rows at most. Ours take `history` steps before any is timed, so that idle rows have missed some; three
    times as many where they take them one by one.
    """
    lazy, exact, sparse, dense = _ours(device, "lazy"), _ours(device, "exact"), _sparse(device), _dense(device)
    few, rows = min(rows, SMALL_ROWS), min(rows, ROWS)
    title = f"AdamW step, {SMALL_IDS} uniform ids in {few:,} x {SMALL_WIDTH} float32"
    task = _Task(OneTable, few, (SMALL_IDS,), history, device, seed)
    yield task.group(SMALL, title, [lazy, exact, sparse, _by_hand(device)], dim=SMALL_WIDTH)
    if quick:
        return
    coupled: dict[str, Any] = {"optimizer": torch.optim.Adam, "weight_decay": 1e-5}
    for name, ways, steps in (
        ("AdamW", [lazy, exact, sparse, dense], history),
        ("Adam(weight_decay=1e-5)", [_ours(device, "exact", **coupled), _dense(device, **coupled)], 3 * history),
    ):
        title = f"{name} step, {TABLES} tables of {rows:,} x {WIDTH} float32, {IDS} uniform ids each"
        task = _Task(ManyTables, rows, (TABLES, IDS), steps, device, seed)
        yield task.group(MANY, title, ways, dim=WIDTH, tables=TABLES)
    if device.type == "cuda":  # where the host should not take much longer for many
        title = f"AdamW step, one table of {rows:,} x {WIDTH} float32, {IDS} uniform ids"
        task = _Task(functools.partial(ManyTables, tables=1), rows, (1, IDS), history, device, seed)
        yield task.group(ONE, title, [lazy, exact, dense], dim=WIDTH, tables=1)
    title = f"AdamW step, softmax over all of {rows:,} x {WHOLE_WIDTH} float32, and {2 * WHOLE_IDS} lookups"
    task = _Task(WholeTable, rows, (2, WHOLE_IDS), 0, device, seed)
    # Every step touches all rows.
    yield task.group(WHOLE, title, [replace(lazy, exact=True), exact, dense], dim=WHOLE_WIDTH)
    tables = f"{TABLES} tables of {rows:,} x {WIDTH} and {TABLES} of {rows:,} x 1 float32"
    task = _Task(DeepFM, rows, (TABLES + 1, IDS), history, device, seed)
    yield task.group(
        DEEPFM,
        f"AdamW step, DeepFM with {tables}, {IDS} examples",
        [exact, dense],
        dim=WIDTH,
        tables=TABLES,
    )


class _Step:
    """A step of one way. The model is made at the first one, so that a lack of memory is the error of this case alone."""

    def __init__(self, task: _Task, way: _Way, batches: list[Tensor]) -> None:
        self.task, self.way, self.batches = task, way, batches
        self._number = 0
        self.model: nn.Module | None = None

    def run(self) -> None:
        """Take a step."""
        if self.model is None:
            self.model = self.task.build(self.way.embed)
            self._optimizer = self.way.optimizer(self.model)
        self.model(self.batches[self._number % len(self.batches)]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._number += 1

    def check(self) -> None:
        """Compare all weights with those of dense training over some steps; then take `history` others, if these are ours.

        Where idle rows stay as they are, rows without a gradient and their state are put back after each dense step.
        """
        assert self.model is not None
        for _ in range(_CHECKED - 1):
            self.run()
        dense = self.task.build(functools.partial(nn.Embedding, device=self.task.device))
        optimizer = self.way.dense(dense)
        for batch in self.batches[:_CHECKED]:
            optimizer.zero_grad()
            dense(batch).backward()
            before = (
                [] if self.way.exact else [(p, v, v.clone()) for p in dense.parameters() for v in _rows(optimizer, p)]
            )
            optimizer.step()
            for param, values, kept in before:
                assert param.grad is not None
                values.copy_(torch.where(param.grad.any(dim=1, keepdim=True), values, kept))
        found = self.model.state_dict()
        for name, expected in dense.state_dict().items():
            torch.testing.assert_close(found[name].to(expected.device), expected, rtol=1e-4, atol=2e-5)
        for _ in range(self.task.history if self.way.role == "ours" else 0):
            self.run()


def _rows(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[Tensor]:
    """Return the values of a parameter, and its state of that shape."""
    return [param.data, *(values for values in optimizer.state[param].values() if values.shape == param.shape)]
