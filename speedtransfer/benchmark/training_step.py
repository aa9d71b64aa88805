"""A training step that is timed: the models and their batches, and the comparison of first steps with dense training.

Models have a list `tables` of embeddings, and return what is differentiated, with its gradient or None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedtransfer.benchmark.contenders import DIM, Contender, Embed, ZeroEmbedding
from speedtransfer.benchmark.measure import cycle
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.nn import Embedding

BATCHES = 4


class Batches:
    """Batches of ids with the same access pattern for every table size, spread over the whole table."""

    def __init__(self, rows: int, lookups: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.lookups, self.seed = rows, lookups, seed
        self._ids = [zipf_ids(rows, lookups, generator) for _ in range(BATCHES)]
        self._touched = torch.cat(self._ids).unique()
        self.values = torch.randn(len(self._touched), DIM, generator=generator)
        # Eighths: sums are exact, and no sum is nearly zero, where the sign in Adam's first step would be arbitrary.
        self.grad = torch.randint(-8, 9, (lookups, DIM), generator=generator) / 8

    def ids(self, rows: int) -> list[Tensor]:
        """Return the batches for a table of `rows` rows."""
        return [self._place(ids, rows) for ids in self._ids]

    def touched(self, rows: int) -> Tensor:
        """Return the sorted rows that occur in any batch; their initial values are `values`."""
        return self._place(self._touched, rows)

    def _place(self, ids: Tensor, rows: int) -> Tensor:
        factor = rows // self.rows
        # Equal distances would map to the same cache sets.
        return ids * factor + ids * 2_654_435_761 % factor


# --- models -------------------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """One table, whose looked up rows get gradients that do not depend on them; `touched` rows, or all, have values."""

    def __init__(self, embed: Embed, rows: int, touched: Tensor | None, batches: Batches, device: torch.device) -> None:
        super().__init__()
        self.tables = nn.ModuleList([embed(rows, DIM)])
        self._grad, values = batches.grad.to(device), batches.values.to(device)
        (emb,), places = self.tables, (torch.arange(rows) if touched is None else touched).to(device)
        if isinstance(emb, Embedding):
            emb.table.scatter(places, values)
        else:
            emb.get_parameter("weight").data[places] = values

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take a batch ``(ids,)``."""
        return self.tables[0](ids), self._grad


