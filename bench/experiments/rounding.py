"""What rounding rows costs: a matrix is factorised until its noise is what remains, with rows stored in several forms.

Where little is left to learn, rows that a step rounds move at random by a step of their form, and the loss cannot fall below
what that makes. No times: ``python bench/record.py here --only rounding``.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.nn import Embedding
from speedtransfer.nn.sizing import table_size

LOSS, FARTHEST, BYTES = "loss", "farthest", "bytes a row"
MAX_SHARE = 1e-3  # of the loss of float32 by which that of rows of 24 bits may differ
NOTE = (
    "Entries of a matrix are products of two rows of normal numbers, and noise; both tables are stored in the form. Adam with "
    "a learning rate that falls to a hundredth, the same first rows and batches in every form. The loss is the mean square of "
    "the error of all entries that were trained on, at the end; beside float32 is the mean over the seeds of its ratio to "
    "that of float32, less 1, and the farthest of them. Bytes are those of a row with both planes of Adam's state. The run "
    "fails if rows of 24 bits end farther from float32 than 0.1% with any seed, with state in 8 bits too, or rows in bfloat16 "
    "nearer."
)
COLUMNS = {
    BYTES: lambda group, case: f"{case.figures[BYTES]:,.0f}",
    LOSS: lambda group, case: f"{case.figures[LOSS]:.6f}",
    "beside float32": lambda group, case: f"{100 * apart(group, case):+.4f}%",
    "farthest": lambda group, case: f"{100 * case.figures[FARTHEST]:+.4f}%",
}
VALUE = None  # no picture: a table says it


@dataclass(frozen=True)
class Settings:
    """Sizes of the matrix and of its factors, and how these are trained."""

    left: int = 300
    right: int = 200
    dim: int = 8
    entries: int = 20_000
    noise: float = 0.1
    steps: int = 1200
    batch: int = 1000
    lr: float = 0.02
    seeds: int = 3


_QUICK = Settings(left=60, right=40, dim=4, entries=1200, steps=800, batch=400, seeds=1)
_STATE8 = {"state_dtype": torch.uint8}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, state in 8 bits": _STATE8,
    "split24": {"storage_dtype": "split24"},
    "split24, state in 8 bits": {"storage_dtype": "split24", **_STATE8},
    "bfloat16": {"storage_dtype": torch.bfloat16},
    "bfloat16, state in 8 bits": {"storage_dtype": torch.bfloat16, **_STATE8},
}


def apart(group: GroupResult, case: CaseResult) -> float:
    """Return by what share the loss of a form differs from that of float32, on average over the seeds."""
    pairs = zip(case.values[LOSS], group.by_name["float32"].values[LOSS], strict=True)
    return statistics.fmean(loss / plain - 1 for loss, plain in pairs)


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    settings = _QUICK if quick else Settings()
    title = (
        f"a matrix of {settings.left:,} x {settings.right:,}, rank {settings.dim}, {settings.entries:,} entries, "
        f"{settings.steps:,} steps, {settings.seeds} seed{'s' * (settings.seeds > 1)}"
    )
    params = {**asdict(settings), "headline": False}
    return [Group(title, functools.partial(_train_all, settings, seed, device), params)]


class Entries(NamedTuple):
    """Numbers of two rows, and what their product should be, ``(n,)`` each."""

    left: Tensor
    right: Tensor
    value: Tensor

    def some(self, places: Tensor) -> Entries:
        return Entries(*(part[places] for part in self))


def drawn(settings: Settings, seed: int) -> Entries:
    """Return the entries that are known of a matrix."""
    draw = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(rows, settings.dim, generator=draw) for rows in (settings.left, settings.right))
    places = torch.randperm(settings.left * settings.right, generator=draw)[: settings.entries]
    i, j = places // settings.right, places % settings.right
    noise = settings.noise * torch.randn(len(places), generator=draw)
    return Entries(i, j, (left[i] * right[j]).sum(1) + noise)


def _batches(entries: Entries, settings: Settings, seed: int) -> Iterator[Entries]:
    draw = torch.Generator().manual_seed(seed + 1)
    while True:
        for places in torch.randperm(len(entries.value), generator=draw).to(entries.value.device).split(settings.batch):
            yield entries.some(places)


def train(options: dict[str, Any], settings: Settings, seed: int, device: torch.device) -> float:
    """Return the loss at the end of training in a form."""
    entries = Entries(*(part.to(device) for part in drawn(settings, seed)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, right = (
            Embedding(n, settings.dim, device=device, idle="lazy", **options) for n in (settings.left, settings.right)
        )
    optimizer = torch.optim.Adam([*left.parameters(), *right.parameters()], lr=settings.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, settings.steps)

    def loss_of(some: Entries) -> Tensor:
        return ((left(some.left) * right(some.right)).sum(1) - some.value).square().mean()

    for some in itertools.islice(_batches(entries, settings, seed), settings.steps):
        take_step(loss_of(some), optimizer)
        schedule.step()
    with torch.no_grad():
        return float(loss_of(entries))


def _train_all(settings: Settings, seed: int, device: torch.device) -> list[CaseResult]:
    found, plain = list[CaseResult](), list[float]()
    for name, options in FORMS.items():
        losses = [train(options, settings, seed + number, device) for number in range(settings.seeds)]
        plain = plain or losses
        farthest = max((loss / other - 1 for loss, other in zip(losses, plain, strict=True)), key=abs)
        row_bytes = table_size(1, settings.dim, torch.optim.Adam, idle="lazy", **options).row_bytes
        case = CaseResult(name, "ours", 0, values={LOSS: losses})
        case.figures = {LOSS: statistics.fmean(losses), FARTHEST: farthest, BYTES: row_bytes}
        case.error = _wrong(name, farthest)
        print(f"{name}: {case.figures[LOSS]:.6f}, farthest from float32 {100 * farthest:+.4f}%", flush=True)
        found.append(case)
    return found


def _wrong(name: str, farthest: float) -> str:
    """Return why a form has not the loss that it is to have; "" where it has."""
    if name.startswith("split24") and not abs(farthest) < MAX_SHARE:
        return f"ends {100 * farthest:+.4f}% from the loss of float32, more than {100 * MAX_SHARE:g}%"
    if name.startswith("bfloat16") and abs(farthest) < MAX_SHARE:
        return f"ends {100 * farthest:+.4f}% from the loss of float32, so that this shows nothing"
    return ""
