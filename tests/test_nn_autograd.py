"""Autograd around ``speedtransfer.Embedding``: double backward, checkpointing, compiled models, writes in between."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.utils.checkpoint
from lazy_oracle import both, dense_grad
from torch import nn

import speedtransfer
from speedtransfer import buffers
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.lookup import lookup
from speedtransfer.nn.tracing import ONE_GRAPH

IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


@pytest.mark.parametrize("from_bytes", [1, buffers.SMALL_BYTES], ids=["large", "small"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_gradgradcheck_through_the_active_rows(
    padding_idx: int | None, from_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "SMALL_BYTES", from_bytes)
    emb = speedtransfer.Embedding(12, 5, padding_idx, dtype=torch.float64)
    active = emb.activate(IDS)

    def look_up(rows: torch.Tensor) -> torch.Tensor:
        active.rows = rows
        return lookup(active).sin()

    rows = active.rows.detach().clone().requires_grad_()
    if padding_idx is None:  # with it the gradient is another by definition
        assert torch.autograd.gradcheck(look_up, rows)
    assert torch.autograd.gradgradcheck(look_up, rows)


def test_a_penalty_on_the_gradient_equals_torch() -> None:
    """Double backward through the output, and the gradient of the penalty reaches the rows."""
    ours, dense = both(dtype=torch.float64)
    for module in (ours, dense):
        out = module(IDS)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), out, create_graph=True)
        (out.sum() + grad.square().sum()).backward()
    torch.testing.assert_close(dense_grad(ours), dense.weight.grad, rtol=1e-14, atol=0)


def test_backward_with_create_graph(request: pytest.FixtureRequest) -> None:
    ours, dense = both(dtype=torch.float64)
    # Torch warns of it once a process, and another test may have been the first.
    request.addfinalizer(functools.partial(torch.set_warn_always, False))
    torch.set_warn_always(True)
    with pytest.warns(UserWarning, match="create_graph=True"):
        ours(IDS).pow(3).sum().backward(create_graph=True)
    dense(IDS).pow(3).sum().backward()
    grad = ours.weight.grad
    assert not grad.requires_grad
    # A penalty on it would train nothing, and nothing would say so.
    for penalty in (torch.norm, torch.square, lambda given: 2 * given):
        with pytest.raises(InvalidValueError, match=r"take torch\.autograd\.grad"):
            penalty(grad)
    assert torch.equal(dense_grad(ours).detach(), dense.weight.grad)
    assert torch.equal(grad.detach().norm(), dense.weight.grad.norm())
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    ours.zero_grad()
    ours(IDS).sum().backward()
    ours.weight.grad.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_deposits_the_gradient_once(reentrant: bool) -> None:
    ours, dense = both()
    for module in (ours, dense):
        torch.manual_seed(0)
        head = nn.Linear(5, 5)
        scale = torch.ones(1, requires_grad=True)

        def block(scale: torch.Tensor, module=module, head=head) -> torch.Tensor:
            return head(module(IDS) * scale).square()

        torch.utils.checkpoint.checkpoint(block, scale, use_reentrant=reentrant).sum().backward()
    assert torch.equal(dense_grad(ours), dense.weight.grad)


def test_rows_written_between_forward_and_backward() -> None:
    emb = speedtransfer.Embedding(12, 5)
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    out = emb(IDS)
    emb.table[[3]] = torch.zeros(1, 5)
    emb.table.torch()[1] = 7.0
    out.sum().backward()
    opt.step()
    assert emb.weight[1].tolist() == [7.0 - 2] * 5
    assert emb.weight[3].tolist() == [0.0 - 2] * 5


@pytest.mark.skipif(ONE_GRAPH, reason="test_nn_compile.py has what there is no break in")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_the_same(backend: str) -> None:
    """The lookup breaks the graph; what is around it is compiled."""
    torch.manual_seed(2)
    model = nn.Sequential(speedtransfer.Embedding(12, 5), nn.Flatten(), nn.Linear(15, 1))
    bag = speedtransfer.EmbeddingBag(12, 5)
    plain = copy.deepcopy(nn.ModuleList([model, bag]))
    compiled = [torch.compile(m, backend=backend) for m in (model, bag)]
    for modules, params in ((compiled, [*model.parameters(), *bag.parameters()]), (plain, [*plain.parameters()])):
        opt = torch.optim.AdamW(params, lr=0.1)
        for shift in range(3):
            ids = (IDS + shift) % 12
            opt.zero_grad()
            (modules[0](ids).sum() + modules[1](ids).square().sum()).backward()
            opt.step()
        with torch.no_grad():
            modules[0](ids)
    assert torch.equal(model[0].table.torch(), plain[0][0].table.torch())
    assert torch.equal(bag.table.torch(), plain[1].table.torch())
    torch.compiler.reset()


def test_vmap_over_a_trained_table():
    torch.manual_seed(0)
    tokens, modules = torch.randint(0, 20, (4, 7)), (speedtransfer.Embedding(20, 3), torch.nn.Embedding(20, 3))
    modules[1].load_state_dict(modules[0].state_dict())
    for module in modules:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            torch.func.vmap(lambda ids, module=module: module(ids).square().sum())(tokens).sum().backward()
            torch.func.grad(lambda x, module=module: (module(tokens) * x).sum())(torch.ones(3)).sum().backward()
            optimizer.step()
    assert torch.equal(modules[0].weight, modules[1].weight)


@pytest.mark.parametrize("padding_idx", [0, 2])
def test_padding_gets_no_gradient_that_may_be_differentiated(padding_idx: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "SMALL_BYTES", 1)
    ours, dense = both(padding_idx=padding_idx)
    found = []
    for module in (ours, dense):
        loss = (module(torch.tensor([0, 2, 0, 1])) + 1).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, module.weight, create_graph=True)
        grad.pow(2).sum().backward()
        found.append((grad.detach().to_dense(), module.weight.grad.to_dense()))
    torch.testing.assert_close(*found)
    assert not found[0][0][padding_idx].any()
