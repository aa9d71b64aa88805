"""Train on streams of ids that drift, with tables that have fewer rows than there are ids, and measure the quality.

Two streams. "zipf": popularity by Zipf's law, and ranks that move; each id has a hidden vector, which is to be learnt as its
row by a logistic regression. "gowalla": users and their items in the order of a file, matrix factorization; a user is asked
for the items held out right after it was trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from idle_data import TOP, Data, hits_among_best, pairs_of
from torch import Tensor, nn

import speedtransfer as st

FULL, HASHED = "full", "hashed"
LRU, LFU, TTL, SEEN_TWICE = "lru", "lfu", "ttl", "lru, admit=2"
POLICIES = (LRU, SEEN_TWICE, LFU, TTL, HASHED)
# Odd, so that multiplying maps consecutive ids to distinct ids of 64 bits.
_MIX = -7046029254386353131


@dataclass(frozen=True)
class Settings:
    """What is trained and how.

    Attributes
    ----------
    shares : tuple of float
        Rows of a table, of the ids that it ever sees.
    seed : int
    half_life : float
        Of "lfu", in steps.
    ids, steps, batch, moves, inputs : int
        Of "zipf": ids in all; pairs of ids that change places in a step; inputs of an example, which are columns of a row.
    users, block, passes, pairs, dim : int
        Of "gowalla": users; how many of them are trained together, how often, and the pairs of a step.
    lr, gowalla_lr : float
        Of Adagrad.
    """

    shares: tuple[float, ...] = (0.1, 0.25, 0.5)
    seed: int = 0
    half_life: float = 200.0
    ids: int = 50_000
    steps: int = 1500
    batch: int = 1024
    moves: int = 100
    inputs: int = 4
    lr: float = 0.25
    users: int = 8000
    block: int = 200
    passes: int = 6
    pairs: int = 1024
    dim: int = 32
    gowalla_lr: float = 0.1


QUICK = Settings(ids=1000, steps=60, batch=32, moves=5, half_life=20.0, users=120, block=5, passes=2, pairs=20, dim=4)


# --- tables ---------------------------------------------------------------------------------------------------------------


class Table(nn.Module):
    """A table for ids of any number, with few rows.

    Parameters
    ----------
    batches : list of Tensor
        The ids of each step; they determine the number of rows and the time to live.
    policy : str
    share : float
        Rows, of the distinct ids.
    dim : int
    settings : Settings
    initial : tuple or float
        Of rows.
    """

    def __init__(
        self, batches: list[Tensor], policy: str, share: float, dim: int, settings: Settings, initial: Any
    ) -> None:
        super().__init__()
        distinct = [ids.unique().numpy() for ids in batches]
        seen = len(np.unique(np.concatenate(distinct)))
        self.num_rows = seen if policy == FULL else max(1, round(share * seen))
        self.hashed, self.lifetime = policy == HASHED, 0
        options: dict[str, Any] = {LRU: {"evict": "lru"}, SEEN_TWICE: {"evict": "lru", "admit": 2}}.get(policy, {})
        if policy == LFU:
            options = {"evict": "lfu", "half_life": settings.half_life}
        if policy == TTL:
            self.lifetime = fitting_lifetime(distinct, self.num_rows)
            options = {"evict": self.lifetime}
        if self.hashed:
            self.rows = st.Embedding(self.num_rows, dim, idle="lazy", device="cpu")
            with torch.no_grad():
                fill(self.rows, initial)
        else:
            vocabulary = st.Vocabulary(initial=initial, seed=settings.seed, unseen="zeros", **options)
            self.rows = st.Embedding(self.num_rows, dim, vocabulary=vocabulary, idle="lazy", device="cpu")
        self.lookups = self.found = 0

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the rows of ids, ``(n, dim)``."""
        names = numbers * _MIX
        return self.rows(names % self.num_rows if self.hashed else names)

    def count(self, numbers: Tensor) -> None:
        """Count which ids have a row now."""
        self.lookups += len(numbers)
        vocabulary = self.rows.vocabulary
        self.found += len(numbers) if vocabulary is None else int((vocabulary.rows(numbers * _MIX) >= 0).sum())

    def about(self) -> dict[str, Any]:
        """Return the number of rows, and the share of lookups that found one."""
        evicted = 0 if self.hashed else self.rows.vocabulary.stats().evicted
        return {
            "rows": self.num_rows,
            "found": self.found / self.lookups,
            "evicted": evicted,
            "lifetime": self.lifetime,
        }


def fill(embedding: Any, initial: Any) -> None:
    """Initialize all rows as those of a vocabulary are."""
    if isinstance(initial, tuple):
        nn.init.normal_(embedding.weight, initial[1], initial[2])
    else:
        nn.init.constant_(embedding.weight, initial)


def fitting_lifetime(distinct: list[np.ndarray], rows: int) -> int:
    """Return the longest time to live, in steps since the last use, with at most `rows` ids alive at once; 1 at least."""
    names, places = np.unique(np.concatenate(distinct), return_inverse=True)
    parts = np.split(places, np.cumsum([len(ids) for ids in distinct])[:-1])

    def most(steps: int) -> int:
        """Return the most distinct ids in so many steps, one after the other."""
        counts, alive, highest = np.zeros(len(names), dtype=np.int64), 0, 0
        for number, part in enumerate(parts):
            alive += int((counts[part] == 0).sum())
            counts[part] += 1
            if number >= steps:
                counts[parts[number - steps]] -= 1
                alive -= int((counts[parts[number - steps]] == 0).sum())
            highest = max(highest, alive)
        return highest

    low, high = 1, len(parts)
    while low < high:
        middle = (low + high + 1) // 2
        # Those of a step and of as many before it.
        low, high = (middle, high) if most(middle + 1) <= rows else (low, middle - 1)
    return low


