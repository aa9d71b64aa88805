"""Steps that idle rows take part in: a row receives the zero-gradient steps it has missed when a batch names it again.

What that costs depends on how long rows have been idle. So ids are new in every step, and steps are taken before any is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.kinds import BATCHES, DIM, Batches, Step, fitting, kinds
from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.nn import Embedding

EXPERIMENT = "idle rows"
HISTORY, QUICK_HISTORY = 300, 20  # steps before any is timed
OTHERS = ("SGD with momentum", "RMSprop", "Adamax")  # these after a third of them

_POOL = 64  # batches to time with: about as many as steps are timed, so that none comes twice
_CHECKED = (0, *[1] * 12, *range(2, BATCHES))  # of the first batches: rows of the first alone are idle for long


def groups(
    device: torch.device, batches: Batches, room: dict[str, float], history: int, quick: bool
) -> Iterator[Group]:
    """Yield a group for each optimizer, with `quick` for AdamW alone: exact against lazy, and for AdamW against torch's own.

    Tables are as small as they come; `history` steps are taken before any is timed.
    """
    for optimizer in ("AdamW",) if quick else ("AdamW", *OTHERS):
        steps = history if optimizer == "AdamW" else max(1, history // 3)
        title = f"{optimizer} step with new ids, {batches.lookups:,} lookups in {batches.rows:,} x {DIM} float32"
        params = {"experiment": EXPERIMENT, "optimizer": optimizer, "rows": batches.rows, "dim": DIM, "history": steps}
        make = functools.partial(_cases, optimizer, device, batches, room, steps)
        yield Group(f"{title}, after {steps:,} steps", make, params)


def _cases(optimizer: str, device: torch.device, batches: Batches, room: dict[str, float], history: int) -> list[Case]:
    lazy, *others = kinds(device, optimizer)
    exact = kinds(device, optimizer, idle="exact")[0]
    rivals = [kind for kind in others if kind.role == "other"] if optimizer == "AdamW" else []
    pool, cases = _Pool(batches), []
    for kind, error in fitting([lazy, exact, *rivals], batches.rows, room):
        step = _IdleStep(kind, batches.rows, device, batches)
        step.pool, step.history = pool, history if kind is exact else 0
        cases.append(Case.of(kind.name, step, kind.role, kind="exact" * (kind is exact), error=error))
    return cases


class _Pool:
    """New ids for every step, the same for all cases."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def draw(self, count: int, seed: int) -> Iterator[Tensor]:
        """Yield `count` batches."""
        generator = torch.Generator().manual_seed(self._batches.seed + seed)
        for _ in range(count):
            yield zipf_ids(self._batches.rows, self._batches.lookups, generator)

    @functools.cached_property
    def timed(self) -> list[Tensor]:
        """Those that are timed, drawn before."""
        return list(self.draw(_POOL, seed=1))


class _IdleStep(Step):
    """A step with new ids, after `history` others."""

    pool: _Pool
    history: int

    def check(self) -> None:
        """Compare with dense training on the touched rows alone, then take the steps that come before the timed ones."""
        if self.kind.idle == "exact":
            self._check_exact()
        else:
            super().check()
        # Rows take memory when they are first touched, and that is not part of the step.
        if isinstance(self.emb, Embedding):
            self.emb.table.torch().add_(0)
        for state in self._opt.state.values():
            for values in state.values():
                if isinstance(values, Tensor) and values.dim():
                    values.add_(0)
        self._take(self.pool.draw(self.history, seed=2), self.history)
        self._turn = cycle([ids.to(self.device) for ids in self.pool.timed])

    def _check_exact(self) -> None:
        """Take some steps, the first of which has been taken; no row may be anywhere else than a dense optimizer takes it."""
        ids = self.batches.ids(self.rows)
        touched = self.batches.touched(self.rows)
        self._take((ids[number] for number in _CHECKED[1:]), len(_CHECKED) - 1)
        weight = nn.Parameter(self.batches.values.clone())
        optimizer = self.kind.optimizer([weight])
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
