"""Four ways to train one recommender on the same batches: dense, and idle rows exact, lazy and by SparseAdam.

Matrix factorisation with the pairwise loss of BPR (Rendle et al., 2009): ``softplus(score of a random item - score of the
user's item)``. The data are those of LightGCN's repository: one line a user, its number and then its items.
"""

from __future__ import annotations

import lzma
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from experiment import DataError
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.benchmark.measure import synchronize

DENSE, EXACT, LAZY, SPARSE = WAYS = ("dense", "exact", "lazy", "SparseAdam")
DOUBLE = "dense, float64"  # its distance to dense is that of rounding alone
TOP = 20
_START = 0.1  # standard deviation of the first weights
_USERS_AT_ONCE = 1024
_MOST = 10_000_000  # users or items: each has a row, also for the dense optimizer
_FORMAT = "lines with the number of a user, then those of its items, as in LightGCN's Gowalla"

Weights = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """What is trained and how; `lr` and `weight_decay` are AdamW's, as SparseAdam has no decay.

    The ways are compared `points` times, and at most so many `users` scored on held-out items.
    """

    steps: int = 2000
    batch: int = 2048
    dim: int = 32
    lr: float = 0.01
    weight_decay: float = 0.1
    seed: int = 0
    points: int = 20
    users: int = 1500


# --- data ---------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Pairs of user and item, ``(n, 2)`` int64 sorted by user."""

    train: Tensor
    test: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of users and of items."""
        users, items = (torch.cat([self.train, self.test]).amax(0) + 1).tolist()
        return users, items


def read_data(folder: Path) -> Data:
    """Read ``train.txt`` and ``test.txt`` of `folder`, packed (``.xz``) or not."""
    return Data(_read_pairs(folder, "train.txt"), _read_pairs(folder, "test.txt"))


def _read_pairs(folder: Path, name: str) -> Tensor:
    path = next((path for path in (folder / name, folder / f"{name}.xz") if path.is_file()), None)
    if path is None:
        raise DataError(f"there is no {name} or {name}.xz in {str(folder)!r}; name the folder that has them: {_FORMAT}")
    pairs: list[tuple[int, int]] = []
    number = 0
    try:
        with lzma.open(path, "rt", encoding="ascii") if path.suffix == ".xz" else path.open(encoding="ascii") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007
                user, *items = map(int, line.split())
                if not 0 <= min([user, *items]) <= max([user, *items]) < _MOST:
                    raise ValueError(f"a number is negative or not below {_MOST:,}")
                pairs += [(user, item) for item in items]
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        where = f"cannot read line {max(number, 1)} of {str(path)!r}"
        raise DataError(f"{where} ({error}); it must have {_FORMAT}") from error
    if not pairs:
        raise DataError(f"{str(path)!r} names no item at all; it must have {_FORMAT}")
    return torch.tensor(sorted(pairs))


def batches(data: Data, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield users, and their items followed by as many random ones, epoch by epoch in a new order."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    count, items = min(settings.batch, len(data.train)), data.sizes[1]
    while True:
        order = torch.randperm(len(data.train), generator=generator)
        for first in range(0, len(order) - count + 1, count):
            users, wanted = data.train[order[first : first + count]].unbind(1)
            yield users, torch.cat([wanted, torch.randint(items, (count,), generator=generator)])


class Recall:
    """The share of a user's held-out items among the `TOP` best of all items that it has not been trained with."""

    def __init__(self, data: Data, settings: Settings) -> None:
        users = data.test[:, 0].unique()
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(settings.seed))
        self.users, self._data = users[order[: settings.users]].sort().values, data

    def __call__(self, users: Tensor, items: Tensor) -> float:
        """Return the mean over the users, for the weights of a model."""
        shares = []
        for chosen in self.users.split(_USERS_AT_ONCE):
            scores = users[chosen.to(users.device)] @ items.T
            known, wanted = (self._marked(pairs, chosen, scores) for pairs in self._data)
            best = scores.masked_fill_(known, -torch.inf).topk(min(TOP, scores.shape[1]), dim=1).indices
            shares.append((wanted.gather(1, best).sum(1).float() / wanted.sum(1)).cpu())
        return float(torch.cat(shares).mean())

    def _marked(self, pairs: Tensor, users: Tensor, scores: Tensor) -> Tensor:
        """Return where the items of `users` are, like `scores`, bool."""
        place = torch.searchsorted(users, pairs[:, 0].contiguous()).clamp_max(len(users) - 1)
        own = users[place] == pairs[:, 0]
        marked = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        marked[place[own].to(scores.device), pairs[own, 1].to(scores.device)] = True
        return marked


