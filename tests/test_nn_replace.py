"""``replace_embeddings`` puts tables into a model that exists, which then trains, or is served, as before."""

import copy
import functools
import sys
from typing import Any

import pytest
import torch
from cases import COPIES, Doubled, take_step
from torch import nn

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidValueError

replace_embeddings = functools.partial(st.replace_embeddings, min_rows=0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(41, 16, padding_idx=0, scale_grad_by_freq=True)
        self.same_words = self.words
        self.parts = nn.ModuleList([nn.EmbeddingBag(29, 16, mode="sum"), nn.Embedding(5, 16)])


def test_names_modules_and_flags():
    model = Model()
    model.words.weight.requires_grad_(False)
    model.words.eval()
    assert replace_embeddings(model, min_rows=29) == ["words", "same_words", "parts.0"]
    assert type(model.parts[1]) is nn.Embedding
    assert replace_embeddings(model) == ["parts.1"]
    assert replace_embeddings(model) == []  # nothing is left to swap
    assert isinstance(model.words, st.Embedding)
    assert isinstance(model.parts[0], st.EmbeddingBag)
    assert model.same_words is model.words
    assert not model.words.weight.requires_grad
    assert not model.words.training
    assert model.parts[0].training
    assert list(model.state_dict()) == list(Model().state_dict())
    for itself in (nn.Embedding(4, 2), nn.EmbeddingBag(4, 2)):
        assert replace_embeddings(itself) == [""]
        assert itself.table.num_rows == 4


def test_every_argument_is_kept():
    given = nn.Embedding(9, 4, 2, 1.5, 1.0, True, True)
    bag = nn.EmbeddingBag(9, 4, 1.5, 1.0, False, "max", False, None, True, 3)
    model = nn.ModuleList([given, bag])
    before, weights = copy.deepcopy(model), [given.weight, bag.weight]
    replace_embeddings(model)
    # The objects are the same, so what holds them goes on to work.
    for module, old, new, weight in zip(model, before, (given, bag), weights, strict=True):
        assert module is new
        assert new.weight is weight
        assert new.extra_repr() == old.extra_repr() + ", memory='pageable'"
        assert torch.equal(new.table.torch(), old.weight)
    assert bag.include_last_offset is True


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.words, self.out = Doubled(31, 4), nn.Linear(4, 31, bias=False)
        self.out.weight = self.words.weight
        self.words.register_forward_hook(lambda module, args, output: output + 1)
        self.penalised = [self.words.weight]  # a list made in __init__, as DeepCTR-Torch's

    def forward(self, ids):
        logits = self.out(self.words(ids))
        return logits.logsumexp(-1).mean() + 1e-3 * sum(weight.square().sum() for weight in self.penalised)


@pytest.mark.parametrize("when", ["before the optimizer", "after the optimizer", "after some steps"])
def test_subclasses_ties_hooks_lists_and_optimizers_made_before_go_on_to_work(when):
    ours, dense = Tied(), Tied()
    if when.startswith("before"):
        replace_embeddings(ours, idle="exact")
    opts = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (ours, dense)]
    if when.endswith("optimizer"):
        replace_embeddings(ours, idle="exact")
    draw = torch.Generator().manual_seed(1)
    for step in range(12):
        ids = (torch.rand(8, 3, generator=draw) ** 2 * 31).long()
        if step == 5:
            assert replace_embeddings(ours, idle="exact") == (["words"] if when.endswith("steps") else [])
        losses = []
        for model, opt in zip((ours, dense), opts, strict=True):
            losses.append(model(ids))
            take_step(opt, losses[-1])
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    assert isinstance(ours.words, st.Embedding)
    assert isinstance(ours.words, Doubled)
    assert ours.out.weight is ours.words.weight is ours.penalised[0]
    torch.testing.assert_close(ours.words.weight, dense.words.weight, rtol=1e-4, atol=1e-5)