# --- ranks that move ------------------------------------------------------------------------------------------------------


class Zipf:
    """Batches of ids with inputs, labels and the probabilities of label 1; the same for every table."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._draw = torch.Generator().manual_seed(settings.seed)
        self._hidden = torch.randn(settings.ids, settings.inputs, generator=self._draw) * (
            2 / math.sqrt(settings.inputs)
        )
        self.batches = list(self._ids())

    def _ids(self) -> Iterator[Tensor]:
        settings, draw = self._settings, self._draw
        id_of_rank = torch.randperm(settings.ids, generator=draw)
        for _ in range(settings.steps):
            # Frequency falls as 1 / rank, by the inverse of its integral.
            shares = torch.rand(settings.batch, generator=draw, dtype=torch.float64)
            ranks = torch.exp(shares * math.log(settings.ids + 1)).long().clamp_(1, settings.ids) - 1
            yield id_of_rank[ranks]
            moved = torch.randperm(settings.ids, generator=draw)[: 2 * settings.moves]
            id_of_rank[moved] = id_of_rank[moved.roll(settings.moves)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Yield ids (n,), inputs (n, dim), labels (n,) and their probabilities (n,)."""
        draw = torch.Generator().manual_seed(self._settings.seed + 1)
        for ids in self.batches:
            inputs = torch.randn(len(ids), self._settings.inputs, generator=draw)
            chances = torch.sigmoid((self._hidden[ids] * inputs).sum(1))
            yield ids, inputs, torch.bernoulli(chances, generator=draw), chances


def train_zipf(stream: Zipf, policy: str, share: float, settings: Settings) -> dict[str, Any]:
    """Predict each batch, then train on it; return the share of the reducible loss that was removed, in the second half."""
    start = time.perf_counter()
    table = Table(stream.batches, policy, share, settings.inputs, settings, 0.0)
    optimizer = torch.optim.Adagrad(table.parameters(), settings.lr)
    losses, best = [], []
    for step, (ids, inputs, labels, chances) in enumerate(stream):
        if measured := 2 * step >= settings.steps:
            table.count(ids)
        # Rows that are new are zero, as those of ids without one: this is the prediction before training.
        loss = F.binary_cross_entropy_with_logits((table(ids) * inputs).sum(1), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if measured:
            losses.append(loss.item())
            best.append(F.binary_cross_entropy(chances, labels).item())
    gone = (math.log(2) - np.mean(losses)) / (math.log(2) - np.mean(best))
    return {"quality": float(gone), **table.about(), "seconds": time.perf_counter() - start}


# --- users and items ------------------------------------------------------------------------------------------------------


class Blocks:
    """Pairs of user and item in the order of the file: blocks of users, each of which is trained several times."""

    def __init__(self, data: Data, settings: Settings) -> None:
        self._data = data
        draw = torch.Generator().manual_seed(settings.seed)
        count = min(settings.users, data.sizes[0])
        self.blocks: list[tuple[range, list[tuple[Tensor, Tensor]]]] = []
        for first in range(0, count, settings.block):
            users = range(first, min(first + settings.block, count))
            pairs, steps = pairs_of(data.train, first, len(users)) + torch.tensor([first, 0]), []
            for _ in range(settings.passes):
                order = torch.randperm(len(pairs), generator=draw)
                steps += [tuple(pairs[chosen].unbind(1)) for chosen in order.split(settings.pairs)]
            self.blocks.append((users, steps))
        self.steps = [step for _, steps in self.blocks for step in steps]

    def recall(self, users: Table, items: Table, block: range) -> list[float]:
        """Return recall@`TOP` of held-out items for each user of a block."""
        known, wanted = (pairs_of(pairs, block.start, len(block)) for pairs in self._data)
        with torch.no_grad():
            users.eval()
            items.eval()
            scores = users(torch.arange(block.start, block.stop)) @ items(torch.arange(self._data.sizes[1])).T
            users.train()
            items.train()
        hits, counts = hits_among_best(scores, known, wanted, TOP)
        return (hits.sum(1)[counts > 0] / counts[counts > 0]).tolist()


def train_gowalla(stream: Blocks, policy: str, share: float, settings: Settings) -> dict[str, Any]:
    """Train block after block, and rank the held-out items of each; return the recall in the second half."""
    start = time.perf_counter()
    initial = ("normal", 0.0, 0.1)
    torch.manual_seed(settings.seed)
    columns = (list(column) for column in zip(*stream.steps, strict=True))
    users, items = (Table(column, policy, share, settings.dim, settings, initial) for column in columns)
    optimizer = torch.optim.Adagrad([*users.parameters(), *items.parameters()], settings.gowalla_lr)
    draw, recalls = torch.Generator().manual_seed(settings.seed), list[float]()
    for number, (block, steps) in enumerate(stream.blocks):
        measured = 2 * number >= len(stream.blocks)
        for own_users, own in steps:
            if measured:
                items.count(own)
            wanted = items(own)
            # Negatives are items of others in the batch: a random one would count as a use of its id.
            other = wanted[torch.randperm(len(own), generator=draw)]
            F.softplus((users(own_users) * (other - wanted)).sum(1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if measured:
            recalls += stream.recall(users, items, block)
    about = items.about()
    return {
        "quality": float(np.mean(recalls)),
        **about,
        "user_rows": users.num_rows,
        "seconds": time.perf_counter() - start,
    }
