"""Steps whose state a kernel reads, updates and writes where it is, beside those of a gather, the optimizer and a scatter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from speedtransfer.benchmark.environment import set_variable
from speedtransfer.benchmark.kinds import DIM, Batches, Kind, Step, fitting, kinds
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import find_handle
from speedtransfer.optim.fused_step import SWITCH, plan_step

EXPERIMENT = "fused step"
OPTIMIZERS = ("AdamW", "SGD with momentum", "SGD")


def groups(device: torch.device, batches: Batches, room: dict[str, float]) -> Iterator[Group]:
    """Yield a group for each optimizer whose step the kernel can make, with tables as small as they come; none on the CPU."""
    for optimizer in OPTIMIZERS if device.type == "cuda" else ():
        title = f"{optimizer} step by one kernel or several, {batches.lookups:,} lookups in {batches.rows:,} x {DIM} float32"
        params = {"experiment": EXPERIMENT, "optimizer": optimizer, "rows": batches.rows, "dim": DIM}
        yield Group(title, functools.partial(_cases, optimizer, device, batches, room), params)


def _cases(optimizer: str, device: torch.device, batches: Batches, room: dict[str, float]) -> list[Case]:
    found = [kind for kind in kinds(device, optimizer) if kind.memory in ("pinned", "device")]
    found = [replace(kind, make=functools.partial(_mapped, kind)) for kind in found]
    pairs = [(kind, fused) for kind in found for fused in (False, True)]
    cases = []
    for (kind, fused), (_, error) in zip(pairs, fitting([kind for kind, _ in pairs], batches.rows, room), strict=True):
        step = _Switched(kind, batches.rows, device, batches)
        step.fused = fused
        cases.append(Case.of(kind.name + ", fused step" * fused, step, kind.role, error=error))
    return cases


def _mapped(kind: Kind, rows: int) -> nn.Module:
    """Make a table whose rows a kernel moves: the choice of another engine is not what is compared."""
    emb = kind.make(rows)
    emb.table.engine = "mapped"  # type: ignore[union-attr]
    return emb


class _Switched(Step):
    """A step by one kernel, or not; the first makes the state and is never."""

    fused: bool

    def run(self) -> None:
        with set_variable(SWITCH, str(int(self.fused))):
            super().run()

    def check(self) -> None:
        """Compare as ever; then see which way the steps go."""
        super().check()
        handle = find_handle(self.emb.weight)
        assert handle is not None
        assert handle.state is not None
        with set_variable(SWITCH, str(int(self.fused))):
            plan = plan_step(handle.state, self._opt, self._opt.param_groups[0])
        if self.fused and plan is None:
            raise OptimizerError(
                f"the step of {self.kind.name} is not made by one kernel; see speedtransfer.optim.fused_step"
            )
