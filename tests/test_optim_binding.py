"""A weight that gets its table between forward and backward: the gradient of that forward is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidValueError


def run(way: str, kind: Any, sparse: bool, hooks: bool, **options: Any) -> tuple[torch.Tensor, list]:
    torch.manual_seed(0)
    model, seen = nn.Sequential(kind(50, 4, sparse=sparse), nn.Linear(4, 1)).double(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1) if sparse else torch.optim.Adam(model.parameters(), lr=0.1)
    if hooks:
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.sum().item()))

    def loss(step: int) -> torch.Tensor:
        return model(torch.arange(6).view(2, 3) * step % 50).square().sum()

    loss(9).backward()
    losses = loss(7), loss(5)
    if way == "replaced":
        st.replace_embeddings(model, min_rows=0, **options)
    elif way == "assigned":
        weight, model[0] = model[0].weight, st.Embedding(50, 4, sparse=sparse, dtype=torch.float64)
        model[0].weight = weight
    losses[0].backward()
    loss(3).backward()
    losses[1].backward()
    opt.step()
    opt.zero_grad()
    loss(2).backward()
    opt.step()
    return model[0].weight.detach().clone(), seen


@pytest.mark.parametrize(
    ("way", "kind", "options"),
    [
        ("replaced", nn.Embedding, {}),
        ("replaced", nn.EmbeddingBag, {}),
        ("replaced", nn.EmbeddingBag, {"sparse": True}),
        ("replaced", nn.Embedding, {"sparse": True}),
        ("replaced", nn.Embedding, {"hooks": True}),
        ("replaced", nn.EmbeddingBag, {"hooks": True}),
        ("replaced", nn.Embedding, {"cache_rows": 7}),
        ("replaced", nn.Embedding, {"layout": "rows"}),
        ("replaced", nn.Embedding, {"idle": "lazy"}),
        ("assigned", nn.Embedding, {}),
    ],
)
def test_the_gradient_of_a_forward_before_the_table(way: str, kind: Any, options: dict[str, Any]) -> None:
    how = {key: options.get(key, False) for key in ("sparse", "hooks")}
    (expected, seen), (found, ours) = run("dense", kind, **how), run(way, kind, **{**how, **options})
    # Lazy rows that the last step does not touch stay.
    rows = torch.arange(6) * 2 if "idle" in options else torch.arange(50)
    torch.testing.assert_close(found[rows], expected[rows], rtol=0, atol=1e-9)
    torch.testing.assert_close(ours, seen)


def test_rows_in_another_order_cannot_take_it() -> None:
    model = nn.Sequential(nn.Embedding(50, 4))
    loss = model(torch.arange(6)).square().sum()
    st.replace_embeddings(model, min_rows=0, vocabulary=st.Vocabulary())
    with pytest.raises(InvalidValueError, match=r"0\.weight is used by its node .* a forward before it got its table"):
        loss.backward()


def test_a_gradient_of_rows_by_number_keeps_a_vocabulary_away() -> None:
    model = nn.Sequential(nn.Embedding(50, 4))
    model(torch.arange(6)).sum().backward()
    report = st.replace_embeddings(model, min_rows=0, vocabulary=st.Vocabulary())
    assert "has a gradient" in report.left["0"]
    assert type(model[0]) is nn.Embedding
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("idle", ["exact", "lazy"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_goes_on_with_the_weight_before(kind, idle):
    def trained(emb):
        opt = kind(emb.parameters(), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        for ids in ([1, 2], [2, 3], [1, 2, 3]):
            opt.zero_grad()
            emb(torch.tensor(ids)).square().sum().backward()
            opt.step()
        before = emb.weight
        opt.zero_grad()
        emb(torch.tensor([1, 2, 3])).square().sum().backward()
        emb.weight = nn.Parameter(torch.ones(10, 4))
        opt.step()
        return before.detach()[1:4], emb.weight.detach()

    torch.manual_seed(0)
    rows = torch.randn(10, 4)
    # Idle rows have missed no step when the weight is replaced, but for row 3 in the first and row 1 in the second.
    found = trained(st.Embedding(10, 4, _weight=rows.clone(), idle=idle))
    expected = trained(nn.Embedding(10, 4, _weight=rows.clone()))
    if idle == "exact" or kind is torch.optim.Adagrad:
        torch.testing.assert_close(found, expected)
    assert torch.equal(found[1], torch.ones(10, 4))
