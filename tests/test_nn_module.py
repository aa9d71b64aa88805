"""``Embedding`` as a module: conversion, state dicts, what a table cannot serve, summaries, functions of torch."""

import contextlib
import copy

import pytest
import torch
from cases import take_step
from forked import run_script
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError

IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


# --- what a table cannot serve ------------------------------------------------------------------------------------------


def test_a_weight_that_one_of_its_modules_shortens_is_shortened_for_all():
    for first, second in ((None, 0.5), (0.5, None)):
        one, other = st.Embedding(20, 4, max_norm=first), st.Embedding(20, 4, max_norm=second)
        one.weight = other.weight
        for model in (one, other, *copy.deepcopy((one, other))):
            assert model._handle.renormalizes


def test_a_table_that_no_optimizer_has_is_told_of_once():
    emb, head = st.Embedding(12, 5), torch.nn.Linear(5, 1)
    opt = torch.optim.SGD(head.parameters(), lr=0.1)

    def train(steps, clear):
        for _ in range(steps):
            (emb if clear else opt).zero_grad()
            head(emb(IDS)).sum().backward()
            opt.step()

    train(120, clear=True)  # somebody clears it, so nothing piles up
    emb.zero_grad()
    with pytest.warns(UserWarning, match="no optimizer that steps has this weight"):
        train(120, clear=False)
    train(120, clear=False)


def test_messages_name_the_module(tmp_path):
    model = torch.nn.ModuleDict({"encoder": torch.nn.Sequential(torch.nn.Identity(), st.Embedding(12, 5))})
    with pytest.raises(ValueError, match=r"the gradient of encoder\.1\.weight is \(3, 5\)"):
        model["encoder"][1].weight.grad = torch.zeros(3, 5)
    emb = st.Embedding(6, 3, memory="mmap", path=tmp_path / "rows.npy")
    old, emb.weight = emb.weight, nn.Parameter(torch.rand(6, 3))
    with pytest.raises(ValueError, match="until another was assigned in its place"):
        old.sum()
    with pytest.raises(TypeError, match="functional_call"):
        nn.utils.parametrize.register_parametrization(st.Embedding(6, 3), "weight", nn.Identity()).activate([1])


# --- summary: the tables of a model, what they take and who trains them ---------------------------------------------------

ROWS = torch.tensor([1, 2, 3])


@pytest.fixture
def model():
    made = nn.ModuleDict({"users": st.Embedding(50, 4, idle="exact")})
    made["bags"] = nn.Sequential(st.EmbeddingBag(20, 4, idle="lazy", storage_dtype=torch.bfloat16))
    made["again"] = made["users"]
    made["head"] = nn.Linear(4, 2)
    return made


def test_text_and_fields(model, tmp_path):
    found = st.summary(model)
    users, bags = found.tables
    assert (users.rows, users.dim, users.dtype, users.idle) == (50, 4, torch.float32, "exact")
    assert (bags.names, bags.dtype, bags.idle) == (("bags.0",), torch.bfloat16, "lazy")
    assert (users.planes, users.num_bytes, bags.num_bytes) == (("weight",), 50 * 4 * 4, 20 * 4 * 2)
    assert (found.num_bytes, found.other_parameters, found.other_bytes) == (800 + 160, 10, 40)
    model["file"] = st.Embedding(10, 2, memory="mmap", path=tmp_path / "rows.npy")
    text = str(st.summary(model, torch.optim.SGD(model["users"].parameters())))
    title, _, *rows, total = text.splitlines()
    assert title.split() == ["table", "rows", "dim", "dtype", "idle", "memory", "planes", "size", "optimizer"]
    assert rows[0].startswith("users, again  50    4    float32   exact  ")
    assert rows[0].endswith("800 bytes  SGD group 0")
    assert "rows.npy" in rows[2]
    assert total == "3 tables, 1.04 kB; 10 other parameters, 40 bytes"
    assert str(st.summary(nn.Linear(2, 2))) == "0 tables, 0 bytes; 6 other parameters, 24 bytes"
    assert st.summary(st.Embedding(3, 2)).tables[0].names == ("Embedding",)


