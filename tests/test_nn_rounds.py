"""Features looked up one after the other give what nn.ModuleList gives, though the first lookup of a round reads for all."""

import copy

import pytest
import torch
from cases import saved, take_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from speedtransfer.errors import RowIndexError, SpeedtransferError
from speedtransfer.nn.rounds import Rounds
from speedtransfer.optim.graph import TELLS_HOOKS

# Before torch 2.8 each is looked up by itself.
reads_ahead = pytest.mark.skipif(not TELLS_HOOKS, reason="this torch does not tell the hooks of saved tensors")

SIZES = [50, 60, 70, 80]
# Ids of all features, (batch, features), as the parts that a model makes of them.
PARTS = {
    "columns": lambda ids: list(ids.unbind(1)),
    "rows": lambda ids: list(ids.t().contiguous().unbind()),
    "pairs": lambda ids: [ids[:, 0:2], ids[:, 1:3], ids[:, 2:4], ids[:, 0]],
    "slices of more": lambda ids: list(torch.cat([ids, ids, ids])[len(ids) :][: len(ids)].unbind(1)),
    "int32": lambda ids: list(ids.int().unbind(1)),
    "one tensor": lambda ids: [ids[:, 0]] * 4,
    "of two tensors": lambda ids: [ids[:, 0], *ids.clone().unbind(1)[1:]],
}
OPTIMIZERS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW]


@pytest.fixture
def reads(monkeypatch):
    """How many features each lookup ahead was for."""
    found = []
    read = Rounds._read

    def counted(self, feature, handle, first, wanted):
        rows = read(self, feature, handle, first, wanted)
        if rows is not None:
            found.append(len(wanted))
        return rows

    monkeypatch.setattr(Rounds, "_read", counted)
    return found


def twins(sizes=SIZES, **options):
    options["dtype"] = torch.float64
    torch.manual_seed(0)
    theirs = nn.ModuleList([nn.Embedding(count, 4, **options) for count in sizes])
    torch.manual_seed(0)
    return [theirs, st.MultiEmbedding(sizes, 4, **options)]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@reads_ahead
@pytest.mark.sweep
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_as_a_module_list(parts, padding_idx, optimizer, reads):
    models = twins(padding_idx=padding_idx)
    steppers = [optimizer(model.parameters(), lr=0.1) for model in models]
    draw = torch.Generator().manual_seed(1)
    for number in range(16):
        # A smaller last batch; a copy in the middle; a feature left out; backward part by part, or to some.
        ids = torch.randint(0, 50, (5 if number % 5 == 4 else 8, 4), generator=draw)
        given = PARTS[parts](ids)
        if number % 7 == 3:
            given[2] = given[2].clone()
        left = given[: 3 if number % 6 == 5 else 4]
        shown = []
        for model, stepper in zip(models, steppers, strict=True):
            stepper.zero_grad()
            rows = [model[feature](part) for feature, part in enumerate(left)]
            losses = [(part * (feature + 1)).pow(2).sum() for feature, part in enumerate(rows)]
            if number % 4 == 1:
                for loss in losses:
                    loss.backward()
            else:
                sum(losses[: 2 if number % 4 == 2 else 4]).backward()
            stepper.step()
            with torch.no_grad():
                shown.append([model[feature](part) for feature, part in enumerate(given)])
        same(*shown)
    same(*([module.weight.detach().clone() for module in model] for model in models))
    assert reads


def look_up(modules, ids):
    return [modules[number](part) for number, part in enumerate(ids.unbind(1))]


@reads_ahead
def test_one_read_for_all(reads):
    _, emb = twins()
    for _ in range(3):
        look_up(emb, torch.randint(0, 50, (8, 4)))
    assert reads == [4, 4]


@pytest.mark.parametrize("array_of", [lambda emb: emb.table.numpy(), lambda emb: emb.weight.detach().numpy()])
def test_an_array_over_the_rows_is_read_each_time(array_of, reads):
    _, emb = twins()
    rows, ids = array_of(emb), torch.randint(0, 50, (8, 4))
    for _ in range(3):
        emb[0](ids[:, 0])
        rows[50 + ids[0, 1]] += 1
        same(emb[1](ids[:, 1])[0].detach(), torch.from_numpy(rows[50 + ids[0, 1]]).clone())
    assert not reads


