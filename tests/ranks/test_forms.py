"""Small forms of rows, state and messages; overflows seen by one owner; plain gradients would drive replicas apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st
from ranks.small import DIM, ROWS, all_ids, ids, rows_of, table
from speedtransfer import rows as rows_module

FORMS = {
    "int8": {"storage_dtype": torch.int8},
    "float8_e4m3fn": {"storage_dtype": torch.float8_e4m3fn, "scale_block": 3},
    "float8_e5m2": {"storage_dtype": torch.float8_e5m2, "state_dtype": torch.bfloat16},
    "bfloat16": {"storage_dtype": torch.bfloat16},
    "float16": {"storage_dtype": torch.float16},
    "state bfloat16": {"state_dtype": torch.bfloat16},
    "state uint8": {"state_dtype": torch.uint8},
    "both": {"storage_dtype": torch.int8, "state_dtype": torch.uint8},
}


@torch.no_grad()
def looked_up(emb: Any) -> torch.Tensor:
    """All rows; the table of one process would give them as they are stored."""
    return emb(torch.arange(ROWS)).clone()


def bits(kind: str, options: dict[str, Any], idle: str, small_chunks: bool) -> tuple[bool, float]:
    """Whether a step of the same gradient (exact in any order) makes the bits of one process."""
    if small_chunks:
        rows_module.row_chunks = lambda count, size: (slice(i, min(i + 7, count)) for i in range(0, count, 7))
    emb, one = (table(each, dtype=torch.float32, idle=idle, **options) for each in (kind, "one"))
    opts = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (emb, one)]
    start = looked_up(one)
    ranks = dist.get_world_size()
    for step in range(6):
        # Rows that one rank looks up alone, so that sums need no rounding.
        parts = [(ids(step, rank) // ranks * ranks + rank).clamp(max=ROWS - 1) for rank in range(ranks)]
        for each, opt, chosen, scale in zip(
            (emb, one), opts, (parts[dist.get_rank()], torch.cat(parts)), (2, 1), strict=True
        ):
            opt.zero_grad()
            (each(chosen).sum() * scale / 2 * ranks / 2).backward()
            opt.step()
        if step == 3 and idle == "exact":
            for each in (emb, one):
                each._handle.rows.catch_up()
    for each in (emb, one):
        # Reading a row of one process writes it as caught up, which rounds it.
        each._handle.rows.catch_up()
    found, wanted = looked_up(emb), looked_up(one)
    return torch.equal(found, wanted), float((wanted - start).abs().max())


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("name", FORMS)
def test_small_forms_have_the_bits_of_one_process(two, kind, name, idle):
    for same, moved in two(bits, kind, FORMS[name], idle, False):
        assert same
        assert moved > 0.01


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_the_same_bits_if_idle_rows_catch_up_in_several_chunks(two, kind):
    try:
        for same, _ in two(bits, kind, FORMS["both"], "exact", True):
            assert same
    finally:
        # They have other chunks now.
        two.pool.stop()


DRAWS = 80


def rounded(kind: str, comm_dtype: torch.dtype) -> tuple[float, float, float]:
    """The mean of many rounded gradients, and one; their distance from the gradient."""
    emb = table(kind, dtype=torch.float32, comm_dtype=comm_dtype)
    one = table("one", dtype=torch.float32)
    weights = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    total, first = None, None
    for _ in range(DRAWS):
        emb.weight.grad = None
        (emb(ids()) * weights[ids()]).sum().backward()
        active = emb.weight.grad
        first = active.rows.clone() if first is None else first
        total = active.rows.double() if total is None else total + active.rows.double()
    (one(all_ids()) * weights[all_ids()]).sum().backward()
    owned = emb._handle.owners.partition.ids_of(dist.get_rank()) if kind == "sharded" else torch.arange(ROWS)
    wanted = one.weight.grad.to_dense()[owned[emb.weight.grad.ids]].double() / dist.get_world_size()
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    if not wanted.numel():
        return 0.0, 0.0, 1.0
    return float((total / DRAWS - wanted).abs().max()) / scale, float((first - wanted).abs().max()) / scale, scale


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize(("comm_dtype", "step"), [(torch.bfloat16, 2**-7), (torch.int8, 1 / 100)])
def test_rounded_gradients_are_unbiased(two, kind, comm_dtype, step):
    for mean, once, _ in two(rounded, kind, comm_dtype):
        assert once <= step
        assert mean <= step / 6


# --- what all must see ----------------------------------------------------------------------------------------------------


def one_row_overflows(kind: str, fused: bool) -> tuple[float, bool]:
    emb = table(kind, dtype=torch.float32)
    lin = nn.Linear(2, 1)
    before = rows_of(emb)
    opt = torch.optim.AdamW([*emb.parameters(), *lin.parameters()], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # Of rank 1 alone, and a row that one of the two owns.
    scale = float("inf") if dist.get_rank() == 1 else 1.0
    loss = emb(torch.tensor([7])).sum() * scale + lin(torch.ones(2)).sum()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return scaler.get_scale(), torch.equal(rows_of(emb), before)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_row_skips_the_step_of_all(two, kind, fused):
    assert two(one_row_overflows, kind, fused) == [(512.0, True)] * 2


def clipped(kind: str, norm: float) -> list[tuple[list[float], torch.Tensor]]:
    """Return norms and dense weights, by each way that torch takes norms."""
    found = []
    for foreach in (None, True, False):
        emb = table(kind)
        torch.manual_seed(2)
        lin = nn.Linear(DIM, 1, dtype=torch.float64)
        params = [*emb.parameters(), *lin.parameters()]
        opt = torch.optim.SGD(params, lr=0.1)
        norms = []
        for step in range(4):
            opt.zero_grad()
            lin(emb(ids(step))).square().sum().backward()
            for param in lin.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            norms.append(float(nn.utils.clip_grad_norm_(params, 0.1, norm, foreach=foreach)))
            opt.step()
        found.append((norms, lin.weight.detach().clone()))
    return found


@pytest.mark.parametrize("kind", ["sharded", "shared"])
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_norms_are_those_of_all_whatever_way_torch_takes(two, kind, norm):
    first, second = two(clipped, kind, norm)
    for (norms, weight), (other_norms, other) in zip(first, second, strict=True):
        # Else replicas would drift apart.
        assert norms == other_norms
        assert torch.equal(weight, other)
        assert norms == pytest.approx(first[0][0], rel=1e-12)
        assert float((weight - first[0][1]).abs().max()) < 1e-12


def nonfinite(kind: str) -> str:
    emb = table(kind)
    (emb(torch.tensor([7])).sum() * (float("nan") if dist.get_rank() else 1.0)).backward()
    messages = []
    for clip in (nn.utils.clip_grad_norm_, st.clip_grad_norm_):
        with pytest.raises(RuntimeError) as raised:
            clip(emb.parameters(), 1.0, error_if_nonfinite=True)
        messages.append(str(raised.value))
    return " ".join(messages)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_all_raise_for_a_norm_that_is_not_finite(two, kind):
    first, second = two(nonfinite, kind)
    assert first == second
    assert "non-finite" in first
