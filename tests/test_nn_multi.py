"""``MultiEmbedding`` against the list of ``nn.Embedding`` that it replaces: numbers, training, tickets, the meta device."""

import copy
import functools
import weakref

import pytest
import torch
from cases import Doubled, take_step
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError

SIZES, DIM, PADDING = [7, 60, 3, 21], 8, [None, 5, None, -1]
NAMES = ["user", "item", "hour", "place"]
# Arguments of the modules; optimizers are in test_optim_features.py.
TRAINED = [{}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
ADAM = functools.partial(torch.optim.Adam, lr=0.02)


def multi(named=False, seed=0, **options):
    torch.manual_seed(seed)
    sizes = dict(zip(NAMES, SIZES, strict=True)) if named else SIZES
    padding = dict(zip(NAMES, PADDING, strict=True)) if named else PADDING
    return st.MultiEmbedding(sizes, DIM, padding_idx=padding, **options)


def dense(named=False, seed=0, **options):
    torch.manual_seed(seed)
    modules = [nn.Embedding(n, DIM, padding_idx=p, **options) for n, p in zip(SIZES, PADDING, strict=True)]
    return nn.ModuleDict(dict(zip(NAMES, modules, strict=True))) if named else nn.ModuleList(modules)


def columns(modules, ids):
    return torch.stack([module(ids[..., i]) for i, module in enumerate(modules)], -2)


def batches(steps, size=12):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.rand(size, len(SIZES), generator=generator) ** 2 * torch.tensor(SIZES)).long()


def train(modules, forward, make, steps=25):
    optimizer = make(list(modules.parameters()))
    for ids in batches(steps):
        rows = forward(modules, ids)
        scale = torch.linspace(0.1, 1.5, rows.numel()).view(rows.shape)
        take_step(optimizer, (rows * scale).square().mean() + rows.mean())
    return optimizer


def assert_same(ours, theirs, tolerance=5e-6):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.weight.detach(), other.weight.detach(), rtol=0, atol=tolerance)


FORMS = {
    "columns": lambda m, ids: m(ids),
    "parts": lambda m, ids: torch.stack(m(list(ids.unbind(1))), 1),
    "names": lambda m, ids: torch.stack(list(m({str(i): ids[:, i] for i in (0, 1, 2, 3)}).values()), 1),
    "one-by-one": columns,
}

# --- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [False, True])
def test_first_values_and_state_dicts_both_ways(named):
    theirs = dense(named)
    state = torch.get_rng_state()
    of_theirs = st.MultiEmbedding.from_modules(theirs)
    assert torch.equal(torch.get_rng_state(), state)
    assert of_theirs.named is named
    shown = repr(list(of_theirs.values())).replace("Feature", "Embedding")
    assert shown == repr(list(theirs.values() if named else theirs))
    assert of_theirs.weight.data_ptr() != next(theirs.parameters()).data_ptr()
    for ours in (multi(named), of_theirs):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    again = nn.ModuleDict({"emb": multi(named, seed=2)})
    assert str(again.load_state_dict(nn.ModuleDict({"emb": theirs}).state_dict())) == "<All keys matched successfully>"
    other = dense(named, seed=1)
    other.load_state_dict(again["emb"].state_dict())
    torch.testing.assert_close(other.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", TRAINED, ids=str)
def test_training_as_torch(options, form):
    ours, theirs = multi(**options), dense(**options)
    make = functools.partial(torch.optim.SparseAdam, lr=0.02) if "sparse" in options else ADAM
    optimizer = train(ours, FORMS[form], make)
    train(theirs, columns, make)
    assert_same(ours, theirs)
    assert [name for name, _ in ours.named_parameters()] == ["weight"]
    assert len(optimizer.state_dict()["state"]) == 1


# --- a module, and a container of modules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function", [torch.as_strided, torch.as_strided_copy, Tensor.as_strided], ids=["view", "copy", "method"]
)
def test_strides_begin_at_the_rows_of_the_feature(function):
    emb, modules = multi(), dense()
    for offset in ((), (3,)):
        found = [function(module.weight, (2, 3), (1, 4), *offset) for module in (emb[1], modules[1])]
        for rows in found:
            rows.square().sum().backward()
        assert torch.equal(*found)
    assert torch.equal(emb[1].weight.grad.to_dense(), modules[1].weight.grad)


