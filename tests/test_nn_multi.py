"""``MultiEmbedding`` against the list of ``nn.Embedding`` that it replaces: numbers, training, state dicts, errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import COPIES
from torch import Tensor, nn
from torch.func import functional_call

import speedtransfer as st

SIZES, DIM, PADDING = [7, 60, 3, 21], 8, [None, 5, None, -1]
NAMES = ["user", "item", "hour", "place"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adam-weight-decay": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "sparse-adam": lambda p: torch.optim.SparseAdam(p, lr=0.02),
}
# Optimizers with arguments of the modules.
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adam", {"max_norm": 1.0}),
    ("adam", {"scale_grad_by_freq": True}),
    ("adam", {"dtype": torch.float64}),
    ("sparse-adam", {"sparse": True}),
]
MAKE: dict[str, Any] = {"padding_idx": PADDING}


def multi(named: bool = False, seed: int = 0, **options: Any) -> st.MultiEmbedding:
    torch.manual_seed(seed)
    options = {**MAKE, **options}
    if not named:
        return st.MultiEmbedding(SIZES, DIM, **options)
    options["padding_idx"] = dict(zip(NAMES, PADDING, strict=True))
    return st.MultiEmbedding(dict(zip(NAMES, SIZES, strict=True)), DIM, **options)


def dense(named: bool = False, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    modules = [nn.Embedding(n, DIM, padding_idx=p, **options) for n, p in zip(SIZES, PADDING, strict=True)]
    return nn.ModuleDict(dict(zip(NAMES, modules, strict=True))) if named else nn.ModuleList(modules)


def columns(modules: Any, ids: Tensor) -> Tensor:
    return torch.stack([module(ids[..., i]) for i, module in enumerate(modules)], -2)


def batches(steps: int, size: int = 12, seed: int = 1) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield (torch.rand(size, len(SIZES), generator=generator) ** 2 * torch.tensor(SIZES)).long()


def loss_of(rows: Tensor) -> Tensor:
    return (rows * torch.linspace(0.1, 1.5, rows.numel()).view(rows.shape)).square().mean() + rows.mean()


def train(
    modules: Any, forward: Callable[[Any, Tensor], Tensor], make: Any, clip: float | None = None, steps: int = 25
) -> Any:
    optimizer = make(list(modules.parameters()))
    for ids in batches(steps):
        optimizer.zero_grad()
        loss_of(forward(modules, ids)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(modules.parameters(), clip)
        optimizer.step()
    return optimizer


def assert_same(ours: Any, theirs: Any, tolerance: float = 5e-6) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.weight.detach(), other.weight.detach(), rtol=0, atol=tolerance)


FORMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "columns": lambda m, ids: m(ids),
    "parts": lambda m, ids: torch.stack(m(list(ids.unbind(1))), 1),
    "names": lambda m, ids: torch.stack(list(m({str(i): ids[:, i] for i in (0, 1, 2, 3)}).values()), 1),
    "one-by-one": columns,
}


class TestNumbers:
    @pytest.mark.parametrize("named", [False, True])
    def test_first_values(self, named):
        ours, theirs = multi(named), dense(named)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for key, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value), key

    def test_first_values_beyond_a_chunk(self):
        sizes = [33, 300_001, 5]
        torch.manual_seed(1)
        ours = st.MultiEmbedding(sizes, 16)
        torch.manual_seed(1)
        assert all(
            torch.equal(m.weight.detach(), nn.Embedding(n, 16).weight.detach())
            for m, n in zip(ours, sizes, strict=True)
        )

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
    @pytest.mark.parametrize("form", FORMS)
    def test_lookups(self, form, dtype):
        ours, theirs, ids = multi(), dense(), next(batches(1))
        expected = columns(theirs, ids)
        assert torch.equal(FORMS[form](ours, ids.to(dtype)), expected)
        with torch.no_grad():
            assert torch.equal(FORMS[form](ours, ids.to(dtype)), expected)

    def test_shapes(self):
        ours, theirs = multi(), dense()
        ids = torch.stack(list(batches(6))).view(2, 3, 12, 4)
        assert torch.equal(ours(ids), columns(theirs, ids))
        assert ours(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4, DIM)
        assert ours(torch.tensor([1, 2, 0, 3])).shape == (4, DIM)
        parts = [torch.tensor([1, 2]), [[3, 4, 5]], torch.tensor(1), torch.zeros(0, 3, dtype=torch.int64)]
        for one, part, module in zip(ours(parts), parts, theirs, strict=True):
            assert torch.equal(one, module(torch.as_tensor(part)))
        assert multi(named=True)({}) == {}

    def test_names(self):
        ours, theirs = multi(named=True), dense(named=True)
        given = {"place": torch.tensor([20, 1]), "user": torch.tensor([[6]])}
        found = ours(given)
        assert list(found) == list(given)
        assert all(torch.equal(found[name], theirs[name](ids)) for name, ids in given.items())

    def test_parts_can_be_changed_in_place(self):
        ours, theirs, ids = multi(), dense(), next(batches(1, size=600))
        for part, module, column in zip(ours(list(ids.unbind(1))), theirs, ids.unbind(1), strict=True):
            assert torch.equal(part.relu_(), module(column).relu_())


class TestTraining:
    @pytest.mark.sweep
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(
        ("name", "options"), [*((name, {}) for name in OPTIMIZERS if "sparse" not in name), *OPTIONS], ids=str
    )
    def test_as_torch(self, name, options, form):
        ours, theirs = multi(**options), dense(**options)
        optimizer = train(ours, FORMS[form], OPTIMIZERS[name])
        train(theirs, columns, OPTIMIZERS[name])
        assert_same(ours, theirs)
        assert [name for name, _ in ours.named_parameters()] == ["weight"]
        assert len(optimizer.state_dict()["state"]) == 1

    @pytest.mark.parametrize("name", ["adamw", "adagrad"])
    def test_lazy_as_a_table_for_each(self, name):
        torch.manual_seed(0)
        each = nn.ModuleList(
            [st.Embedding(n, DIM, padding_idx=p, idle="lazy") for n, p in zip(SIZES, PADDING, strict=True)]
        )
        ours = multi(idle="lazy")
        train(ours, FORMS["columns"], OPTIMIZERS[name])
        train(each, columns, OPTIMIZERS[name])
        assert_same(ours, each, 1e-6)

    def test_frozen(self):
        ours = multi(_freeze=True)
        assert not ours(next(batches(1))).requires_grad
        assert not ours[0].weight.requires_grad
        ours.requires_grad_(True)
        assert ours(next(batches(1))).requires_grad
        assert ours[0].weight.requires_grad


class TestOutOfRange:
    @pytest.mark.parametrize("grad", [False, True])
    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (
                torch.tensor([[0, 0, 0, 0], [0, 0, 3, 0]]),
                r"index\[1, 2\] of feature '2' is 3 but it has 3 rows \(0 to 2\)",
            ),
            (torch.tensor([0, -1, 0, 0]), r"index\[1\] of feature '1' is -1"),
            ([[0], [0], [[1, 7]], [99]], r"index\[0, 1\] of feature '2' is 7"),
            ([0, 1, 2, 21], r"index of feature '3' is 21"),
            ({"0": torch.tensor([7])}, r"index\[0\] of feature '0' is 7"),
        ],
    )
    def test_names_the_feature(self, ids, message, grad):
        ours = multi()
        with torch.set_grad_enabled(grad), pytest.raises(st.errors.RowIndexError, match=message):
            ours(ids)

    def test_of_one_feature(self):
        model = nn.ModuleDict({"emb": multi(named=True)})
        with pytest.raises(IndexError, match=r"index\[1\] of feature 'emb.hour' is 3"):
            model["emb"]["hour"](torch.tensor([0, 3]))

    def test_where_nobody_can_look_it_is_no_row(self):
        with torch.no_grad(), pytest.raises(IndexError):
            torch.vmap(multi())(torch.tensor([[0, 0, 3, 0]]))

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            (torch.zeros(3, 5, dtype=torch.int64), r"\(3, 5\) but must be \(..., 4\)"),
            (torch.tensor(3), "a column for each feature"),
            ([torch.zeros(1, dtype=torch.int64)], "a list of 1 but there are 4 features"),
            ({"usr": torch.zeros(1, dtype=torch.int64)}, "'usr', which is not a feature; did you mean 'user'"),
        ],
    )
    def test_wrong_forms(self, ids, message):
        with pytest.raises(ValueError, match=message):
            multi(named=True)(ids)

    def test_no_integers(self):
        with pytest.raises(TypeError, match="rows are named by integers"):
            multi()(torch.zeros(3, 4))


class TestContainer:
    def test_list(self):
        ours = multi()
        assert len(ours) == 4
        assert list(ours) == [ours[i] for i in range(4)]
        assert ours[-1] is ours[3]
        assert ours[1:3] == [ours[1], ours[2]]
        assert [module.num_embeddings for module in ours] == SIZES
        assert ours[0] in ours
        with pytest.raises(IndexError):
            ours[4]

    def test_dict(self):
        ours = multi(named=True)
        assert list(ours) == list(ours.keys()) == NAMES
        assert dict(ours.items())["hour"] is ours["hour"]
        assert "hour" in ours
        with pytest.raises(KeyError, match="did you mean 'hour'"):
            ours["hours"]

    def test_modules_are_embeddings(self):
        ours, theirs = multi(), dense()
        assert [name for name, _ in ours.named_modules()] == [name for name, _ in theirs.named_modules()]
        assert all(isinstance(module, nn.Embedding) for module in ours)
        assert [module.padding_idx for module in ours] == [module.padding_idx for module in theirs]
        assert "(1): Feature(60, 8, padding_idx=5)" in repr(ours)
        for module, like in zip(ours, theirs, strict=True):
            assert torch.equal(module.weight.index_select(0, torch.tensor([2])), like.weight[2:3])

    @pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
    def test_a_copy_of_the_weight_of_a_feature_is_apart(self, copied):
        ours = multi()
        before = ours[3].weight.detach().clone()
        apart = copied(ours[3].weight)
        assert torch.equal(apart, before)
        apart.data.zero_()
        assert torch.equal(ours[3].weight, before)


class TestStateDicts:
    @pytest.mark.parametrize("named", [False, True])
    def test_both_ways(self, named):
        ours, theirs = (nn.ModuleDict({"emb": make(named, seed)}) for make, seed in ((multi, 0), (dense, 1)))
        saved = {key: value.clone() for key, value in ours.state_dict().items()}
        theirs.load_state_dict(saved)
        again = nn.ModuleDict({"emb": multi(named, seed=2)})
        assert str(again.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
        assert all(torch.equal(again.state_dict()[key], value) for key, value in saved.items())

    def test_what_does_not_fit(self):
        ours, before = multi(), multi().state_dict()
        with pytest.raises(RuntimeError, match=r"size mismatch for 1\.weight"):
            ours.load_state_dict({**before, "1.weight": torch.zeros(3, DIM)})
        with pytest.raises(RuntimeError, match=r'Missing key.*"2\.weight"'):
            ours.load_state_dict({key: value for key, value in before.items() if key != "2.weight"})
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"4\.weight"'):
            ours.load_state_dict({**before, "4.weight": torch.zeros(3, DIM)})

    def test_a_checkpoint_that_does_not_fit(self, tmp_path):
        st.save_checkpoint(tmp_path / "run", nn.ModuleDict({"emb": multi()}))
        with pytest.raises(ValueError, match=r"'emb.0.weight' is \(7, 0\)"):
            st.load_checkpoint(tmp_path / "run", nn.ModuleDict({"emb": st.MultiEmbedding([60, 7, 3, 21], DIM)}))


class TestFromModules:
    @pytest.mark.parametrize("named", [False, True])
    def test_of_torch(self, named):
        theirs = dense(named)
        state = torch.get_rng_state()
        ours = st.MultiEmbedding.from_modules(theirs)
        assert torch.equal(torch.get_rng_state(), state)
        assert ours.named is named
        assert repr(list(ours.values())).replace("Feature", "Embedding") == repr(
            list(theirs.values() if named else theirs)
        )
        assert all(torch.equal(ours.state_dict()[key], value) for key, value in theirs.state_dict().items())
        assert ours.weight.data_ptr() != next(theirs.parameters()).data_ptr()

    def test_keeps_arguments(self):
        made = st.MultiEmbedding.from_modules([nn.Embedding(3, 2, max_norm=1.0, dtype=torch.float64)], idle="lazy")
        assert (made.max_norm, made.table.dtype, made.idle, made[0].max_norm) == (1.0, torch.float64, "lazy", 1.0)
        frozen = st.MultiEmbedding.from_modules([nn.Embedding.from_pretrained(torch.ones(2, 2))] * 1)
        assert not frozen.weight.requires_grad
        ours = st.MultiEmbedding.from_modules(
            [st.Embedding(3, 2, storage_dtype=torch.int8)], storage_dtype=torch.bfloat16
        )
        assert ours.table.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (nn.Embedding(5, 3), "embedding_dim of '1' is 3 but that of '0' is 2"),
            (nn.Embedding(5, 2, dtype=torch.float64), "dtype of '1' is torch.float64"),
            (nn.Embedding(5, 2, max_norm=1.0), "max_norm of '1' is 1.0"),
            (nn.Embedding(5, 2, sparse=True), "sparse of '1'"),
            (nn.Embedding(5, 2, scale_grad_by_freq=True), "scale_grad_by_freq of '1'"),
            (nn.Embedding.from_pretrained(torch.ones(3, 2)), "requires_grad of '1' is False"),
        ],
    )
    def test_what_differs(self, other, message):
        with pytest.raises(ValueError, match=message):
            st.MultiEmbedding.from_modules([nn.Embedding(4, 2), other])

    def test_what_cannot_be(self):
        class Scaled(nn.Embedding):
            def forward(self, input):
                return super().forward(input) * 2

        shared = nn.Embedding(3, 2)
        for modules, error, message in (
            ([nn.EmbeddingBag(3, 2)], TypeError, "'0' is a EmbeddingBag"),
            ({"a": Scaled(3, 2)}, TypeError, "'a' is a Scaled, whose own way"),
            ([shared, shared], ValueError, "share a weight"),
            ([], ValueError, "no modules"),
        ):
            with pytest.raises(error, match=message):
                st.MultiEmbedding.from_modules(modules)


class TestModule:
    def test_functional_call(self):
        ours, ids, values = multi(), next(batches(1)), torch.randn(sum(SIZES), DIM)
        for forward in (FORMS["columns"], FORMS["parts"], columns):
            wrapper = _Model(ours, forward)
            found = functional_call(wrapper, {"emb.weight": values}, (ids,))
            assert torch.equal(found, columns([nn.Embedding.from_pretrained(v) for v in values.split(SIZES)], ids))

    def test_replace_embeddings_leaves_it_alone(self):
        model = nn.ModuleDict({"emb": multi(), "other": nn.Embedding(9, 2)})
        report = st.replace_embeddings(model, 0, strict=True)
        assert report == ["other"]
        assert report.left == {}

    def test_summary(self):
        found = st.summary(nn.ModuleDict({"emb": multi()}))
        assert [(table.names, table.rows) for table in found.tables] == [(("emb",), sum(SIZES))]
        assert found.other_parameters == 0

    @pytest.mark.parametrize("named", [False, True])
    def test_to_dense(self, named):
        model = nn.ModuleDict({"emb": multi(named), "head": nn.Linear(DIM, 1)})
        ids, copied = next(batches(1)), st.to_dense(model)
        assert type(copied["emb"]["user" if named else 0]) is nn.Embedding
        assert list(copied.state_dict()) == list(model.state_dict())
        assert len(list(copied.parameters())) == 6
        given = dict(zip(NAMES, ids.unbind(1), strict=True)) if named else list(ids.unbind(1))
        expected = model["emb"](given)
        found = copied["emb"](given)
        for key in expected if named else range(4):
            assert torch.equal(found[key], expected[key])
        exported = torch.export.export(copied["emb"], (ids,)).module()
        assert torch.equal(exported(ids), model["emb"](ids))

    def test_to_dense_of_a_subclass(self):
        ours = _Sums(SIZES, DIM)
        ids = next(batches(1))
        assert torch.equal(st.to_dense(ours)(ids), ours(ids))

    def test_freed_at_once(self, no_gc):
        ours = multi()
        train(ours, FORMS["columns"], OPTIMIZERS["adam"], steps=2)
        ours[1].weight.detach()
        table = weakref.ref(ours.table)
        del ours
        assert table() is None

    def test_activate(self):
        ours = multi()
        active = ours.activate(torch.tensor([[1, 5, 0, 3], [1, 6, 0, 3]]))
        assert active.ids.tolist() == [1, 7 + 5, 7 + 6, 67, 70 + 3]
        active.add_grad(torch.ones_like(active.rows))

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda m: m[1].requires_grad_(False), "frozen and trained as a whole"),
            (lambda m: torch.optim.SGD(m[1].parameters()).step(), "no optimizer of its own"),
            (lambda m: torch.optim.SGD([{"params": e.parameters()} for e in m]).step(), "no optimizer of its own"),
            (lambda m: torch.autograd.grad(m[1](torch.tensor([1])).sum(), m[1].weight), "no gradient"),
            (lambda m: m[1].double(), "moved as a whole"),
            (lambda m: setattr(m[1], "weight", nn.Parameter(torch.zeros(60, DIM))), "cannot be replaced; copy"),
            (lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(60, DIM))), "assign one of that shape"),
            (
                lambda m: setattr(m[3].weight, "data", torch.ones(2, DIM)),
                r"is \(21, 8\) but the values assigned are \(2, 8\)",
            ),
            (lambda m: torch.jit.script(m), "to_dense"),
            (lambda m: torch.jit.trace(m, next(batches(1))), "to_dense"),
            (
                lambda m: st.MultiEmbedding([3, 4], 2, padding_idx=[1]),
                r"features \['0'\] but num_embeddings of \['0', '1'\]",
            ),
            (lambda m: st.MultiEmbedding([3, -4], 2), "num_embeddings of feature '1' is -4"),
            (lambda m: st.MultiEmbedding([3, 4], 2, padding_idx=3), "feature '0' must be within its 3 rows"),
            (lambda m: st.MultiEmbedding([3, 4], 2, storage=3), "did you mean"),
        ],
    )
    @pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
    def test_refused(self, use, message):
        with pytest.raises((st.errors.SpeedtransferError, AssertionError), match=message):
            use(multi())


class _Model(nn.Module):
    def __init__(self, emb: Any, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.emb, self.how = emb, forward

    def forward(self, ids: Tensor) -> Tensor:
        return self.how(self.emb, ids)


class _Sums(st.MultiEmbedding):
    def forward(self, ids: Any) -> Tensor:
        return super().forward(ids).sum(-2)
