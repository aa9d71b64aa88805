"""Uses of ``weight`` that a table cannot serve: each is an error that names the way, none a silent difference."""

from __future__ import annotations

import pytest
import torch
from lazy_oracle import both

import speedtransfer

IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


def test_a_graph_that_saved_rows_cannot_be_used_after_a_step_wrote_them() -> None:
    bag = speedtransfer.EmbeddingBag(12, 5, mode="sum")
    weights = torch.rand(IDS.shape, requires_grad=True)
    loss = bag(IDS, per_sample_weights=weights).pow(2).sum()
    loss.backward(retain_graph=True)
    torch.optim.SGD(bag.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_memory_cannot_be_two_tables() -> None:
    first, second = both()[0], both()[0]
    with pytest.raises(ValueError, match=r"another table, .* write its values \(weight\.data\.copy_"):
        first.weight.data = second.weight.data
    first.weight.data = first.weight.data
    first.weight.data.copy_(second.weight.data)
    assert torch.equal(first.weight, second.weight)


def test_a_table_that_no_optimizer_has_is_told_of_once() -> None:
    emb, head = speedtransfer.Embedding(12, 5), torch.nn.Linear(5, 1)
    opt = torch.optim.SGD(head.parameters(), lr=0.1)

    def train(steps: int, clear: bool) -> None:
        for _ in range(steps):
            (emb if clear else opt).zero_grad()
            head(emb(IDS)).sum().backward()
            opt.step()

    train(120, clear=True)  # somebody clears it, so nothing piles up
    emb.zero_grad()
    with pytest.warns(UserWarning, match="no optimizer that steps has this weight"):
        train(120, clear=False)
    train(120, clear=False)


def test_messages_name_the_module() -> None:
    model = torch.nn.ModuleDict({"encoder": torch.nn.Sequential(torch.nn.Identity(), speedtransfer.Embedding(12, 5))})
    with pytest.raises(ValueError, match=r"the gradient of encoder\.1\.weight is \(3, 5\)"):
        model["encoder"][1].weight.grad = torch.zeros(3, 5)