def test_container():
    ours, named, theirs = multi(), multi(named=True), dense()
    assert list(ours) == [ours[i] for i in range(4)]
    assert ours[-1] is ours[3]
    assert list(named) == list(named.keys()) == NAMES
    assert dict(named.items())["hour"] is named["hour"]
    assert "hour" in named
    with pytest.raises(KeyError, match="did you mean 'hour'"):
        named["hours"]
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
    assert "(1): Feature(60, 8, padding_idx=5)" in repr(ours)
    frozen = multi(_freeze=True)
    for trains in (False, True):
        assert frozen.requires_grad_(trains)(next(batches(1))).requires_grad is trains
        assert frozen[0].weight.requires_grad is trains


def test_freed_at_once(no_gc):
    ours = multi()
    train(ours, FORMS["columns"], ADAM, steps=2)
    ours[1].weight.detach()
    active = ours.activate(torch.tensor([[1, 5, 0, 3], [1, 6, 0, 3]]))
    assert active.ids.tolist() == [1, 7 + 5, 7 + 6, 67, 70 + 3]
    active.add_grad(torch.ones_like(active.rows))
    table = weakref.ref(ours.table)
    del ours, active
    assert table() is None


@pytest.mark.parametrize("how", ["alone", "a copy", "after a training"])
def test_features_alone_are_not_trained(how):
    ours, ids = multi(), torch.tensor([1])
    if how == "after a training":
        train(ours, FORMS["columns"], ADAM, steps=1)
    kept = copy.deepcopy(ours[1]) if how == "a copy" else ours[1]
    again = copy.deepcopy(ours)
    del ours
    again[1](ids).sum().backward()
    with torch.no_grad():
        assert kept(ids).equal(kept.weight[1:2])
    with pytest.raises(InvalidTypeError, match="feature '1' is looked up to be trained"):
        kept(ids)


def test_what_is_in_the_place_of_features_is_called_and_converted():
    ours, seen = multi(named=True), []
    expected = ours(ids := torch.tensor([[1, 5, 0, 3], [2, 6, 1, 4]]))
    ours["hour"].register_forward_hook(lambda *about: seen.append(about))
    ours.add_module("user", nn.Sequential(ours["user"], nn.Linear(DIM, DIM)))
    ours.double()
    found = ours(ids)
    assert (found.dtype, len(seen)) == (torch.float64, 1)
    assert found[..., 1, :].float().equal(expected[..., 1, :])
    assert not found[..., 0, :].float().equal(expected[..., 0, :])
    with pytest.raises(InvalidTypeError, match="a ticket has the rows of all features"):
        ours(ours.prefetch(ids))
    for wrong in (ids[:, :3], ids.repeat(1, 2), [ids], {"usr": ids}):
        with pytest.raises(InvalidValueError):
            ours(wrong)


# --- refused ------------------------------------------------------------------------------------------------------------


def load(m, **entries):
    m.load_state_dict({**m.state_dict(), **{f"{name[1:]}.weight": value for name, value in entries.items()}})


def of_modules(*others):
    return st.MultiEmbedding.from_modules([nn.Embedding(4, 2), *others])


def of_another(options, _):
    m = st.MultiEmbedding([4, 4], 2, **options)
    m[0].weight.data = m[0].weight.data
    m[0].weight.data = m[1].weight.data


