"""Lookups and training steps in a table with a vocabulary, beside a plain table with the same rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.environment import Room, host_room
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.workload import MIX, Lookups, zipf_ids
from speedtransfer.nn import Embedding
from speedtransfer.vocabulary import Vocabulary

STEP, LOOKUP = "step", "lookup"
PLAIN = "plain table, ids are rows"
KNOWN, NEW, EVICTED = (
    "vocabulary, known ids",
    "vocabulary, {:.0%} new ids",
    "vocabulary, {:.0%} new ids, as many evicted",
)
DEFERRED = "vocabulary, known ids, deferred=True"
BY_DICT = "dict, then the plain table"
NEW_SHARE = 0.01

# Rows, columns.
_TABLES, _QUICK_TABLES = ((10_000, 32), (1_000_000, 64)), ((1000, 8),)
_BATCH, _QUICK_BATCH = 8192, 200
_BATCHES = 32
_LR = 1e-3
_BACK = pow(MIX, -1, 1 << 64) - (1 << 64)


def names_of(numbers: Tensor) -> Tensor:
    """Return a distinct 64-bit id for each number, int64."""
    return numbers * MIX


def numbers_of(names: Tensor) -> Tensor:
    """Invert `names_of`."""
    return names * _BACK


def groups(device: torch.device, quick: bool, rows: int | None, seed: int) -> list[Group]:
    """Make groups of steps with lazy and exact idle rows, and of lookups, for each table."""
    tables = _QUICK_TABLES if quick else _TABLES
    tables = tables if rows is None else ((rows, tables[0][1]),)
    batch, found = _QUICK_BATCH if quick else _BATCH, []
    for size, dim in tables:
        about = f"{batch:,} ids in {size:,} x {dim} float32"
        params = {"rows": size, "dim": dim, "ids": batch}
        effort = {"budget_s": 1.0 if quick else 10.0}
        for idle in ("lazy", "exact"):
            make = functools.partial(_step_cases, device, size, dim, batch, idle, seed)
            found.append(
                Group(f"AdamW step, idle={idle}, {about}", make, {"kind": STEP, "idle": idle, **params}, effort=effort)
            )
        make = functools.partial(_lookup_cases, device, size, dim, batch, seed)
        found.append(Group(f"lookup in evaluation, {about}", make, {"kind": LOOKUP, **params}))
    return found


class _Training:
    """A table trained with AdamW, with initial `values` (rows, dim); a vocabulary knows the names of all rows."""

    def __init__(self, values: Tensor, device: torch.device, idle: str, vocabulary: Vocabulary | None = None) -> None:
        rows, dim = values.shape
        place: dict[str, Any] = {
            "device": device,
            "memory": "pinned" if device.type == "cuda" else "pageable",
            "idle": idle,
        }
        self.vocabulary = vocabulary
        if vocabulary is None:
            self.embedding = Embedding(rows, dim, _weight=values.clone(), **place)
        else:
            self.embedding = Embedding(rows, dim, vocabulary=vocabulary, **place)
            vocabulary.update(names_of(torch.arange(rows)), values)
        self.optimizer = torch.optim.AdamW(self.embedding.parameters(), lr=_LR, fused=True)

    def step(self, ids: Tensor, grad: Tensor) -> None:
        """Train on ids, with the gradient of their rows."""
        self.embedding(ids).backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Steps:
    """Training steps on batches of ids."""

    def __init__(self, training: _Training, batch: Callable[[], Tensor], values: Tensor, grad: Tensor) -> None:
        self.training, self._batch, self._values, self._grad = training, batch, values, grad
        self.first: tuple[Tensor, Tensor] | None = None

    def run(self) -> None:
        ids = self._batch()
        if self.first is None:
            self.first = ids, self._begin(ids)
        self.training.step(ids, self._grad)

    def _begin(self, ids: Tensor) -> Tensor:
        ids, vocabulary = ids.cpu(), self.training.vocabulary
        if vocabulary is None:
            return self._values[ids]
        rows, begun = numbers_of(ids), vocabulary.initial_values(ids.numpy(), self._values.shape[1], torch.float32)
        known = (rows >= 0) & (rows < len(self._values))
        begun[known] = self._values[rows[known]]
        return begun

    @torch.no_grad()
    def check(self) -> None:
        """Compare the first step with dense training; then take more, so that rows become idle."""
        assert self.first is not None
        ids, begun = self.first
        distinct, inverse = ids.cpu().unique(return_inverse=True)
        start = torch.empty(len(distinct), begun.shape[1]).index_copy_(0, inverse, begun)
        weight = nn.Parameter(start)
        with torch.enable_grad():
            F.embedding(inverse, weight).backward(self._grad.cpu())
        torch.optim.AdamW([weight], lr=_LR).step()
        embedding = self.training.embedding
        embedding.eval()
        found = embedding(ids).cpu()
        embedding.train()
        torch.testing.assert_close(found, weight[inverse], rtol=1e-4, atol=1e-5)
        with torch.enable_grad():
            for _ in range(_BATCHES):
                self.run()


def _step_cases(device: torch.device, rows: int, dim: int, batch: int, idle: str, seed: int) -> list[Case]:
    if (error := Room({"host": host_room()}).take(6 * 3 * 4 * rows * dim)) is not None:
        raise error
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator)
    # Eighths: sums are exact, and no sum is nearly zero, where the sign in Adam's first step would be arbitrary.
    grad = (torch.randint(-8, 8, (batch, dim), generator=generator) + 0.5) / 8
    drawn = [zipf_ids(rows, batch, generator) for _ in range(_BATCHES)]
    plain_ids, named = [ids.to(device) for ids in drawn], [names_of(ids).to(device) for ids in drawn]
    fewest = max(1, round(NEW_SHARE * batch))
    settings: dict[str, dict[str, Any]] = {
        KNOWN: {},
        NEW.format(NEW_SHARE): {"max_capacity": float("inf")},
        EVICTED.format(NEW_SHARE): {"evict": "lru"},
    }
    if device.type == "cuda":
        # The host does not wait to see whether ids are new.
        settings[DEFERRED] = {"deferred": True}
    grad_there = grad.to(device)
    found = []
    for name, options in settings.items():
        training = _Training(values, device, idle, Vocabulary(seed=0, **options))
        turn: Callable[[], Tensor] = cycle(named)
        steps = _Steps(
            training, turn if name in (KNOWN, DEFERRED) else _with_new(turn, rows, fewest), values, grad_there
        )
        found.append(Case.of(name, steps, "ours"))
    for name, batches in ((PLAIN, cycle(plain_ids)), (BY_DICT, _by_dict(rows, named, device))):
        found.append(Case.of(name, _Steps(_Training(values, device, idle), batches, values, grad_there)))
    return found


def _with_new(turn: Callable[[], Tensor], rows: int, count: int) -> Callable[[], Tensor]:
    """Return a function that puts `count` new ids, evenly spaced, into each batch of `turn`."""
    seen = rows

    def batch() -> Tensor:
        nonlocal seen
        ids = turn().clone()
        ids[:: len(ids) // count][:count] = names_of(torch.arange(seen, seen + count)).to(ids.device)
        seen += count
        return ids

    return batch


def _by_dict(rows: int, named: list[Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return a function that finds the rows of the next batch in a dict."""
    known = dict(zip(names_of(torch.arange(rows)).tolist(), range(rows), strict=True))
    turn: Callable[[], Tensor] = cycle(named)
    return lambda: torch.tensor([known[id] for id in turn().tolist()]).to(device)


def _lookup_cases(device: torch.device, rows: int, dim: int, batch: int, seed: int) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator)
    drawn = [zipf_ids(rows, batch, generator) for _ in range(_BATCHES)]
    found = []
    for name, vocabulary in ((KNOWN, Vocabulary(seed=0)), (PLAIN, None)):
        embedding = _Training(values, device, "lazy", vocabulary).embedding.eval()
        given = [(ids if vocabulary is None else names_of(ids), values[ids]) for ids in drawn]
        lookups = Lookups(embedding, [(ids.to(device), expected) for ids, expected in given])
        found.append(Case.of(name, lookups, "other" if vocabulary is None else "ours"))
    return found
