"""Compiled lookups of every kind of module, in one graph: bags, features, rows that are shortened, ids of a vocabulary."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, RowIndexError
from speedtransfer.nn.tracing import ONE_GRAPH

F64 = torch.float64
pytestmark = [
    pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph"),
    # Of torch: inductor's own use of torch.jit.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
EAGER, INDUCTOR = (pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "inductor"))


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def compiled(model: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def leaves(found: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(found)


def trained(run: Any, model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """Return the results in training, and of evaluation after it, and the weights."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    # What a vocabulary draws for new ids.
    torch.manual_seed(5)
    found = []
    for batch in batches:
        opt.zero_grad()
        parts = leaves(run(*batch))
        sum(part.square().sum() * (n + 1) for n, part in enumerate(parts)).backward()
        opt.step()
        found += [part.detach().clone() for part in parts]
    model.eval()
    with torch.no_grad():
        found += [part for batch in batches for part in leaves(run(*batch))]
    model.train()
    return [*found, *(value for name, value in model.state_dict().items() if name.endswith("weight"))]


def check(make: Callable[[], nn.Module], batches: list[Any], backend: str, dense: bool = True) -> None:
    """See that a compiled model has the bits of the model itself, and the numbers of torch.nn, for batches of any size."""
    torch.manual_seed(0)
    model = make()
    plain, other = copy.deepcopy(model), st.to_dense(model) if dense else None
    found = trained(compiled(model, backend, dynamic=True), model, batches)
    # One to train, one to evaluate.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    expected = trained(plain, plain, batches)
    if backend == "aot_eager":
        assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    if other is not None:
        again = copy.deepcopy(other)
        torch.testing.assert_close(found, trained(other, other, batches), rtol=1e-12, atol=1e-14)
        if backend == "inductor":
            torch.testing.assert_close(found, trained(compiled(again, backend), again, batches), rtol=1e-12, atol=1e-14)


def drawn(*shapes: Any, high: int = 20) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.empty(shape, dtype=torch.int64).random_(high, generator=generator) for shape in shapes]


# --- rows ----------------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two tables, one of them looked up twice."""

    def __init__(self, dtype: torch.dtype = F64, **options: Any) -> None:
        super().__init__()
        self.words = st.Embedding(50, 4, padding_idx=3, dtype=dtype, **options)
        self.tags = st.Embedding(20, 4, dtype=dtype, **options)
        self.head = nn.Linear(4, 2, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.words(ids) * self.words((ids + 1) % 50) + self.tags(ids % 20)
        return self.head(found).square()


class Hashing(nn.Module):
    """N-grams of tokens that are hashed in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = st.NgramEmbedding(st.NgramHash(orders=(2, 3), heads=2, rows=1000), 4, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).double()


ROWS: dict[str, Callable[[], nn.Module]] = {
    "exact": Model,
    "lazy": lambda: Model(idle="lazy"),
    "by frequency": lambda: Model(scale_grad_by_freq=True),
    "cache": lambda: Model(cache_rows=8),
    "int8": lambda: Model(torch.float32, storage_dtype=torch.int8),
    "bfloat16": lambda: Model(torch.bfloat16),
    # Of which copies are in memory that is used again.
    "large": lambda: st.Embedding(5000, 64, padding_idx=7, dtype=F64),
    "n-grams": Hashing,
}
LARGE = [(ids,) for ids in drawn(3000, 2000, 2500, high=5000)]
SMALL = [(ids,) for ids in drawn((6, 7), (5, 4), (9, 3), high=50)]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("backend", [EAGER, "aot_eager", INDUCTOR])
def test_rows(name: str, backend: str) -> None:
    # Dense ones are trained with other idle rows, or from other values.
    dense = name in ("exact", "by frequency", "cache", "large")
    check(ROWS[name], LARGE if name == "large" else SMALL, backend, dense)


# --- bags ----------------------------------------------------------------------------------------------------------------

TABLES = [(ids,) for ids in drawn((4, 3), (5, 2), (7, 6))]
OFFSETS = [(ids, torch.tensor(at)) for ids, at in zip(drawn(9, 6), ([0, 2, 2, 7], [0, 0, 1, 4, 6]), strict=True)]
WEIGHTED = [(ids, at, torch.rand(len(ids), dtype=F64)) for ids, at in OFFSETS]
LAST = [(ids, torch.cat([at, torch.tensor([len(ids)])])) for ids, at in OFFSETS]


BAGS = {
    "mean": ({"mode": "mean"}, TABLES),
    "max": ({"mode": "max", "padding_idx": 2}, OFFSETS),
    "weights": ({"mode": "sum", "padding_idx": 3}, WEIGHTED),
    "last": ({"mode": "mean", "include_last_offset": True}, LAST),
    "norm": ({"mode": "sum", "max_norm": 0.7, "scale_grad_by_freq": True}, OFFSETS),
}


@pytest.mark.parametrize("name", BAGS)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_bags(name: str, backend: str) -> None:
    options: Any = BAGS[name][0]
    check(lambda: st.EmbeddingBag(20, 4, dtype=F64, **options), BAGS[name][1], backend)


class Weighing(nn.Module):
    """Weights of the ids of bags that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = st.EmbeddingBag(20, 4, mode="sum", dtype=F64)
        self.weight = nn.Parameter(torch.rand(20, dtype=F64))

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(per_sample_weights=self.weight[ids].exp(), input=ids)


@pytest.mark.parametrize("backend", [EAGER, "aot_eager", INDUCTOR])
def test_weights_of_bags_get_their_gradient(backend: str) -> None:
    check(Weighing, TABLES, backend)
    # Of a table that is frozen too.
    model, ids = Weighing(), TABLES[0][0]
    model.bag.requires_grad_(False)
    plain = copy.deepcopy(model)
    compiled(model, backend)(ids).square().sum().backward()
    plain(ids).square().sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=1e-12, atol=0)
    assert model.bag.weight.grad is None


