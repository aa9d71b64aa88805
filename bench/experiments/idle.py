"""Idle rows: a recommender trained with dense, exact, lazy and SparseAdam's idle rows, on the same batches.

``make idle DATA=FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the Gowalla of LightGCN's
repository (https://github.com/kuandeng/LightGCN) has them, a line for each user: its number, then its items. The data are not
part of this repository. Matrix factorisation with the pairwise loss of BPR (Rendle et al., 2009): ``softplus(score of a random
item - score of the user's item)``.
"""

from __future__ import annotations

import functools
import lzma
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.errors import InvalidValueError
from speedtransfer.units import format_share

DENSE, EXACT, LAZY, SPARSE = WAYS = ("dense", "exact", "lazy", "SparseAdam")
DOUBLE = "dense, float64"  # its distance to dense is that of rounding alone
TOP = 20
FILES = ("train.txt", "test.txt")
RECALL, DISTANCE, APART = f"recall@{TOP}", "farthest weight from dense", "farthest loss from dense"
NOTE = (
    "dense: nn.Embedding with AdamW, in float64 too, whose distance is that of rounding alone; exact and lazy: speedtransfer "
    "with AdamW; SparseAdam has no weight decay. Recall is that of held-out items, higher is better, and the loss that of "
    "training. A distance is that of the farthest weight, as a share of the farthest that dense training has moved one."
)
CURVES = {
    "loss": ("training loss", "linear"),
    RECALL: (f"{RECALL} on held-out items (higher is better)", "linear"),
    DISTANCE: ("farthest weight from dense (1: as far as dense has moved any)", "log"),
}
_START = 0.1  # standard deviation of the first weights
_MOST = 10_000_000  # users or items

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


_QUICK = {"steps": 60, "batch": 8}
SETTINGS = [each.name for each in fields(Settings)]


def groups(device: torch.device, quick: bool, data: str = "", **others: Any) -> list[Group]:
    """Make the group of all ways, which other settings can be given for."""
    given = {name: value for name, value in others.items() if name in SETTINGS}
    settings, found = (
        Settings(**(_QUICK if quick else {}) | given),
        Data(*(_read_pairs(Path(data), name) for name in FILES)),
    )
    users, items = found.sizes
    title = f"{Path(data).resolve().name}, {users:,} users x {items:,} items"
    every = max(1, settings.steps // settings.points)
    counts = [0, *range(every, settings.steps, every), settings.steps]
    params = {**asdict(settings), "interactions": len(found.train), "steps_shown": counts, "headline": False}
    return [Group(title, functools.partial(train, found, settings, device, params), params)]


def about(groups: list[GroupResult]) -> list[str]:
    """Return what was trained, and how far the exact rows are from dense ones."""
    lines = []
    for params, cases in ((group.params, group.by_name) for group in groups):
        users, items = map(format_share, params["touched"])
        lines += [
            f"matrix factorisation with BPR, dim {params['dim']}, {params['steps']:,} steps of {params['batch']:,} pairs, "
            f"each of which touches {users} of the users and {items} of the items; AdamW with lr {params['lr']:g} "
            f"and weight decay {params['weight_decay']:g}; one seed",
            f'no weight trained with idle="exact" is farther from dense than {cases[EXACT].figures[DISTANCE]:.1e} of the '
            f"farthest that one moved, by rounding alone {cases[DOUBLE].figures[DISTANCE]:.1e}; no loss of any step differs "
            f"by more than {cases[EXACT].figures[APART]:.0e}",
        ]
    return lines


# --- data ---------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Pairs of user and item, ``(n, 2)`` int64 sorted by user."""

    train: Tensor
    test: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        users, items = (torch.cat([self.train, self.test]).amax(0) + 1).tolist()
        return users, items


def _read_pairs(folder: Path, name: str) -> Tensor:
    path = next((path for path in (folder / name, folder / f"{name}.xz") if path.is_file()), None)
    if path is None:
        raise InvalidValueError(f"there is no {name} or {name}.xz in {str(folder)!r}; name the folder that has them")
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            lines = [list(map(int, line.split())) for line in file]
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        what = "lines with the number of a user, then those of its items, as in LightGCN's Gowalla"
        raise InvalidValueError(f"cannot read {str(path)!r} ({error}); it must have {what}") from error
    pairs = torch.tensor(sorted((user, item) for user, *items in lines for item in items))
    # Each has a row, also for the dense optimizer.
    if not len(pairs) or pairs.min() < 0 or pairs.max() >= _MOST:
        raise InvalidValueError(f"{str(path)!r} names no item, or a number that is negative or not below {_MOST:,}")
    return pairs


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
        scores = users[self.users.to(users.device)] @ items.T
        known, wanted = (self._marked(pairs, scores) for pairs in self._data)
        best = scores.masked_fill_(known, -torch.inf).topk(min(TOP, scores.shape[1]), dim=1).indices
        return float((wanted.gather(1, best).sum(1).float() / wanted.sum(1)).mean())

    def _marked(self, pairs: Tensor, scores: Tensor) -> Tensor:
        """Return where the items of the users are, like `scores`, bool."""
        place = torch.searchsorted(self.users, pairs[:, 0].contiguous()).clamp_max(len(self.users) - 1)
        own = self.users[place] == pairs[:, 0]
        marked = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        marked[place[own].to(scores.device), pairs[own, 1].to(scores.device)] = True
        return marked


# --- training -----------------------------------------------------------------------------------------------------------


class Model:
    """A table of users and one of items, with an optimizer."""

    def __init__(self, way: str, start: Weights, settings: Settings) -> None:
        self.losses: list[Tensor] = []
        users, items = (weight.double() if way == DOUBLE else weight.clone() for weight in start)
        self.users, self.items = _table(way, users), _table(way, items)
        parameters = [*self.users.parameters(), *self.items.parameters()]
        if way == SPARSE:
            self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters, lr=settings.lr)
        else:
            self.optimizer = torch.optim.AdamW(parameters, settings.lr, weight_decay=settings.weight_decay, fused=True)

    def step(self, users: Tensor, items: Tensor) -> None:
        """Train on users (n,) and their items followed by n others."""
        wanted, other = self.items(items).view(2, len(users), -1)
        loss = F.softplus((self.users(users) * (other - wanted)).sum(1)).mean()
        take_step(loss, self.optimizer)
        self.losses.append(loss.detach())

    def weights(self) -> Weights:
        """Return all rows of users and of items, the idle ones of "exact" after all steps so far too."""
        return self.users.state_dict()["weight"], self.items.state_dict()["weight"]