# Between the lookups of two features.
BETWEEN = {
    "weight": lambda model, ids: torch.no_grad()(model[1].weight.__setitem__)(ids[0, 1], 7.0),
    "data": lambda model, ids: model[1].weight.data.__setitem__(ids[0, 1], 7.0),
    "ids": lambda model, ids: ids.__setitem__((0, 1), 3),
    "ids by numpy": lambda model, ids: ids.numpy().__setitem__((0, 1), 3),
    "a step": lambda model, ids: model.stepper.step(),
    "load": lambda model, ids: model.load_state_dict({name: it + 1 for name, it in model.state_dict().items()}),
    "frozen": lambda model, ids: model.requires_grad_(False),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_happens_between_lookups_shows(what):
    models, ids = twins(), torch.randint(0, 50, (3, 8, 4), generator=torch.Generator().manual_seed(2))
    shown = []
    for model in models:
        given = ids.clone()
        model.stepper = torch.optim.AdamW(model.parameters(), lr=0.1)
        for batch in given[:2]:
            take_step(model.stepper, sum(part.pow(2).sum() for part in look_up(model, batch)))
        model[0](given[2, :, 0])
        BETWEEN[what](model, given[2])
        found = model[1](given[2, :, 1])
        shown.append((found, found.requires_grad))
    same(shown[0][0], shown[1][0])
    assert shown[0][1] == shown[1][1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    grads, ids = [], torch.randint(0, 50, (8, 2), generator=torch.Generator().manual_seed(2))
    for model in twins([50, 60]):
        for _ in range(3):
            one = torch.ones((), dtype=torch.float64, requires_grad=True)
            parts = [
                checkpoint(lambda by, part, module=model[at]: module(part) * by, one, part, use_reentrant=reentrant)
                for at, part in enumerate(ids.unbind(1))
            ]
            (parts[0] * parts[1]).sum().backward()
        grads.append([module.weight.grad.to_dense() for module in model])
    same(*grads)


def test_rows_are_written_in_place_and_copies_have_rounds_of_their_own():
    _, emb = twins()
    ids = torch.randint(0, 50, (8, 4))
    for _ in range(2):
        rows = look_up(emb, ids)
        rows[0].mul_(2)
        same(rows[1], emb.weight[ids[:, 1] + 50])
    for copied in (copy.deepcopy(emb), saved(emb)):
        assert copied[0]._rounds is copied[1]._rounds is not emb[0]._rounds
        same(copied[1](ids[:, 1]), emb[1](ids[:, 1]))


def test_an_id_out_of_range_is_told_where_it_is_looked_up():
    _, emb = twins()
    ids = torch.randint(0, 50, (8, 4))
    for _ in range(2):
        look_up(emb, ids)
    ids[3, 2] = 70
    emb[0](ids[:, 0])
    emb[1](ids[:, 1])
    with pytest.raises(RowIndexError, match=r"index\[3\] of feature '2' is 70"):
        emb[2](ids[:, 2])


# --- replace_embeddings(fuse=True) ----------------------------------------------------------------------------------------


class Model(nn.Module):
    """Embeddings in a list and in a dict, which can be fused, and in a list of several widths, which cannot."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.many = nn.ModuleList([nn.Embedding(40 + number, 8) for number in range(3)])
        self.named = nn.ModuleDict({"a": nn.Embedding(40, 8, padding_idx=0), "b": nn.Embedding(30, 8)})
        self.widths = nn.ModuleList([nn.Embedding(40, 8), nn.Embedding(40, 4)])
        self.last = nn.Linear(8, 1)
        self.double()

    def forward(self, ids):
        found = sum(module(ids[:, number]) for number, module in enumerate(self.many))
        found = found + self.named["a"](ids[:, 0]) + self.named["b"](ids[:, 1] % 30) + self.widths[0](ids[:, 2])
        return self.last(found)


def test_fused_models_train_as_before():
    models = [Model(), Model()]
    before = models[1].many[1].weight
    report = st.replace_embeddings(models[1], min_rows=0, fuse=True)
    assert set(report) == {"many", "named", "widths.0", "widths.1"}
    assert report.notes["many"] == "of 3 tables, 123 rows together"
    assert "embedding_dim of '1' is 4 but that of '0' is 8" in report.notes["widths.1"]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    steppers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    draw = torch.Generator().manual_seed(1)
    for _ in range(5):
        ids = torch.randint(0, 40, (16, 3), generator=draw)
        for model, stepper in zip(models, steppers, strict=True):
            take_step(stepper, model(ids).pow(2).mean())
    same(models[0].state_dict(), {name: values.clone() for name, values in models[1].state_dict().items()})
    same(before.detach().clone(), models[0].many[1].weight.detach())
    assert "many (3 features)" in str(st.summary(models[1]))
    with pytest.raises(SpeedtransferError, match="part of one parameter"):
        torch.optim.SGD([before], lr=0.1).step()


def test_what_is_not_fused():
    model = Model()
    model.many[0].register_forward_hook(lambda *args: None)
    model.named["b"].weight = model.many[1].weight
    report = st.replace_embeddings(model, min_rows=0, fuse=True)
    assert "'0' has hooks" in report.notes["many.0"]
    assert "is shared" in report.notes["named.a"]
    model = Model()
    assert list(st.replace_embeddings(model, min_rows=0, names="many.0", fuse=True)) == ["many.0"]
    assert type(model.many) is nn.ModuleList
    alone = Model().many
    assert "the model is the list itself" in st.replace_embeddings(alone, min_rows=0, fuse=True).notes["0"]


def test_compiled_lookups_have_memory_of_their_own():
    _, emb = twins()
    compiled = torch.compile(look_up, backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            rows = compiled(emb, torch.randint(0, 50, (8, 4)))
    assert len({part.untyped_storage().data_ptr() for part in rows}) == 4
