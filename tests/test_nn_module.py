"""``speedtransfer.Embedding`` as a module: conversion, pickles, state dicts, uses that a table cannot serve."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from cases import saved
from lazy_oracle import both
from torch import nn

import speedtransfer

IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


# --- conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["half", "double", "bfloat16", "float"])
def test_conversion_converts_the_table(how: str) -> None:
    ours, dense = both(dtype=torch.float64 if how == "float" else torch.float32)
    ours(IDS).sum().backward()  # a gradient pending goes
    getattr(ours, how)()
    getattr(dense, how)()
    assert ours.weight.dtype == ours.table.dtype == dense.weight.dtype
    assert ours.weight.grad is None
    assert torch.equal(ours.table.torch(), dense.weight)
    opt = torch.optim.SGD(ours.parameters(), lr=0.5)
    dense_opt = torch.optim.SGD(dense.parameters(), lr=0.5)
    for module in (ours, dense):
        module(IDS).sum().backward()
    opt.step()
    dense_opt.step()
    assert torch.equal(ours.table.torch(), dense.weight)


def test_conversion_that_makes_new_parameters() -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        emb = speedtransfer.Embedding(12, 5).double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert emb.table.dtype == torch.float64
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    before = emb.table.torch().clone()
    emb(torch.tensor([1])).sum().backward()
    opt.step()
    assert torch.equal(emb.table.torch()[1], before[1] - 1)


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_pickle_by_torch_save(memory: str, tmp_path) -> None:
    path = tmp_path / "rows.npy" if memory == "mmap" else None
    model = nn.Sequential(speedtransfer.Embedding(12, 5, padding_idx=1, memory=memory, path=path), nn.Linear(5, 2))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    opt.step()
    model(IDS).sum().backward()  # a gradient pending is left behind, as torch leaves it
    loaded = saved(model)
    assert loaded[0].padding_idx == 1
    assert loaded[0].weight.grad is None
    assert torch.equal(loaded[0].weight, model[0].weight)
    assert torch.equal(loaded[0].table.torch(), model[0].table.torch())
    assert torch.equal(loaded(IDS), model(IDS))
    before = model[0].table.torch().clone()
    new = torch.optim.AdamW(loaded.parameters(), lr=0.1)
    loaded(IDS).sum().backward()
    new.step()
    assert not torch.equal(loaded[0].table.torch()[3], before[3])
    assert torch.equal(model[0].table.torch(), before)


# --- what a table cannot serve ----------------------------------------------------------------------------------------


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


# --- state dicts, which cross over ------------------------------------------------------------------------------------


def test_state_dict_holds_every_row_as_a_view() -> None:
    ours, dense = both()
    state = ours.state_dict()
    assert list(state) == list(dense.state_dict()) == ["weight"]
    assert torch.equal(state["weight"], dense.weight)
    assert state["weight"].data_ptr() == ours.table.torch().data_ptr()
    assert ours.state_dict(prefix="a.b.")["a.b.weight"].shape == (12, 5)
    assert ours.state_dict(keep_vars=True)["weight"].shape == (12, 5)


def models() -> tuple[nn.Module, nn.Module]:
    def make(library: object) -> nn.Module:
        return nn.Sequential(
            nn.ModuleDict({"words": library.Embedding(12, 5)}),  # type: ignore[attr-defined]
            library.EmbeddingBag(7, 3),  # type: ignore[attr-defined]
            nn.BatchNorm1d(3),
        )

    return make(speedtransfer), make(nn)


def test_state_dicts_cross_over_in_nested_models() -> None:
    ours, dense = models()
    assert list(ours.state_dict()) == list(dense.state_dict())
    ours.load_state_dict(dense.state_dict())
    for key, value in dense.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    other_ours, other_dense = models()
    other_dense.load_state_dict(ours.state_dict())
    other_ours.load_state_dict(other_dense.state_dict(), strict=True, assign=True)
    assert torch.equal(other_ours[0]["words"].table.torch(), dense[0]["words"].weight)
    assert torch.equal(other_ours[1].table.torch(), dense[1].weight)
    # assign=True copies too: the table keeps its memory, and the tensor that was loaded stays the caller's.
    assert other_ours[1].table.torch().data_ptr() != other_dense[1].weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_loading_another_dtype_converts_as_torch_does(dtype: torch.dtype) -> None:
    ours, dense = both()
    state = {"weight": torch.randn(12, 5).to(dtype)}
    for module in (ours, dense):
        module.load_state_dict(state)
    assert ours.table.dtype == dense.weight.dtype == torch.float32
    assert torch.equal(ours.table.torch(), dense.weight)


@pytest.mark.parametrize("strict", [True, False])
def test_missing_and_unexpected_keys(strict: bool) -> None:
    def load(model: nn.Module, change: str) -> object:
        state = dict(model.state_dict())
        if change == "missing":
            del state["0.words.weight"]
        else:
            state["0.words.more"] = torch.zeros(1)
            state["0.words.deeper.more"] = torch.zeros(1)
        try:
            return model.load_state_dict(state, strict=strict)
        except RuntimeError as error:
            return str(error)

    for change in ("missing", "unexpected"):
        ours, dense = (load(model, change) for model in models())
        assert str(ours) == str(dense)
        assert ("0.words" in str(ours)) or not strict


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("shape", [(11, 5), (12, 4), (60,)])
def test_size_mismatch(strict: bool, shape: tuple[int, ...]) -> None:
    ours = nn.Sequential(speedtransfer.Embedding(12, 5))
    before = ours[0].table.torch().clone()
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight: .*\[12, 5\]") as caught:
        ours.load_state_dict({"0.weight": torch.zeros(shape)}, strict=strict)
    assert str(torch.Size(shape)) in str(caught.value)
    assert torch.equal(ours[0].table.torch(), before)


def test_hooks_of_state_dicts_run() -> None:
    emb = speedtransfer.Embedding(4, 2)
    calls = []
    emb.register_state_dict_post_hook(lambda module, state, prefix, meta: calls.append("saved"))
    emb.register_load_state_dict_pre_hook(lambda module, state, *rest: calls.append("loading"))
    emb.load_state_dict(emb.state_dict())
    assert calls == ["saved", "loading"]


class WithBias(speedtransfer.Embedding):
    """A subclass with a parameter and a buffer of its own."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.zeros(self.embedding_dim))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.bias


def test_a_subclass_keeps_what_it_adds() -> None:
    emb, other = WithBias(4, 2), WithBias(4, 2)
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    emb(torch.tensor([1, 2])).sum().backward()
    opt.step()
    emb.count += 3
    assert list(emb.state_dict()) == ["weight", "bias", "count"]
    other.load_state_dict(emb.state_dict())
    assert torch.equal(other.bias, torch.full((2,), -2.0))
    assert other.count == 3
    assert torch.equal(other.table.torch(), emb.table.torch())
    assert list(dict(other.named_parameters())) == ["weight", "bias"]
    assert torch.equal(copy.deepcopy(emb)(torch.tensor([1])), emb(torch.tensor([1])))


def test_a_hook_may_rename_keys() -> None:
    emb = speedtransfer.Embedding(4, 2)

    def rename(module, state, prefix, *rest) -> None:
        state[prefix + "weight"] = state.pop(prefix + "vectors")

    emb.register_load_state_dict_pre_hook(rename)
    emb.load_state_dict({"vectors": torch.ones(4, 2)})
    assert torch.equal(emb.table.torch(), torch.ones(4, 2))
