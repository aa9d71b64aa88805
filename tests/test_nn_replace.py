"""``replace_embeddings`` puts tables into a model that exists, which then trains as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import COPIES
from torch import nn

import speedtransfer
from speedtransfer.nn.replace import Replaced


def replace_embeddings(model: nn.Module, min_rows: int = 0, **options: Any) -> Replaced:
    return speedtransfer.replace_embeddings(model, min_rows, **options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(41, 16, padding_idx=0, scale_grad_by_freq=True)
        self.same_words = self.words
        self.parts = nn.ModuleList([nn.EmbeddingBag(29, 16, mode="sum"), nn.Embedding(5, 16)])
        self.head = nn.Linear(16, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.words(ids).sum(1) + self.same_words(ids[:, :1]).squeeze(1) + self.parts[0](ids % 29)
        return self.head(rows + self.parts[1](ids[:, 0] % 5)).square().mean()


def batches(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.rand(8, 3, generator=generator) ** 2 * 40).long() for _ in range(steps)]


def test_names_modules_and_arguments() -> None:
    model = Model().eval()
    assert replace_embeddings(model) == ["words", "same_words", "parts.0", "parts.1"]
    assert isinstance(model.words, speedtransfer.Embedding)
    assert model.same_words is model.words
    assert isinstance(model.parts[0], speedtransfer.EmbeddingBag)
    assert model.words.padding_idx == 0
    assert model.words.scale_grad_by_freq
    assert model.parts[0].mode == "sum"
    assert not model.words.training
    assert model.words.weight.requires_grad
    assert replace_embeddings(model) == []  # nothing is left to swap
    assert list(model.state_dict()) == list(Model().state_dict())


def test_every_argument_is_kept() -> None:
    given = nn.Embedding(9, 4, 2, 1.5, 1.0, True, True)
    bag = nn.EmbeddingBag(9, 4, 1.5, 1.0, False, "max", False, None, True, 3)
    model = nn.ModuleDict({"given": given, "bag": bag})
    before = copy.deepcopy(model)
    weights = [given.weight, bag.weight]
    replace_embeddings(model)
    for old, new in ((before["given"], given), (before["bag"], bag)):
        assert new.extra_repr() == old.extra_repr() + ", memory='pageable'"
        assert torch.equal(new.table.torch(), old.weight)
    assert bag.include_last_offset is True
    assert model["given"] is given  # the objects are the same, so what holds them goes on to work
    assert given.weight is weights[0]
    assert bag.weight is weights[1]


def test_min_rows_leaves_small_ones_alone() -> None:
    model = Model()
    assert replace_embeddings(model, min_rows=29) == ["words", "same_words", "parts.0"]
    assert type(model.parts[1]) is nn.Embedding
    assert replace_embeddings(model, min_rows=0) == ["parts.1"]


def test_frozen_and_training_flags() -> None:
    model = Model()
    model.words.weight.requires_grad_(False)
    model.words.eval()
    replace_embeddings(model)
    assert not model.words.weight.requires_grad
    assert not model.words.training
    assert model.parts[0].training


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.out = Scaled(31, 4), nn.Linear(4, 31, bias=False)
        self.out.weight = self.words.weight
        self.words.register_forward_hook(lambda module, args, output: output + 1)
        self.penalised = [self.words.weight]  # a list made in __init__, as DeepCTR-Torch's

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.words(ids))
        return logits.logsumexp(-1).mean() + 1e-3 * sum(weight.square().sum() for weight in self.penalised)


class Scaled(nn.Embedding):
    """A subclass with code of its own, as Gemma's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 2


@pytest.mark.parametrize("when", ["before the optimizer", "after the optimizer", "after some steps"])
def test_subclasses_ties_hooks_lists_and_optimizers_made_before_go_on_to_work(when: str) -> None:
    ours, dense = Tied(), Tied()
    if when.startswith("before"):
        replace_embeddings(ours, idle="exact")
    opts = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, dense)]
    if when.endswith("optimizer"):
        replace_embeddings(ours, idle="exact")
    for step, ids in enumerate(batches(12)):
        if step == 5:
            report = replace_embeddings(ours, idle="exact")
            assert report == (["words"] if when.endswith("steps") else [])
        losses = []
        for model, opt in zip((ours, dense), opts, strict=True):
            opt.zero_grad()
            losses.append(model(ids % 31))
            losses[-1].backward()
            opt.step()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert isinstance(ours.words, speedtransfer.Embedding)
    assert isinstance(ours.words, Scaled)
    assert ours.out.weight is ours.words.weight is ours.penalised[0]
    torch.testing.assert_close(ours.words.weight, dense.words.weight, rtol=1e-4, atol=1e-5)


