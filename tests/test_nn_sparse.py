"""``weight.grad`` of modules made with ``sparse=True``: it reads as that of torch.nn, and does what a dense one does."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from cases import COPIES, saved
from lazy_oracle import both
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import OptimizerError
from speedtransfer.optim import find_handle

IDS = torch.tensor([7, 1, 3, 1])


both = functools.partial(both, 10, 4, sparse=True)


def backward(*modules: Any, ids: Tensor = IDS) -> None:
    for emb in modules:
        emb(ids).square().sum().backward()


READS = {
    "is_sparse": lambda g: g.is_sparse,
    "layout": lambda g: g.layout,
    "shape": lambda g: g.shape,
    "sparse_dim": lambda g: (g.sparse_dim(), g.dense_dim()),
    "nnz": lambda g: g.coalesce()._nnz(),
    "indices": lambda g: g.coalesce().indices(),
    "_indices": lambda g: g.coalesce()._indices(),
    "values": lambda g: g.coalesce().values(),
    "_values": lambda g: g.coalesce()._values(),
    "coalesced": lambda g: g.coalesce().is_coalesced(),
    "to_dense": lambda g: g.to_dense(),
    "clone": lambda g: g.clone(),
    "detach": lambda g: g.detach(),
    "scaled": lambda g: g * 0.5,
    "negative": lambda g: -g,
    "sum": lambda g: torch.sparse.sum(g),
    "sum of columns": lambda g: torch.sparse.sum(g, dim=0),
    "added": lambda g: torch.zeros(10, 4) + g.to_dense(),
    "deepcopy": copy.deepcopy,
    "pickled": lambda g: saved(g, weights_only=True),
}


@pytest.mark.parametrize("read", list(READS))
def test_reads_as_in_torch(read: str) -> None:
    ours, theirs = both()
    backward(ours, theirs)
    found, expected = READS[read](ours.weight.grad), READS[read](theirs.weight.grad)
    if isinstance(expected, Tensor):
        assert found.is_sparse == expected.is_sparse
        dense = expected.to_dense()  # that of torch names a row once for each time that it was looked up
        torch.testing.assert_close(found.to_dense(), dense)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_dense_where_torch_makes_it_dense(kind: str) -> None:
    ours, theirs = both(kind=kind)
    for emb in (ours, theirs):
        emb(IDS[None]).sum().backward()
        emb.weight.pow(2).sum().backward()
    assert not theirs.weight.grad.is_sparse
    assert not ours.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.grad.to_dense(), theirs.weight.grad)
    for emb in (ours, theirs):
        emb.zero_grad()
        emb(IDS[None]).sum().backward()
    assert theirs.weight.grad.is_sparse
    assert ours.weight.grad.is_sparse


def test_a_dense_gradient_assigned_is_dense() -> None:
    ours, theirs = both()
    backward(ours, theirs)
    for emb in (ours, theirs):
        emb.weight.grad = emb.weight.grad.to_dense()
    assert not ours.weight.grad.is_sparse
    for emb, error in ((theirs, RuntimeError), (ours, OptimizerError)):
        with pytest.raises(error, match="dense"):
            torch.optim.SparseAdam(emb.parameters()).step()


def test_a_sparse_gradient_assigned_is_sparse() -> None:
    ours, theirs = both()
    backward(ours, theirs)
    for emb in (ours, theirs):
        emb.weight.grad = emb.weight.grad.coalesce() * 2
        torch.optim.SparseAdam(emb.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())


def test_values_written_reach_the_step() -> None:
    """As GradScaler writes to them."""
    ours, theirs = both()
    backward(ours, theirs)
    theirs.weight.grad = theirs.weight.grad.coalesce()
    for emb in (ours, theirs):
        emb.weight.grad._values().mul_(0.25)
        torch.optim.SGD(emb.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())


def test_hooks_see_a_sparse_gradient() -> None:
    seen: list[bool] = []
    for emb in both():
        emb.weight.register_hook(lambda grad: seen.append(grad.is_sparse))
        backward(emb)
    assert seen == [True, True]


def test_gradients_by_the_weight_are_sparse() -> None:
    found = []
    for emb in both():
        out = emb(IDS).square().sum() + emb(IDS[:2]).sum()
        found.append(torch.autograd.grad(out, emb.weight)[0])
    assert all(grad.is_sparse for grad in found)
    torch.testing.assert_close(found[0].to_dense(), found[1].to_dense())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_adds_up_as_torch_does(dtype: torch.dtype, mode: str) -> None:
    """Where each addition rounds, the order of a sum shows."""
    ours, theirs = both(kind="EmbeddingBag", dtype=dtype, mode=mode)
    ids = torch.randint(10, (40, 30), generator=torch.Generator().manual_seed(0))
    grad = torch.rand(40, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    for emb in (ours, theirs):
        emb(ids).backward(grad)
    assert torch.equal(ours.weight.grad.to_dense(), theirs.weight.grad.to_dense())


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_many_gradients_at_once(dtype: torch.dtype, padding_idx: int | None) -> None:
    """``is_grads_batched`` of autograd.grad, which gradcheck uses."""
    found = []
    for kind in (st.Embedding, nn.Embedding):
        torch.manual_seed(0)
        emb = kind(10, 4, padding_idx=padding_idx, dtype=dtype)
        out, grads = emb(IDS), torch.rand(5, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
        found.append(torch.autograd.grad(out, emb.weight, grads, is_grads_batched=True)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("clone", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kind", ["plain", "vocabulary", "feature"])
def test_a_copy_of_the_weight_gets_sparse_gradients(clone: Any, kind: str) -> None:
    """By itself, in a function; an optimizer for sparse gradients trains it as that of torch."""
    ours, theirs = both(padding_idx=2, max_norm=3.0)
    if kind == "feature":
        multi = st.MultiEmbedding({"a": 10}, 4, sparse=True)
        multi["a"].weight.data.copy_(theirs.weight.data)
        ours = multi["a"]
    if kind == "vocabulary":
        ours = st.Embedding(10, 4, sparse=True, padding_idx=2, max_norm=3.0, vocabulary=st.Vocabulary())
        handle, copied = find_handle(ours.weight), find_handle(clone(ours.weight))
        names = "sparse", "renormalizes", "padding_idx"
        assert [getattr(copied, name) for name in names] == [getattr(handle, name) for name in names]
        return
    weights = [clone(module.weight) for module in (ours, theirs)]
    for weight in weights:
        optimizer = torch.optim.SparseAdam([weight], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.embedding(IDS, weight, sparse=True).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(*weights)