def test_a_replaced_subclass_is_copied_and_pickled():
    model = nn.ModuleDict({"words": Doubled(31, 4), "out": nn.Linear(4, 31, bias=False)})
    model["out"].weight = model["words"].weight
    replace_embeddings(model)
    for other in (copied(model) for copied in COPIES.values()):
        assert type(other["words"]) is type(model["words"])
        assert other["out"].weight is other["words"].weight is not model["words"].weight
        other["words"].weight.data[3] = 0
        assert not other["words"](torch.tensor([3])).any()
        assert model["words"](torch.tensor([3])).any()
    first, second = nn.Embedding(9, 4), nn.Embedding(9, 4)
    second.weight = first.weight
    replace_embeddings(nn.ModuleList([first, second]))
    assert first.table is second.table
    assert first.weight is second.weight


# --- what is left, and why ----------------------------------------------------------------------------------------------


def test_the_report_says_what_was_left_and_why():
    model = nn.ModuleDict(
        {"a": Doubled(9, 4), "small": nn.Embedding(3, 4), "b": nn.Embedding(9, 4), "head": nn.Linear(4, 9)}
    )
    model["head"].weight = model["a"].weight
    nn.utils.parametrize.register_parametrization(model["b"], "weight", nn.Identity())
    model["odd"] = nn.Embedding(9, 4, _weight=torch.ones(9, 4).to(torch.complex64), _freeze=True)
    model["named"] = nn.Embedding(9, 4)
    model["named"].table, model["named"].activate = "x", nn.ReLU()
    report = replace_embeddings(model, min_rows=5)
    assert report == ["a"]
    assert "a weight of torch.complex64, which a table cannot hold" in report.left["odd"]
    assert "shared with 'head'" in report.notes["a"]
    assert "reads every row" in str(report)
    assert "fewer than min_rows=5" in report.left["small"]
    assert "parametrization" in report.left["b"]
    assert "has activate, table of its own" in report.left["named"]
    fresh = nn.ModuleDict({"a": nn.Embedding(9, 4), "b": model["b"]})
    with pytest.raises(ValueError, match="embedding 'b' has a weight that something computes"):
        replace_embeddings(fresh, strict=True)
    message = "names has 'embedd', but no embedding has such a name; did you mean 'emb"
    with pytest.raises(InvalidValueError, match=message):
        replace_embeddings(nn.ModuleDict({"embed": nn.Embedding(9, 2)}), names=["embedd"])
    assert type(fresh["a"]) is nn.Embedding
    again = nn.ModuleDict({"embed": nn.Embedding(9, 2), "many": nn.ModuleList(nn.Embedding(9, 2) for _ in range(2))})
    for made in (["embed", "many"], []):
        assert replace_embeddings(again, names=["embed", "many.*"], min_rows=0, fuse=True) == made
    assert "no nn.Embedding" in str(replace_embeddings(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    "names",
    ["parts.*", ["parts.0", "parts.1"], iter(["parts.1", "parts.0"]), lambda name, module: module.num_embeddings < 40],
)
def test_names(names):
    report = replace_embeddings(Model(), names=names)
    assert report == ["parts.0", "parts.1"]
    assert "not among the names" in report.left["words"]


def test_embeddings_by_bytes():
    model = nn.ModuleDict({"words": nn.Embedding(100, 8), "layers": nn.Embedding(100, 64)})
    model["halves"] = nn.Embedding(100, 64).bfloat16()
    report = replace_embeddings(model, min_bytes=100 * 64 * 4)
    assert report == ["layers"]
    assert report.left["words"] == "its weight has 3,200 bytes, fewer than min_bytes=25,600"
    assert "12,800 bytes" in report.left["halves"]
    waiting = nn.Embedding(100, 64, device="meta")
    assert replace_embeddings(waiting, min_bytes=25_601) == []
    assert replace_embeddings(waiting, min_bytes=25_600) == [""]


def test_a_failure_half_way_leaves_the_model_whole(monkeypatch):
    model = nn.ModuleDict({"a": nn.Embedding(9, 3), "b": nn.Embedding(9, 3)})
    module = sys.modules["speedtransfer.nn.replace"]
    make, made = module.make_handle, list[Any]()

    def no_second(*args):
        if made:
            raise HostMemoryError("no room")
        made.append(make(*args))
        return made[0]

    monkeypatch.setattr(module, "make_handle", no_second)
    with pytest.raises(HostMemoryError):
        replace_embeddings(model)
    assert type(model["a"]) is type(model["b"]) is nn.Embedding


# --- a weight that gets its table between forward and backward: the gradient of that forward is its own ------------------


def bound(kind, replaced=False, sparse=False, hooks=False):
    torch.manual_seed(0)
    model, seen = nn.Sequential(kind(50, 4, sparse=sparse), nn.Linear(4, 1)).double(), []
    opt = torch.optim.SGD(model.parameters(), lr=0.1) if sparse else torch.optim.Adam(model.parameters(), lr=0.1)
    if hooks:
        model[0].weight.register_hook(lambda grad: grad * 2)
        model[0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.sum().item()))

    def loss(step):
        return model(torch.arange(6).view(2, 3) * step % 50).square().sum()

    loss(9).backward()
    first, second = loss(7), loss(5)
    if replaced:
        replace_embeddings(model)
    first.backward()
    loss(3).backward()
    take_step(opt, second)
    take_step(opt, loss(2))
    return model[0].weight.detach().clone(), seen


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("how", [{}, {"sparse": True}, {"hooks": True}], ids=str)
def test_the_gradient_of_a_forward_before_the_table(kind, how):
    (expected, seen), (found, ours) = bound(kind, **how), bound(kind, True, **how)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(ours, seen)


