"""Lazy AdamW on the rows of a batch in plain torch: the idea of this library, without checks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TableByHand(nn.Embedding):
    """An embedding whose unique rows of a batch are a leaf of autograd."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        super().__init__(rows, width, device=device)
        self.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102 (nn.Embedding)
        self.ids, inverse = ids.unique(return_inverse=True)
        self.rows = self.weight.index_select(0, self.ids).requires_grad_()
        return F.embedding(inverse, self.rows)


class AdamWByHand:
    """AdamW on the rows that each `TableByHand` has looked up: gathers the state, steps, and scatters everything."""

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
        """Drop the gradients."""
        for param in self._params:
            param.grad = None
