"""Many lookups in one graph, as a decoder makes one for each word: torch's numbers, and one addition for all gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from speedtransfer.optim import merge

ROWS, DIM, STEPS = 50, 4, 12


def pair() -> list[tuple[torch.nn.Module, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    dense = torch.nn.Embedding(ROWS, DIM, dtype=torch.float64)
    ours = st.Embedding.from_pretrained(dense.weight.detach(), freeze=False, idle="exact")
    return [(module, torch.optim.AdamW(module.parameters(), lr=0.1)) for module in (dense, ours)]


def decode(module: torch.nn.Module, seed: int, call=lambda module, ids: module(ids)) -> torch.Tensor:
    ids = torch.randint(ROWS, (STEPS, 6), generator=torch.Generator().manual_seed(seed))
    state = torch.zeros(6, DIM, dtype=torch.float64)
    for row in ids:
        state = torch.tanh(state + call(module, row))
    return state.square().sum()


def accumulated(module, optimizer):
    for seed in range(3):
        decode(module, seed).backward()
    optimizer.step()


def zeroed(module, optimizer):
    decode(module, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    decode(module, 1).backward()
    optimizer.step()


def held(module, optimizer):
    decode(module, 0).backward()
    grad = module.weight.grad
    decode(module, 1).backward()
    assert module.weight.grad is grad
    grad.mul_(0.5)
    optimizer.step()


def hooked(module, optimizer):
    seen = []
    module.weight.register_hook(lambda grad: seen.append(1) or 2 * grad)
    decode(module, 0).backward()
    assert seen == [1]
    optimizer.step()


def with_the_whole(module, optimizer):
    (decode(module, 0) + module.weight.square().sum() + decode(module, 1)).backward()
    optimizer.step()


def reentrant(module, optimizer):
    call = lambda module, ids: checkpoint(lambda _: module(ids), torch.zeros(1, requires_grad=True), use_reentrant=True)  # noqa: E731
    decode(module, 0, call).backward()
    optimizer.step()


def failed(module, optimizer):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows):
            return rows.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("fails")

    calls = iter(range(STEPS))
    with pytest.raises(RuntimeError, match="fails"):
        decode(module, 0, lambda m, ids: Fails.apply(m(ids)) if next(calls) == 3 else m(ids)).backward()
    optimizer.zero_grad()
    decode(module, 1).backward()
    optimizer.step()


def many(module, optimizer):
    sum(decode(module, seed) for seed in range(20)).backward()
    optimizer.step()


@pytest.mark.parametrize("rows", [1 << 16, 8])
@pytest.mark.parametrize("program", [many, accumulated, zeroed, held, hooked, with_the_whole, reentrant, failed])
def test_as_torch(program, rows, monkeypatch):
    monkeypatch.setattr(merge, "MANY_ROWS", rows)
    (dense, _), (ours, _) = pairs = pair()
    for module, optimizer in pairs:
        program(module, optimizer)
        optimizer.zero_grad()
        # What is left of the first would show in a second step.
        decode(module, 7).backward()
        optimizer.step()
    torch.testing.assert_close(ours.weight.detach(), dense.weight.detach(), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("rows", "lookups"), [(1 << 16, 1), (8, 20)])
def test_gradients_are_added_at_once_but_not_too_many(rows, lookups, monkeypatch):
    monkeypatch.setattr(merge, "MANY_ROWS", rows)
    added = []
    unique_rows = merge.unique_rows
    monkeypatch.setattr(merge, "unique_rows", lambda ids: added.append(len(ids)) or unique_rows(ids))
    _, (ours, _) = pair()
    sum(decode(ours, seed) for seed in range(lookups)).backward()
    assert max(added) < 3 * ROWS
    # The first part is pending already.
    assert lookups > 1 or len(added) == 2
