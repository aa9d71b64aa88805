"""Ids that are admitted after the step that follows their lookup, against a dict."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import speedtransfer as st
from speedtransfer.errors import HostMemoryError
from speedtransfer.vocabulary import room

DIM, RATE = 3, 0.5


class Oracle:
    """Rows by id, trained by SGD; ids become known in the order in which they were first seen, after `admit` sightings."""

    def __init__(self, vocabulary: st.Vocabulary, admit: int, capacity: int) -> None:
        self.vocabulary, self.admit, self.capacity = vocabulary, admit, capacity
        self.rows: dict[int, Tensor] = {}
        self.last_use: dict[int, int] = {}
        self.seen: Counter[int] = Counter()
        self.waiting: list[list[int]] = []
        self.shared, self.clock, self.evicted = torch.zeros(DIM), 0, 0

    def initial(self, id: int) -> Tensor:
        return self.vocabulary.initial_values(torch.tensor([id]).numpy(), DIM, torch.float32)[0]

    def read(self, ids: list[int]) -> Tensor:
        unseen = {"initial": self.initial, "zeros": lambda _: torch.zeros(DIM), "row": lambda _: self.shared}
        return torch.stack([self.rows[i] if i in self.rows else unseen[self.vocabulary.unseen](i) for i in ids])

    def step(self, batches: list[tuple[list[int], Tensor]]) -> None:
        """Take the gradients of some lookups, then admit the new ids of all."""
        shared = self.shared.clone()
        for ids, grads in batches:
            for id, grad in zip(ids, grads, strict=True):
                if id in self.rows:
                    self.rows[id] = self.rows[id] - RATE * grad
                elif self.vocabulary.unseen == "row":
                    shared -= RATE * grad
        self.shared = shared
        before = [{id for id in ids if id not in self.rows} for ids, _ in batches]
        for ids, _ in batches:
            self.last_use.update({id: self.clock for id in ids if id in self.rows})
        for (ids, _), unknown in zip(batches, before, strict=True):
            still = [id for id in dict.fromkeys(ids) if id in unknown and id not in self.rows]
            self.seen.update(id for id in ids if id in still)
            new = [id for id in still if self.seen[id] >= self.admit]
            for _ in range(len(self.rows) + len(new) - self.capacity):
                oldest = min(self.last_use, key=lambda id: self.last_use[id])
                del self.rows[oldest], self.last_use[oldest]
                self.evicted += 1
            for id in new:
                self.rows[id], self.last_use[id] = self.initial(id), self.clock
        self.clock += 1


def module_with(vocabulary: st.Vocabulary, **options: Any) -> Any:
    return st.Embedding(4, DIM, vocabulary=vocabulary, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("unseen", ["initial", "zeros", "row"])
@pytest.mark.parametrize(("admit", "capacity"), [(1, 300), (3, 300), (1, 6)])
@pytest.mark.parametrize("lookups_a_step", [1, 3])
def test_training_is_that_of_a_dict(unseen: str, admit: int, capacity: int, lookups_a_step: int) -> None:
    """With few rows those of the ids used longest ago are taken."""
    vocabulary = st.Vocabulary(4, capacity, admit=admit, unseen=unseen, evict="lru", deferred=True, seed=1)
    module, oracle = module_with(vocabulary), Oracle(vocabulary, admit, capacity)
    opt = torch.optim.SGD(module.parameters(), lr=RATE)
    draw, unknown, looked_up = torch.Generator().manual_seed(2), 0, 0
    for step in range(25):
        batches = []
        for _ in range(lookups_a_step):
            ids = (torch.rand(9, generator=draw) ** 2 * 60 + step).long() * -(2**57)
            if capacity == 6:
                # Each three follow each other, so that nobody has to be chosen among equals.
                ids = torch.arange(3 * (step // 2), 3 * (step // 2) + 3)
            target = torch.randn(len(ids), DIM, generator=draw)
            known = oracle.read(ids.tolist())
            out = module(ids)
            torch.testing.assert_close(out, known)
            (out * target).sum().backward()
            batches.append((ids.tolist(), target))
            unknown += sum(id not in oracle.rows for id in ids.tolist())
            looked_up += len(ids)
        opt.step()
        opt.zero_grad()
        oracle.step(batches)
        assert sorted(vocabulary.ids().tolist()) == sorted(oracle.rows)
    ids, rows = vocabulary.export()
    torch.testing.assert_close(rows, torch.stack([oracle.rows[id] for id in ids.tolist()]))
    stats = vocabulary.stats()
    assert (stats.lookups, stats.unseen, stats.evicted) == (looked_up, unknown, oracle.evicted)


@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_known_ids_train_as_at_once(idle: str) -> None:
    """Once all are known the numbers are those without `deferred`, to the last bit."""
    found = []
    for deferred in (False, True):
        torch.manual_seed(0)
        vocabulary = st.Vocabulary(50, deferred=deferred, seed=1)
        module = st.EmbeddingBag(50, DIM, vocabulary=vocabulary, idle=idle)
        vocabulary.update(torch.arange(40), vocabulary.initial_values(torch.arange(40).numpy(), DIM, torch.float32))
        opt = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(6):
            opt.zero_grad()
            module(torch.randint(40, (4, 5))).square().sum().backward()
            opt.step()
        state = vocabulary.state_dict()
        # A number of this vocabulary.
        del state["origin"]
        found.append((*vocabulary.export(), *state.values(), vocabulary.stats()))
    assert found[0][-1] == found[1][-1]
    assert all(torch.equal(*pair) for pair in zip(found[0][:-1], found[1][:-1], strict=True))


def test_rows_of_a_lookup_whose_gradient_is_to_come_stay() -> None:
    module = module_with(st.Vocabulary(4, evict="lru", deferred=True))
    opt = torch.optim.SGD(module.parameters(), lr=RATE)
    module.vocabulary.update(torch.arange(4), torch.zeros(4, DIM))
    held = module(torch.arange(3))
    module(torch.tensor([7])).sum().backward()
    opt.step()
    assert sorted(module.vocabulary.ids().tolist()) == [0, 1, 2, 7]
    module(torch.tensor([8, 9])).sum().backward()
    with pytest.raises(HostMemoryError, match="2 new ids need rows"):
        opt.step()
    # The step was made, and those go as soon as they can.
    opt.zero_grad()
    held.sum().backward()
    opt.step()
    opt.zero_grad()
    assert module.vocabulary.clock == 3
    assert sorted(module.vocabulary.ids().tolist()) == [0, 1, 2, 7]


def test_ids_wait_for_a_number_of_lookups_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MOST_WAITING", 3)
    module = module_with(st.Vocabulary(20, deferred=True))
    batch = torch.zeros(1, dtype=torch.int64)
    for id in range(8):
        # The memory of a batch may be filled anew.
        module(batch.fill_(id))
        assert module.vocabulary.ids().tolist() == [*range(id - id % 3)]


def test_what_was_looked_up_is_settled_before_ids_are_forgotten_or_set() -> None:
    module = module_with(st.Vocabulary(20, deferred=True))
    module(torch.tensor([3, 4]))
    assert module.vocabulary.forget(torch.tensor([3])) == 1
    assert module.vocabulary.ids().tolist() == [4]
    module(torch.tensor([5, 6]))
    module.vocabulary.update(torch.tensor([6]), torch.ones(1, DIM))
    assert sorted(module.vocabulary.ids().tolist()) == [4, 5, 6]
