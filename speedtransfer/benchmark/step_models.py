"""Steps of small models: one table, many tables, and a table used as a whole, with several kinds of tables.

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

from speedtransfer.benchmark.contenders import our_name
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import Role
from speedtransfer.nn import Embedding

SMALL, MANY, WHOLE = "small step", "many tables", "whole table"
BY_HAND = "rows by hand, unchecked"

_SMALL_ROWS, _SMALL_WIDTH, _SMALL_IDS = 10_000, 32, 64
_ROWS, _TABLES, _WIDTH, _IDS = 100_000, 26, 16, 256
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


def _training(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: optimizer(model.parameters(), **options)


_ADAMW, _DENSE_ADAMW = (_training(torch.optim.AdamW, **{how: True}) for how in ("fused", "foreach"))


def _ours(device: torch.device, idle: Any) -> _Method:
    memory: Any = "pinned" if device.type == "cuda" else "pageable"
    embed = functools.partial(Embedding, device=device, memory=memory, idle=idle)
    exact = idle == "exact"
    return _Method(our_name(memory, idle), "ours", embed, _ADAMW, _DENSE_ADAMW, exact)


def _dense(device: torch.device) -> _Method:
    embed = functools.partial(nn.Embedding, device=device)
    return _Method("nn.Embedding + AdamW", "other", embed, _ADAMW, _DENSE_ADAMW, exact=True)


def _sparse(device: torch.device) -> _Method:
    embed = functools.partial(nn.Embedding, sparse=True, device=device)
    still = _training(torch.optim.AdamW, weight_decay=0)
    name = "nn.Embedding(sparse=True) + SparseAdam"
    return _Method(name, "other", embed, _training(torch.optim.SparseAdam), still, exact=False)


def _by_hand(device: torch.device) -> _Method:
    embed = functools.partial(TableByHand, device=device)
    return _Method(BY_HAND, "other", embed, AdamWByHand, _training(torch.optim.AdamW), exact=False)


# --- the idea of this library in plain torch, without checks -----------------------------------------------------------


class TableByHand(nn.Embedding):
    """Plain torch: an embedding whose unique rows of a batch are a leaf of autograd."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        super().__init__(rows, width, device=device)
        self.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102 (nn.Embedding)
        self.ids, inverse = ids.unique(return_inverse=True)
        self.rows = self.weight.index_select(0, self.ids).requires_grad_()
        return F.embedding(inverse, self.rows)


class AdamWByHand:
    """AdamW on the rows that each `TableByHand` has looked up: gathers the state, steps, and scatters everything."""

    def __init__(self, model: nn.Module) -> None:
        tables = [table for table in model.modules() if isinstance(table, TableByHand)]
        self._params = [nn.Parameter(table.weight[:0]) for table in tables]
        self._adamw = torch.optim.AdamW(self._params, fused=True)
        planes = [{name: torch.zeros_like(table.weight) for name in ("exp_avg", "exp_avg_sq")} for table in tables]
        self._parts = list(zip(tables, self._params, planes, strict=True))

    def step(self) -> None:
        """Step the rows of the last batch."""
        for table, param, planes in self._parts:
            param.data, param.grad = table.rows.detach(), table.rows.grad
            if state := self._adamw.state[param]:
                state.update({name: plane.index_select(0, table.ids) for name, plane in planes.items()})
        self._adamw.step()
        for table, param, planes in self._parts:
            table.weight.index_copy_(0, table.ids, param.data)
            for name, plane in planes.items():
                plane.index_copy_(0, table.ids, self._adamw.state[param][name])

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for param in self._params:
            param.grad = None


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
        return [Case.of(method.name, _Step(self, method, pool), method.role) for method in methods]

    def build(self, embed: Embed) -> nn.Module:
        """Make the model, with initial weights by the seed."""
        torch.manual_seed(self.seed)
        return self.model(embed, self.rows).to(self.device)


def groups(device: torch.device, rows: int, seed: int, history: int, quick: bool = False) -> Iterator[Group]:
    """Yield a group for a small step and, unless `quick`, for many tables and for a whole table, of at most `rows` rows.

    Ours take `history` steps before any is timed, so that idle rows have missed some.
    """
    lazy, exact, sparse, dense = _ours(device, "lazy"), _ours(device, "exact"), _sparse(device), _dense(device)
    few, rows = min(rows, _SMALL_ROWS), min(rows, _ROWS)
    title = f"AdamW step, {_SMALL_IDS} uniform ids in {few:,} x {_SMALL_WIDTH} float32"
    task = _Task(_OneTable, few, (_SMALL_IDS,), history, device, seed)
    yield task.group(SMALL, title, [lazy, exact, sparse, _by_hand(device)], dim=_SMALL_WIDTH)
    if quick:
        return
    title = f"AdamW step, {_TABLES} tables of {rows:,} x {_WIDTH} float32, {_IDS} uniform ids each"
    task = _Task(_ManyTables, rows, (_TABLES, _IDS), history, device, seed)
    yield task.group(MANY, title, [lazy, exact, sparse, dense], dim=_WIDTH, tables=_TABLES)
    title = f"AdamW step, softmax over all of {rows:,} x {_WHOLE_WIDTH} float32, and {2 * _WHOLE_IDS} lookups"
    task = _Task(_WholeTable, rows, (2, _WHOLE_IDS), 0, device, seed)
    # Every step touches all rows.
    yield task.group(WHOLE, title, [replace(lazy, exact=True), exact, dense], dim=_WHOLE_WIDTH)


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
