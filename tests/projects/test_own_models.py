"""Models of our own, written and trained as public projects do: what the other files check, without a package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from projects.click_models import DLRM, DeepFM, binary_loss
from projects.data import ITEMS, USERS, clicks, interactions, sequences
from projects.item_models import BilinearNet, LightGCN, MatrixFactorization, SASRec
from projects.pairs import WAYS, Outcome, classes, compare, hand_over

BATCH = 100
LATE = "late"  # replaced after the optimizer is made
MODELS = (DLRM, DeepFM, LightGCN, MatrixFactorization, BilinearNet, SASRec)
CASES = {
    "DLRM": ("SGD", {"lr": 0.5}),
    "DLRM Adagrad": ("Adagrad", {"lr": 0.1}),
    "DeepFM": ("Adam", {"lr": 0.02}),
    "DeepFM coupled": ("Adam", {"lr": 0.02, "weight_decay": 1e-4}),
    "DeepFM AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    "LightGCN": ("Adam", {"lr": 0.02}),
    "MatrixFactorization": ("Adam", {"lr": 0.02}),
    "MatrixFactorization Adagrad": ("Adagrad", {"lr": 0.1}),
    "MatrixFactorization momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "BilinearNet": ("Adam", {"lr": 0.02, "weight_decay": 1e-6}),
    "SASRec": ("Adam", {"lr": 0.01, "betas": (0.9, 0.98)}),
}


def make(way: str, case: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    np.random.seed(1)
    with classes(way):
        model = {made.__name__: made for made in MODELS}[case.split()[0]]()
    if way != LATE:
        hand_over(model, way)
    name, options = CASES[case]
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    if way == LATE:
        hand_over(model, "replace")
    return model, optimizer


def area(scores: torch.Tensor, clicked: torch.Tensor) -> float:
    """Return the share of pairs (clicked, not clicked) in the right order."""
    return float((scores[clicked == 1][:, None] > scores[clicked == 0]).to(torch.get_default_dtype()).mean())


def train_clicks(way: str, case: str, epochs: int = 3) -> Outcome:
    model, optimizer = make(way, case)
    fields, numbers, clicked = (torch.tensor(part) for part in clicks())
    numbers, clicked = (part.to(torch.get_default_dtype()) for part in (numbers, clicked))
    losses = []
    for epoch in range(epochs):
        order = torch.randperm(500, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            loss = binary_loss(model, fields[batch], numbers[batch], clicked[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        auc = area(model(fields[500:], numbers[500:]), clicked[500:])
    return Outcome({"losses": losses, "AUC": auc}, {}, model)


def train_pairs(way: str, case: str, epochs: int = 3) -> Outcome:
    model, optimizer = make(way, case)
    data = interactions()
    users, items = torch.tensor(data.user), torch.tensor(data.item)
    losses = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(epoch)
        others = torch.randint(ITEMS, (len(users),), generator=generator)
        for batch in torch.randperm(len(users), generator=generator).split(BATCH):
            loss = model.loss(users[batch], items[batch], others[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        scores = model.scores()
    chosen = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    chosen[users, items] = True
    recall = chosen.gather(1, scores.topk(10).indices).double().mean().item()
    return Outcome({"losses": losses, "recall": recall}, {"scores": scores}, model)


def train_sequences(way: str, case: str, epochs: int = 4) -> Outcome:
    model, optimizer = make(way, case)
    history, target = (torch.tensor(part) for part in sequences())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for _ in range(epochs):
        for batch in torch.arange(USERS).split(20):
            loss = model.loss(history[batch], target[batch])
            optimizer.zero_grad()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses += [loss.item(), norm.item()]
        schedule.step()
    model.eval()
    with torch.no_grad():
        scores = model.scores(history)
    ranks = (scores > scores.gather(1, target[:, None] - 1)).sum(1)
    return Outcome({"losses": losses, "MRR": (1 / (1.0 + ranks)).mean().item()}, {}, model)


TRAINERS = {
    **dict.fromkeys(("DLRM", "DeepFM"), train_clicks),
    **dict.fromkeys(("LightGCN", "MatrixFactorization", "BilinearNet"), train_pairs),
    "SASRec": train_sequences,
}


@pytest.mark.sweep
@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("way", [*WAYS, LATE])
@pytest.mark.parametrize("case", CASES)
def test_own_models(case, way, double):
    compare(TRAINERS[case.split()[0]], way, double, case)
