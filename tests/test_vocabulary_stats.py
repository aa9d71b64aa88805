"""What a vocabulary counts, and the curves that are made of it."""

from __future__ import annotations

import pytest
import torch

import speedtransfer as st


def test_counts_of_training_and_evaluation() -> None:
    vocabulary = st.Vocabulary(admit=2, evict="lru", seed=0)
    module = st.Embedding(3, 2, vocabulary=vocabulary, idle="lazy")
    assert (vocabulary.stats().load, vocabulary.stats().unseen_rate) == (0.0, 0.0)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for ids in ([1, 1, 2], [2, 3, 3, 4, 4], [5, 5]):
        module(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = vocabulary.stats()
    # 2 was seen once in the first batch; in the second 2, 3 and 4 need rows, of which there are two without that of 1.
    assert (stats.capacity, stats.max_capacity, stats.clock) == (3, 3, 3)
    assert (stats.admitted, stats.lookups, stats.unseen) == (5, 10, 1)
    # Steps take rows for the ids that may come next.
    assert stats.evicted >= 2
    assert len(vocabulary) == stats.size == stats.admitted - stats.evicted
    assert stats.scalars("items") == {
        "items/size": stats.size,
        "items/load": stats.size / 3,
        "items/admitted": 5.0,
        "items/evicted": stats.evicted,
        "items/unseen_rate": pytest.approx(0.1),
    }
    vocabulary.reset_stats()
    module.eval()(torch.tensor([5, 77]))
    assert vocabulary.stats().scalars()["vocabulary/unseen_rate"] == 0.5
    assert vocabulary.stats().admitted == 0