SHARED = nn.Embedding(4, 2)
REFUSED = [
    (
        lambda m: m(torch.tensor([[0, 0, 0, 0], [0, 0, 3, 0]])),
        r"index\[1, 2\] of feature '2' is 3 but it has 3 rows \(0 to 2\)",
    ),
    (lambda m: m(torch.tensor([0, -1, 0, 0])), r"index\[1\] of feature '1' is -1"),
    (lambda m: m([[0], [0], [[1, 7]], [99]]), r"index\[0, 1\] of feature '2' is 7"),
    (lambda m: nn.ModuleDict({"emb": m})["emb"][2](torch.tensor([0, 3])), r"index\[1\] of feature 'emb.2' is 3"),
    (lambda m: m(torch.zeros(3, 5).long()), r"\(3, 5\) but must be \(..., 4\)"),
    (lambda m: m([torch.tensor([0])]), "a list of 1 but there are 4 features"),
    (lambda m: multi(named=True)({"usr": torch.tensor([0])}), "'usr', which is not a feature; did you mean 'user'"),
    (lambda m: load(m, _1=torch.zeros(3, DIM)), r"size mismatch for 1\.weight"),
    (lambda m: of_modules(nn.Embedding(5, 3)), "embedding_dim of '1' is 3 but that of '0' is 2"),
    (lambda m: of_modules(nn.Embedding(5, 2, max_norm=1.0)), "max_norm of '1' is 1.0"),
    (lambda m: st.MultiEmbedding.from_modules({"a": Doubled(3, 2)}), "'a' is a Doubled, whose own way"),
    (lambda m: of_modules(SHARED, SHARED), "share a weight"),
    (lambda m: m[1].requires_grad_(False), "frozen and trained as a whole"),
    (lambda m: torch.optim.SGD(m[1].parameters()).step(), "no optimizer of its own"),
    (lambda m: torch.autograd.grad(m[1](torch.tensor([1])).sum(), m[1].weight), "no gradient"),
    (lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(60, DIM))), "cannot be replaced; copy"),
    (
        lambda m: jacrev(lambda w: functional_call(m[1], {"weight": w}, (0,)))(torch.ones(60, DIM)),
        "cannot be replaced; copy",
    ),
    (lambda m: m[1](torch.tensor([1]).to_sparse()), "is a sparse tensor"),
    (lambda m: setattr(m, "max_norm", 0.5), r"max_norm of a MultiEmbedding becomes 0\.5 but"),
    (lambda m: setattr(m[1].weight, "no_decay", True), "would be lost; mark the weight of the MultiEmbedding"),
    (lambda m: setattr(m[1], "padding_idx", 4), "padding_idx of feature '1' becomes 4 but .* with padding_idx="),
    (lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(8, DIM))), "assign one of that shape"),
    *((functools.partial(of_another, options), "write its values") for options in ({}, {"cache_rows": 3})),
    (lambda m: st.MultiEmbedding([3, 4], 2, padding_idx=[1]), r"features \['0'\] but num_embeddings of \['0', '1'\]"),
    (lambda m: st.MultiEmbedding([3, 4], 2, padding_idx=3), "feature '0' must be within num_embeddings: it is 3"),
]