def test_gradients_of_weights_are_not_differentiated_again() -> None:
    model = Weighing()
    loss = compiled(model, "eager")(TABLES[0][0]).square().sum()
    with pytest.raises(InvalidTypeError, match="create_graph"):
        torch.autograd.grad(loss, [model.weight], create_graph=True)


def test_bags_that_torch_refuses() -> None:
    bag = st.EmbeddingBag(20, 4, dtype=F64)
    run, ids = torch.compile(bag, backend="aot_eager"), drawn(6)[0]
    for wrong in (
        (ids,),
        (ids, torch.tensor([1, 2])),
        (ids, torch.tensor([0, 7])),
        (ids.view(2, 3), torch.tensor([0])),
    ):
        with pytest.raises(Exception) as expected:  # noqa: PT011 - what torch says of it
            bag(*wrong)
        with pytest.raises(expected.type, match=re.escape(str(expected.value)[:20])):
            run(*wrong)
    with pytest.raises(RowIndexError, match="is 20"):
        run(torch.tensor([[1, 20]]))


# --- features ------------------------------------------------------------------------------------------------------------

SIZES = {"user": 20, "item": 20, "day": 25}
COLUMNS = [(ids,) for ids in drawn((4, 3), (5, 3), (7, 3))]
PARTS = [([*drawn(*shapes)],) for shapes in ((3, (4, 5), 6), (5, (2, 6), 3), (4, (3, 2), 7))]
NAMED = [(dict(zip(SIZES, part[0], strict=True)),) for part in PARTS]
SOME = [({name: part for name, part in batch.items() if name != "item"},) for (batch,) in NAMED]


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [([*SIZES.values()], COLUMNS), ([*SIZES.values()], PARTS), (SIZES, SOME)],
    ids=["columns", "list", "some"],
)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_features(sizes: Any, batches: list[Any], backend: str) -> None:
    check(lambda: st.MultiEmbedding(sizes, 4, padding_idx=2, dtype=F64), batches, backend, dense=batches is not SOME)


def test_features_with_norm() -> None:
    check(lambda: st.MultiEmbedding(SIZES, 4, max_norm=0.6, dtype=F64), NAMED, "aot_eager")


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = st.MultiEmbedding(SIZES, 4, padding_idx=1, dtype=F64)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        named = self.features({"user": ids, "item": ids})
        return self.features["user"](ids) * self.features["day"](ids + 1), named["user"]


@pytest.mark.parametrize("backend", [EAGER, "aot_eager"])
def test_features_by_themselves_and_those_that_nothing_comes_to(backend: str) -> None:
    check(Alone, TABLES, backend, dense=False)
    model = Alone()
    torch.compiler.reset()
    compiled(model, backend)(TABLES[0][0])[1].sum().backward()
    assert model.features["user"].weight.grad is not None
    assert model.features["item"].weight.grad is None
    assert not model.features["user"].weight.grad.to_dense()[1].any()


def test_a_copy_of_a_feature_has_rows_of_its_own() -> None:
    model = st.MultiEmbedding(SIZES, 4, dtype=F64)
    ids = torch.tensor([1, 2])
    twin = copy.deepcopy(model["user"])
    with torch.no_grad():
        model["user"].weight.data.zero_()
        assert torch.equal(compiled(twin)(ids), twin(ids))
    assert twin(ids).count_nonzero()


