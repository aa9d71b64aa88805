"""Micro-timings by pytest-benchmark: ``python -m pytest bench --benchmark-enable --benchmark-autosave``.

For changes of a few microseconds on one machine; what machines give is measured by the suites of ``speedtransfer bench``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speedtransfer as st

IDS = torch.randint(100_000, (1000,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def emb() -> st.Embedding:
    """A table on the CPU, whose rows have been touched."""
    made = st.Embedding(100_000, 64, device="cpu", idle="lazy")
    made.table.torch().add_(0)
    return made


def test_gather(benchmark: Any, emb: st.Embedding) -> None:
    assert benchmark(emb.table.gather, IDS).shape == (1000, 64)


def test_scatter(benchmark: Any, emb: st.Embedding) -> None:
    ids, rows = IDS.unique(), torch.ones(len(IDS.unique()), 64)
    benchmark(emb.table.scatter, ids, rows)
    assert emb.table.gather(ids).equal(rows)


def test_lookup(benchmark: Any, emb: st.Embedding) -> None:
    emb.requires_grad_(False)
    assert benchmark(emb, IDS[:8]).shape == (8, 64)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_step(benchmark: Any, emb: st.Embedding, optimizer: Any) -> None:
    opt, before = optimizer(emb.parameters(), lr=0.1), emb.table.gather(IDS)

    def step() -> None:
        emb(IDS).sum().backward()
        opt.step()
        opt.zero_grad()

    benchmark(step)
    assert not emb.table.gather(IDS).equal(before)
