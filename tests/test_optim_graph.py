"""The weight in the graph of autograd: what reaches the node of its parameter trains it, hooks there see lookups, too.

Also many lookups in one graph, as a decoder makes one for each word: torch's numbers, and one addition for all gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim import merge

IDS = torch.tensor([1, 3, 3, 8])
MORE = torch.tensor([8, 2, 3])
OPTIONS = [{}, {"idle": "lazy"}, {"sparse": True, "idle": "lazy"}, {"cache_rows": 4}, {"storage_dtype": torch.float32}]


class LinearHead(torch.autograd.Function):
    """As fused linear cross-entropies are: given the weight itself, which no function of torch then sees."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ hidden


def made(kind: Any, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    module = kind(10, 4, **options) if kind is not nn.Embedding else nn.Embedding(10, 4)
    return module if options.get("storage_dtype") else module.double()


def tied(emb: Any) -> Tensor:
    hidden = emb(IDS)
    return F.cross_entropy(LinearHead.apply(hidden, emb.weight), torch.tensor([0, 1, 2, 9]))


def head(emb: Any) -> Tensor:
    hidden = torch.ones(3, 4, dtype=emb.weight.dtype)
    return F.cross_entropy(LinearHead.apply(hidden, emb.weight), torch.tensor([0, 1, 2]))


def reentrant(emb: Any) -> Tensor:
    return checkpoint(lambda weight: weight.square().sum(), emb.weight, use_reentrant=True) + emb(IDS).sum()


def mixed(emb: Any) -> Tensor:
    return emb(IDS).square().sum() + emb(MORE).sin().sum() + emb.weight.cos().sum() + tied(emb)


def train(kind: Any, loss_of: Callable[[Any], Tensor], hook: bool = False, **options: Any) -> Tensor:
    emb = made(kind, **options)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
    if hook:
        emb.weight.register_hook(lambda grad: grad * 0.5)
    for _ in range(3):
        opt.zero_grad()
        loss_of(emb).backward()
        opt.step()
    return emb.weight.detach().clone()


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3], OPTIONS[4]], ids=str)
@pytest.mark.parametrize("loss_of", [tied, head, reentrant, mixed])
def test_what_reaches_the_node_trains(loss_of: Callable[[Any], Tensor], options: dict[str, Any], hook: bool) -> None:
    if options.get("cache_rows") and loss_of is reentrant:
        # `detach` of it would have to collect a gradient, and there is no tensor over its rows.
        with pytest.raises(InvalidTypeError, match=r"weight\.data reads rows where they are stored"):
            train(st.Embedding, loss_of, hook, **options)
        return
    ours, dense = train(st.Embedding, loss_of, hook, **options), train(nn.Embedding, loss_of, hook)
    close = 1e-5 if options.get("storage_dtype") else 1e-12
    torch.testing.assert_close(ours.double(), dense, rtol=close, atol=close)


def total(grad: Tensor | None) -> Any:
    return None if grad is None else round(float(grad.detach().abs().sum()), 6)


def multi_all(emb: Any, see: Callable[[Any], None]) -> Any:
    return graph.register_multi_grad_hook((emb.weight,), lambda grads: see([total(grad) for grad in grads]))


def multi_any(emb: Any, see: Callable[[Any], None]) -> Any:
    return graph.register_multi_grad_hook((emb.weight,), lambda grad: see(total(grad)), mode="any")


def prehook(emb: Any, see: Callable[[Any], None]) -> Any:
    node = graph.get_gradient_edge(emb.weight).node
    return node, node.register_prehook(lambda grads: see(total(grads[0])))


def accumulated(emb: Any, see: Callable[[Any], None]) -> Any:
    node = emb.weight.expand_as(emb.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: see(total(emb.weight.grad)))
    return node


def on_weight(emb: Any, see: Callable[[Any], None]) -> Any:
    emb.weight.register_post_accumulate_grad_hook(lambda weight: see(total(weight.grad)))
    return emb.weight.register_hook(lambda grad: see(total(grad)))


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_of", [lambda emb: emb(IDS).square().sum() + emb(MORE).sum(), mixed])
@pytest.mark.parametrize("watch", [multi_all, multi_any, prehook, accumulated, on_weight])
def test_hooks_see_the_gradient(watch: Any, loss_of: Callable[[Any], Tensor], options: dict[str, Any]) -> None:
    if options.get("sparse") and loss_of is mixed:
        return
    seen: dict[Any, list[Any]] = {}
    for kind in (nn.Embedding, st.Embedding):
        emb, seen[kind] = made(kind, **options), []
        kept = watch(emb, seen[kind].append)
        for _ in range(2):
            loss_of(emb).backward()
        del kept
        seen[kind].append(total(emb.weight.grad))
    close = 1e-3 if options.get("storage_dtype") else 1e-5
    for ours, dense in zip(seen[st.Embedding], seen[nn.Embedding], strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(dense), rtol=close, atol=close)


