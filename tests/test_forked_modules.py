"""Modules in a child of fork, over rows that it shares with its parent: those are read and not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_child import FORKS, in_child, plain
from torch import Tensor

import speedtransfer as st
from speedtransfer.errors import DeviceError, SpeedtransferError

pytestmark = FORKS
ROWS, DIM = 60, 4
EVERY = torch.arange(ROWS)


def test_lookups_that_shorten_rows(tmp_path: Path) -> None:
    emb = st.Embedding(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", max_norm=30.0)
    opt = torch.optim.AdamW(emb.parameters())
    for ids in (EVERY, EVERY[:5]):
        emb(ids).sum().backward()
        opt.step()
    got = in_child(lambda: plain(emb(EVERY)))
    torch.testing.assert_close(got, plain(emb(EVERY)), rtol=0, atol=0)
    emb.max_norm = 1.0
    with pytest.raises(DeviceError, match="forked"):
        in_child(lambda: plain(emb(EVERY)))


@pytest.mark.parametrize("taken", [False, True])
def test_a_weight_in_shared_memory(taken: bool) -> None:
    """torch shares it, whatever the memory of the table is called."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, DIM).share_memory_()
    emb = st.Embedding.from_pretrained(weight.clone() if taken else weight, freeze=False, memory="pageable")
    if taken:
        emb.weight.data = weight
    opt = torch.optim.AdamW(emb.parameters(), lr=0.05)
    for ids in (EVERY, EVERY[:5]):
        emb(ids).sum().backward()
        opt.step()
        opt.zero_grad()
    before = weight.clone()
    got = in_child(lambda: plain(emb.weight + 0))
    assert torch.equal(weight, before)
    torch.testing.assert_close(got, plain(emb.weight), rtol=0, atol=0)
    with pytest.raises(DeviceError, match="forked"):
        in_child(lambda: emb.weight.data.zero_())


@pytest.mark.parametrize("make", [st.EmbeddingBag, st.MultiEmbedding])
def test_bags_and_several_features(tmp_path: Path, make: Any) -> None:
    bags = make is st.EmbeddingBag
    ids = EVERY.view(20, 3) if bags else {"a": EVERY[:20], "b": EVERY[:30]}
    options = {"memory": "mmap", "path": tmp_path / "t.npy"}
    emb = make(ROWS, DIM, **options) if bags else make({"a": 20, "b": 40}, DIM, **options)
    opt = torch.optim.AdamW(emb.parameters())

    def read(given: Any) -> Any:
        out = emb(given)
        return list(out.values()) if isinstance(out, dict) else [out] if isinstance(out, Tensor) else list(out)

    for given in (ids, ids[:2] if bags else {"a": EVERY[:2], "b": EVERY[:2]}):
        sum(part.sum() for part in read(given)).backward()
        opt.step()
        opt.zero_grad()
    got = in_child(lambda: plain([read(ids), emb.state_dict()]))
    torch.testing.assert_close(got, plain([read(ids), emb.state_dict()]), rtol=0, atol=0)
    # torch makes a RuntimeError of it.
    with pytest.raises(RuntimeError, match="forked"):
        in_child(lambda: emb.load_state_dict({name: value + 1 for name, value in emb.state_dict().items()}))
    if not bags:
        with pytest.raises(DeviceError, match="forked"):
            in_child(lambda: plain(emb["a"].weight.data.zero_()))


def test_ids_that_the_parent_forgets(tmp_path: Path) -> None:
    """Their rows may be those of other ids by now."""
    words = st.Vocabulary(max_capacity=8, evict="lru")
    emb = st.Embedding(8, DIM, memory="mmap", path=tmp_path / "t.npy", vocabulary=words)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)

    def step(ids: Tensor) -> None:
        emb(ids).sum().backward()
        opt.step()
        opt.zero_grad()

    step(torch.arange(100, 106))
    step(torch.arange(100, 102))
    emb.eval()
    ids = torch.arange(100, 106)
    got = in_child(lambda: plain([emb(ids), emb.state_dict()]))
    torch.testing.assert_close(got, plain([emb(ids), emb.state_dict()]), rtol=0, atol=0)
    emb.train()
    for change in (
        lambda: emb(torch.tensor([100])),
        lambda: words.forget([100]),
        lambda: words.update([7], torch.ones(1, DIM)),
    ):
        with pytest.raises(SpeedtransferError, match="forked"):
            in_child(lambda change=change: plain(change()))
    assert emb.vocabulary.rows([100, 101]).min() >= 0
