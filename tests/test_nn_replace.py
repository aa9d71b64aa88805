"""``replace_embeddings`` puts tables into a model that exists, which then trains as before."""

from __future__ import annotations

import copy

import pytest
import torch
from lazy_oracle import (
    LazyOracle,
    assert_same,
    one_thread,  # noqa: F401 - a fixture
)
from torch import nn

import speedtransfer
from speedtransfer import replace_embeddings


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
    replace_embeddings(model)
    for old, new in ((given, model["given"]), (bag, model["bag"])):
        assert new.extra_repr() == old.extra_repr() + ", memory='pageable'"
        assert torch.equal(new.table.torch(), old.weight)
    assert model["bag"].include_last_offset is True


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


def test_options_are_passed_on() -> None:
    model = Model()
    replace_embeddings(model, memory="device")
    assert model.words.table.memory == "device"
    with pytest.raises(ValueError, match="did you mean 'pageable'"):
        replace_embeddings(Model(), memory="pagable")


def test_trains_equal_afterwards() -> None:
    dense = Model()
    ours = copy.deepcopy(dense)
    replace_embeddings(ours, idle="lazy")
    tables = [(ours.words, dense.words), (ours.parts[0], dense.parts[0]), (ours.parts[1], dense.parts[1])]
    opt = torch.optim.AdamW(ours.parameters(), lr=0.02)
    oracle = LazyOracle(torch.optim.AdamW(dense.parameters(), lr=0.02), *(d for _, d in tables))
    for ids in batches(12):
        opt.zero_grad()
        oracle.zero_grad()
        loss, expected = ours(ids), dense(ids)
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        loss.backward()
        expected.backward()
        opt.step()
        oracle.step()
    for module, reference in tables:
        assert_same(opt, module, oracle, reference, 1e-5)  # two lookups of one table sum in another order
    torch.testing.assert_close(ours.head.weight, dense.head.weight, rtol=1e-5, atol=1e-6)


def test_tied_weights_are_refused_and_the_model_is_left_whole() -> None:
    model = nn.ModuleDict(
        {"other": nn.Embedding(9, 4), "words": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)}
    )
    model["out"].weight = model["words"].weight
    with pytest.raises(ValueError, match="'words' shares its weight with another module") as caught:
        replace_embeddings(model)
    assert "\n" not in str(caught.value)
    assert type(model["other"]) is nn.Embedding  # nothing was swapped before the error
    assert replace_embeddings(model, min_rows=9) == ["other"]  # the way out that the message names


def test_a_model_that_is_itself_an_embedding() -> None:
    for model in (nn.Embedding(4, 2), nn.EmbeddingBag(4, 2)):
        with pytest.raises(ValueError, match="is the model itself"):
            replace_embeddings(model)


def test_bad_min_rows() -> None:
    with pytest.raises(ValueError, match="min_rows is -1"):
        replace_embeddings(Model(), min_rows=-1)


def test_nothing_to_replace() -> None:
    assert replace_embeddings(nn.Linear(2, 2)) == []


def test_embeddings_with_code_or_hooks_of_their_own_are_refused_and_the_model_is_left_whole() -> None:
    class Shifted(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids + 2)

    hooked = nn.Embedding(9, 3)
    hooked.register_forward_hook(lambda *_: None)
    for odd, message in ((Shifted(9, 3), "is a Shifted"), (hooked, "has hooks")):
        model = nn.ModuleDict({"plain": nn.Embedding(9, 3), "odd": odd})
        with pytest.raises(ValueError, match=f"'odd' {message}"):
            speedtransfer.replace_embeddings(model)
        assert type(model["plain"]) is nn.Embedding
        assert speedtransfer.replace_embeddings(nn.ModuleDict({"plain": model["plain"]})) == ["plain"]


def test_a_failure_half_way_leaves_the_model_whole(tmp_path) -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 3), "b": nn.Embedding(9, 3)})
    with pytest.raises(OSError, match="exists"):
        speedtransfer.replace_embeddings(model, memory="mmap", path=tmp_path / "rows.npy")  # one file for two tables
    assert type(model["a"]) is type(model["b"]) is nn.Embedding