def _table(way: str, weight: Tensor) -> nn.Embedding:
    if way in (EXACT, LAZY):
        return st.Embedding.from_pretrained(weight, freeze=False, idle=way)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=way == SPARSE)


def train(data: Data, settings: Settings, device: torch.device, params: dict[str, Any]) -> list[CaseResult]:
    """Train all ways side by side on the same batches, and return curves and differences."""
    generator = torch.Generator().manual_seed(settings.seed)
    users, items = (_START * torch.randn(size, settings.dim, generator=generator) for size in data.sizes)
    start = (users.to(device), items.to(device))
    models, recall = {way: Model(way, start, settings) for way in (*WAYS, DOUBLE)}, Recall(data, settings)
    curves: dict[str, dict[str, list[float]]] = {way: {"loss": [], RECALL: [], DISTANCE: []} for way in models}
    before, untrained, touched = 0, _digits(recall(*start)), torch.zeros(2)
    for number, batch in zip(range(1, settings.steps + 1), batches(data, settings), strict=False):
        touched += torch.tensor([len(ids.unique()) for ids in batch])
        for model in models.values():
            model.step(*(ids.to(device) for ids in batch))
        if number not in params["steps_shown"]:
            continue
        dense = models[DENSE].weights()
        moved = _distance(dense, start)
        for way, model in models.items():
            weights = model.weights()
            curves[way][DISTANCE].append(_digits(_distance(weights, dense) / moved))
            if way in WAYS:
                curves[way]["loss"].append(_digits(float(torch.stack(model.losses[before:]).mean())))
                curves[way][RECALL].append(_digits(recall(*weights)))
        before = number
        shown = (f"{way} {curves[way]['loss'][-1]:.4f} / {curves[way][RECALL][-1]:.4f}" for way in WAYS)
        print(f"step {number:,}, loss / recall: {', '.join(shown)}", flush=True)
    params["touched"] = (touched / settings.steps / torch.tensor(data.sizes)).tolist()
    dense_losses = torch.stack(models[DENSE].losses).double()
    found = []
    for way, model in models.items():
        case = CaseResult(way, "ours" if way in (EXACT, LAZY) else "other", 0)
        if way in WAYS:
            ends = {"loss": curves[way]["loss"][-1], RECALL: curves[way][RECALL][-1]}
            case.figures = {**ends, f"best {RECALL}": max(untrained, *curves[way][RECALL])}
            curves[way][RECALL].insert(0, untrained)
        apart = float((torch.stack(model.losses).double() - dense_losses).abs().max())
        case.figures |= {DISTANCE: curves[way][DISTANCE][-1], APART: apart}
        case.values = {name: values for name, values in curves[way].items() if values}
        found.append(case)
    return found


def _distance(weights: Weights, others: Weights) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(weights, others, strict=True))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
