"""Measure a training step of tables on this machine: the very configuration, with fewer rows where there are many.

Modules and optimizer are real ones. All rows are trained once first, so that state and pages exist as after a while of
training. Where even a step would be too large, part of its distinct rows is looked up, and what it takes beyond a step with
next to no rows is multiplied.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from speedtransfer.cuda import synchronize
from speedtransfer.nn import Embedding, EmbeddingBag
from speedtransfer.nn.sizing import MakeOptimizer
from speedtransfer.planning.footprint import DEVICE, MMAP, PINNED, Form, size_of, state_planes
from speedtransfer.planning.workload import BAG, Load, Workload
from speedtransfer.ranks.zipf import draw_ids, expected_unique
from speedtransfer.system import available_bytes

# Of the tables of a trial, more than caches of processors hold; and the part of what is available that they take at most.
TRIAL_BYTES, _TRIAL_PART = 256 << 20, 1 / 8
_CHUNK_VALUES = 1 << 22  # of rows that are trained at once, before
_WARM, _LEAST, _MOST = 3, 3, 9  # steps
_LIMIT_S, _ALL_S = 0.4, 1.0  # seconds of those that are timed, and of all with what is drawn for them; after the least
# A dense module, whose time is in proportion to its rows, has this part of it, and is measured with fewer rows too.
_DENSE_PART, _FEWER = 1 / 2, 4

# More are not drawn for one feature and step: the sorting of them would take seconds.
_MAX_DRAWN = 1 << 22
_MIX = 0x9E3779B1  # prime, near 2**32 divided by the golden ratio: spreads numbers that count up


def trial_bytes() -> int:
    """Return how many bytes the tables of a trial may take here."""
    return max(1 << 20, min(TRIAL_BYTES, int(_TRIAL_PART * available_bytes())))


def time_tables(
    workload: Workload, form: Form, memory: str, device: torch.device, folder: Path, budget: int | None = None
) -> float:
    """Return the seconds of a step of tables in one memory and form; files of tables are made in `folder`, and removed.

    Tables are cut to `budget` bytes in all, by default to :func:`trial_bytes`.
    """
    row_bytes = [size_of(workload, table, form).row_bytes for table in workload.tables]
    cut = _Cut(workload, row_bytes, trial_bytes() if budget is None else budget)
    with _quiet(), tempfile.TemporaryDirectory(dir=folder, prefix=".speedtransfer-plan-") as files:
        modules = []
        for number, (table, rows) in enumerate(zip(workload.tables, cut.rows, strict=True)):
            kind = EmbeddingBag if table.kind == BAG else Embedding
            path = Path(files, f"{number}.safetensors") if memory == MMAP else None
            options = {"memory": memory, "path": path, "idle": workload.idle, **form.arguments}
            options["sparse"] = workload.trainer.wants_sparse
            zeros = torch.zeros(1, 1, device="cpu").expand(sum(rows), table.dim)
            modules.append(kind(sum(rows), table.dim, _weight=zeros, device=device, **options))
        ids_on = device if memory in (DEVICE, PINNED) else torch.device("cpu")
        steps = _Steps(workload, cut, modules, workload.trainer.make, device, ids_on)
        fixed, whole = steps.measured(few=True), steps.measured()
        del steps, modules
    fixed = min(fixed, whole)
    return fixed + (whole - fixed) * cut.times


def time_torch(workload: Workload, make: MakeOptimizer | None, sparse: bool, device: torch.device) -> float:
    """Return the seconds of a step of modules of torch: ``nn.Embedding`` and ``nn.EmbeddingBag``, dense or sparse.

    A dense one is measured with few and with more rows, as its step reads and writes all of them.
    """
    planes = state_planes(workload)
    row_bytes = [4 * table.dim * (1 + planes + (make is not None and not sparse)) for table in workload.tables]
    cut = _Cut(workload, row_bytes, trial_bytes() if sparse else int(_DENSE_PART * trial_bytes()))
    with _quiet():
        steps = _Steps(workload, cut, _of_torch(workload, cut.rows, sparse, device), make, device, device)
        few, whole = steps.measured(few=True), steps.measured()
        few = min(few, whole)
        if sparse or make is None:
            return few + (whole - few) * cut.times
        del steps
        less = [tuple(max(1, rows // _FEWER) for rows in of_table) for of_table in cut.rows]
        steps = _Steps(workload, cut, _of_torch(workload, less, sparse, device), make, device, device)
        small = min(steps.measured(few=True), few)
        del steps
    had, fewer, planned = (
        sum(table.dim * sum(own) for table, own in zip(workload.tables, rows, strict=True))
        for rows in (cut.rows, less, [[table.rows] for table in workload.tables])
    )
    by_value = (few - small) / max(1, had - fewer)
    return max(0.0, small - by_value * fewer) + (whole - few) * cut.times + by_value * planned


def _of_torch(
    workload: Workload, rows: Sequence[Sequence[int]], sparse: bool, device: torch.device
) -> list[nn.Embedding | nn.EmbeddingBag]:
    modules = []
    for table, of_table in zip(workload.tables, rows, strict=True):
        kind = nn.EmbeddingBag if table.kind == BAG else nn.Embedding
        weight = torch.zeros(sum(of_table), table.dim, device=device)
        modules.append(kind(sum(of_table), table.dim, sparse=sparse, _weight=weight))
    return modules


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Draw none of the caller's random numbers, in any mode, and repeat no warning that training will give."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Cut:
    """How many rows each feature has in a trial, and which part of a step's distinct rows it looks up.

    `row_bytes` are those of each table; all tables, and four times the lookups of a step, have `budget` bytes.
    """

    def __init__(self, workload: Workload, row_bytes: Sequence[int], budget: int) -> None:
        whole = [
            (rows * size, at, number)
            for at, (table, size) in enumerate(zip(workload.tables, row_bytes, strict=True))
            for number, (rows, _) in enumerate(table.features)
        ]
        kept = [[rows for rows, _ in table.features] for table in workload.tables]
        # The smallest first: what they leave of their part is for the larger ones.
        left = float(budget)
        for done, (size, at, number) in enumerate(sorted(whole)):
            part = left / (len(whole) - done)
            if size > part:
                kept[at][number] = max(1, min(kept[at][number], int(part / row_bytes[at])))
            left -= min(size, part)
        self.rows = [tuple(rows) for rows in kept]
        looked_up = sum(3 * 4 * table.dim * min(table.lookups, 1 << 40) for table in workload.tables)
        shares = [1.0, budget / 4 / max(1, looked_up)]
        drawn = 0.0
        for table, of_table in zip(workload.tables, self.rows, strict=True):
            expected, ratio = _drawn_of(table, workload.zipf)
            for (rows, _), each, kept_rows in zip(table.features, expected, of_table, strict=True):
                unique = min(each * min(ratio, 1.0), rows)
                drawn += unique
                if kept_rows < rows:
                    shares.append(kept_rows / 4 / max(unique, 1e-9))
        self.share = min(shares)
        # What the part of a step that grows with it is multiplied by.
        self.times = max(1.0, workload.unique / max(drawn * self.share, 1e-9)) if self.share < 1 else 1.0


class _Steps:
    """Steps of modules, on ids that are drawn anew for each."""

    def __init__(
        self,
        workload: Workload,
        cut: _Cut,
        modules: Sequence[Any],
        make: MakeOptimizer | None,
        device: torch.device,
        ids_on: torch.device,
    ) -> None:
        self._modules, self._device, self._ids_on = modules, device, ids_on
        self._bags = [table.bag for table in workload.tables]
        self._draws = [
            _draws_of(table, workload.zipf, rows, cut.share)
            for table, rows in zip(workload.tables, cut.rows, strict=True)
        ]
        params = [param for module in modules for param in module.parameters()]
        self._optimizer = None if make is None else make(params)
        self._grads = [torch.empty(0, table.dim, device=device) for table in workload.tables]
        if self._optimizer is None:
            for param in params:
                param.requires_grad_(False)
        else:
            self._train_all()

    def measured(self, few: bool = False) -> float:
        """Return the median time of a step; of one with a single row of each table if `few`."""
        times: list[float] = []
        begin = time.perf_counter()
        for number in range(_WARM + _MOST):
            ids = self._single(number) if few else self._drawn()
            synchronize(self._device)
            start = time.perf_counter()
            self._step(ids)
            synchronize(self._device)
            now = time.perf_counter()
            # Where a step takes long, one has warmed up all that matters.
            if number >= _WARM or (number and now - begin > _ALL_S):
                times.append(now - start)
            if len(times) >= _LEAST and (sum(times) > _LIMIT_S or now - begin > _ALL_S):
                break
        return statistics.median(times)

    def _single(self, number: int) -> list[Tensor]:
        """Return ids of one row of each table."""
        rows = [(number * 1_000_003) % module.num_embeddings for module in self._modules]
        return [torch.full((bag,), row, device=self._ids_on) for row, bag in zip(rows, self._bags, strict=True)]

    def _drawn(self) -> list[Tensor]:
        found = []
        for draws in self._draws:
            begin, parts = 0, []
            for draw, rows in draws:
                parts.append(draw.step() + begin)
                begin += rows
            found.append(torch.from_numpy(np.concatenate(parts)).to(self._ids_on))
        return found

    def _train_all(self) -> None:
        """Take steps that touch every row once."""
        sizes = [max(256, _CHUNK_VALUES // module.embedding_dim) for module in self._modules]
        most = max(-(-module.num_embeddings // size) for module, size in zip(self._modules, sizes, strict=True))
        for number in range(most):
            spans = [
                (number * size, min((number + 1) * size, module.num_embeddings))
                for module, size in zip(self._modules, sizes, strict=True)
            ]
            # One that has come to its end begins again: all modules have gradients in every step.
            spans = [(begin, end) if begin < end else (0, 1) for begin, end in spans]
            self._step([torch.arange(begin, end, device=self._ids_on) for begin, end in spans])

    def _step(self, ids: Sequence[Tensor]) -> None:
        outs = []
        for module, own, bag in zip(self._modules, ids, self._bags, strict=True):
            if isinstance(module, nn.EmbeddingBag):
                outs.append(module(own, torch.arange(0, len(own), bag, device=own.device)))
            else:
                outs.append(module(own))
        if self._optimizer is None:
            return
        torch.autograd.backward(outs, [self._grad(number, len(out)) for number, out in enumerate(outs)])
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _grad(self, number: int, count: int) -> Tensor:
        """Return a gradient of so many rows."""
        kept = self._grads[number]
        if len(kept) < count:
            kept = self._grads[number] = kept.new_full((count, kept.shape[1]), 1e-2)
        return kept[:count]


def _draws_of(table: Load, zipf: float, kept: Sequence[int], share: float) -> list[tuple[Draws, int]]:
    """Return what draws the ids of each feature, and its rows."""
    expected, ratio = _drawn_of(table, zipf)
    told = [ratio * unique if ratio < 1 - 1e-6 else None for unique in expected]
    features = enumerate(zip(table.features, kept, told, strict=True))
    return [(Draws(rows, own, n, zipf, share, unique, seed), own) for seed, ((rows, n), own, unique) in features]


def _drawn_of(table: Load, zipf: float) -> tuple[list[float], float]:
    """Return the distinct rows of each feature that are expected of a step as it is drawn, and those planned over them."""
    expected = [expected_unique(rows, zipf, min(count, _MAX_DRAWN)) for rows, count in table.features]
    return expected, table.unique / sum(expected)


# --- ids ----------------------------------------------------------------------------------------------------------------


class Draws:
    """Draws the lookups of one feature, step by step, by the Zipf law, spread over its rows.

    Where it has fewer rows (`kept`) than the table that is planned (`rows`), the most frequent ids have half of them to
    themselves, and all others take the other half in turns: distinct ids of a step have distinct rows, and a rare row is one
    that has not been touched for long. A `share` of the distinct rows is looked up. If they are `unique`, not those of the
    law, rows take turns.
    """

    def __init__(
        self, rows: int, kept: int, lookups: int, zipf: float, share: float, unique: float | None, seed: int
    ) -> None:
        self._rows, self._kept, self._share, self._unique, self._zipf = rows, kept, share, unique, zipf
        self._lookups = min(lookups, _MAX_DRAWN)
        self._draw = np.random.default_rng(seed)
        self._next = 0

    def step(self) -> NDArray[np.int64]:
        """Return the rows that the lookups of the next step name, at least one."""
        if self._unique is not None:
            count = max(1, round(self._share * self._lookups))
            distinct = self._in_turn(min(count, max(1, round(self._share * self._unique))), 0, self._kept)
            more = distinct[self._draw.integers(len(distinct), size=count - len(distinct))]
            return self._draw.permutation(np.concatenate([distinct, more]))
        drawn = draw_ids(self._rows, self._zipf, self._lookups, self._draw)
        ids, place = np.unique(drawn, return_inverse=True)
        if self._share < 1:
            wanted = np.zeros(len(ids), dtype=bool)
            wanted[self._draw.permutation(len(ids))[: max(1, round(self._share * len(ids)))]] = True
            place = place[wanted[place]]
        if self._kept == self._rows:
            rows = _spread(ids, self._kept)
        else:
            hot = self._kept // 2
            rows = np.empty_like(ids)
            rare = ids >= hot
            rows[~rare] = _spread(ids[~rare], hot)
            rows[rare] = self._in_turn(int(rare.sum()), hot, self._kept)
        return rows[place]

    def _in_turn(self, count: int, begin: int, end: int) -> NDArray[np.int64]:
        """Return the next `count` of the rows from `begin` on, which come again when all have been."""
        numbers = (self._next + np.arange(count)) % (end - begin)
        self._next = (self._next + count) % (end - begin)
        return begin + _spread(numbers, end - begin)


def _spread(numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return other numbers below `size`, different ones for different ones, that are near each other for none."""
    if not len(numbers):
        return numbers
    # A prime above all sizes that are spread has no factor in common with them, and products of numbers below 2**31 fit into
    # int64. Larger ones have no need to be spread as well.
    return numbers if size >= 1 << 31 else (numbers * (_MIX % size)) % size
