"""A weight that gets its table between forward and backward: the gradient of that forward is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidValueError


def run(kind: Any, way: str = "dense", sparse: bool = False, hooks: bool = False, **options: Any) -> tuple[Any, list]:
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


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("how", [{}, {"sparse": True}, {"hooks": True}], ids=str)
def test_the_gradient_of_a_forward_before_the_table(kind: Any, how: dict[str, Any]) -> None:
    (expected, seen), (found, ours) = run(kind, **how), run(kind, "replaced", **how)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(ours, seen)


@pytest.mark.parametrize(
    "options", [{"cache_rows": 7}, {"layout": "rows"}, {"idle": "lazy"}, {"way": "assigned"}], ids=str
)
def test_of_other_tables(options: dict[str, Any]) -> None:
    expected, found = run(nn.Embedding)[0], run(nn.Embedding, **{"way": "replaced", **options})[0]
    # Lazy rows that the last step does not touch stay.
    rows = torch.arange(6) * 2 if "idle" in options else torch.arange(50)
    torch.testing.assert_close(found[rows], expected[rows], rtol=0, atol=1e-9)


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
