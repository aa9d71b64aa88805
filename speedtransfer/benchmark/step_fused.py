"""Training steps in one kernel, which updates rows and state in place, beside those of a gather, optimizer and scatter."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from speedtransfer.benchmark.contenders import DIM, Batches, Contender, Step, contenders, fitting
from speedtransfer.benchmark.environment import set_variable
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import find_handle
from speedtransfer.optim.fused_step import SWITCH, plan_step

EXPERIMENT = "fused step"
OPTIMIZERS = ("AdamW", "SGD with momentum", "SGD")


def groups(device: torch.device, batches: Batches, room: dict[str, float]) -> Iterator[Group]:
    """Yield a group for each optimizer that has a fused kernel, with the smallest tables; none on the CPU."""
    for optimizer in OPTIMIZERS if device.type == "cuda" else ():
        title = f"{optimizer} step by one kernel or several, {batches.lookups:,} lookups in {batches.rows:,} x {DIM} float32"
        params = {"experiment": EXPERIMENT, "optimizer": optimizer, "rows": batches.rows, "dim": DIM}
        yield Group(title, functools.partial(_cases, optimizer, device, batches, room), params)


def _cases(optimizer: str, device: torch.device, batches: Batches, room: dict[str, float]) -> list[Case]:
    cases = []
    both = [
        replace(one, name=one.name + suffix, make=functools.partial(_mapped, one))
        for one in contenders(device, optimizer)
        if one.memory in ("pinned", "device")
        for suffix in ("", ", fused step")
    ]
    for number, (contender, error) in enumerate(fitting(both, batches.rows, room)):
        step = _Switched(contender, batches.rows, device, batches)
        step.fused = number % 2 == 1
        cases.append(Case.of(contender.name, step, contender.role, error=error))
    return cases


def _mapped(contender: Contender, rows: int) -> nn.Module:
    """Make a table whose rows a kernel moves, as other engines are not compared here."""
    emb = contender.make(rows)
    emb.table.engine = "mapped"  # type: ignore[union-attr]
    return emb


class _Switched(Step):
    """A step with the fused kernel switched on or off; the first step makes the state and is never fused."""

    fused: bool

    def run(self) -> None:
        with set_variable(SWITCH, str(int(self.fused))):
            super().run()

    def check(self) -> None:
        """Check the first step as usual, then that the kernel is really used."""
        super().check()
        handle = find_handle(self.emb.weight)
        assert handle is not None
        assert handle.state is not None
        with set_variable(SWITCH, str(int(self.fused))):
            plan = plan_step(handle.state, self._opt, self._opt.param_groups[0])
        if self.fused and plan is None:
            raise OptimizerError(
                f"the step of {self.contender.name} is not made by one kernel; see speedtransfer.optim.fused_step"
            )
