"""Lookups and training steps in a table whose ids have a vocabulary, beside a plain table with the same rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.environment import Room, host_room
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.workload import zipf_ids
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
# 2**64 divided by the golden ratio: an odd number, so that ids which count up become others, all different.
_MIX = -7046029254386353131
_BACK = pow(_MIX, -1, 1 << 64) - (1 << 64)


def names_of(numbers: Tensor) -> Tensor:
    """Return ids of 64 bits, a different one for each of `numbers`, int64."""
    return numbers * _MIX


def numbers_of(names: Tensor) -> Tensor:
    """Return the numbers that `names_of` made ids of."""
    return names * _BACK


def groups(device: torch.device, quick: bool, rows: int | None, seed: int) -> list[Group]:
    """Return what is compared: steps with lazy and with exact idle rows, and lookups, for each table."""
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


class Training:
    """A table with AdamW, whose rows begin with `values` (rows, dim).

    With a vocabulary the ids are names of rows, and known from the beginning.
    """

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
        """Train on ids, whose rows have the gradient `grad`."""
        self.embedding(ids).backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Steps:
    """Steps of a training, on batches of its own kind."""

    def __init__(self, training: Training, batch: Callable[[], Tensor], values: Tensor, grad: Tensor) -> None:
        self.training, self._batch, self._values, self._grad = training, batch, values, grad
        self.first: tuple[Tensor, Tensor] | None = None

    def run(self) -> None:
        """Take a step."""
        ids = self._batch()
        if self.first is None:
            self.first = ids, self._begin(ids)
        self.training.step(ids, self._grad)

    def _begin(self, ids: Tensor) -> Tensor:
        """Return what the rows of ids begin with."""
        ids, vocabulary = ids.cpu(), self.training.vocabulary
        if vocabulary is None:
            return self._values[ids]
        rows, begun = numbers_of(ids), vocabulary.initial_values(ids.numpy(), self._values.shape[1], torch.float32)
        known = (rows >= 0) & (rows < len(self._values))
        begun[known] = self._values[rows[known]]
        return begun

    @torch.no_grad()
    def check(self) -> None:
        """Compare the rows after the first step with those of dense training; then take steps, for rows to become idle."""
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
    # Eighths: their sums are exact, and none is nearly zero, where Adam's first step, lr * sign(grad), would be chance.
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
        # The host does not wait for ids to see whether there are new ones.
        settings[DEFERRED] = {"deferred": True}
    grad_there = grad.to(device)
    found = []
    for name, options in settings.items():
        training = Training(values, device, idle, Vocabulary(seed=0, **options))
        turn: Callable[[], Tensor] = cycle(named)
        steps = Steps(
            training, turn if name in (KNOWN, DEFERRED) else _with_new(turn, rows, fewest), values, grad_there
        )
        found.append(Case.of(name, steps, "ours"))
    for name, batches in ((PLAIN, cycle(plain_ids)), (BY_DICT, _by_dict(rows, named, device))):
        found.append(Case.of(name, Steps(Training(values, device, idle), batches, values, grad_there)))
    return found


def _with_new(turn: Callable[[], Tensor], rows: int, count: int) -> Callable[[], Tensor]:
    """Return a function that gives the batches of `turn` with `count` ids that never came before, in equal distances."""
    seen = rows

    def batch() -> Tensor:
        nonlocal seen
        ids = turn().clone()
        ids[:: len(ids) // count][:count] = names_of(torch.arange(seen, seen + count)).to(ids.device)
        seen += count
        return ids

    return batch


def _by_dict(rows: int, named: list[Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return a function that gives the rows of the next batch of `named`, from a dict of all."""
    known = dict(zip(names_of(torch.arange(rows)).tolist(), range(rows), strict=True))
    turn: Callable[[], Tensor] = cycle(named)
    return lambda: torch.tensor([known[id] for id in turn().tolist()]).to(device)


class _Lookups:
    def __init__(self, embedding: Embedding, batches: list[tuple[Tensor, Tensor]]) -> None:
        self._embedding, self._turn = embedding, cycle(batches)

    def run(self) -> Tensor:
        with torch.inference_mode():
            return self._embedding(self._turn()[0])

    def check(self) -> None:
        ids, rows = self._turn()
        with torch.inference_mode():
            assert torch.equal(self._embedding(ids).cpu(), rows), "the rows looked up are not those of the ids"


def _lookup_cases(device: torch.device, rows: int, dim: int, batch: int, seed: int) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator)
    drawn = [zipf_ids(rows, batch, generator) for _ in range(_BATCHES)]
    found = []
    for name, vocabulary in ((KNOWN, Vocabulary(seed=0)), (PLAIN, None)):
        embedding = Training(values, device, "lazy", vocabulary).embedding.eval()
        given = [(ids if vocabulary is None else names_of(ids), values[ids]) for ids in drawn]
        lookups = _Lookups(embedding, [(ids.to(device), expected) for ids, expected in given])
        found.append(Case.of(name, lookups, "other" if vocabulary is None else "ours"))
    return found
