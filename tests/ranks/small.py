"""Small tables and batches of every kind, for tests of single uses: of W processes, and of one with the batches of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st

ROWS, DIM = 50, 4


def table(kind: str, rows: int = ROWS, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """An embedding of a kind: sharded, shared, or one, the same numbers in each."""
    if kind == "shared":
        options["memory"] = "shared"
    if kind in ("sharded", "shared"):
        options["process_group"] = dist.group.WORLD
    torch.manual_seed(3)
    return st.Embedding(rows, DIM, dtype=dtype, **options)


def ids(step: int = 0, rank: int | None = None) -> torch.Tensor:
    """The batch of a rank, this one by default."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(0, ROWS, (6,), generator=torch.Generator().manual_seed(100 * step + rank))


def all_ids(step: int = 0) -> torch.Tensor:
    return torch.cat([ids(step, rank) for rank in range(dist.get_world_size())])


def rows_of(emb: Any) -> torch.Tensor:
    """All rows in the order of ids, a copy; collective for shards."""
    return emb.table.gather(torch.arange(len(emb.table))).clone()


def distance(emb: Any, other: Any) -> float:
    return float((rows_of(emb) - rows_of(other)).abs().max())


def squares(emb: Any, ids: torch.Tensor) -> torch.Tensor:
    return emb(ids).square().sum()


class Pair:
    """An embedding of a kind, and one of one process, each with an optimizer."""

    def __init__(
        self, kind: str, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any
    ) -> None:
        self.emb, self.one = table(kind, **options), table("one", **options)
        self.opt, self.one_opt = (optimizer(each.parameters(), lr=0.1) for each in (self.emb, self.one))

    def backward(self, step: int = 0, loss: Callable[[Any, torch.Tensor], torch.Tensor] = squares) -> None:
        """Backward of the loss of the batch of this rank, and of the mean of the losses of all."""
        loss(self.emb, ids(step)).backward()
        self.one_backward(step, loss)

    def one_backward(self, step: int = 0, loss: Callable[[Any, torch.Tensor], torch.Tensor] = squares) -> None:
        ranks = dist.get_world_size()
        (sum(loss(self.one, ids(step, rank)) for rank in range(ranks)) / ranks).backward()

    def end(self) -> None:
        for opt in (self.opt, self.one_opt):
            opt.step()
            opt.zero_grad()

    def train(self, *steps: int, loss: Callable[[Any, torch.Tensor], torch.Tensor] = squares) -> None:
        for step in steps:
            self.backward(step, loss)
            self.end()

    def distance(self) -> float:
        return distance(self.emb, self.one)


def told(function: Callable[[], Any]) -> str:
    """What an error of `function` says, or ``""``."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def plain(emb: Any) -> nn.Embedding:
    """torch's module with the same rows."""
    made = nn.Embedding(emb.num_embeddings, DIM, dtype=emb.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(rows_of(emb))
    return made
