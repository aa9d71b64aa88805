"""Steps of tables whose idle rows are trained: a row catches up on missed zero-gradient steps when it is looked up again.

The cost depends on how long rows have been idle, so every step has new ids, and steps are taken before any is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.contenders import BATCHES, DIM, Batches, Step, contenders, fitting
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.nn import Embedding

EXPERIMENT = "idle rows"
HISTORY, QUICK_HISTORY = 300, 20  # steps before any is timed, with AdamW; a third with the others
OTHERS = ("SGD with momentum", "RMSprop", "Adamax")

_POOL = 64  # timed batches: about as many as steps are timed, so that none is repeated
_CHECKED = (0, *[1] * 12, *range(2, BATCHES))  # numbers of checked batches: rows of the first stay idle for long


def groups(
    device: torch.device, batches: Batches, room: dict[str, float], history: int, quick: bool
) -> Iterator[Group]:
    """Yield a group for each optimizer, `quick` for AdamW only: exact against lazy, and for AdamW against torch."""
    for optimizer in ("AdamW",) if quick else ("AdamW", *OTHERS):
        steps = history if optimizer == "AdamW" else max(1, history // 3)
        title = f"{optimizer} step with new ids, {batches.lookups:,} lookups in {batches.rows:,} x {DIM} float32"
        params = {"experiment": EXPERIMENT, "optimizer": optimizer, "rows": batches.rows, "dim": DIM, "history": steps}
        make = functools.partial(_cases, optimizer, device, batches, room, steps)
        yield Group(f"{title}, after {steps:,} steps", make, params)


def _cases(optimizer: str, device: torch.device, batches: Batches, room: dict[str, float], history: int) -> list[Case]:
    lazy, *others = contenders(device, optimizer)
    exact = contenders(device, optimizer, idle="exact")[0]
    rivals = [one for one in others if one.role == "other"] if optimizer == "AdamW" else []
    pool, cases = _Pool(batches), []
    for contender, error in fitting([lazy, exact, *rivals], batches.rows, room):
        step = _IdleStep(contender, batches.rows, device, batches)
        step.pool, step.history = pool, history if contender is exact else 0
        cases.append(Case.of(contender.name, step, contender.role, error=error))
    return cases


class _Pool:
    """New ids for every step, the same for all cases."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def draw(self, count: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self._batches.seed + seed)
        for _ in range(count):
            yield zipf_ids(self._batches.rows, self._batches.lookups, generator)

    @functools.cached_property
    def timed(self) -> list[Tensor]:
        return list(self.draw(_POOL, seed=1))


class _IdleStep(Step):
    """A step with new ids, after `history` others."""

    pool: _Pool
    history: int

    def check(self) -> None:
        """Compare with dense training on the touched rows, then take the steps before the timed ones."""
        if self.contender.idle == "exact":
            self._check_exact()
        else:
            super().check()
        # Rows get memory when they are first touched, which must not be timed.
        if isinstance(self.emb, Embedding):
            self.emb.table.torch().add_(0)
        for state in self._opt.state.values():
            for values in state.values():
                if isinstance(values, Tensor) and values.dim():
                    values.add_(0)
        self._take(self.pool.draw(self.history, seed=2), self.history)
        self._turn = cycle([ids.to(self.device) for ids in self.pool.timed])

    def _check_exact(self) -> None:
        """Take some steps after the first and compare all rows with those of a dense optimizer."""
        ids = self.batches.ids(self.rows)
        touched = self.batches.touched(self.rows)
        self._take((ids[number] for number in _CHECKED[1:]), len(_CHECKED) - 1)
        weight = nn.Parameter(self.batches.values.clone())
        optimizer = self.contender.optimizer([weight])
        for number in _CHECKED:
            F.embedding(torch.searchsorted(touched, ids[number]), weight).backward(self.batches.grad)
            optimizer.step()
            optimizer.zero_grad()
        after = self.emb.table.gather(touched).cpu()
        torch.testing.assert_close(after, weight.detach(), rtol=1e-6, atol=3e-6)

    def _take(self, batches: Iterator[Tensor], count: int) -> None:
        self._turn = lambda: next(batches).to(self.device)
        for _ in range(count):
            self.run()
