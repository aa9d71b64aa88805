"""Steps of a model with many small tables, as recommenders have them: what a table costs apart from its rows.

Exact and lazy idle rows beside torch's own, in turns in one run. Ids are uniform, so that rows are idle for long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.benchmark.kinds import OURS
from speedtransfer.benchmark.measure import Case, Group, Role
from speedtransfer.nn import Embedding

EXPERIMENT = "many tables"
TABLES, ROWS, WIDTH, IDS = 26, 100_000, 16, 256
_POOL = 64  # batches, taken in turn
_CHECKED = 9  # steps that exact rows are compared over


@dataclass(frozen=True)
class _Way:
    """One way to make the step: `table` makes a table of some rows, `optimizer` what trains all of them."""

    name: str
    role: Role
    table: Callable[[int], Any]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer]  # which trains a dense table alike
    exact: bool  # also rows that a step does not touch


def groups(device: torch.device, rows: int, seed: int, history: int) -> Iterator[Group]:
    """Yield a group for AdamW, and one for Adam with weight decay in the gradient.

    Parameters
    ----------
    device : torch.device
    rows : int
        Of each table, at most.
    seed : int
    history : int
        Steps before any is timed; three times as many where rows take the steps they missed one by one.
    """
    rows = min(rows, ROWS)
    for name, ways, steps in (
        ("AdamW", _adamw(device), history),
        ("Adam(weight_decay=1e-5)", _coupled(device), 3 * history),
    ):
        title = (
            f"{name} step, {TABLES} tables of {rows:,} x {WIDTH} float32, {IDS} uniform ids each, after {steps:,} steps"
        )
        params = {"experiment": EXPERIMENT, "rows": rows, "dim": WIDTH, "tables": TABLES, "history": steps}
        yield Group(title, functools.partial(_cases, ways, device, rows, seed, steps), params)


def _adamw(device: torch.device) -> list[_Way]:
    adamw = functools.partial(torch.optim.AdamW, fused=True)
    still = functools.partial(torch.optim.AdamW, weight_decay=0)
    sparse = functools.partial(_dense_table, device, sparse=True)
    return [
        *(_ours(device, idle, adamw) for idle in ("lazy", "exact")),
        _Way("nn.Embedding(sparse=True) + SparseAdam", "other", sparse, torch.optim.SparseAdam, still, exact=False),
        _Way("nn.Embedding + AdamW", "other", functools.partial(_dense_table, device), adamw, adamw, exact=True),
    ]


def _coupled(device: torch.device) -> list[_Way]:
    adam = functools.partial(torch.optim.Adam, weight_decay=1e-5, fused=True)
    dense = functools.partial(_dense_table, device)
    return [_ours(device, "exact", adam), _Way("nn.Embedding + Adam", "other", dense, adam, adam, exact=True)]


def _ours(device: torch.device, idle: str, optimizer: Callable[..., torch.optim.Optimizer]) -> _Way:
    memory = "pinned" if device.type == "cuda" else "pageable"
    name = OURS.format(memory) + (f", idle={idle}" if idle != "lazy" else "")
    make = functools.partial(Embedding, embedding_dim=WIDTH, device=device, memory=memory, idle=idle)
    return _Way(name, "ours", make, optimizer, optimizer, exact=idle == "exact")


def _dense_table(device: torch.device, rows: int, sparse: bool = False) -> nn.Embedding:
    return nn.Embedding(rows, WIDTH, sparse=sparse, device=device)


def _cases(ways: list[_Way], device: torch.device, rows: int, seed: int, history: int) -> list[Case]:
    draw = torch.Generator().manual_seed(seed)
    pool = [torch.randint(0, rows, (TABLES, IDS), generator=draw).to(device) for _ in range(_POOL)]
    steps = [_Step(way, rows, seed, pool, history) for way in ways]
    return [Case(step.way.name, step.run, step.check, role=step.way.role) for step in steps]


class _Step:
    """A step of one way. The tables are made at the first one, so that a lack of memory is the error of this case alone."""

    def __init__(self, way: _Way, rows: int, seed: int, pool: list[Tensor], history: int) -> None:
        self.way, self.rows, self.pool, self.history = way, rows, pool, history
        self._seed, self._number = seed, 0
        self.tables: list[Any] = []

    def run(self) -> None:
        """Take a step."""
        if not self.tables:
            torch.manual_seed(self._seed)
            self.tables = [self.way.table(self.rows) for _ in range(TABLES)]
            self._optimizer = self.way.optimizer([table.get_parameter("weight") for table in self.tables])
            self._first = self._weight().clone()
        ids = self.pool[self._number % len(self.pool)]
        self._number += 1
        total = torch.stack([_loss(table(part)) for table, part in zip(self.tables, ids, strict=True)]).sum()
        total.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _weight(self) -> Tensor:
        """Return the weights of the first table."""
        table = self.tables[0]
        weight: Tensor = table.table.torch() if isinstance(table, Embedding) else table.weight.detach()
        return weight

    def check(self) -> None:
        """Compare the first table with a dense one: rows that the first step touches, or all after some. Then take others."""
        count = _CHECKED if self.way.exact else 1
        for _ in range(count - 1):
            self.run()
        dense = nn.Embedding.from_pretrained(self._first.to(self.pool[0].device, copy=True), freeze=False)
        optimizer = self.way.dense([dense.weight])
        for ids in self.pool[:count]:
            _loss(dense(ids[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected, after = dense.weight.detach().to(self._first.device), self._weight()
        if not self.way.exact:
            idle = torch.ones(self.rows, dtype=torch.bool)
            idle[self.pool[0][0].cpu()] = False
            expected = torch.where(idle[:, None].to(expected.device), self._first, expected)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)
        del self._first
        for _ in range(self.history):
            self.run()


def _loss(rows: Tensor) -> Tensor:
    return (rows * rows).sum()