@pytest.mark.parametrize(("use", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(use, message):
    for grad in (True, False) if "index" in message else (True,):
        errors = (st.errors.SpeedtransferError, AssertionError, RuntimeError, IndexError)
        with torch.set_grad_enabled(grad), pytest.raises(errors, match=message) as caught:
            use(multi())
        assert not message.startswith("index") or isinstance(caught.value, RowIndexError)


# --- tickets in the place of ids ------------------------------------------------------------------------------------------


def test_what_tickets_serve():
    emb, ids, weight = multi(), next(batches(1)), torch.randn(sum(SIZES), DIM)
    active, wanted = emb.activate(emb.prefetch(ids)), emb.activate(ids)
    assert torch.equal(active.ids, wanted.ids)
    assert torch.equal(active.rows[active.inverse], wanted.rows[wanted.inverse])
    expected = columns([nn.Embedding.from_pretrained(part) for part in weight.split(SIZES)], ids)
    for given in (emb.prefetch(ids), ids, list(ids.unbind(1))):
        found = functional_call(emb, {"weight": weight}, (given,))
        assert torch.equal(torch.stack(found, 1) if isinstance(given, list) else found, expected)
    for made, used in ((emb[0], emb), (emb, emb[0]), (emb[1], emb[0])):
        ticket = made.prefetch(ids if made is emb else ids[:, 2])
        with pytest.raises(InvalidValueError, match="pass it to the module whose prefetch"):
            used(ticket)
    with pytest.raises(InvalidValueError, match="made for"):
        multi()(emb.prefetch(ids))


# --- the meta device: no rows until it is given some ----------------------------------------------------------------------


@pytest.mark.parametrize("born", [lambda: multi(device="meta"), lambda: copy.deepcopy(multi().to("meta"))])
@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_gives_it_rows(born, assign):
    ours, theirs, ids = born(), dense(), next(batches(1))
    assert ours.weight.is_meta
    assert ours(ids.to("meta")).shape == (12, 4, DIM)
    assert ours[0](ids[:, 0].to("meta")).shape == (12, DIM)
    if not assign:
        with pytest.warns(UserWarning, match="no-op"):
            ours.load_state_dict(theirs.state_dict())
        assert ours.weight.is_meta
        ours.to_empty(device="cpu")
    ours.load_state_dict(theirs.state_dict(), assign=assign)
    train(ours, columns, ADAM, steps=2)
    train(theirs, columns, ADAM, steps=2)
    assert_same(ours, theirs)


@pytest.mark.parametrize("kind", [st.MultiEmbedding, st.MultiEmbeddingBag])
def test_names_of_attributes_are_refused(kind):
    made, refused = kind({"x": 5, "y": 5}, DIM), set()
    for name in sorted({*dir(made), *vars(made), "mode", "dtype"}):
        if name.startswith("_") or hasattr(nn.ModuleDict, name) or hasattr(nn.ModuleDict(), name):
            # nn.ModuleDict refuses these.
            continue
        try:
            assert kind({"x": 5, name: 5}, DIM)[name].weight.shape == (5, DIM)
        except InvalidValueError:
            refused.add(name)
    assert refused == set(kind._taken)


def test_a_dict_with_such_a_name_stays_apart():
    model = nn.ModuleDict({"sizes": nn.ModuleDict({"weight": nn.Embedding(5, DIM), "shop": nn.Embedding(5, DIM)})})
    replaced = st.replace_embeddings(model, 0, fuse=True)
    assert replaced == ["sizes.weight", "sizes.shop"]
    assert "a feature is named 'weight'" in replaced.notes["sizes.weight"]


def test_a_copy_of_a_model_with_a_head_tied_to_a_feature(tmp_path):
    torch.manual_seed(0)
    model = nn.Module()
    model.emb, model.head = st.MultiEmbedding({"a": 5, "b": 7}, 4), nn.Linear(4, 5, bias=False)
    model.head.weight = model.emb["a"].weight
    for each in (copied := copy.deepcopy(model), model):
        opt = torch.optim.Adam(each.emb.parameters(), lr=0.1)
        for _ in range(2):
            take_step(opt, each.head(each.emb["a"](torch.tensor([1, 2]))).square().sum())
    assert torch.equal(copied.head.weight, copied.emb["a"].weight)
    assert torch.equal(copied.emb.weight, model.emb.weight)
    st.save_checkpoint(tmp_path, model, opt)
    nn.init.zeros_(copied.emb.weight)
    st.load_checkpoint(tmp_path, copied)
    assert torch.equal(copied.head.weight, model.head.weight)
    alone = copy.deepcopy(model.head)
    with torch.no_grad():
        alone.weight.zero_()
    assert torch.equal(copied.head.weight, model.head.weight)