class SmallTables(nn.Module):
    """The sum of the squares of looked up rows of each table: a loss that costs next to nothing."""

    def __init__(self, embed: Embed, rows: int, touched: Tensor | None, width: int, tables: int = 1) -> None:
        super().__init__()
        self.tables = nn.ModuleList(embed(rows, width) for _ in range(tables))
        # No gradient is near zero, where steps of Adam and SparseAdam differ.
        for table in self.tables:
            nn.init.uniform_(table.get_parameter("weight"), 0.5, 1.5)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take a batch ``(tables, ids)``."""
        parts = [table(ids) for table, ids in zip(self.tables, batch, strict=True)]
        return torch.stack([(rows * rows).sum() for rows in parts]).sum(), None


# --- steps --------------------------------------------------------------------------------------------------------------


def take_step(loss: Tensor, *optimizers: Any, scaler: Any = None, gradient: Tensor | None = None) -> None:
    """Go back from `loss`, or from what has this `gradient`, and step, by the GradScaler `scaler` if there is one."""
    (loss if scaler is None else scaler.scale(loss)).backward(gradient)
    for optimizer in optimizers:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Task:
    """What is trained: a `model` of an `embed`, a number of rows, and those of them that have values, by default all.

    The first steps take the `checked` batches and are compared with dense training, on the sorted `touched` rows alone (by
    default all); then come the batches that `history` returns for a contender, and the `timed` ones in turn, which with
    `all_rows` have rows that no step before has touched.
    """

    model: Callable[[Embed, int, Tensor | None], nn.Module]
    rows: int
    checked: Sequence[Tensor]
    timed: Sequence[Tensor]
    device: torch.device
    history: Callable[[Contender], Iterable[Tensor]] = lambda contender: ()
    touched: Tensor | None = None
    seed: int = 0
    all_rows: bool = False

    def build(self, embed: Embed, compact: bool = False) -> Any:
        """Make the model, with initial weights by the seed; `compact`: of the touched rows alone."""
        torch.manual_seed(self.seed)
        if compact and self.touched is not None:
            return self.model(embed, len(self.touched), None)
        return self.model(embed, self.rows, self.touched)


class TrainingStep:
    """A training step. The model is made in the first one, so that running out of memory fails this case alone."""

    def __init__(self, contender: Contender, task: Task) -> None:
        self.contender, self.task = contender, task
        self.model: Any = None
        self._turn: Callable[[], Tensor]

    def run(self) -> None:
        """Take a step."""
        if self.model is None:
            self.model = self.task.build(self.contender.embed)
            self._optimizer = self.contender.optimizer(self.model)
            self._turn = cycle([self.task.checked[0].to(self.task.device)])
        out, grad = self.model(self._turn())
        take_step(out, self._optimizer, gradient=grad)

    def _take(self, batches: Iterable[Tensor]) -> None:
        for ids in batches:
            self._turn = cycle([ids.to(self.task.device)])
            self.run()

    def check(self) -> None:
        """Take some steps after the first and compare with dense training, then those between them and the timed ones.

        Unless idle rows are trained, rows without a gradient and their state are restored after each dense step.
        """
        task, exact = self.task, self.contender.exact
        self._take(task.checked[1:])
        dense = task.build(functools.partial(ZeroEmbedding, device=task.device), compact=True)
        optimizer, start = self.contender.dense(dense), [table.weight.detach().clone() for table in dense.tables]
        seen = [torch.zeros(len(weight), dtype=torch.bool, device=task.device) for weight in start]
        for batch in task.checked:
            ids = batch if task.touched is None else torch.searchsorted(task.touched, batch)
            optimizer.zero_grad()
            out, grad = dense(ids.to(task.device))
            out.backward(grad)
            trained = [table.weight.grad.any(dim=1) for table in dense.tables]
            seen = [before | now for before, now in zip(seen, trained, strict=True)]
            before = [[plane.clone() for plane in _planes(optimizer, table)] for table in dense.tables]
            optimizer.step()
            for table, kept, now in zip(dense.tables, before, trained, strict=True):
                # State that the first step makes was zero before it.
                for number, plane in enumerate(_planes(optimizer, table) if not exact else ()):
                    idle = kept[number] if number < len(kept) else torch.zeros_like(plane)
                    plane.copy_(torch.where(now[:, None], plane, idle))
        for table, expected, first, touched in zip(self.model.tables, dense.tables, start, seen, strict=True):
            found = self._weights(table)
            if self.contender.role == "ours" and not exact:
                assert torch.equal(found[~touched], first[~touched]), "a step changed rows that it does not touch"
            rows = slice(None) if exact else touched
            torch.testing.assert_close(found[rows], expected.weight.detach()[rows], rtol=1e-4, atol=2e-5)
        if task.all_rows:
            self._touch_all()
        self._take(task.history(self.contender))
        self._turn = cycle([ids.to(task.device) for ids in task.timed])

    def _weights(self, table: Any) -> Tensor:
        """Return the rows that are compared."""
        places = torch.arange(self.task.rows) if self.task.touched is None else self.task.touched
        if isinstance(table, Embedding):
            return table.table.gather(places).to(self.task.device)
        weight: Tensor = table.weight.detach()[places.to(self.task.device)]
        return weight

    def _touch_all(self) -> None:
        """Write every row: rows get memory when they are first touched, which must not be timed."""
        (table,) = self.model.tables
        if isinstance(table, Embedding):
            table.table.torch().add_(0)
        for state in self._optimizer.state.values():
            for values in state.values():
                if isinstance(values, Tensor) and values.dim():
                    values.add_(0)


def _planes(optimizer: torch.optim.Optimizer, table: Any) -> list[Tensor]:
    """Return the values of a table and its state of the same shape."""
    weight = table.weight
    return [weight.data, *(values for values in optimizer.state[weight].values() if values.shape == weight.shape)]
