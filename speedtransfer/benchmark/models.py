"""Models that suites train, and a batch's rows trained by hand, with torch alone: what the idea of this library costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL_ROWS, SMALL_WIDTH, SMALL_IDS = 10_000, 32, 64
ROWS, TABLES, WIDTH, IDS, HIDDEN = 100_000, 26, 16, 256, 64
WHOLE_WIDTH, WHOLE_IDS = 64, 64

Embed = Callable[[int, int], nn.Module]


class TableByHand(nn.Embedding):
    """A table whose batch gets its unique rows as a leaf of autograd: the idea of this library in four lines."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        super().__init__(rows, width, device=device)
        self.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102 (nn.Embedding)
        self.ids, inverse = ids.unique(return_inverse=True)
        self.rows = self.weight.index_select(0, self.ids).requires_grad_()
        return F.embedding(inverse, self.rows)


class AdamWByHand:
    """AdamW over the rows that each `TableByHand` has looked up: state is gathered, then all is scattered, with no checks."""

    def __init__(self, model: nn.Module) -> None:
        tables = [table for table in model.modules() if isinstance(table, TableByHand)]
        self._params = [nn.Parameter(table.weight[:0]) for table in tables]
        self._adamw = torch.optim.AdamW(self._params, fused=True)
        planes = [{name: torch.zeros_like(table.weight) for name in ("exp_avg", "exp_avg_sq")} for table in tables]
        self._parts = list(zip(tables, self._params, planes, strict=True))

    def step(self) -> None:
        """Step the rows of the last batch."""
        for table, param, planes in self._parts:
            param.data, param.grad = table.rows.detach(), table.rows.grad
            if state := self._adamw.state[param]:
                state.update({name: plane.index_select(0, table.ids) for name, plane in planes.items()})
        self._adamw.step()
        for table, param, planes in self._parts:
            table.weight.index_copy_(0, table.ids, param.data)
            for name, plane in planes.items():
                plane.index_copy_(0, table.ids, self._adamw.state[param][name])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for param in self._params:
            param.grad = None


class OneTable(nn.Module):
    """The sum of the rows that a batch names: a loss that costs next to nothing."""

    def __init__(self, embed: Embed, rows: int) -> None:
        super().__init__()
        self.emb = embed(rows, SMALL_WIDTH)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.emb(batch).sum()
        return loss


class ManyTables(nn.Module):
    """The sum of squares of the rows that a batch, ``(tables, ids)``, names in each table."""

    def __init__(self, embed: Embed, rows: int, tables: int = TABLES) -> None:
        super().__init__()
        self.tables = nn.ModuleList(embed(rows, WIDTH) for _ in range(tables))
        for table in self.tables:  # no gradient near zero, where steps of Adam and SparseAdam differ
            nn.init.uniform_(table.get_parameter("weight"), 0.5, 1.5)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        parts = [table(ids) for table, ids in zip(self.tables, batch, strict=True)]
        return torch.stack([(rows * rows).sum() for rows in parts]).sum()


class WholeTable(nn.Module):
    """The loss of a softmax over all rows, which are looked up too: tied weights, as in a language model."""

    def __init__(self, embed: Embed, rows: int) -> None:
        super().__init__()
        self.emb = embed(rows, WHOLE_WIDTH)
        nn.init.normal_(self.emb.get_parameter("weight"), std=0.1)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        hidden, wanted = self.emb(batch[0]), self.emb(batch[1])
        logits = hidden @ self.emb.get_parameter("weight").T
        return (logits.logsumexp(dim=1) - (hidden * wanted).sum(dim=1)).mean()


class DeepFM(nn.Module):
    """Loss of a factorization machine and a network on the same rows: a wide table and one of single weights a feature."""

    def __init__(self, embed: Embed, rows: int) -> None:
        super().__init__()
        self.factors = nn.ModuleList(embed(rows, WIDTH) for _ in range(TABLES))
        self.linear = nn.ModuleList(embed(rows, 1) for _ in range(TABLES))
        self.deep = nn.Sequential(nn.Linear(TABLES * WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        *features, labels = batch
        rows = torch.stack([table(ids) for table, ids in zip(self.factors, features, strict=True)], dim=1)
        pairs = (rows.sum(dim=1).square() - rows.square().sum(dim=1)).sum(dim=1) / 2
        linear = torch.cat([table(ids) for table, ids in zip(self.linear, features, strict=True)], dim=1).sum(dim=1)
        return F.binary_cross_entropy_with_logits(
            pairs + linear + self.deep(rows.flatten(1)).squeeze(1), labels.float() % 2
        )