def test_a_replaced_subclass_is_copied_and_pickled() -> None:
    model = nn.ModuleDict({"words": Scaled(31, 4), "out": nn.Linear(4, 31, bias=False)})
    model["out"].weight = model["words"].weight
    replace_embeddings(model)
    for other in (copied(model) for copied in COPIES.values()):
        assert type(other["words"]) is type(model["words"])
        assert other["out"].weight is other["words"].weight is not model["words"].weight
        assert torch.equal(other["words"](torch.tensor([3])), model["words"](torch.tensor([3])))
        other["words"].weight.data[3] = 0
        assert not other["words"](torch.tensor([3])).any()
        assert model["words"](torch.tensor([3])).any()


def test_a_model_that_is_itself_an_embedding() -> None:
    for model in (nn.Embedding(4, 2), nn.EmbeddingBag(4, 2)):
        assert replace_embeddings(model) == [""]
        assert model.table.num_rows == 4


def test_the_report_says_what_was_left_and_why() -> None:
    model = nn.ModuleDict(
        {"a": Scaled(9, 4), "small": nn.Embedding(3, 4), "b": nn.Embedding(9, 4), "head": nn.Linear(4, 9)}
    )
    model["head"].weight = model["a"].weight
    nn.utils.parametrize.register_parametrization(model["b"], "weight", nn.Identity())
    report = replace_embeddings(model, min_rows=5)
    assert report == ["a"]
    assert "shared with 'head'" in report.notes["a"]
    assert "reads every row" in str(report)
    assert "fewer than min_rows=5" in report.left["small"]
    assert "parametrization" in report.left["b"]
    assert len(str(report).splitlines()) == 3
    fresh = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": model["b"]})
    with pytest.raises(ValueError, match="embedding 'b' has a weight that something computes"):
        replace_embeddings(fresh, strict=True)
    assert type(fresh["a"]) is nn.Embedding
    assert "no nn.Embedding" in str(replace_embeddings(nn.Linear(2, 2)))


@pytest.mark.parametrize("names", ["parts.*", ["parts.0", "parts.1"], lambda name, module: module.num_embeddings < 40])
def test_names(names: Any) -> None:
    model = Model()
    report = replace_embeddings(model, names=names)
    assert report == ["parts.0", "parts.1"]
    assert "not among the names" in report.left["words"]


def test_two_modules_that_share_a_weight_share_a_table() -> None:
    first, second = nn.Embedding(9, 4), nn.Embedding(9, 4)
    second.weight = first.weight
    replace_embeddings(nn.ModuleList([first, second]))
    assert first.table is second.table
    assert first.weight is second.weight


def test_bad_min_rows() -> None:
    with pytest.raises(ValueError, match="min_rows is -1"):
        replace_embeddings(Model(), min_rows=-1)


def test_a_failure_half_way_leaves_the_model_whole(tmp_path) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 3), "b": nn.Embedding(9, 3)})
    with pytest.raises(OSError, match="exists"):
        replace_embeddings(model, memory="mmap", path=tmp_path / "rows.npy")  # one file for two tables
    assert type(model["a"]) is type(model["b"]) is nn.Embedding


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.uint16], ids=str)
def test_a_dtype_that_no_table_holds_is_left(dtype: torch.dtype) -> None:
    def model() -> nn.ModuleDict:
        odd = nn.Embedding(9, 4, _weight=torch.ones(9, 4).to(dtype), _freeze=True)
        return nn.ModuleDict({"real": nn.Embedding(9, 4), "odd": odd})

    report = replace_embeddings(model())
    assert report == ["real"]
    assert f"a weight of {dtype}, which a table cannot hold" in report.left["odd"]
    with pytest.raises(ValueError, match="embedding 'odd' has a weight of"):
        replace_embeddings(model(), strict=True)


def test_a_dtype_that_is_not_stored_in_another_is_left() -> None:
    whole = torch.ones(9, 4, dtype=torch.int64)
    for options, left in (
        ({"storage_dtype": torch.bfloat16}, ["whole"]),
        ({"state_dtype": torch.uint8}, ["whole", "wide"]),
    ):
        model = nn.ModuleDict({"real": nn.Embedding(9, 4), "whole": nn.Embedding.from_pretrained(whole)})
        model["wide"] = nn.Embedding(9, 4, dtype=torch.float64)
        report = replace_embeddings(model, **options)
        assert list(report.left) == left
        assert "which storage_dtype and state_dtype are not for" in report.left["whole"]
