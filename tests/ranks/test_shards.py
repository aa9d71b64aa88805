"""Tables that several processes own, or have replicas of: the numbers of one process with the batches of all."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from optimizer_cases import BASE

from ranks.training import Run, compare

RUNS = {
    "adamw": Run(),
    "adamw exact": Run(idle="exact"),
    "sgd momentum exact": Run(optimizer="sgd-momentum", idle="exact"),
    "adagrad": Run(optimizer="adagrad"),
    "clip, schedule": Run(clip=0.05, schedule=True, idle="exact"),
    "clip by the largest": Run(clip=0.01, norm=math.inf),
    "uneven, empty ranks": Run(sizes=(6, 2, 9, 4), empty=True, clip=0.05, idle="exact"),
    "three backwards": Run(accumulate=3),
    "no_sync": Run(accumulate=3, no_sync=True),
    "GradScaler": Run(overflow=4, clip=0.05, idle="exact"),
    "two lookups": Run(lookups=2, idle="exact"),
    "bag": Run(bag=True, module={"padding_idx": 0}),
    "max_norm": Run(module={"max_norm": 1.5}),
    "padding": Run(module={"padding_idx": 3}, idle="exact"),
    "sparse": Run(optimizer="sgd", module={"sparse": True}),
    "foreach": Run(optimizer_options={"foreach": True}),
    "fused": Run(optimizer_options={"fused": True}),
    "unused parameters": Run(ddp={"find_unused_parameters": True}),
    "static graph": Run(ddp={"static_graph": True}),
}


# By two processes of every kind, and by three of one kind, in every run of the tests; of other runs one kind.
CORE = {"adamw exact", "uneven, empty ranks", "two lookups"}


def _marks(world, name):
    if world == 4 or (world == 3 and name not in CORE):
        return [pytest.mark.slow]
    return [pytest.mark.sweep("kind", "name")] if world == 3 or name not in CORE else []


CASES = [
    pytest.param(world, kind, name, marks=_marks(world, name))
    for world in (2, 3, 4)
    for name in RUNS
    for kind in ("sharded", "shared", "replicas")
    # Others refuse it.
    if kind == "sharded" or "max_norm" not in RUNS[name].module
]


@pytest.mark.parametrize(("world", "kind", "name"), CASES)
def test_numbers_of_one_process(pool, world, kind, name):
    run = dataclasses.replace(RUNS[name], kind=kind)
    found = pool.of(world)(compare, run)
    for each in found:
        assert each["moved"] > 1e-3
        assert each["error"] < 1e-10
        assert each["dense"] < 1e-10
        assert each["shared"][0] == each["shared"][1]
        for ours, theirs in each["numbers"]:
            assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)
        assert torch.equal(each["rows"], found[0]["rows"])
        assert torch.equal(each["replica"], found[0]["replica"])


def each_optimizer() -> list[str]:
    """The optimizers whose numbers are not those of one process, within the rounding of sums in another order."""
    wrong = []
    for case in BASE:
        for idle in ("lazy", "auto"):
            with warnings.catch_warnings():
                # Of optimizers without a rule for idle rows.
                warnings.simplefilter("ignore")
                found = compare(Run(optimizer=case.name, idle=idle, steps=6))
            if not (found["error"] < 1e-8 and found["moved"] > 1e-3 and found["shared"][0] == found["shared"][1]):
                wrong.append(f"{case.name} {idle}: {found['error']:.1e} of the move")
    return wrong


@pytest.mark.slow
def test_every_optimizer(two):
    assert two(each_optimizer, limit=300) == [[], []]