def test_owners(model):
    def owners(*optimizers):
        return [table.optimizer for table in st.summary(model, *optimizers).tables]

    users, bags = model["users"], model["bags"][0]
    opt = torch.optim.AdamW([{"params": model["head"].parameters()}, {"params": [users.weight], "lr": 0.1}])
    assert owners(opt) == ["AdamW group 1", "no optimizer has this table"]
    # Without an optimizer the last one is named.
    take_step(opt, users(ROWS).sum())
    assert owners() == ["AdamW group 1", ""]
    bags.weight.requires_grad_(False)
    assert owners([opt, torch.optim.SGD([users.weight])]) == ["AdamW group 1 and SGD group 0", "frozen"]
    of_users = st.summary(model).tables[0]
    assert set(of_users.planes) > {"weight", "exp_avg", "exp_avg_sq"}
    assert of_users.num_bytes == users.table.nbytes


@pytest.mark.parametrize(
    ("optimizer", "sparse", "idle"), [(torch.optim.AdamW, False, "exact"), (torch.optim.SparseAdam, True, "lazy")]
)
def test_idle_rows_are_those_in_force(optimizer, sparse, idle):
    emb = st.Embedding(50, 4, sparse=sparse)
    opt = optimizer(emb.parameters())
    assert st.summary(emb, opt).tables[0].idle == "auto"
    take_step(opt, emb(ROWS).sum())
    assert st.summary(emb, opt).tables[0].idle == idle


# --- functions of torch that are replaced where there are tables -----------------------------------------------------------

IMPORTED = """
import torch
import speedtransfer as st
from speedtransfer.errors import InvalidTypeError
from speedtransfer.nn import patches

torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
def now():
    places = [(owner, name) for owner, name, _ in patches.PATCHES] + [(torch.optim.Adam, "step")]
    return [vars(owner)[name] for owner, name in places]

own = now()
functions = [getattr(each, "__func__", each) for each in own]
assert all(each.__module__.startswith("torch.") for each in functions), functions
st.Embedding(2, 2)
assert not any(map(lambda a, b: a is b, own, now())), "something is not replaced"
"""


def test_an_import_replaces_nothing():
    ran = run_script(IMPORTED)
    assert ran.returncode == 0, ran.stderr


# --- classes of others --------------------------------------------------------------------------------------------------


class Asked(nn.Module):
    """As a module of Pyro: it has an ``__init__`` without arguments, and notes where a parameter is read."""

    def __init__(self):
        super().__init__()
        self.read = list[str]()

    def __getattr__(self, name):
        found = super().__getattr__(name)
        if isinstance(found, nn.Parameter):
            self.read.append(name)
        return found


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_second_base_class_begins_and_is_asked_for_the_weight(kind):
    for library in (nn, st):
        made = type(kind, (getattr(library, kind), Asked), {})(12, 5)
        made.read.clear()
        assert made(IDS).requires_grad
        assert made.read == ["weight"]


def test_tensors_without_values():
    emb, mode = st.Embedding(12, 5), FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(InvalidTypeError, match="FakeTensorMode cannot record how Embedding looks rows up"):
        emb(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidTypeError, match="make_fx cannot record how Embedding looks rows up"):
        make_fx(emb)(torch.tensor([3]))
    with mode, pytest.raises(InvalidTypeError, match="is made under FakeTensorMode"):
        st.Embedding(12, 5)
    assert emb(IDS).shape == (2, 3, 5)


@pytest.mark.parametrize("options", [{}, {"storage_dtype": "split24"}, {"cache_rows": 5}], ids=str)
def test_files_by_addresses(options, tmp_path):
    """What writes files by the addresses of tensors gets rows: under each name of a tied weight, or it is refused."""
    emb, head = st.Embedding(20, 4, **options), nn.Linear(4, 20, bias=False)
    head.weight = emb.weight
    for model in (nn.ModuleDict({"emb": emb, "head": head}), nn.ModuleDict({"head": head, "emb": emb})):
        state = model.state_dict()
        assert len({value.data_ptr() for value in state.values()}) == 1
        assert all(torch.equal(value, emb.weight) for value in state.values())
        save_model(model, tmp_path / "model")
        (saved,) = load_file(tmp_path / "model").values()
        assert torch.equal(saved, emb.weight)
        emb.weight.data.mul_(2)
        assert torch.equal(model.state_dict(destination=state)["head.weight"], emb.weight)
    for values in (emb.weight, emb.weight.data, emb.weight.detach().cpu()):
        with (
            contextlib.nullcontext()
            if not options
            else pytest.raises(InvalidTypeError, match="no address of all its rows")
        ):
            save_file({"weight": values}, tmp_path / "weight")
            assert torch.equal(load_file(tmp_path / "weight")["weight"], emb.weight)
