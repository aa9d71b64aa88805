"""Rows of ids with a vocabulary, read ahead of their lookup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lazy_oracle import one_thread  # noqa: F401 - a fixture
from reading_ahead import at_once, by_loader, by_ticket

import speedtransfer as st


def trained(ahead: Any, idle: str = "lazy", **about: Any) -> tuple[Any, Any, Any]:
    """Return outputs and export of a run over ids that come and go; `ahead` takes a module and batches, and yields these."""
    torch.manual_seed(0)
    vocabulary = st.Vocabulary(20, 40, evict="lru", seed=1, **about)
    module = st.Embedding(20, 4, vocabulary=vocabulary, idle=idle)
    opt = torch.optim.AdamW(module.parameters(), lr=0.1)
    draw, outs = torch.Generator().manual_seed(2), []
    batches = [torch.randint(3 * step, 3 * step + 18, (2, 8), generator=draw) - 30 for step in range(25)]
    for ids, found in ahead(module, batches):
        out = module(found)
        outs.append(out.detach().clone())
        opt.zero_grad()
        (out - 1).square().mean().backward()
        opt.step()
        with torch.no_grad():
            outs.append(module(ids))
    return torch.cat(outs), vocabulary.export(), vocabulary.stats()


@pytest.mark.parametrize("about", [{}, {"admit": 2}, {"admit": 2, "unseen": "row"}], ids=str)
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("ahead", [by_ticket, by_loader])
def test_reading_ahead_changes_no_bits(ahead: Any, idle: str, about: dict[str, Any]) -> None:
    expected, (ids, rows), _ = trained(at_once, idle, **about)
    outs, (found_ids, found_rows), stats = trained(ahead, idle, **about)
    assert torch.equal(outs, expected)
    assert torch.equal(found_ids, ids)
    assert torch.equal(found_rows, rows)
    assert stats.evicted


def test_rows_read_ahead_are_used_beside_those_of_new_ids() -> None:
    module = st.Embedding(20, 4, vocabulary=st.Vocabulary())
    module(torch.arange(6))
    module.table.reset_stats()
    ticket = module.prefetch(torch.arange(8))
    out = module(ticket)
    # Seven rows ahead, with that of unseen ids, and the two of the new ids twice: their first values were written meanwhile.
    assert module.table.stats().gathered_rows == 7 + 2 * 2
    assert torch.equal(out.detach(), module(torch.arange(8)).detach())


def test_a_buffer_that_is_filled_anew_is_noticed() -> None:
    module = st.Embedding(20, 4, vocabulary=st.Vocabulary())
    batch = torch.arange(3)

    def refilled() -> Any:
        for start in range(4):
            batch.copy_(torch.arange(start, start + 3))
            yield batch

    with pytest.raises(st.errors.InvalidValueError, match="copies"):
        list(map(module, st.prefetch(refilled(), lambda ids: {module: ids})))
