"""Training steps beside those of other libraries: torch, FBGEMM, TorchRec, DeepSpeed, bitsandbytes and TFRA, on the host.

Each trains the same tables on the same batches with the same gradient of what is looked up. Before any is timed, its rows are
compared with those of ``torch.nn.Embedding`` after some steps; where an optimizer leaves idle rows as they are, or rounds its
state, only that they moved. ``make peers`` installs the libraries into an environment of their own; one that does not install
or run is named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import peer_tables as tables
import torch
from torch import nn

from speedtransfer import Embedding, EmbeddingBag
from speedtransfer.benchmark.environment import host_room
from speedtransfer.benchmark.measure import Case, Group

NOTE = (
    "Ids follow Zipf's law. Embedding and EmbeddingBag are a module for each table; MultiEmbedding has all in one, looked "
    "up at once with ids in one tensor, as those of FBGEMM and TorchRec are, or one by one as in a loop over the features. "
    "FBGEMM and TorchRec make the step in backward, and on a host have SGD and Adagrad only; tables of FBGEMM are given "
    "bags of one id where rows are not pooled. Idle rows stay as they are in FBGEMM, TorchRec, TFRA and SparseAdam, and in "
    'ours with idle="lazy". DeepSpeed and bitsandbytes train nn.Embedding by dense gradients, as they take no others for '
    "these optimizers. TFRA runs in a process of its own, whose table holds the ids of the batches only; the times include "
    "a message through a pipe."
)

ACROSS, LOGARITHMIC = len(tables.OPTIMIZERS), True
VALUE = (lambda case: 1e3 * case.median_s, "time of a step on a logarithmic scale, less is better")
_TOLERANCE = 1e-4  # of the farthest that any weight moved
# Of a contender, where some have none here, and the share of the memory for all of them.
_PLANES, _SHARE = {"SGD": 1.5, "Adagrad": 2.5, "AdamW": 3.8}, 0.75
SHAPES = (
    tables.Shape(1, 1_000_000, 128, 98_304),
    tables.Shape(26, 100_000, 16, 256),
    tables.Shape(26, 1_000_000, 64, 4_096),
    tables.Shape(26, 100_000, 16, 2_560, 256),
)
QUICK = (tables.Shape(1, 2_000, 16, 512), tables.Shape(3, 1_000, 8, 64), tables.Shape(3, 1_000, 8, 128, 16))


# --- what is compared ---------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A way to train; `same` says whether its tables are those of nn.Embedding."""

    name: str
    make: Callable[[tables.Data], tables.Peer]
    same: bool = True
    ours: bool = False


def contenders(shape: tables.Shape, optimizer: str) -> Iterator[Contender]:
    kind, theirs = (EmbeddingBag, nn.EmbeddingBag) if shape.bags else (Embedding, nn.Embedding)
    several = shape.tables > 1
    name = "MultiEmbeddingBag" if shape.bags else "MultiEmbedding"
    for idle in ("exact", "lazy") if optimizer == "AdamW" else ("exact",):
        told, same = f', idle="{idle}"' if optimizer == "AdamW" else "", idle == "exact"
        if several:
            yield Contender(f"{name}{told}", functools.partial(tables.together, idle=idle), same, True)
        if several and not shape.bags:
            apart = functools.partial(tables.together, one_by_one=True, idle=idle)
            yield Contender(f"{name}, one by one{told}", apart, same, True)
        yield Contender(f"{kind.__name__}{told}", functools.partial(tables.modules, kind=kind, idle=idle), same, True)
    yield Contender(f"torch.nn.{theirs.__name__}", functools.partial(tables.modules, kind=theirs))
    sparse = functools.partial(tables.modules, kind=theirs, sparse=True)
    if optimizer == "AdamW":
        sparse_adam = functools.partial(
            sparse, make=lambda params: torch.optim.SparseAdam(list(params), lr=tables.RATE)
        )
        yield Contender("torch SparseAdam", sparse_adam, False)
        adam = {"module": "deepspeed.ops.adam", "name": "DeepSpeedCPUAdam", "weight_decay": 0.01}
        yield Contender("DeepSpeed CPUAdam", functools.partial(tables.dense, **adam))
        adam = {"module": "bitsandbytes.optim", "name": "AdamW8bit"}
        yield Contender("bitsandbytes AdamW8bit", functools.partial(tables.dense, **adam), False)
    else:
        yield Contender(f"torch.nn.{theirs.__name__}(sparse=True)", sparse)
    yield Contender("FBGEMM", tables.fbgemm)
    yield Contender("TorchRec, fused", tables.torchrec)
    yield Contender("TFRA", tables.tfra, optimizer != "AdamW")


class Training:
    """A contender that trains, and the check of its tables."""

    def __init__(self, contender: Contender, data: tables.Data) -> None:
        self.contender, self.data, self.number = contender, data, tables.CHECKED - 1

    @functools.cached_property
    def peer(self) -> tables.Peer:
        """What trains, after the steps that are compared but the last."""
        made = self.contender.make(self.data)
        for number in range(self.number):
            made.step(number)
        return made

    def run(self) -> None:
        """Make a step."""
        self.peer.step(self.number)
        self.number += 1

    def check(self) -> None:
        """Raise AssertionError unless the rows are those of nn.Embedding, or at least have moved."""
        moved = max(float((a - b).abs().max()) for a, b in zip(self.data.expected, self.data.weights, strict=True))
        off = 0.0
        for found, expected, first in zip(self.peer.tables(), self.data.expected, self.data.weights, strict=True):
            off = max(off, float((found - (expected if self.contender.same else first)).abs().max()))
        if self.contender.same:
            assert off <= _TOLERANCE * moved, f"a weight is {off:.1e} off, where the farthest has moved by {moved:.1e}"
        else:
            assert moved / 4 < off < 4 * moved, f"the farthest weight has moved by {off:.1e}, not by about {moved:.1e}"


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each shape and optimizer; tables have fewer rows where those of all would not fit."""
    found = []
    for shape in QUICK if quick else SHAPES:
        for optimizer in tables.OPTIMIZERS:
            # All are in memory at once, with the first weights and the expected ones; those of dense gradients have most.
            planes = _PLANES[optimizer] * sum(1 for _ in contenders(shape, optimizer)) + 2
            most = int(host_room(_SHARE) / (4 * shape.dim * shape.tables * planes))
            fits = shape._replace(rows=min(shape.rows, max(1, most // 1_000) * 1_000))
            params = {"optimizer": optimizer, **fits._asdict()}
            found.append(Group(f"{fits.title}, {optimizer}", functools.partial(_cases, fits, optimizer), params))
    return found


def _cases(shape: tables.Shape, optimizer: str) -> list[Case]:
    data = tables.Data(shape, optimizer)
    return [
        Case.of(one.name, Training(one, data), "ours" if one.ours else "other") for one in contenders(shape, optimizer)
    ]
