"""A child of fork of a process that has a table with others: it reads what there is in memory, and sends no messages."""

from __future__ import annotations

import os

import pytest
import torch
from in_child import in_child, plain

from ranks.small import Pair
from speedtransfer.errors import DeviceError, ProcessGroupError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def forked(kind: str) -> list[object]:
    pair = Pair(kind, torch.optim.AdamW, idle="exact")
    pair.train(0, 1, 2)
    every = torch.arange(pair.emb.num_embeddings)
    table = pair.emb.table.local
    stored = {name: table.stored(name).clone() for name in table.planes}
    found: list[object] = []
    for use in (lambda: plain(pair.emb(every)), lambda: plain(pair.emb.table.scatter([0], torch.ones(1, 1)))):
        try:
            found.append(in_child(lambda use=use: use()))
        except Exception as error:
            found.append(type(error))
    same = all(torch.equal(table.stored(name), before) for name, before in stored.items())
    return [*found, same, plain(pair.emb(every))]


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_a_child_of_a_rank(two, kind):
    for lookup, write, same, want in two(forked, kind):
        if kind == "shared":
            torch.testing.assert_close(lookup, want, rtol=0, atol=0)
        else:
            assert lookup is ProcessGroupError
        assert write in (ProcessGroupError, DeviceError)
        assert same
