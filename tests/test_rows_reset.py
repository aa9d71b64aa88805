"""Rows that start anew in the middle of training: against dense parameters of torch whose rows and state are put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_pair import CASES, COUPLED, Exact
from lazy_oracle import Twins, start_value, tensors_in
from optimizer_cases import BASE, OptimizerCase, case_named, some
from test_rows import KINDS, train, trained
from torch import nn
from torch.optim import Optimizer

import speedtransfer as st
from speedtransfer.dtypes import bits_of
from speedtransfer.errors import DeviceError, StorageError
from speedtransfer.optim import find_handle
from speedtransfer.rows import LAST_STEP, Rows

# Touched often, sometimes, late and never.
IDS = torch.tensor([7, 0, 30, 2])


@torch.no_grad()
def reset_both(ours: nn.Module, dense: nn.Module, optimizer: Optimizer, ids: torch.Tensor) -> None:
    """Reset the rows `ids` of ours, and those of a dense weight and its state as `start_value` says."""
    weights = torch.randn(len(ids), dense.weight.shape[1], generator=torch.Generator().manual_seed(5))
    weights = weights.to(dense.weight.dtype)
    find_handle(ours.weight).rows.reset(ids, weights)
    dense.weight[ids] = weights
    for key, value in tensors_in(optimizer.state[dense.weight]).items():
        if value.dim() and len(value) == len(dense.weight):
            start = start_value(key, optimizer.param_groups[0], dense.weight)
            value[ids] = start[ids] if isinstance(start, torch.Tensor) else start


@pytest.mark.parametrize("case", some(BASE), ids=str)
def test_a_lazy_row_starts_anew(case: OptimizerCase) -> None:
    twins = Twins(case.make, dim=5)
    batches = twins.batches(21)
    for start in (0, 7, 14):
        twins.train(batches[start : start + 7])
        reset_both(twins.ours, twins.dense, twins.oracle.optimizer, IDS)
        twins.assert_same()
    twins.train(batches)
    twins.assert_same()


@pytest.mark.parametrize("between", [7, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", some([*CASES, *COUPLED]), ids=str)
def test_an_exact_row_starts_anew_and_misses_no_step_before(case: OptimizerCase, between: int) -> None:
    pair = Exact(case)
    batches = pair.batches(3 * between)
    for start in range(0, 3 * between, between):
        pair.train(batches[start : start + between])
        reset_both(pair.ours, pair.dense, pair.dense_opt, IDS)
        assert torch.equal(pair.ours(IDS), pair.dense(IDS))
    pair.train(batches)
    pair.assert_same()


def reset_midway(idle: str, kind: str, ids: list[int]) -> st.Embedding:
    """Return an embedding trained for 8 steps on rows below 20, some of whose other rows were reset meanwhile."""
    emb, opt, rows = trained(idle, kind, steps=5)
    rows.reset(torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), 8, dtype=torch.float64))
    train(emb, opt, [torch.randint(0, 20, (9,), generator=torch.Generator().manual_seed(step)) for step in range(3)])
    emb.opt = opt  # type: ignore[assignment]
    return emb


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_rows_that_are_reset_are_stored_as_new_ones_and_others_as_ever(idle: str, kind: str) -> None:
    emb, never = reset_midway(idle, kind, [33, 21, 39]), reset_midway(idle, kind, [])
    others = torch.arange(20)
    for name in emb.table.planes:
        ours, theirs = (bits_of(module.table.stored(name)) for module in (emb, never))
        assert torch.equal(ours[others], theirs[others]), name

    rows, ids = find_handle(emb.weight).rows, torch.tensor([25, 3])
    weights = torch.randn(2, 8)
    writes, count = rows.table.stats().scattered_rows, rows.state_dict()
    rows.reset(ids, weights)
    assert (rows.table.stats().scattered_rows - writes, rows.state_dict()) == (2, count)
    fresh = Rows(st.Table(2, 8, emb.table.dtype, "pageable"), rows.storage_dtype, rows.state_dtype, rows.scale_block)
    fresh.load("weight", weights)
    fresh.add_together(dict.fromkeys(("exp_avg", "exp_avg_sq"), ((8,), torch.float32, 0.0)))
    for name in fresh.table.planes:
        assert torch.equal(bits_of(emb.table.stored(name))[ids], bits_of(fresh.table.stored(name))), name
    if idle == "exact":
        assert emb.table.stored(LAST_STEP)[ids].flatten().tolist() == [8, 8]
    assert torch.equal(emb(ids), fresh.read(torch.arange(2))["weight"])


def test_planes_that_start_from_the_weights_do_so_as_these_are_stored() -> None:
    rows = Rows(st.Table(4, 8, torch.int8, "pageable"), torch.int8)
    rows.add("average", (8,), torch.float32, None)
    rows.reset(torch.tensor([2]), 1 + torch.rand(1, 8))
    assert torch.equal(rows.whole("average"), rows.whole("weight"))
    assert rows.whole("average")[2].ne(0).all()


def test_a_pending_gradient_meets_the_row_as_it_was_reset() -> None:
    twins = Twins(case_named("adamw").make)
    twins.train(twins.batches(4))
    twins.zero_grad()
    twins.backward(IDS, torch.zeros(4, 16))
    reset_both(twins.ours, twins.dense, twins.oracle.optimizer, IDS)
    twins.step()
    twins.assert_same()


def test_rows_that_cannot_be_written_are_not_reset(tmp_path: Any) -> None:
    st.Table(4, 8, memory="pageable").save(tmp_path / "table.npy")
    rows = Rows(st.Table.load(tmp_path / "table.npy", "mmap"))
    with pytest.raises((StorageError, DeviceError), match="read in place"):
        rows.reset(torch.tensor([2]), torch.ones(1, 8))
    assert rows.read(torch.tensor([2]))["weight"].eq(0).all()
