"""Steps of small models: one table, many tables, a table used as a whole, and a DeepFM, with several kinds of tables.

They show what a table costs apart from its rows. Ids are uniform, so that rows stay idle for long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.by_hand import AdamWByHand, TableByHand
from speedtransfer.benchmark.contenders import our_name
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import Role
from speedtransfer.nn import Embedding

SMALL, MANY, ONE, WHOLE, DEEPFM = "small step", "many tables", "one table", "whole table", "DeepFM"
BY_HAND = "rows by hand, unchecked"

_SMALL_ROWS, _SMALL_WIDTH, _SMALL_IDS = 10_000, 32, 64
_ROWS, _TABLES, _WIDTH, _IDS, _HIDDEN = 100_000, 26, 16, 256, 64
_WHOLE_WIDTH, _WHOLE_IDS = 64, 64
_POOL = 64  # batches, used in turn
_CHECKED = 9  # steps that are compared with dense training

Embed = Callable[[int, int], nn.Module]


# --- models -------------------------------------------------------------------------------------------------------------


class _OneTable(nn.Module):
    """The sum of looked up rows, a loss that costs next to nothing."""

    def __init__(self, embed: Embed, rows: int) -> None:
        super().__init__()
        self.emb = embed(rows, _SMALL_WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.emb(batch).sum()
        return loss


class _ManyTables(nn.Module):
    """The sum of squares of the rows that a batch, ``(tables, ids)``, looks up in each table."""

    def __init__(self, embed: Embed, rows: int, tables: int = _TABLES) -> None:
        super().__init__()
        self.tables = nn.ModuleList(embed(rows, _WIDTH) for _ in range(tables))
        # No gradient is near zero, where steps of Adam and SparseAdam differ.
        for table in self.tables:
            nn.init.uniform_(table.get_parameter("weight"), 0.5, 1.5)

    def forward(self, batch: Tensor) -> Tensor:
        parts = [table(ids) for table, ids in zip(self.tables, batch, strict=True)]
        return torch.stack([(rows * rows).sum() for rows in parts]).sum()


class _WholeTable(nn.Module):
    """A softmax loss over all rows, which are looked up too: tied weights, as in a language model."""

    def __init__(self, embed: Embed, rows: int) -> None:
        super().__init__()
        self.emb = embed(rows, _WHOLE_WIDTH)
        nn.init.normal_(self.emb.get_parameter("weight"), std=0.1)

    def forward(self, batch: Tensor) -> Tensor:
        hidden, wanted = self.emb(batch[0]), self.emb(batch[1])
        logits = hidden @ self.emb.get_parameter("weight").T
        return (logits.logsumexp(dim=1) - (hidden * wanted).sum(dim=1)).mean()


class _DeepFM(nn.Module):
    """The loss of a factorization machine plus a network: a wide table and one of single weights for each feature."""

    def __init__(self, embed: Embed, rows: int) -> None:
        super().__init__()
        self.factors = nn.ModuleList(embed(rows, _WIDTH) for _ in range(_TABLES))
        self.linear = nn.ModuleList(embed(rows, 1) for _ in range(_TABLES))
        self.deep = nn.Sequential(nn.Linear(_TABLES * _WIDTH, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))

    def forward(self, batch: Tensor) -> Tensor:
        *features, labels = batch
        rows = torch.stack([table(ids) for table, ids in zip(self.factors, features, strict=True)], dim=1)
        pairs = (rows.sum(dim=1).square() - rows.square().sum(dim=1)).sum(dim=1) / 2
        linear = torch.cat([table(ids) for table, ids in zip(self.linear, features, strict=True)], dim=1).sum(dim=1)
        logits = pairs + linear + self.deep(rows.flatten(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels.float() % 2)


# --- methods to train them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Method:
    """How the tables of a model are made and trained.

    `optimizer` makes what trains a model, `dense` the optimizer that trains one of dense tables in the same way. `exact`: a
    step also trains rows that it does not touch.
    """

    name: str
    role: Role
    embed: Embed
    optimizer: Callable[[nn.Module], Any]
    dense: Callable[[nn.Module], torch.optim.Optimizer]
    exact: bool
    kind: str = ""


def _training(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: optimizer(model.parameters(), **options)


def _method(name: str, role: Role, embed: Embed, exact: bool, optimizer: Callable[..., Any], **options: Any) -> _Method:
    trains, dense = (_training(optimizer, **{how: True}, **options) for how in ("fused", "foreach"))
    return _Method(name, role, embed, trains, dense, exact)


def _ours(
    device: torch.device, idle: Any, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any
) -> _Method:
    memory: Any = "pinned" if device.type == "cuda" else "pageable"
    embed = functools.partial(Embedding, device=device, memory=memory, idle=idle)
    made = _method(our_name(memory, idle), "ours", embed, idle == "exact", optimizer, **options)
    return replace(made, kind="exact" * made.exact)


def _dense(device: torch.device, optimizer: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> _Method:
    embed = functools.partial(nn.Embedding, device=device)
    return _method(f"nn.Embedding + {optimizer.__name__}", "other", embed, True, optimizer, **options)


def _sparse(device: torch.device) -> _Method:
    embed = functools.partial(nn.Embedding, sparse=True, device=device)
    still = _training(torch.optim.AdamW, weight_decay=0)
    name = "nn.Embedding(sparse=True) + SparseAdam"
    return _Method(name, "other", embed, _training(torch.optim.SparseAdam), still, exact=False)


def _by_hand(device: torch.device) -> _Method:
    embed = functools.partial(TableByHand, device=device)
    return _Method(BY_HAND, "other", embed, AdamWByHand, _training(torch.optim.AdamW), exact=False)


# --- groups -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """A model with tables of `rows` rows, and its batches: integers below `rows` in the shape `batch`."""

    model: Callable[[Embed, int], nn.Module]
    rows: int
    batch: tuple[int, ...]
    history: int
    device: torch.device
    seed: int

    def group(self, experiment: str, title: str, methods: list[_Method], **params: int) -> Group:
        title += f", after {self.history:,} steps" if self.history else ""
        params = {"rows": self.rows, **params, "history": self.history}
        return Group(title, lambda: self._cases(methods), {"experiment": experiment, **params})

    def _cases(self, methods: list[_Method]) -> list[Case]:
        draw = torch.Generator().manual_seed(self.seed)
        pool = list(torch.randint(0, self.rows, (_POOL, *self.batch), generator=draw).to(self.device))
        return [Case.of(method.name, _Step(self, method, pool), method.role, kind=method.kind) for method in methods]

    def build(self, embed: Embed) -> nn.Module:
        """Make the model, with initial weights by the seed."""
        torch.manual_seed(self.seed)
        return self.model(embed, self.rows).to(self.device)


def groups(device: torch.device, rows: int, seed: int, history: int, quick: bool = False) -> Iterator[Group]:
    """Yield a group for a small step and, unless `quick`, two for many tables, one for a whole table and one for a DeepFM.

    CUDA has one for a single such table as well. Tables have at most `rows` rows. Ours take `history` steps before any is
    timed, so that idle rows have missed some; three times as many where they are caught up step by step.
    """
    lazy, exact, sparse, dense = _ours(device, "lazy"), _ours(device, "exact"), _sparse(device), _dense(device)
    few, rows = min(rows, _SMALL_ROWS), min(rows, _ROWS)
    title = f"AdamW step, {_SMALL_IDS} uniform ids in {few:,} x {_SMALL_WIDTH} float32"
    task = _Task(_OneTable, few, (_SMALL_IDS,), history, device, seed)
    yield task.group(SMALL, title, [lazy, exact, sparse, _by_hand(device)], dim=_SMALL_WIDTH)
    if quick:
        return
    coupled: dict[str, Any] = {"optimizer": torch.optim.Adam, "weight_decay": 1e-5}
    for name, methods, steps in (
        ("AdamW", [lazy, exact, sparse, dense], history),
        ("Adam(weight_decay=1e-5)", [_ours(device, "exact", **coupled), _dense(device, **coupled)], 3 * history),
    ):
        title = f"{name} step, {_TABLES} tables of {rows:,} x {_WIDTH} float32, {_IDS} uniform ids each"
        task = _Task(_ManyTables, rows, (_TABLES, _IDS), steps, device, seed)
        yield task.group(MANY, title, methods, dim=_WIDTH, tables=_TABLES)
    if device.type == "cuda":  # shows how much longer the host takes for many tables
        title = f"AdamW step, one table of {rows:,} x {_WIDTH} float32, {_IDS} uniform ids"
        task = _Task(functools.partial(_ManyTables, tables=1), rows, (1, _IDS), history, device, seed)
        yield task.group(ONE, title, [lazy, exact, dense], dim=_WIDTH, tables=1)
    title = f"AdamW step, softmax over all of {rows:,} x {_WHOLE_WIDTH} float32, and {2 * _WHOLE_IDS} lookups"
    task = _Task(_WholeTable, rows, (2, _WHOLE_IDS), 0, device, seed)
    # Every step touches all rows.
    yield task.group(WHOLE, title, [replace(lazy, exact=True), exact, dense], dim=_WHOLE_WIDTH)
    tables = f"{_TABLES} tables of {rows:,} x {_WIDTH} and {_TABLES} of {rows:,} x 1 float32"
    task = _Task(_DeepFM, rows, (_TABLES + 1, _IDS), history, device, seed)
    title = f"AdamW step, DeepFM with {tables}, {_IDS} examples"
    yield task.group(DEEPFM, title, [exact, dense], dim=_WIDTH, tables=_TABLES)


class _Step:
    """A training step. The model is made in the first one, so that running out of memory fails this case alone."""

    def __init__(self, task: _Task, method: _Method, batches: list[Tensor]) -> None:
        self.task, self.method, self.batches = task, method, batches
        self._number = 0
        self.model: nn.Module | None = None

    def run(self) -> None:
        if self.model is None:
            self.model = self.task.build(self.method.embed)
            self._optimizer = self.method.optimizer(self.model)
        self.model(self.batches[self._number % len(self.batches)]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._number += 1

    def check(self) -> None:
        """Compare all weights with dense training over some steps; then ours take `history` more.

        Unless idle rows are trained, rows without a gradient and their state are restored after each dense step.
        """
        assert self.model is not None
        for _ in range(_CHECKED - 1):
            self.run()
        dense = self.task.build(functools.partial(nn.Embedding, device=self.task.device))
        optimizer = self.method.dense(dense)
        for batch in self.batches[:_CHECKED]:
            optimizer.zero_grad()
            dense(batch).backward()
            idle = [] if self.method.exact else list(dense.parameters())
            before = [(p, values, values.clone()) for p in idle for values in _planes(optimizer, p)]
            optimizer.step()
            for param, values, kept in before:
                assert param.grad is not None
                values.copy_(torch.where(param.grad.any(dim=1, keepdim=True), values, kept))
        found = self.model.state_dict()
        for name, expected in dense.state_dict().items():
            torch.testing.assert_close(found[name].to(expected.device), expected, rtol=1e-4, atol=2e-5)
        for _ in range(self.task.history if self.method.role == "ours" else 0):
            self.run()


def _planes(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> list[Tensor]:
    """Return the values of a parameter and its state of the same shape."""
    return [param.data, *(values for values in optimizer.state[param].values() if values.shape == param.shape)]
