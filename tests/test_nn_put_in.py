"""A weight that is put into a table module from outside, also on the meta device: seen as ``torch.nn.Embedding`` sees it."""

import copy

import pytest
import torch
from cases import COPIES, Doubled, take_step
from torch import nn
from torch.optim.swa_utils import AveragedModel

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError

IDS = torch.tensor([[1, 5, 5], [19, 0, 3]])
ROWS = torch.arange(80.0).reshape(20, 4)


def replaced(device):
    model = nn.ModuleList([Doubled(20, 4, device=device)])
    st.replace_embeddings(model, min_rows=0)
    return model[0]


MAKE = {
    "embedding": (nn.Embedding, st.Embedding),
    "bag": (nn.EmbeddingBag, st.EmbeddingBag),
    "cache": (nn.Embedding, lambda *args, **kwargs: st.Embedding(*args, cache_rows=5, **kwargs)),
    "replaced": (Doubled, lambda *_, device: replaced(device)),
}
PUT = {
    "dict": lambda module, rows: module._parameters.update(weight=rows),
    "register": lambda module, rows: module.register_parameter("weight", rows),
    "assign": lambda module, rows: setattr(module, "weight", rows),
    "of another": lambda module, rows: module._parameters.update(weight=st.Embedding(20, 4, _weight=rows.data).weight),
}


def after(use):
    """Return what uses a model, and returns the model."""
    return lambda model: (use(model), model)[1]


def load(model, **how):
    model.load_state_dict({name: value.clone() * 2 for name, value in model.state_dict().items()}, **how)


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return average.module


def draw(model):
    torch.manual_seed(4)
    model[0].reset_parameters()


def empty(model, device="cpu"):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(device).to_empty(device="cpu").load_state_dict(state)


THEN = {
    "to": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "half": lambda model: model.half().double(),
    **COPIES,
    "average": averaged,
    "load": after(load),
    "load assign": after(lambda model: load(model, assign=True)),
    "reset": after(draw),
    "to_empty": after(empty),
    "meta": after(lambda model: empty(model, "meta")),
    "repr": after(repr),
    "to_dense": st.to_dense,
    "functional_call": after(lambda model: torch.func.functional_call(model, {"0.weight": ROWS}, (IDS,))),
    "assign": after(lambda model: setattr(model[0], "weight", model[0].weight)),
}


def trained(model, steps=2):
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        take_step(opt, model(IDS).square().sum())
    return model(IDS).detach()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "put"),
    [("embedding", "register"), ("embedding", "assign"), *((k, p) for k in MAKE for p in ("dict", "of another"))],
)
@pytest.mark.parametrize("born", ["meta", "trained"])
def test_every_use_sees_it(kind, put, born, tmp_path):
    for name, then in THEN.items():
        results = []
        for make in MAKE[kind]:
            torch.manual_seed(0)
            model = nn.Sequential(make(20, 4, device="meta" if born == "meta" else "cpu"))
            if born == "trained":
                trained(model)
            PUT[put](model[0], nn.Parameter(ROWS.clone()))
            model = then(model)
            results.append((model(IDS).detach(), trained(model)))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    saved, other = nn.Sequential(MAKE[kind][1](20, 4, device="cpu")), nn.Sequential(MAKE[kind][1](20, 4, device="cpu"))
    PUT[put](saved[0], nn.Parameter(ROWS.clone()))
    st.save_checkpoint(tmp_path, saved)
    st.load_checkpoint(tmp_path, other)
    assert torch.equal(other[0].weight, ROWS)


@pytest.mark.parametrize("kind", MAKE)
def test_what_needs_the_table_says_how_it_gets_the_rows(kind):
    for device in ("meta", "cpu"):
        module = MAKE[kind][1](20, 4, device=device)
        module._parameters["weight"] = nn.Parameter(ROWS.clone())
        uses = [lambda m: m.table, lambda m: m.activate(IDS), lambda m: m.prefetch(IDS)]
        for use in uses:
            with pytest.raises(InvalidTypeError, match="was swapped from outside"):
                use(module)
        module.weight = module.weight
        assert torch.equal(module.table.torch(), ROWS)
        assert module.activate(IDS).rows.shape == (5, 4)


# A parameter of a class with rules of its own, as geoopt's.
class OnManifold(nn.Parameter):
    pass


def test_a_parameter_of_another_class_is_refused():
    made = OnManifold(torch.ones(9, 2))
    ways = [
        lambda module: setattr(module, "weight", made),
        lambda module: module.register_parameter("weight", made),
        lambda module: module.load_state_dict(dict.fromkeys(module.state_dict(), made), assign=True),
        lambda module: type(module).from_pretrained(made),
    ]
    for module in (st.Embedding(9, 2), st.Embedding(9, 2, device="meta"), st.MultiEmbedding([9], 2)):
        before = module.weight
        for way in ways if hasattr(module, "from_pretrained") else ways[:3]:
            with pytest.raises(InvalidTypeError, match="cannot become a OnManifold"):
                way(module)
        assert module.weight is before
    # Without a table, as torch.nn has it.
    emb = st.Embedding(9, 2)
    emb._parameters["weight"] = made
    assert type(emb.weight) is type(copy.deepcopy(emb).weight) is OnManifold


# --- the meta device ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["meta", "cpu"])
def test_a_module_on_the_meta_device_that_shares_a_weight_shares_the_table(first):
    one, other = st.Embedding(9, 2, device=first), st.Embedding(9, 2, device="meta")
    assert repr(other) == repr(nn.Embedding(9, 2, device="meta"))
    with pytest.raises(InvalidValueError, match="is on the meta device and has no rows yet"):
        other.activate(torch.tensor([1]))
    if first == "meta":
        one.weight = nn.Parameter(torch.ones(9, 2))
    other.weight = one.weight
    assert other.table is one.table
    opt = torch.optim.SGD(one.parameters(), lr=1.0)
    (one(torch.tensor([1])) + other(torch.tensor([2]))).sum().backward()
    before = one.weight.detach().clone()
    opt.step()
    torch.testing.assert_close((before - other.weight).detach().sum(1), torch.tensor([0.0, 2.0, 2.0, *[0.0] * 6]))
