"""Suite `exchange`: gradients sent whole, in fewer bits, or seldom. What is sent until a model is as good, and how long is it?

All methods of a group train the same model on the same batches, each process its part, until the loss is that of one process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from speedtransfer.benchmark.exchange_methods import (
    ALL_REDUCE,
    BLOCK_MOMENTUM,
    COMM_DTYPES,
    EIGHT_BITS,
    FP16,
    LOCAL_SGD,
    NO_ERRORS,
    ONE_BIT,
    PERIOD,
    POWER_SGD,
    ROWS,
    WARMUP,
)
from speedtransfer.benchmark.exchange_worker import Sizes, Worker
from speedtransfer.benchmark.measure import Case, Group, Role
from speedtransfer.benchmark.world import World
from speedtransfer.errors import SpeedtransferError

GRADIENTS, TABLE = "gradients", "rows of a table"
SENT, STEPS, LOSS = "sent_bytes", "steps", "loss"
METHODS = {
    GRADIENTS: (ALL_REDUCE, FP16, EIGHT_BITS, POWER_SGD, ONE_BIT, NO_ERRORS, LOCAL_SGD, BLOCK_MOMENTUM),
    TABLE: tuple(COMM_DTYPES),
}
SLACK = 0.01  # by which the loss that is reached may be above that of one process: methods round
NOTE = (
    "Processes of one machine: with gloo the times show what compressing costs, not what a slow network gains. Batches are "
    "sorted, so that each process sees inputs of its own. The loss to reach is that of one process with the whole batches and "
    f"{SLACK:.0%} more; it is looked at every {PERIOD} steps. Methods that keep errors or average models begin with {WARMUP} "
    "steps of all-reduce. Network: SGD with one learning rate and no momentum, so that block momentum also gains what a "
    "higher rate would. Table: AdamW, sharded rows. Bytes are those that one process sends, counted at each call of "
    "torch.distributed as a ring sends them, and of tables by their counters. Seconds are of training alone."
)
TOLERANCE = 0.01  # of its loss is the most that all-reduce may be off the loss of one process: sums in another order

_FULL, _QUICK = Sizes(256, 4096, 64, 128, 0.1, 0.03, 0), Sizes(32, 256, 8, 64, 0.1, 0.03, 0)
_STEPS, _QUICK_STEPS = 256, 32
_MOST = 3  # times the steps of one process, before a method is said not to reach its loss
_RANKS, _QUICK_RANKS = (2, 4), (2,)


def groups(device: torch.device, quick: bool, **options: Any) -> list[Group]:
    """Return what the suite compares.

    Parameters
    ----------
    device : torch.device
        Of CUDA, and there is a GPU for each process: they train there, with NCCL. Else on the CPU, with gloo.
    quick : bool
        Small models, few steps, and two processes.
    seed : int, optional
    """
    sizes = (_QUICK if quick else _FULL)._replace(seed=options.get("seed") or 0)
    steps = _QUICK_STEPS if quick else _STEPS
    # Each sample is a training from its beginning.
    effort = {"turns": 1, "samples": 1, "budget_s": 1.0} if quick else {"turns": 2, "samples": 2, "budget_s": 40.0}
    about = {
        GRADIENTS: f"a network {sizes.width} wide",
        TABLE: f"a sharded table of {sizes.rows:,} x {sizes.dim}",
    }
    return [
        Group(
            f"train {about[kind]} to the loss of {steps} steps of one process, {ranks} processes",
            functools.partial(_cases, kind, sizes, ranks, steps, device),
            {**sizes._asdict(), "kind": kind, "ranks": ranks, "most": _MOST * steps},
            effort=effort,
        )
        for kind in METHODS
        for ranks in (_QUICK_RANKS if quick else _RANKS)
    ]


class UnreachedError(SpeedtransferError):
    """A method does not come to the loss of one process in the steps that it has."""


def _cases(kind: str, sizes: Sizes, ranks: int, steps: int, device: torch.device) -> list[Case]:
    cuda = device.type == "cuda" and torch.cuda.device_count() >= ranks
    target = (1 + SLACK) * loss_of_one(kind, sizes, steps)
    world, found = World(ranks, Worker, cuda), []
    for method in METHODS[kind]:
        ours = kind == TABLE or method in (ONE_BIT, BLOCK_MOMENTUM)
        role: Role = "ours" if ours else "other"
        way = Way(method, world, sizes, target, steps)
        found.append(Case(method, way.run, way.check, role=role, figures=way.figures, before=way.before))
    return found


def loss_of_one(kind: str, sizes: Sizes, steps: int) -> float:
    """Return the loss after `steps` steps of one process, which has the whole batches."""
    one = World(1, Worker)
    one.call("begin", METHODS[kind][0], sizes)
    one.call("steps", steps)
    (loss,) = one.call("loss")
    one.end()
    return float(loss)


class Way:
    """Training by one method until the loss is `target`: the first run finds how many steps that takes, others take them."""

    def __init__(self, method: str, world: World, sizes: Sizes, target: float, steps: int) -> None:
        self.method, self.world, self.sizes, self.target, self.steps = method, world, sizes, target, steps
        self.figures = dict[str, float]()
        self._losses: list[float] = []

    def before(self) -> None:
        """Make a new model in all processes."""
        self.world.call("begin", self.method, self.sizes)

    def run(self) -> None:
        """Train to the loss."""
        if STEPS in self.figures:
            self.world.call("steps", int(self.figures[STEPS]))
        else:
            self._search()

    def _search(self) -> None:
        while not self._losses or self._losses[-1] > self.target:
            if PERIOD * len(self._losses) >= _MOST * self.steps:
                raise UnreachedError(
                    f"did not come to a loss of {self.target:.4g} in {_MOST * self.steps} steps; the lowest is "
                    f"{min(self._losses):.4g}"
                )
            self.world.call("steps", PERIOD)
            losses = self.world.call("loss")
            assert len(set(losses)) == 1, "the processes have different models"
            self._losses.append(losses[0])
        steps = PERIOD * len(self._losses)
        sent = sum(self.world.call("sent")) / self.world.ranks / steps
        self.figures |= {STEPS: float(steps), SENT: sent, LOSS: self._losses[-1]}

    def check(self) -> None:
        """Raise AssertionError unless all-reduce has trained as one process does, and the same steps give the same loss."""
        if self.method in (ALL_REDUCE, ROWS):
            one = loss_of_one(TABLE if self.method == ROWS else GRADIENTS, self.sizes, int(self.figures[STEPS]))
            off = abs(self.figures[LOSS] - one)
            assert off <= TOLERANCE * one, f"the loss is {self.figures[LOSS]:.6g} but that of one process {one:.6g}"
        self.before()
        self.run()
        assert self.world.call("loss")[0] == self.figures[LOSS], "the same steps give another loss"
