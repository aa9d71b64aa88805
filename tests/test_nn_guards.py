"""Uses of ``weight`` that a table cannot serve: each is an error that names the way, none a silent difference."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from lazy_oracle import (
    both,
    one_thread,  # noqa: F401 - a fixture
)

import speedtransfer

IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_writing_to_the_idle_weight_is_an_error_not_a_silent_nothing(how: str) -> None:
    emb = speedtransfer.Embedding(12, 5)
    if how == "in place":
        torch.nn.init.uniform_(emb.weight, -0.1, 0.1)
    else:
        emb.weight.data = torch.ones(12, 5)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"held no rows.*emb\.table"):
            emb(IDS)
    emb.table.fill_(0.5)
    assert emb(IDS).eq(0.5).all()
    assert emb.weight.shape == (0, 5)


def test_a_penalty_over_the_parameters_is_an_error_not_a_silent_nothing() -> None:
    emb = speedtransfer.Embedding(12, 5)
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    emb.weight.pow(2).sum().backward()
    with pytest.raises(ValueError, match="penalty"):
        opt.step()
    with pytest.raises((ValueError, RuntimeError)):
        (emb(IDS).sum() + emb.weight.pow(2).sum()).backward()


def test_hooks_on_the_weight_see_the_gradient_of_the_active_rows() -> None:
    ours, dense = both()
    for module in (ours, dense):
        module.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    opt, dense_opt = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (ours, dense))
    done = []
    ours.weight.register_post_accumulate_grad_hook(lambda weight: (done.append(len(weight)), opt.step()))
    for module in (ours, dense):
        module(IDS).sum().backward()
    dense_opt.step()
    assert done == [len(IDS.unique())]
    assert torch.equal(ours.table.torch(), dense.weight.detach())
    assert len(ours.weight) == 0


def test_a_graph_that_saved_rows_cannot_be_used_after_a_step_wrote_them() -> None:
    bag = speedtransfer.EmbeddingBag(12, 5, mode="sum")
    weights = torch.rand(IDS.shape, requires_grad=True)
    loss = bag(IDS, per_sample_weights=weights).pow(2).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(bag.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_a_file_keeps_its_dtype(tmp_path) -> None:
    emb = speedtransfer.Embedding(12, 5, memory="mmap", path=tmp_path / "rows.npy")
    with pytest.raises(ValueError, match="cannot change its dtype"):
        emb.half()
    assert emb.table.path is not None
    assert emb.weight.dtype == torch.float32


def test_a_trained_table_is_freed_with_its_module() -> None:
    emb = speedtransfer.Embedding(12, 5)
    opt = torch.optim.AdamW(emb.parameters())
    emb(IDS).sum().backward()
    opt.step()
    table = weakref.ref(emb.table)
    gc.disable()
    try:
        del emb, opt
        assert table() is None, "no cycle keeps it until the next collection"
    finally:
        gc.enable()


def test_writes_to_the_active_rows_are_the_users_own() -> None:
    emb = speedtransfer.Embedding(12, 5)
    opt = torch.optim.SGD(emb.parameters(), lr=0.0)
    emb(IDS).sum().backward()
    with torch.no_grad():
        emb.weight.zero_()
    opt.step()
    assert not emb(IDS).any()
