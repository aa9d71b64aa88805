"""Steps of models that use a table as a whole, or many tables beside dense layers; the same models with `nn.Embedding`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.kinds import OURS
from speedtransfer.benchmark.measure import Case, Group, Role
from speedtransfer.nn import Embedding

WHOLE, DEEPFM = "whole table", "DeepFM"
ROWS, WHOLE_WIDTH, WHOLE_IDS = 100_000, 64, 64
TABLES, WIDTH, HIDDEN, IDS = 26, 16, 64, 256
_POOL = 16  # batches, taken in turn
_CHECKED = 5  # steps that the weights are compared over

_Embed = Callable[[int, int], nn.Module]
_AdamW = functools.partial(torch.optim.AdamW, fused=True)


class _WholeTable(nn.Module):
    """The loss of a softmax over all rows, which are looked up too: tied weights, as in a language model."""

    def __init__(self, embed: _Embed, rows: int) -> None:
        super().__init__()
        self.emb = embed(rows, WHOLE_WIDTH)
        nn.init.normal_(self.emb.get_parameter("weight"), std=0.1)

    def forward(self, batch: Tensor) -> Tensor:
        hidden, wanted = self.emb(batch[0]), self.emb(batch[1])
        logits = hidden @ self.emb.get_parameter("weight").T
        return (logits.logsumexp(dim=1) - (hidden * wanted).sum(dim=1)).mean()


class _DeepFM(nn.Module):
    """Loss of a factorization machine and a network on the same rows: a wide table and one of single weights a feature."""

    def __init__(self, embed: _Embed, rows: int) -> None:
        super().__init__()
        self.factors = nn.ModuleList(embed(rows, WIDTH) for _ in range(TABLES))
        self.linear = nn.ModuleList(embed(rows, 1) for _ in range(TABLES))
        self.deep = nn.Sequential(nn.Linear(TABLES * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, batch: Tensor) -> Tensor:
        *features, labels = batch
        rows = torch.stack([table(ids) for table, ids in zip(self.factors, features, strict=True)], dim=1)
        pairs = (rows.sum(dim=1).square() - rows.square().sum(dim=1)).sum(dim=1) / 2
        linear = torch.cat([table(ids) for table, ids in zip(self.linear, features, strict=True)], dim=1).sum(dim=1)
        return F.binary_cross_entropy_with_logits(
            pairs + linear + self.deep(rows.flatten(1)).squeeze(1), labels.float()
        )


@dataclass(frozen=True)
class _Way:
    """One way to make the tables of a model."""

    name: str
    role: Role
    embed: _Embed


def groups(device: torch.device, rows: int, seed: int, history: int) -> Iterator[Group]:
    """Yield a group for a table used as a whole, and one for a DeepFM.

    Parameters
    ----------
    device : torch.device
    rows : int
        Of each table, at most.
    seed : int
    history : int
        Steps before any is timed, of models whose rows are idle in between.
    """
    rows = min(rows, ROWS)
    dense = _Way("nn.Embedding + AdamW", "other", functools.partial(nn.Embedding, device=device))
    lazy, exact = (_ours(device, idle) for idle in ("lazy", "exact"))
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, rows, (_POOL, 2, WHOLE_IDS), generator=draw)
    clicks = torch.randint(0, rows, (_POOL, TABLES + 1, IDS), generator=draw)
    clicks[:, -1] %= 2  # the labels
    title = f"AdamW step, softmax over all of {rows:,} x {WHOLE_WIDTH} float32, and {2 * WHOLE_IDS} lookups"
    params = {"experiment": WHOLE, "rows": rows, "dim": WHOLE_WIDTH, "history": 0}
    yield Group(
        title, functools.partial(_cases, _WholeTable, [lazy, exact, dense], device, rows, seed, whole, 0), params
    )
    tables = f"{TABLES} tables of {rows:,} x {WIDTH} and {TABLES} of {rows:,} x 1 float32"
    params = {"experiment": DEEPFM, "rows": rows, "dim": WIDTH, "tables": TABLES, "history": history}
    make = functools.partial(_cases, _DeepFM, [exact, dense], device, rows, seed, clicks, history)
    yield Group(f"AdamW step, DeepFM with {tables}, {IDS} examples, after {history:,} steps", make, params)


def _ours(device: torch.device, idle: str) -> _Way:
    memory = "pinned" if device.type == "cuda" else "pageable"
    name = OURS.format(memory) + (f", idle={idle}" if idle != "lazy" else "")
    return _Way(name, "ours", functools.partial(Embedding, device=device, memory=memory, idle=idle))


def _cases(
    model: Callable[[_Embed, int], nn.Module],
    ways: list[_Way],
    device: torch.device,
    rows: int,
    seed: int,
    pool: Tensor,
    history: int,
) -> list[Case]:
    batches = list(pool.to(device))
    steps = [_Step(model, way, device, rows, seed, batches, history if way.role == "ours" else 0) for way in ways]
    return [Case(step.way.name, step.run, step.check, role=step.way.role) for step in steps]


class _Step:
    """A step of one way. The model is made at the first one, so that a lack of memory is the error of this case alone."""

    def __init__(
        self,
        model: Callable[[_Embed, int], nn.Module],
        way: _Way,
        device: torch.device,
        rows: int,
        seed: int,
        batches: list[Tensor],
        history: int,
    ) -> None:
        self.way, self.batches, self.history = way, batches, history
        self._make, self._device, self._rows, self._seed = model, device, rows, seed
        self._number = 0
        self.model: nn.Module | None = None

    def run(self) -> None:
        """Take a step."""
        if self.model is None:
            self.model = self._built(self.way.embed)
            self._optimizer = _AdamW(self.model.parameters())
        _train(self.model, self._optimizer, self.batches[self._number % len(self.batches)])
        self._number += 1

    def _built(self, embed: _Embed) -> nn.Module:
        torch.manual_seed(self._seed)
        return self._make(embed, self._rows).to(self._device)

    def check(self) -> None:
        """Compare all weights after some steps with those of dense training, not fused. Then take `history` others."""
        assert self.model is not None
        for _ in range(_CHECKED - 1):
            self.run()
        dense = self._built(functools.partial(nn.Embedding, device=self._device))
        optimizer = torch.optim.AdamW(dense.parameters(), foreach=True)
        for batch in self.batches[:_CHECKED]:
            _train(dense, optimizer, batch)
        found = self.model.state_dict()
        for name, expected in dense.state_dict().items():
            torch.testing.assert_close(found[name].to(expected.device), expected, rtol=1e-4, atol=2e-5)
        for _ in range(self.history):
            self.run()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