@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_grad_by_the_weight_and_by_its_edge(create_graph: bool) -> None:
    results = []
    for kind in (nn.Embedding, st.Embedding):
        emb = made(kind)
        by_weight = torch.autograd.grad(mixed(emb), emb.weight, create_graph=create_graph)
        by_edge = torch.autograd.grad(mixed(emb), [graph.get_gradient_edge(emb.weight)], create_graph=create_graph)
        assert emb.weight.grad is None
        results.append([by_weight[0], by_edge[0]])
        if create_graph:
            results[-1].append(torch.autograd.grad(by_weight[0].square().sum(), emb.weight)[0])
    for ours, dense in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours.to_dense(), dense, rtol=1e-12, atol=1e-12)


def test_the_weight_of_a_feature_in_a_function() -> None:
    grads = []
    for module in (
        nn.ModuleDict({"a": nn.Embedding(3, 4), "b": nn.Embedding(7, 4)}),
        st.MultiEmbedding({"a": 3, "b": 7}, 4),
    ):
        module.double()
        with torch.no_grad():
            for name in ("a", "b"):
                module[name].weight.copy_(torch.arange(module[name].weight.numel()).view(-1, 4))
        hidden = module["a"](torch.tensor([0, 2]))
        LinearHead.apply(hidden, module["b"].weight).sum().backward()
        grads.append(torch.cat([p.grad.to_dense() for p in module.parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_rows_of_ids_have_no_node() -> None:
    emb = st.Embedding(10, 4, vocabulary=st.Vocabulary())
    with pytest.raises(InvalidValueError, match="used by its node in the graph"):
        graph.get_gradient_edge(emb.weight)
    loss = LinearHead.apply(emb(IDS), emb.weight).sum()
    with pytest.raises(InvalidValueError, match=r"weight is used by its node .* ids of a vocabulary"):
        loss.backward()


def test_active_rows_are_not_changed_in_place_and_go_with_their_graph(no_gc: None) -> None:
    emb = made(st.Embedding)
    rows = emb.activate(IDS).rows
    with pytest.raises(RuntimeError, match="modified inplace"):
        rows *= 2
    for change in (Tensor.mul_, lambda weight, factor: torch._foreach_mul_([weight], factor)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            change(emb.weight, 2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        emb.weight.view(-1).mul_(2)
    out = emb(IDS)
    table, node = weakref.ref(emb.table), weakref.ref(rows)
    del rows
    assert node() is None
    del emb
    assert table() is not None, "its graph has the table"
    del out
    assert table() is None


# --- many lookups -------------------------------------------------------------------------------------------------------

ROWS, DIM, WORDS = 50, 4, 12


def decode(module: nn.Module, seed: int = 0, call: Callable[..., Tensor] = lambda module, ids: module(ids)) -> Tensor:
    ids = torch.randint(ROWS, (WORDS, 6), generator=torch.Generator().manual_seed(seed))
    state = torch.zeros(6, DIM, dtype=torch.float64)
    for row in ids:
        state = torch.tanh(state + call(module, row))
    return state.square().sum()


def many(module: Any, optimizer: Any) -> None:
    sum(decode(module, seed) for seed in range(20)).backward()


def held(module: Any, optimizer: Any) -> None:
    decode(module).backward()
    grad = module.weight.grad
    decode(module, 1).backward()
    assert module.weight.grad is grad
    grad.mul_(0.5)


def hooked(module: Any, optimizer: Any) -> None:
    seen = []
    module.weight.register_hook(lambda grad: seen.append(1) or 2 * grad)
    decode(module).backward()
    assert seen == [1]


def with_the_whole(module: Any, optimizer: Any) -> None:
    (decode(module) + module.weight.square().sum() + decode(module, 1)).backward()


def all_reentrant(module: Any, optimizer: Any) -> None:
    def call(module: Any, ids: Tensor) -> Tensor:
        return checkpoint(lambda _: module(ids), torch.zeros(1, requires_grad=True), use_reentrant=True)

    decode(module, 0, call).backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("fails")


def failed(module: Any, optimizer: Any) -> None:
    calls = iter(range(WORDS))
    with pytest.raises(RuntimeError, match="fails"):
        decode(module, 0, lambda m, ids: Fails.apply(m(ids)) if next(calls) == 3 else m(ids)).backward()
    optimizer.zero_grad()
    decode(module, 1).backward()


@pytest.mark.parametrize("rows", [1 << 16, 8])
@pytest.mark.parametrize("program", [many, held, hooked, with_the_whole, all_reentrant, failed])
def test_many_lookups(program: Callable[..., None], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MANY_ROWS", rows)
    weights = []
    for kind in (nn.Embedding, st.Embedding):
        torch.manual_seed(0)
        module = kind(ROWS, DIM, dtype=torch.float64)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        # What is left of the first would show in a second step.
        for part in (program, lambda module, optimizer: decode(module, 7).backward()):
            part(module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(module.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-14)
