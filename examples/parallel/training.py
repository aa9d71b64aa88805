"""What is trained, and what each process does: a regression on numbers and ids, all processes together on each batch."""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st

ONE, DATA_PARALLEL = "one process", "DataParallel"
ORDINARY, SHARDED, SHARED = "DDP, ordinary table", "DDP, sharded", "DDP, shared"
KINDS = (ONE, DATA_PARALLEL, ORDINARY, SHARDED, SHARED)
FEATURES = 5
WARM_STEPS = 5  # that are not timed
_NOISE = 0.1


@dataclass(frozen=True)
class Settings:
    """The sizes; the flags of run.py have the same names."""

    processes: int = 2
    steps: int = 300
    batch: int = 64
    rows: int = 1000
    dim: int = 8
    width: int = 32
    lr: float = 0.01
    seed: int = 0


class Data:
    """Targets are a linear function of five numbers, and a number of an id; each batch is drawn anew, the same each time."""

    def __init__(self, settings: Settings) -> None:
        self._draw, self._settings = torch.Generator().manual_seed(settings.seed), settings
        self._slope = torch.randn(FEATURES, 1, generator=self._draw)
        self._of_ids = torch.randn(settings.rows, 1, generator=self._draw)

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return numbers ``(batch, 5)``, ids ``(batch,)`` and targets ``(batch, 1)``."""
        size, draw = self._settings.batch, self._draw
        numbers = torch.randn(size, FEATURES, generator=draw)
        ids = torch.randint(self._settings.rows, (size,), generator=draw)
        noise = _NOISE * torch.randn(size, 1, generator=draw)
        return numbers, ids, numbers @ self._slope + self._of_ids[ids] + noise


class Regression(nn.Module):
    """A row for the id beside the numbers, and a small network. It notes the sizes of the first batch it is given."""

    def __init__(self, emb: nn.Module, settings: Settings) -> None:
        super().__init__()
        self.emb = emb
        torch.manual_seed(settings.seed + 1)
        self.layers = nn.Sequential(
            nn.Linear(FEATURES + settings.dim, settings.width), nn.Tanh(), nn.Linear(settings.width, 1)
        )
        # Replicas of DataParallel have the same list.
        self.sizes: list[tuple[str, list[int], list[int]]] = []

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Return predictions ``(batch, 1)``."""
        found: Tensor = self.layers(torch.cat([numbers, self.emb(ids)], 1))
        device = str(numbers.device)
        if device not in [where for where, *_ in self.sizes]:
            self.sizes.append((device, list(numbers.shape), list(found.shape)))
        return found


def make_table(kind: str, settings: Settings, device: torch.device) -> nn.Module:
    """Return the table of a kind of training."""
    torch.manual_seed(settings.seed)
    if kind == DATA_PARALLEL and torch.cuda.device_count() > 1:
        # It copies the model to each GPU in every forward, and refuses those with tables.
        return nn.Embedding(settings.rows, settings.dim, device=device)
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if kind in (SHARDED, SHARED) else {}
    if kind == SHARED:
        options["memory"] = "shared"
    return st.Embedding(settings.rows, settings.dim, device=device, **options)


class Worker:
    """One of the processes: it trains on its part of every batch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def train(self, kind: str, settings: Settings) -> dict[str, Any]:
        """Return the loss of each step on the part of this process, the median time of a step, the sizes and the rows held."""
        device = torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")
        net = Regression(make_table(kind, settings, device), settings).to(device)
        model: nn.Module = net
        if kind == DATA_PARALLEL:
            model = nn.DataParallel(net)
        elif kind != ONE:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "DistributedDataParallel keeps the whole table")
                model = DistributedDataParallel(net)
        opt, data = torch.optim.AdamW(net.parameters(), lr=settings.lr), Data(settings)
        each = settings.batch // self.ranks
        part = slice(self.rank * each, (self.rank + 1) * each)
        losses, times = [], []
        for _ in range(settings.steps):
            numbers, ids, targets = (values[part].to(device) for values in data.batch())
            start = time.perf_counter()
            opt.zero_grad()
            loss = (model(numbers, ids) - targets).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
            times.append(time.perf_counter() - start)
        table = getattr(net.emb, "table", None)
        return {
            "losses": losses,
            "step_s": statistics.median(times[WARM_STEPS:] or times),
            "sizes": net.sizes,
            "rows": len(getattr(table, "local", None) if kind in (SHARDED, SHARED) else net.emb.weight),
        }
