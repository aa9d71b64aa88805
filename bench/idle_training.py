"""Four ways to train one recommender on the same batches: dense, and idle rows exact, lazy and by SparseAdam.

Matrix factorisation with the pairwise loss of BPR (Rendle et al., 2009): ``softplus(score of a random item - score of the
user's item)``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from idle_data import Data, Recall, Settings, batches
from torch import Tensor, nn

import speedtransfer as st

DENSE, EXACT, LAZY, SPARSE = WAYS = ("dense", "exact", "lazy", "SparseAdam")
DOUBLE = "dense, float64"  # its distance to dense is that of rounding alone
_START = 0.1  # standard deviation of the first weights

Weights = tuple[Tensor, Tensor]


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
        _wait(users)
        start = time.perf_counter()
        wanted, other = self.items(items).view(2, len(users), -1)
        loss = F.softplus((self.users(users) * (other - wanted)).sum(1)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        _wait(users)
        self.seconds += time.perf_counter() - start

    def weights(self) -> Weights:
        """Return all rows of users and of items, the idle ones of "exact" after all steps so far too."""
        return self.users.state_dict()["weight"], self.items.state_dict()["weight"]


def _table(way: str, weight: Tensor) -> nn.Embedding:
    if way in (EXACT, LAZY):
        return st.Embedding.from_pretrained(weight, freeze=False, idle=way)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=way == SPARSE)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def train(
    data: Data, settings: Settings, device: torch.device, report: Callable[[int, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Train all ways side by side on the same batches, and return curves and differences as plain data.

    Parameters
    ----------
    data : Data
    settings : Settings
    device : torch.device
        The compute device.
    report : callable, optional
        Gets the step and the curves, whenever the ways have been compared.
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
            curves[way]["distance"].append(_distance(weights, dense) / moved)
            if way in WAYS:
                curves[way]["loss"].append(float(torch.stack(model.losses[counts[-1] :]).mean()))
                curves[way]["recall"].append(recall(*weights))
        counts.append(number)
        if report is not None:
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
        "curves": _rounded(curves),
        "moved": moved,
        "loss_difference": {way: float((loss - losses[DENSE]).abs().max()) for way, loss in losses.items()},
        "training_seconds": {way: round(model.seconds, 1) for way, model in models.items()},
    }


def _distance(weights: Weights, others: Weights) -> float:
    """Return the largest difference of any weight."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(weights, others, strict=True))


def _rounded(curves: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    return {way: {key: [float(f"{v:.5g}") for v in values] for key, values in c.items()} for way, c in curves.items()}
