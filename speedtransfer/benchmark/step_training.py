"""A training step on a table, and the batches that it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.kinds import DIM, ROW_BYTES, Kind
from speedtransfer.benchmark.measure import cycle
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import HostMemoryError, SpeedtransferError, format_bytes
from speedtransfer.nn import Embedding

BATCHES = 4


class Batches:
    """Batches of ids that are the same accesses whatever the size of the table: they spread over all of it."""

    def __init__(self, rows: int, lookups: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.lookups, self.seed = rows, lookups, seed
        self._ids = [zipf_ids(rows, lookups, generator) for _ in range(BATCHES)]
        self._touched = torch.cat(self._ids).unique()
        self.values = torch.randn(len(self._touched), DIM, generator=generator)
        # Eighths: their sums are exact, and none is nearly zero, where Adam's first step, lr * sign(grad), would be chance.
        self.grad = torch.randint(-8, 9, (lookups, DIM), generator=generator) / 8

    def ids(self, rows: int) -> list[Tensor]:
        """Return the batches for a table of `rows`."""
        return [self._place(ids, rows) for ids in self._ids]

    def touched(self, rows: int) -> Tensor:
        """Return the rows, sorted, that any of the batches names; they start from `values`."""
        return self._place(self._touched, rows)

    def _place(self, ids: Tensor, rows: int) -> Tensor:
        factor = rows // self.rows
        return ids * factor + ids * 2_654_435_761 % factor  # not at equal distances, which would share sets of a cache


def fitting(
    chosen: Iterable[Kind], rows: int, room: dict[str, float]
) -> Iterator[tuple[Kind, SpeedtransferError | None]]:
    """Yield each kind and why a table of `rows` rows does not fit beside those before it, where it does not.

    `room` says how many bytes tables may take, by place.
    """
    left = dict(room)
    for kind in chosen:
        num_bytes, error = kind.planes * rows * ROW_BYTES, None
        if num_bytes <= left[kind.place]:
            left[kind.place] -= num_bytes
        else:
            error = HostMemoryError(
                f"takes {format_bytes(num_bytes)} but of the {kind.place}'s memory the tables beside it leave "
                f"{format_bytes(left[kind.place])}"
            )
        yield kind, error


class Step:
    """A training step. The table is made at the first one, so that a lack of memory is the error of this case alone."""

    def __init__(
        self, kind: Kind, rows: int, device: torch.device, batches: Batches, error: Exception | None = None
    ) -> None:
        self.kind, self.rows, self.device, self.batches, self.error = kind, rows, device, batches, error
        self.emb: Any = None
        self._turn: Callable[[], Tensor]

    def run(self) -> None:
        """Take a step."""
        if self.emb is None:
            self._build()
        self.emb(self._turn()).backward(self._grad)
        self._opt.step()
        self._opt.zero_grad()

    def _build(self) -> None:
        """Make the table, the first values of the rows in use, and the optimizer."""
        if self.error is not None:
            raise self.error
        emb = self.kind.make(self.rows)
        touched, values = (t.to(self.device) for t in (self.batches.touched(self.rows), self.batches.values))
        if isinstance(emb, Embedding):
            emb.table.scatter(touched, values)
        else:
            emb.get_parameter("weight").data[touched] = values
        self._opt = self.kind.optimizer(list(emb.parameters()))
        self._grad = self.batches.grad.to(self.device)
        self._turn = cycle([ids.to(self.device) for ids in self.batches.ids(self.rows)])
        self.emb = emb

    def check(self) -> None:
        """Compare the table after the first step with dense training on the touched rows alone; ours leaves all others.

        Then take the other batches: their rows take memory when they are first touched, and that is not part of the step.
        """
        ours = isinstance(self.emb, Embedding)
        touched, before = self.batches.touched(self.rows), self.batches.values
        inverse = torch.searchsorted(touched, self.batches.ids(self.rows)[0])
        weight = nn.Parameter(before.clone())
        F.embedding(inverse, weight).backward(self.batches.grad)
        sparse = isinstance(self._opt, torch.optim.SparseAdam)
        (torch.optim.AdamW([weight], weight_decay=0) if sparse else self.kind.optimizer([weight])).step()
        first = torch.zeros(len(touched), dtype=torch.bool).index_fill_(0, inverse, True)

        plane = self.emb.table.torch() if ours else self.emb.weight.detach()
        after = plane[touched.to(plane.device)].cpu()
        torch.testing.assert_close(after[first], weight.detach()[first], rtol=1e-4, atol=1e-5)
        if ours:
            assert torch.equal(after[~first], before[~first]), "a step changed rows that it does not touch"
        for _ in range(BATCHES - 1):
            self.run()