# --- training -----------------------------------------------------------------------------------------------------------


class Model:
    """A table of users and one of items, with an optimizer."""

    def __init__(self, way: str, start: Weights, settings: Settings) -> None:
        self.losses: list[Tensor] = []
        self.seconds = 0.0
        users, items = (weight.double() if way == DOUBLE else weight.clone() for weight in start)
        self.users, self.items = _table(way, users), _table(way, items)
        parameters = [*self.users.parameters(), *self.items.parameters()]
        if way == SPARSE:
            self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters, lr=settings.lr)
        else:
            self.optimizer = torch.optim.AdamW(parameters, settings.lr, weight_decay=settings.weight_decay, fused=True)

    def step(self, users: Tensor, items: Tensor) -> None:
        """Train on users (n,) and their items followed by n others."""
        synchronize(users.device)
        start = time.perf_counter()
        wanted, other = self.items(items).view(2, len(users), -1)
        loss = F.softplus((self.users(users) * (other - wanted)).sum(1)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        synchronize(users.device)
        self.seconds += time.perf_counter() - start

    def weights(self) -> Weights:
        """Return all rows of users and of items, the idle ones of "exact" after all steps so far too."""
        return self.users.state_dict()["weight"], self.items.state_dict()["weight"]


def _table(way: str, weight: Tensor) -> nn.Embedding:
    if way in (EXACT, LAZY):
        return st.Embedding.from_pretrained(weight, freeze=False, idle=way)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=way == SPARSE)


def train(
    data: Data, settings: Settings, device: torch.device, report: Callable[[int, dict[str, Any]], None]
) -> dict[str, Any]:
    """Train all ways side by side on the same batches, and return curves and differences as plain data.

    `report` gets the step and the curves, whenever the ways have been compared.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    users, items = (_START * torch.randn(size, settings.dim, generator=generator) for size in data.sizes)
    start = (users.to(device), items.to(device))
    models, recall = {way: Model(way, start, settings) for way in (*WAYS, DOUBLE)}, Recall(data, settings)
    untrained = recall(*start)
    curves: dict[str, dict[str, list[float]]] = {
        way: {"loss": [], "recall": [untrained], "distance": []} for way in WAYS
    }
    curves[DOUBLE] = {"distance": []}
    counts, touched = [0], torch.zeros(2)
    every = max(1, settings.steps // settings.points)
    for number, batch in enumerate(batches(data, settings), start=1):
        touched += torch.tensor([len(ids.unique()) for ids in batch])
        for model in models.values():
            model.step(*(ids.to(device) for ids in batch))
        if number % every and number != settings.steps:
            continue
        dense = models[DENSE].weights()
        moved = _distance(dense, start)
        for way, model in models.items():
            weights = model.weights()
            curves[way]["distance"].append(_digits(_distance(weights, dense) / moved))
            if way in WAYS:
                curves[way]["loss"].append(_digits(float(torch.stack(model.losses[counts[-1] :]).mean())))
                curves[way]["recall"].append(_digits(recall(*weights)))
        counts.append(number)
        report(number, curves)
        if number >= settings.steps:
            break
    losses = {way: torch.stack(models[way].losses).double() for way in WAYS}
    return {
        "settings": asdict(settings),
        "sizes": {"users": len(users), "items": len(items), "interactions": len(data.train)},
        "asked": len(recall.users),
        "touched": (touched / settings.steps / torch.tensor(data.sizes)).tolist(),
        "counts": counts,  # of steps, where the curves have points; losses are means since the point before
        "curves": curves,
        "moved": moved,
        "loss_difference": {way: float((loss - losses[DENSE]).abs().max()) for way, loss in losses.items()},
        "training_seconds": {way: round(model.seconds, 1) for way, model in models.items()},
    }


def _distance(weights: Weights, others: Weights) -> float:
    """Return the largest difference of any weight."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(weights, others, strict=True))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