def test_rows_in_another_order_cannot_take_it():
    model = nn.Sequential(nn.Embedding(50, 4))
    before, loss = (model(torch.arange(6)).square().sum() for _ in range(2))
    before.backward()
    report = replace_embeddings(model, vocabulary=st.Vocabulary())
    assert "has a gradient" in report.left["0"]
    assert type(model[0]) is nn.Embedding
    model.zero_grad()
    replace_embeddings(model, vocabulary=st.Vocabulary())
    with pytest.raises(InvalidValueError, match=r"0\.weight is used by its node .* a forward before it got its table"):
        loss.backward()


# --- what one table in the place of several would lose --------------------------------------------------------------------


CHANGES = {
    "a hook of a weight": lambda tables: tables[0].weight.register_hook(lambda grad: grad * 3),
    "a hook after it": lambda tables: tables[0].weight.register_post_accumulate_grad_hook(lambda weight: None),
    "a lookup": lambda tables: setattr(tables[0], "forward", lambda ids: tables[1](ids) * 2),
    "a mark of a weight": lambda tables: setattr(tables[1].weight, "decays", False),
    "a buffer": lambda tables: tables[1].register_buffer("scale", torch.ones(1)),
    "a parameter": lambda tables: tables.register_parameter("scale", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tables_with_something_of_their_own_stay_apart(change):
    model = nn.ModuleDict({"tables": nn.ModuleList(nn.Embedding(20, 4) for _ in range(2))})
    CHANGES[change](model["tables"])
    before = set(model.state_dict())
    report = st.replace_embeddings(model, min_rows=0, fuse=True)
    assert list(report) == ["tables.0", "tables.1"]
    assert "apart from the others" in str(report)
    assert set(model.state_dict()) == before


def test_a_path_is_that_of_one_table(tmp_path):
    model = nn.ModuleList(nn.Embedding(20, 4) for _ in range(2))
    with pytest.raises(InvalidValueError, match="the file of one table, but there are 2"):
        st.replace_embeddings(model, min_rows=0, memory="mmap", path=tmp_path / "rows.npy")
    assert not list(tmp_path.iterdir())
