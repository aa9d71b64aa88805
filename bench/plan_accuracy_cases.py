"""The configurations of bench/plan_accuracy.py: what a plan says of each, and what a step takes at full size."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speedtransfer as st
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.ranks.zipf import draw_ids

_CHUNK_VALUES = 1 << 22
_WARM, _STEPS, _LIMIT_S = 4, 15, 4.0
_MIX = 2_654_435_761  # a prime that divides no number of rows here: spreads frequent ids over the table


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes
    ----------
    name : str
    tables : tuple of (int, int)
        Rows and columns of each.
    optimizer : str
    batch, lookups : int
        Samples, and ids of a sample in each table.
    zipf : float
    memory, idle : str
    storage, state : str
    """

    name: str
    tables: tuple[tuple[int, int], ...]
    optimizer: str = "AdamW"
    batch: int = 4096
    lookups: int = 4
    zipf: float = 1.05
    memory: str = "pageable"
    idle: str = "exact"
    storage: str = "float32"
    state: str = "float32"


# Of 1 to 3 GB with state.
CASES = (
    Case("AdamW exact, dim 64", ((3_000_000, 64),)),
    Case("AdamW lazy, dim 64", ((3_000_000, 64),), idle="lazy"),
    Case("AdamW exact, dim 16, uniform ids", ((6_000_000, 16),), zipf=0.0),
    Case("SGD, dim 256, uniform ids", ((2_000_000, 256),), optimizer="SGD", zipf=0.0, idle="auto"),
    Case("SGD momentum, dim 128", ((2_000_000, 128),), optimizer="SGD(momentum=0.9)"),
    Case("Adagrad, dim 128, small batch", ((2_000_000, 128),), optimizer="Adagrad", batch=256, idle="auto"),
    Case("AdamW, int8 rows, uint8 state", ((4_000_000, 128),), storage="int8", state="uint8"),
    Case("AdamW, bfloat16 rows, uint8 state", ((4_000_000, 64),), storage="bfloat16", state="uint8", idle="lazy"),
    Case(
        "AdamW exact, 8 tables, dim 32",
        tuple((rows, 32) for rows in (2_000_000, 1_000_000, 500_000, 300_000, 100_000, 30_000, 5_000, 300)),
        lookups=1,
    ),
    Case("AdamW exact, mmap, dim 64", ((2_000_000, 64),), memory="mmap"),
)


def planned(case: Case) -> dict[str, Any]:
    """Return the time of a step by :func:`speedtransfer.plan`, its bytes, and how long planning took."""
    start = time.perf_counter()
    plan = st.plan(
        list(case.tables),
        case.optimizer,
        case.batch,
        case.lookups,
        zipf=case.zipf,
        idle=case.idle,
        storage_dtype=case.storage,
        state_dtype=case.state,
    )
    (option,) = [option for option in plan.options if option.memory == case.memory]
    seconds = round(time.perf_counter() - start, 1)
    return {"step_s": option.step_s, "bytes": sum(held.total for held in plan.bytes.values()), "seconds": seconds}


def measured(case: Case) -> dict[str, Any]:
    """Return the median time of a step of tables of full size, all rows of which have been trained once."""
    start = time.perf_counter()
    trainer = optimizer_given(case.optimizer)
    assert trainer.make is not None
    options: dict[str, Any] = {"memory": case.memory, "idle": case.idle}
    if case.storage != "float32":
        options["storage_dtype"] = getattr(torch, case.storage)
    if case.state != "float32":
        options["state_dtype"] = getattr(torch, case.state)
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".plan-accuracy-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tables = []
        for number, (rows, dim) in enumerate(case.tables):
            path = Path(folder, f"{number}.npy") if case.memory == "mmap" else None
            zeros = torch.zeros(1, 1).expand(rows, dim)
            tables.append(st.Embedding(rows, dim, _weight=zeros, path=path, **options))
        optimizer = trainer.make([param for table in tables for param in table.parameters()])
        _train_all(tables, optimizer)
        times = _times(case, tables, optimizer)
        held = sum(table.table.nbytes for table in tables)
        del tables, optimizer
    seconds = round(time.perf_counter() - start, 1)
    return {"step_s": statistics.median(times), "steps": len(times), "bytes": held, "seconds": seconds}


def _train_all(tables: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """Touch every row once, so that its state and its pages exist."""
    parts = [torch.arange(len(table.table)).split(_CHUNK_VALUES // table.embedding_dim) for table in tables]
    for number in range(max(map(len, parts))):
        for table, own in zip(tables, parts, strict=True):
            table(own[number] if number < len(own) else own[0][:1]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _times(case: Case, tables: list[Any], optimizer: torch.optim.Optimizer) -> list[float]:
    draw = np.random.default_rng(0)
    times: list[float] = []
    for number in range(_WARM + _STEPS):
        ids = [
            torch.from_numpy(draw_ids(rows, case.zipf, case.batch * case.lookups, draw) * _MIX % rows)
            for rows, _ in case.tables
        ]
        grads = [torch.full((len(own), dim), 1e-2) for own, (_, dim) in zip(ids, case.tables, strict=True)]
        start = time.perf_counter()
        torch.autograd.backward([table(own) for table, own in zip(tables, ids, strict=True)], grads)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
        if number > 2 * _WARM and sum(times) > _LIMIT_S:
            break
    return times[_WARM:]
