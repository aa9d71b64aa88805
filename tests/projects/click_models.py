"""Click models as the field's projects write them: DLRM's bags, one table for all fields, penalty lists made in `__init__`."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from projects.data import FIELDS


class DLRM(nn.Module):
    """A bag for each field with uniform rows given as `_weight`, dot products of all pairs, two MLPs."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.bags = nn.ModuleList()
        for size in FIELDS:
            bag = nn.EmbeddingBag(size, dim, mode="sum", sparse=False)
            bound = np.sqrt(1 / size)
            rows = np.random.uniform(low=-bound, high=bound, size=(size, dim))
            bag.weight.data = torch.tensor(rows, dtype=torch.get_default_dtype(), requires_grad=True)
            self.bags.append(bag)
        self.bottom = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, dim), nn.ReLU())
        pairs = (len(FIELDS) + 1) * len(FIELDS) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, fields: Tensor, numbers: Tensor) -> Tensor:
        x = self.bottom(numbers)
        offsets = torch.arange(len(fields))
        vectors = torch.stack([x, *(bag(fields[:, k], offsets) for k, bag in enumerate(self.bags))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        rows, columns = torch.tril_indices(len(FIELDS) + 1, len(FIELDS) + 1, offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], 1)).squeeze(1)


class DeepFM(nn.Module):
    """A dict of tables and a list of what is penalised, made in `__init__`, as DeepCTR has it."""

    def __init__(self, dim: int = 8, l2: float = 1e-3) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"field {k}": nn.Embedding(size, dim) for k, size in enumerate(FIELDS)})
        self.linear = nn.ModuleDict({f"field {k}": nn.Embedding(size, 1) for k, size in enumerate(FIELDS)})
        for table in (*self.tables.values(), *self.linear.values()):
            nn.init.normal_(table.weight, mean=0, std=0.01)
        self.dnn = nn.Sequential(nn.Linear(len(FIELDS) * dim + 2, 16), nn.ReLU(), nn.Linear(16, 1))
        self.penalised = [(list(self.tables.parameters()), l2), (list(self.linear.named_parameters()), l2)]

    def forward(self, fields: Tensor, numbers: Tensor) -> Tensor:
        x = torch.stack([table(fields[:, k]) for k, table in enumerate(self.tables.values())], 1)
        pairs = 0.5 * (x.sum(1) ** 2 - (x**2).sum(1)).sum(1, keepdim=True)
        linear = sum(table(fields[:, k]) for k, table in enumerate(self.linear.values()))
        return (linear + pairs + self.dnn(torch.cat([x.flatten(1), numbers], 1))).squeeze(1)

    def penalty(self) -> Tensor:
        total = torch.zeros((1,))
        for weights, l2 in self.penalised:
            for weight in weights:
                weight = weight[1] if isinstance(weight, tuple) else weight
                total += torch.sum(l2 * torch.square(weight))
        return total.squeeze()


def binary_loss(model: nn.Module, fields: Tensor, numbers: Tensor, clicked: Tensor) -> Tensor:
    loss = F.binary_cross_entropy_with_logits(model(fields, numbers), clicked)
    penalty = getattr(model, "penalty", None)
    return loss if penalty is None else loss + penalty()
