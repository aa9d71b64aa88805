"""One AdamW training step on a table of which a batch touches a few percent, against PyTorch's own ways.

The step is forward, backward from a fixed gradient, optimizer step and zero_grad. All cases see the same batches.
"""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, DIM, LOOKUPS, ROWS, turns, zipf_ids

import speedtransfer as st

CASES = {
    "speedtransfer": (lambda rows: st.Embedding(rows, DIM), lambda p: torch.optim.AdamW(p, fused=True)),
    "nn.Embedding + SparseAdam": (
        lambda rows: torch.nn.Embedding(rows, DIM, sparse=True),
        lambda p: torch.optim.SparseAdam(list(p)),
    ),
    "nn.Embedding + dense fused AdamW": (
        lambda rows: torch.nn.Embedding(rows, DIM),
        lambda p: torch.optim.AdamW(p, fused=True),
    ),
    "nn.Embedding + dense AdamW": (lambda rows: torch.nn.Embedding(rows, DIM), lambda p: torch.optim.AdamW(p)),
}


def stepper(case: str, rows: int, batches: list[torch.Tensor]):
    torch.manual_seed(0)
    make_embedding, make_optimizer = CASES[case]
    emb = make_embedding(rows).to(DEVICE)
    opt = make_optimizer(emb.parameters())
    grad = torch.randn(LOOKUPS, DIM, device=DEVICE)
    turn = iter(range(1 << 60))

    def step() -> None:
        emb(batches[next(turn) % len(batches)]).backward(grad)
        opt.step()
        opt.zero_grad()

    return emb, step


@pytest.mark.parametrize("case", CASES)
@turns
def test_adamw_step(benchmark, synchronize, case, turn):
    benchmark.group = f"AdamW step, {ROWS} x {DIM} float32, {LOOKUPS} lookups, on {DEVICE.type}"
    batches = [zipf_ids(ROWS, LOOKUPS, seed).to(DEVICE) for seed in range(4)]
    benchmark.extra_info["unique_rows"] = len(batches[0].unique())
    emb, step = stepper(case, ROWS, batches)
    if case == "speedtransfer" and turn == 0:
        check_first_step(emb, step, batches)

    def run() -> None:
        step()
        synchronize()

    benchmark.pedantic(run, rounds=9, warmup_rounds=3)


def check_first_step(emb, step, batches) -> None:
    """The touched rows after a step are those of dense AdamW, the others untouched."""
    torch.manual_seed(0)
    dense, dense_step = stepper("nn.Embedding + dense AdamW", ROWS, batches)
    before = dense.weight.detach().clone()
    step()
    dense_step()
    touched = batches[0].unique().cpu()
    ours = emb.table.torch().cpu()
    torch.testing.assert_close(ours[touched], dense.weight.detach().cpu()[touched])
    ours_idle, idle = ours.clone(), before.cpu()
    ours_idle[touched] = idle[touched] = 0
    assert torch.equal(ours_idle, idle)


@pytest.mark.parametrize("case", ["1x rows", "2x rows", "4x rows", "8x rows"])
@turns
def test_step_by_table_size(benchmark, synchronize, case, turn):
    """The same accesses in a larger table: the cost of a step must not grow with it."""
    factor = int(case.split("x")[0])
    benchmark.group = f"AdamW step by table size, 1x = {ROWS} rows, on {DEVICE.type}"
    batches = [(zipf_ids(ROWS, LOOKUPS, seed) * factor).to(DEVICE) for seed in range(4)]
    _, step = stepper("speedtransfer", ROWS * factor, batches)

    def run() -> None:
        step()
        synchronize()

    benchmark.pedantic(run, rounds=9, warmup_rounds=3)
