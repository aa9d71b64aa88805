"""Modules made with ``sparse=True`` train as ``nn.Embedding(sparse=True)``, by any optimizer that takes sparse gradients."""

import copy
import functools

import pytest
import torch
from cases import take_step
from lazy_oracle import Twins, sparse, squared_loss
from third_party import REFUSED_SPARSE, TAKERS, SingleSparse
from torch import nn
from torch.optim import SGD, Adam, AdamW

import speedtransfer
from speedtransfer.errors import InvalidValueError, OptimizerError

# torch warns once a process that it does not check what sparse tensors hold.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

IDLE = ("lazy", "exact")


@pytest.fixture(params=TAKERS.values(), ids=TAKERS)
def make(request):
    return request.param


@pytest.mark.sweep
@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_trains_as_torch(make, dtype, idle):
    pair = sparse(make, dtype, idle=idle)
    before = pair.ours.table.torch().clone()
    pair.train(pair.batches(30))
    assert not torch.equal(pair.ours.table.torch(), before)
    pair.assert_same()


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_moves_idle_rows_as_in_torch(nesterov):
    """Torch's buffer of sparse gradients holds every row that ever had one: that is dense training."""
    pair = sparse(functools.partial(SGD, lr=0.05, foreach=nesterov, momentum=0.9, nesterov=nesterov), idle="exact")
    pair.train(pair.batches(20))
    pair.assert_same(1e-5)
    state = copy.deepcopy(pair.dense_opt.state_dict())
    assert state["state"][0]["momentum_buffer"].is_sparse
    pair.opt.load_state_dict(state)
    pair.train(pair.batches(10, seed=1))
    pair.assert_same(1e-5)


@pytest.mark.parametrize("make", [Adam, AdamW, functools.partial(SGD, lr=0.1, weight_decay=0.1)])
def test_an_optimizer_that_refuses_sparse_gradients_gets_dense_ones(make):
    pair = sparse(make)
    batch = pair.batches(1)[0]
    with pytest.raises(RuntimeError, match="sparse"):
        pair.train([batch])
    others = [Twins(make, dim=6, size=12, idle="exact", sparse=is_sparse) for is_sparse in (True, False)]
    for ids, target in pair.batches(10):
        for other in others:
            take_step(other.opt, squared_loss(other.ours(ids), target))
    assert torch.equal(*(other.ours.table.torch() for other in others))


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("kind", REFUSED_SPARSE, ids=lambda kind: kind.__name__)
def test_refused(kind, idle):
    pair = sparse(kind, idle=idle)
    before = pair.ours.table.torch().clone()
    squared_loss(pair.ours(torch.tensor([1, 2])), torch.zeros(2, 6)).backward()
    with pytest.raises(OptimizerError, match=REFUSED_SPARSE[kind]) as caught:
        pair.opt.step()
    assert "rows of a table made with sparse=True: " in str(caught.value)
    assert torch.equal(pair.ours.table.torch(), before)
    assert pair.ours.table.planes == ("weight",)


def test_a_dtype_that_the_sparse_branch_cannot_do_is_refused():
    """Dense gradients would be another algorithm."""
    pair = sparse(SingleSparse, torch.bfloat16)
    squared_loss(pair.ours(torch.tensor([1, 2])), torch.zeros(2, 6)).backward()
    with pytest.raises(OptimizerError, match=r"rows of torch\.bfloat16 made with sparse=True: .*no kernel for sparse"):
        pair.opt.step()


# --- the training loop --------------------------------------------------------------------------------------------------


def test_the_gradient_outside_the_step_is_that_of_any_table(make):
    """Clipping works, which torch cannot do for sparse gradients."""
    pair = sparse(make)
    for ids, target in pair.batches(10):
        pair.zero_grad()
        squared_loss(pair.ours(ids), target).backward()
        norm = nn.utils.clip_grad_norm_(pair.ours.parameters(), 0.5)
        squared_loss(pair.dense(ids), target).backward()
        grad = pair.dense.weight.grad.coalesce()
        torch.testing.assert_close(grad.values().norm(), norm)
        pair.dense.weight.grad = grad * min(0.5 / (float(norm) + 1e-6), 1.0)
        pair.step()
    pair.assert_same(1e-5)


def test_a_padding_row_is_in_no_sparse_gradient(make):
    pair = sparse(make, padding_idx=0)
    for module in pair.modules:
        rows = module.table.torch() if module is pair.ours else module.weight.detach()
        rows[0] = 5.0  # nothing may move it
    batches = [(ids * (torch.arange(ids.numel()).view(ids.shape) % 3 > 0), target) for ids, target in pair.batches(9)]
    pair.train([*batches, (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 6)), *batches])
    assert (pair.ours.table.torch()[0] == 5).all()
    pair.assert_same()


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("bad", [[1, 9], [-1, 2]])
def test_a_sparse_gradient_with_rows_that_do_not_exist(bad, is_sparse):
    """Torch makes one without looking (check_invariants=False), and its own step writes outside of the weight."""
    emb = speedtransfer.Embedding(6, 3, memory="pageable", device="cpu", sparse=is_sparse)
    grad = torch.sparse_coo_tensor([bad], torch.ones(2, 3), (6, 3), check_invariants=False)
    with pytest.raises(InvalidValueError, match=r"gradient of weight is a sparse tensor of shape .* with indices"):
        emb.weight.grad = grad


def test_ids_that_are_changed_before_the_step():
    """They are public, and the memory by which the step writes: it writes nowhere else, and nothing at all."""
    emb = speedtransfer.Embedding(10_000, 64, memory="pageable", device="cpu")
    opt, before = SGD(emb.parameters(), lr=1.0), emb.weight.detach().clone()
    active = emb.activate(torch.arange(5000))
    active.rows.sum().backward()
    active.ids += 1 << 34
    with pytest.raises(IndexError):
        opt.step()
    torch.testing.assert_close(emb.table.torch(), before, rtol=0, atol=0)


def test_sparse_is_set_after_the_module_was_made():
    emb = speedtransfer.Embedding(8, 2)
    emb.sparse = True
    take_step(torch.optim.SparseAdam(emb.parameters()), emb(torch.tensor([1, 5])).sum())
    with pytest.raises(InvalidValueError, match="sparse of weight becomes False after a step"):
        emb.sparse = False
    assert emb.sparse
