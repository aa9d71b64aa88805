"""Training with a vocabulary, against tables that have a row for each id from the beginning; and rows read ahead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lazy_oracle import squared_loss
from optimizer_cases import BASE, COUPLED, OptimizerCase, some
from reading_ahead import at_once, by_loader, by_ticket
from torch import Tensor

import speedtransfer as st
from speedtransfer.optim import find_handle

NUM_IDS, DIM = 24, 5
# Among them negative ones, and the first and the last.
DRAWN = torch.randint(-(2**63), 2**63 - 1, (NUM_IDS - 2,), generator=torch.Generator().manual_seed(5))
IDS = torch.cat([DRAWN, torch.tensor([-(2**63), 2**63 - 1])])


class Pair:
    """A module with a vocabulary, and one whose rows, numbered by `order`, are those of all ids from the beginning."""

    def __init__(self, case: OptimizerCase, vocabulary: st.Vocabulary, **options: Any) -> None:
        torch.manual_seed(7)
        self.vocabulary = vocabulary
        self.ours = st.Embedding(NUM_IDS, DIM, vocabulary=self.vocabulary, **options)
        self.plain = st.Embedding(NUM_IDS + 1, DIM, **options)
        self.order = {id: row for row, id in enumerate(IDS.tolist(), 1)}
        self.optimizers = [case.make(module.parameters()) for module in (self.ours, self.plain)]

    def rows(self, ids: Tensor) -> Tensor:
        return torch.tensor([self.order[id] for id in ids.flatten().tolist()]).view(ids.shape)

    def begin(self, ids: Tensor) -> None:
        """Set the rows of ids in the plain table to what the vocabulary begins with, without state."""
        weights = self.vocabulary.initial_values(ids.numpy(), DIM, torch.float32)
        find_handle(self.plain.weight).rows.reset(self.rows(ids), weights)

    def train(self, ids: Tensor, target: Tensor) -> None:
        outs = self.ours(ids), self.plain(self.rows(ids))
        assert torch.equal(*outs)
        for out, optimizer in zip(outs, self.optimizers, strict=True):
            optimizer.zero_grad()
            squared_loss(out, target).backward()
            optimizer.step()

    def check(self) -> None:
        ids, rows = self.vocabulary.export()
        assert torch.equal(rows, self.plain.weight.detach()[self.rows(ids)])
        ours, plain = (optimizer.state_dict()["state"].get(0, {}) for optimizer in self.optimizers)
        assert ours.keys() == plain.keys()
        for name, value in ours.items():
            if isinstance(value, Tensor) and value.dim():
                assert torch.equal(value[self.vocabulary.rows(ids)], plain[name][self.rows(ids)]), name


def batches(steps: int, size: int = 6) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    at = [(torch.rand(size, generator=draw) ** 2 * NUM_IDS).long() for _ in range(steps)]
    return [(IDS[one], torch.randn(size, DIM, generator=draw)) for one in at]


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("ids", ["at first", "later", "again"])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("case", some([*BASE, *COUPLED[:2]]), ids=str)
def test_ids_start_anew_when_they_come(case: OptimizerCase, idle: str, ids: str) -> None:
    """All before the first step, so that what idle rows miss then is the same too; or later; or after they have gone."""
    known, gone, returned = set[int](), set[int](), 0
    capacity = 14 if ids == "again" else None
    archive = lambda ids, rows: gone.update(ids.tolist())  # noqa: E731
    pair = Pair(case, st.Vocabulary(capacity, evict="lru" if capacity else None, on_evict=archive), idle=idle)
    first = [(IDS, torch.zeros(NUM_IDS, DIM))] if ids == "at first" else []
    for found, target in [*first, *batches(25 if capacity else 12)]:
        new = [id for id in dict.fromkeys(found.tolist()) if id not in known - gone]
        returned += len(gone & set(new))
        gone -= set(new)
        known.update(new)
        pair.begin(torch.tensor(new, dtype=torch.int64))
        pair.train(found, target)
    pair.check()
    assert bool(returned) == (ids == "again")


# --- rows of ids with a vocabulary, read ahead of their lookup --------------------------------------------------------


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


@pytest.mark.sweep(strength=2)
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
