"""Rows: catching up, and rows that start anew in the middle of training."""

import pytest
import torch
from cases import take_step
from lazy_oracle import Twins, exact, start_value, tensors_in
from optimizer_cases import ALL, BASE, COUPLED, case_named, some

import speedtransfer as st
from speedtransfer.dtypes import bits_of
from speedtransfer.optim import find_handle
from speedtransfer.rows import LAST_STEP, Rows

KINDS = {
    "plain": {},
    "bfloat16": {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "8 bits": {"storage_dtype": torch.int8, "state_dtype": torch.uint8},
    "float8": {"storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8, "scale_block": 4},
}
IDS = torch.tensor([2, 3, 11, 17])


def trained(idle, kind, steps=6):
    torch.manual_seed(0)
    emb = st.Embedding(40, 8, memory="pageable", idle=idle, **KINDS[kind])
    opt = torch.optim.AdamW(emb.parameters(), lr=0.05, weight_decay=0.1)
    train(emb, opt, [torch.randint(0, 20, (9,)) for _ in range(steps)])
    handle = find_handle(emb.weight)
    assert handle is not None
    return emb, opt, handle.rows


def train(emb, opt, batches):
    for ids in batches:
        take_step(opt, emb(ids).pow(2).sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_is_what_the_step_before_has_left(kind):
    emb, _, rows = trained("exact", kind)
    read = rows.read(IDS)
    assert read.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    rows.catch_up(IDS)
    now = rows.table.read(IDS, [LAST_STEP])[LAST_STEP]
    assert now.flatten().tolist() == [6] * len(IDS)
    if kind == "plain":  # others are rounded once more
        torch.testing.assert_close(rows.read(IDS), read, rtol=0, atol=0)
        assert torch.equal(emb(IDS).detach(), read["weight"])


# --- rows that start anew: against dense parameters of torch whose rows and state are put back --------------------------

# Touched often, sometimes, late and never.
RESET = torch.tensor([7, 0, 30, 2])


@torch.no_grad()
def reset_both(twins):
    """Reset the rows `RESET` of ours, and those of the dense weight and its state as `start_value` says."""
    dense = twins.dense.weight
    weights = torch.randn(len(RESET), twins.dim, generator=torch.Generator().manual_seed(5)).to(dense.dtype)
    find_handle(twins.ours.weight).rows.reset(RESET, weights)
    dense[RESET] = weights
    for key, value in tensors_in(twins.dense_opt.state[dense]).items():
        if value.dim() and len(value) == len(dense):
            start = start_value(key, twins.dense_opt.param_groups[0], dense)
            value[RESET] = start[RESET] if isinstance(start, torch.Tensor) else start
    assert torch.equal(twins.ours(RESET), twins.dense(RESET))


CASES = [pytest.param(*case.values, "lazy", marks=case.marks, id=f"{case.values[0]}-lazy") for case in some(BASE)]
CASES += [
    pytest.param(*it.values, "exact", marks=it.marks, id=f"{it.values[0]}-exact") for it in some([*ALL, *COUPLED])
]


@pytest.mark.parametrize(("case", "idle"), CASES)
def test_a_row_starts_anew_and_misses_no_step_before(case, idle):
    twins = Twins(case.make, dim=5) if idle == "lazy" else exact(case)
    batches = twins.batches(21)
    for start in (0, 7, 14):
        twins.train(batches[start : start + 7])
        reset_both(twins)
    twins.train(batches)
    twins.assert_same()


def reset_midway(idle, kind, ids):
    """Return an embedding trained for 8 steps on rows below 20, some of whose other rows were reset meanwhile."""
    emb, opt, rows = trained(idle, kind, steps=5)
    rows.reset(torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), 8, dtype=torch.float64))
    train(emb, opt, [torch.randint(0, 20, (9,), generator=torch.Generator().manual_seed(step)) for step in range(3)])
    emb.opt = opt
    return emb


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_rows_that_are_reset_are_stored_as_new_ones_and_others_as_ever(idle, kind):
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


def test_planes_that_start_from_the_weights_do_so_as_these_are_stored():
    rows = Rows(st.Table(4, 8, torch.int8, "pageable"), torch.int8)
    rows.add("average", (8,), torch.float32, None)
    rows.reset(torch.tensor([2]), 1 + torch.rand(1, 8))
    assert torch.equal(rows.whole("average"), rows.whole("weight"))
    assert rows.whole("average")[2].ne(0).all()


def test_a_pending_gradient_meets_the_row_as_it_was_reset():
    twins = Twins(case_named("adamw").make)
    twins.train(twins.batches(4))
    twins.zero_grad()
    twins.backward(RESET, torch.zeros(4, 16))
    reset_both(twins)
    twins.step()
    twins.assert_same()
