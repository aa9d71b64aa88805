"""State dicts hold every row and cross over between ``nn.Embedding`` and ours."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from lazy_oracle import both
from torch import nn

import speedtransfer


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