def test_ids_beyond_a_feature() -> None:
    model = st.MultiEmbedding(SIZES, 4)
    run = compiled(model)
    with pytest.raises(RowIndexError, match=r"index\[1\] of feature '.*user' is 20"):
        run({"item": torch.tensor([1]), "user": torch.tensor([3, 20])})
    with pytest.raises(RowIndexError, match=r"index\[0\] of feature '.*day' is -1"):
        compiled(model["day"])(torch.tensor([-1]))
    # Names that are none, and too few: what is said without a graph.
    for wrong in ({"users": torch.tensor([1])}, {0: torch.tensor([1])}, [torch.tensor([1])]):
        with pytest.raises(st.errors.InvalidValueError, match="feature"):
            torch.compile(model, backend="aot_eager")(wrong)


def test_layers_of_one_row() -> None:
    check(
        lambda: st.ngrams.PerLayerEmbedding(20, layers=2, dim=3, padding_idx=1, dtype=F64),
        TABLES,
        "aot_eager",
        dense=False,
    )


# --- lookups with effects ------------------------------------------------------------------------------------------------


class InTurn(nn.Module):
    """Rows that are looked up twice, and by a lookup whose result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = st.Embedding(30, 4, max_norm=0.5, dtype=F64)
        self.ids = st.Embedding(30, 4, vocabulary=st.Vocabulary(seed=3), dtype=F64)

    def forward(self, ids: Tensor) -> list[Tensor]:
        found = self.rows(ids) * self.ids(ids)
        self.rows(ids + 10)
        self.ids(ids - 1)
        return [found * self.ids(ids + 5), self.rows(ids)]


@pytest.mark.parametrize("backend", [EAGER, "aot_eager", INDUCTOR])
def test_rows_that_are_shortened(backend: str) -> None:
    check(lambda: st.Embedding(20, 4, padding_idx=2, max_norm=0.8, dtype=F64), TABLES, backend)
    torch._dynamo.utils.counters.clear()
    check(InTurn, TABLES, backend, dense=False)


def test_a_weight_that_one_of_its_modules_shortens_is_looked_up_in_turn_by_all() -> None:
    for first, second in ((None, 0.5), (0.5, None)):
        one, other = st.Embedding(20, 4, max_norm=first), st.Embedding(20, 4, max_norm=second)
        one.weight = other.weight
        for model in (one, other, *copy.deepcopy((one, other))):
            assert model._handle.renormalizes


def of_ids(dim: int = 4, kind: Any = st.Embedding, **options: Any) -> Callable[[], nn.Module]:
    given = {name: options.pop(name) for name in ("max_norm", "padding_idx", "mode") if name in options}
    return lambda: kind(30, dim, vocabulary=st.Vocabulary(seed=3, **options), dtype=F64, **given)


@pytest.mark.parametrize(
    "make",
    [
        of_ids(),
        of_ids(unseen="row", admit=2, padding_idx=3),
        of_ids(max_norm=0.7),
        of_ids(kind=st.EmbeddingBag, mode="sum"),
        of_ids(max_capacity=30, evict="lru"),
    ],
    ids=["plain", "counted", "norm", "bag", "lru"],
)
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_ids_of_a_vocabulary(make: Callable[[], nn.Module], backend: str) -> None:
    batches = [(ids * 10**9 + 3,) for ids in drawn((4, 3), (5, 3), (6, 2), (4, 3))]
    check(make, batches, backend, dense=False)


@pytest.mark.parametrize("backend", [EAGER, "aot_eager", INDUCTOR])
@pytest.mark.parametrize("where", ["within", "around"])
def test_effects_are_not_repeated_by_checkpoints(backend: str, where: str) -> None:
    def seen(compiles: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = of_ids(admit=3)()
        call = lambda ids: checkpoint(lambda ids: model(ids).tanh(), ids, use_reentrant=False)  # noqa: E731
        run: Any = call if where == "within" else model
        run = compiled(run, backend) if compiles else run
        outer = run if where == "within" else lambda ids: checkpoint(run, ids, use_reentrant=False)
        found = trained(outer, model, [(ids,) for ids in drawn((4, 3), (5, 3), (6, 2), (5, 2))])
        return found, {name: value for name, value in model.state_dict().items() if "origin" not in name}

    for one, other in zip(seen(True), seen(False), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_copies_of_what_is_saved_are_refused_where_a_lookup_has_effects() -> None:
    model = st.Embedding(20, 4, max_norm=0.8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = compiled(model)(TABLES[0][0]).sum()
    with pytest.raises(InvalidTypeError, match="save_on_cpu"):
        loss.backward()
