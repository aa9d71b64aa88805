"""Lookups in compiled models, of every kind of module: operators of one graph, with the numbers of the model itself."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import take_step
from in_child import forks, in_child
from refusals import check_refused, refusals
from sweeps import few
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from weight_cases import parse

import speedtransfer as st
from speedtransfer.nn.tracing import ONE_GRAPH

F64 = torch.float64
pytestmark = [
    pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph"),
    # Of torch: inductor's own use of torch.jit, and tensors that come from one graph into the next.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:invoke_subgraph traced multiple"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def compiled(model, backend="aot_eager", **options):
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def leaves(found):
    return torch.utils._pytree.tree_leaves(found)


def trained(run, model, batches):
    """Return the results in training, and of evaluation after it, and the weights."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    # What a vocabulary draws for new ids.
    torch.manual_seed(5)
    found = []
    for batch in batches:
        parts = leaves(run(*batch))
        take_step(opt, sum(part.square().sum() * (n + 1) for n, part in enumerate(parts)))
        found += [part.detach().clone() for part in parts]
    model.eval()
    with torch.no_grad():
        found += [part for batch in batches for part in leaves(run(*batch))]
    model.train()
    return [*found, *(value for name, value in model.state_dict().items() if name.endswith("weight"))]


def drawn(*shapes, high=20):
    generator = torch.Generator().manual_seed(1)
    return [torch.empty(shape, dtype=torch.int64).random_(high, generator=generator) for shape in shapes]


# --- every kind of module ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, dtype=F64, **options):
        super().__init__()
        self.words = st.Embedding(50, 4, padding_idx=3, dtype=dtype, **options)
        self.tags = st.Embedding(20, 4, dtype=dtype, **options)
        self.head = nn.Linear(4, 2, dtype=dtype)

    def forward(self, ids):
        found = self.words(ids) * self.words((ids + 1) % 50) + self.tags(ids % 20)
        return self.head(found).square()


class Weighing(nn.Module):
    """Weights of the ids of bags that are learned."""

    def __init__(self):
        super().__init__()
        self.bag = st.EmbeddingBag(20, 4, mode="sum", dtype=F64)
        self.weight = nn.Parameter(torch.rand(20, dtype=F64))

    def forward(self, ids):
        return self.bag(per_sample_weights=self.weight[ids].exp(), input=ids)


class Alone(nn.Module):
    """Features that are looked up by themselves, and one that nothing comes to."""

    def __init__(self):
        super().__init__()
        self.features = st.MultiEmbedding(SIZES, 4, padding_idx=1, dtype=F64)

    def forward(self, ids):
        named = self.features({"user": ids, "item": ids})
        return self.features["user"](ids) * self.features["day"](ids + 1), named["user"]


class InTurn(nn.Module):
    """Rows that are looked up twice, and by a lookup whose result is not used."""

    def __init__(self):
        super().__init__()
        self.rows = st.Embedding(30, 4, max_norm=0.5, dtype=F64)
        self.ids = st.Embedding(30, 4, vocabulary=st.Vocabulary(seed=3), dtype=F64)

    def forward(self, ids):
        found = self.rows(ids) * self.ids(ids)
        self.rows(ids + 10)
        self.ids(ids - 1)
        return [found * self.ids(ids + 5), self.rows(ids)]


bag = functools.partial(functools.partial, st.EmbeddingBag, 20, 4, dtype=F64)
features = functools.partial(functools.partial, st.MultiEmbedding, embedding_dim=4, dtype=F64)


def by_id(padding_idx=None, **options):
    return lambda: st.Embedding(30, 4, padding_idx, vocabulary=st.Vocabulary(seed=3, **options), dtype=F64)


SMALL = [(ids,) for ids in drawn((6, 7), (5, 4), (9, 3), high=50)]
TABLES = [(ids,) for ids in drawn((4, 3), (5, 2), (7, 6))]
OFFSETS = [(ids, torch.tensor(at)) for ids, at in zip(drawn(9, 6), ([0, 2, 2, 7], [0, 0, 1, 4, 6]), strict=True)]
WEIGHTED = [(ids, at, torch.rand(len(ids), dtype=F64)) for ids, at in OFFSETS]
SIZES = {"user": 20, "item": 20, "day": 25}
PARTS = [(drawn(*shapes),) for shapes in ((3, (4, 5), 6), (5, (2, 6), 3), (4, (3, 2), 7))]
SOME = [({"user": users, "day": days},) for ((users, _, days),) in PARTS]
IDS = [(ids * 10**9 + 3,) for ids in drawn((4, 3), (5, 3), (6, 2), (4, 3))]
# What is compiled, its batches, and whether torch.nn trains the same: not with other idle rows, or from other values.
KINDS = {
    "exact": (Model, SMALL, True),
    # Copies of its rows are in memory that is used again.
    "large": (lambda: st.Embedding(5000, 64, 7, dtype=F64), [(ids,) for ids in drawn(3000, 2000, 2500)], True),
    "n-grams": (lambda: st.NgramEmbedding(st.NgramHash(rows=1000, heads=2), 4, std=0.1), SMALL, False),
    "in turn": (InTurn, TABLES, False),
    "bag max": (bag(mode="max", padding_idx=2), OFFSETS, True),
    "bag weights": (bag(mode="sum", padding_idx=3), WEIGHTED, True),
    "bag learned weights": (Weighing, TABLES, True),
    "bag norm": (bag(mode="sum", max_norm=0.7, scale_grad_by_freq=True), OFFSETS, True),
    "list": (features([*SIZES.values()], padding_idx=2), PARTS, True),
    "some features": (features(SIZES, padding_idx=2), SOME, False),
    "features alone": (Alone, TABLES, False),
    "ids": (by_id(unseen="row", admit=2, padding_idx=3), IDS, False),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", few(KINDS, "exact", "n-grams", "bag weights", "features alone", "ids"))
def test_every_kind(name, backend):
    """A compiled model has the bits of the model itself, and the numbers of torch.nn, for batches of any size."""
    make, given, dense = KINDS[name]
    torch.manual_seed(0)
    model = make()
    plain, other = copy.deepcopy(model), st.to_dense(model) if dense else None
    found = trained(compiled(model, backend, dynamic=True), model, given)
    # One to train, one to evaluate.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    expected = trained(plain, plain, given)
    if backend == "aot_eager":
        assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    if other is not None:
        torch.testing.assert_close(found, trained(other, other, given), rtol=1e-12, atol=1e-14)


def test_what_nothing_comes_to_has_no_gradient():
    model, ids = Alone(), TABLES[0][0]
    compiled(model)(ids)[1].sum().backward()
    user, item = (model.features[name].weight.grad for name in ("user", "item"))
    assert not user.to_dense()[1].any()
    assert item is None
    weighing = Weighing()
    weighing.bag.requires_grad_(False)
    plain = copy.deepcopy(weighing)
    for run in (compiled(weighing), plain):
        run(ids).square().sum().backward()
    torch.testing.assert_close(weighing.weight.grad, plain.weight.grad, rtol=1e-12, atol=0)
    assert weighing.bag.weight.grad is None


@pytest.mark.parametrize("where", few(["within", "around"], "within"))
def test_effects_are_not_repeated_by_checkpoints(where):
    def seen(compiles):
        torch.compiler.reset()
        torch.manual_seed(0)
        model, change = by_id(admit=3)(), compiled if compiles else lambda run: run
        if where == "within":
            run = change(lambda ids: checkpoint(lambda ids: model(ids).tanh(), ids, use_reentrant=False))
        else:
            run = functools.partial(checkpoint, change(model), use_reentrant=False)
        found = trained(run, model, [(ids,) for ids in drawn((4, 3), (5, 3), (6, 2), (5, 2))])
        return found, {name: value for name, value in model.state_dict().items() if "origin" not in name}

    torch.testing.assert_close(seen(True), seen(False), rtol=1e-12, atol=1e-14)


# --- programs -----------------------------------------------------------------------------------------------------------


def pair(**options):
    torch.manual_seed(0)
    model = Model(**options)
    return model, copy.deepcopy(model)


def batches(count=4, shape=(6, 7)):
    return drawn(*[shape] * count, high=50)


PROGRAMS = parse(
    "compiled",
    """
# activation checkpointing around the model
for number, ids in enumerate(batches):
    start = torch.zeros((), dtype=torch.float64, requires_grad=True)
    step(checkpoint(lambda x: run(ids) + x, start, use_reentrant=number % 2 == 0).mean())

# backward twice, and hooks
words.weight.register_hook(lambda grad: seen.append(grad.to_dense().clone()))
loss = run(batches[0]).mean()
loss.backward(retain_graph=True)
loss.backward()
seen += [words.weight.grad, tags.weight.grad]

# frozen between forward and backward, and thawed
loss = run(batches[0]).mean()
words.requires_grad_(False)
loss.backward()
seen += [words.weight.grad is None, tags.weight.grad is None]
run(batches[0]).mean().backward()
seen.append(words.weight.grad is None)
words.requires_grad_(True)
run(batches[0]).mean().backward()
seen.append(words.weight.grad is None)

# gradients of something else deposit nothing, though a compiled graph runs its whole backward
seen += torch.autograd.grad(run(batches[0]).mean(), [model.head.weight])
seen.append(words.weight.grad is None)
run(batches[0]).mean().backward(inputs=[model.head.weight, tags.weight])
seen.append(words.weight.grad is None)
run(batches[1]).mean().backward()
seen += [words.weight.grad, tags.weight.grad]

# gradients asked for by the weight leave nothing for a later backward
loss = run(batches[0]).mean() + words(torch.tensor([4, 4])).sum()
seen += torch.autograd.grad(loss, [words.weight, model.head.weight, tags.weight])
seen += [words.weight.grad is None, tags.weight.grad is None]
run(batches[0]).mean().backward()
seen.append(words.weight.grad)

# rows read ahead
for ids in batches:
    ticket = words.prefetch(ids)
    seen.append(ticket.is_waiting)
    step(run(ids).mean())
    seen.append(ticket.is_waiting)

# saved tensors that are copied: backward reads the rows again
for ids in batches:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = run(ids).mean()
    step(loss)

# a weight that is assigned later, and written
run(batches[0])
words.weight = nn.Parameter(torch.ones(50, 4, dtype=torch.float64))
seen.append(run(batches[0]))
words.weight.data = torch.full((50, 4), 0.5, dtype=torch.float64)
seen.append(run(batches[0]))
opt = torch.optim.AdamW(model.parameters(), lr=0.1)
""",
)


def outcome(program, run, model):
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(loss):
        take_step(opt, loss)
        seen.append(loss)

    seen = []
    names = {"torch": torch, "nn": nn, "checkpoint": checkpoint, "run": run, "model": model, "opt": opt, "step": step}
    names |= {"words": model.words, "tags": model.tags, "batches": batches(), "seen": seen}
    exec(compile(program.code, f"<{program.title}>", "exec"), names)
    assert not model.words._handle.anchor._arrived
    return [it.detach().to_dense() if isinstance(it, Tensor) else it for it in seen]


@pytest.mark.sweep
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.title)
@pytest.mark.parametrize("options", [{}, {"sparse": True}], ids=str)
def test_programs_are_those_of_the_model_itself(program, options):
    model, plain = pair(**options)
    found = outcome(program, compiled(model), model)
    torch.testing.assert_close(found, outcome(program, plain, plain), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-15)


# --- what breaks the graph, or is refused --------------------------------------------------------------------------------


class Tied(Model):
    def __init__(self, feature):
        super().__init__()
        if feature:
            self.all = st.MultiEmbedding({"word": 50}, 4, dtype=F64)
            self.words = self.all["word"]

    def forward(self, ids):
        weight, found = self.words.weight, self.words(ids).tanh()
        scores = F.linear(found, weight).logsumexp(-1) + (found @ weight.T).sum(-1)
        return scores + weight[ids].sum(-1) + weight.square().mean() + weight.shape[0]


@pytest.mark.parametrize("feature", [False, True])
def test_the_weight_used_beside_the_lookup(feature, caplog):
    torch.manual_seed(0)
    model = Tied(feature)
    plain = copy.deepcopy(model)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model)(torch.tensor([1, 2]))
    found = trained(torch.compile(model, backend="aot_eager"), model, SMALL)
    torch.testing.assert_close(found, trained(plain, plain, SMALL), rtol=1e-10, atol=1e-12)
    # Not once for each function that is called with a weight.
    assert "recompile_limit" not in caplog.text


WRITES = {
    "data": lambda emb: emb.weight.data.mul_(1.5),
    "rows": lambda emb: emb.weight.detach()[2:5].fill_(0.5),
    "another": lambda emb: setattr(emb.weight, "data", F.normalize(emb.weight.data)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_before_a_lookup_are_seen(name):
    model, plain = pair()
    ids = batches(1)[0]

    def used(model):
        WRITES[name](model.words)
        return model(ids)

    assert torch.equal(torch.compile(used, backend="aot_eager")(model), used(plain))


@pytest.mark.parametrize("options", [{}, {"cache_rows": 12}])
def test_rows_of_the_table(options):
    emb, ids = st.Embedding(30, 4, **options), torch.tensor([1, 5, 7])
    take_step(torch.optim.AdamW(emb.parameters()), emb(ids + 1).sum())
    before = emb.table[ids]

    def used(ids):
        rows = emb.table[ids]
        emb.table[ids] = rows + 1
        return rows, emb.table.gather(ids)

    rows, after = torch.compile(used, backend="aot_eager")(ids)
    assert torch.equal(rows, before)
    assert torch.equal(after, before + 1)


def test_under_a_mode_of_dispatch():
    """A compiled function runs as it is there, and so does a lookup, which the mode is not shown."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    emb, ids = st.Embedding(30, 4, cache_rows=12), torch.tensor([1, 5, 7])
    run = torch.compile(emb, backend="aot_eager")
    with Mode():
        assert torch.equal(run(ids), emb.table[ids])


@pytest.mark.parametrize("compiles_autograd", [False, True])
def test_backward_in_a_compiled_function(compiles_autograd):
    """It deposits once, by lookups that are compiled or not; compiled autograd, which would trace it, is left out."""
    model, plain = pair()
    backward = torch.compile(lambda loss: loss.backward(), backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=compiles_autograd):
        for run in (model, torch.compile(model, backend="aot_eager")):
            backward(run(batches(1)[0]).sum())
            plain(batches(1)[0]).sum().backward()
    assert torch.equal(model.words.weight.grad, plain.words.weight.grad)
    torch.testing.assert_close(model.head.weight.grad, plain.head.weight.grad)


def changed_ids(ids):
    loss = compiled(st.Embedding(50, 4))(ids).sum()
    ids.zero_()
    loss.backward()


def copies_of_what_is_saved():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = compiled(st.Embedding(20, 4, max_norm=0.8))(TABLES[0][0]).sum()
    loss.backward()


REFUSED = r"""
torch.autograd.grad(compiled(emb)(TABLES[0][0]).mean(), [emb.weight], create_graph=True)
-> InvalidTypeError: create_graph
changed_ids(tensor([3, 4])) -> RuntimeError: modified by an inplace operation
copies_of_what_is_saved() -> InvalidTypeError: save_on_cpu
compiled(st.Embedding(50, 4))(tensor([0, 50])) -> RowIndexError: index\[1\] is 50
compiled(st.Embedding(9, 4, _freeze=True))(tensor([-1, 5])) -> RowIndexError: index\[0\] is -1
torch.compile(st.Embedding(9, 4), backend="eager")(torch.ones(1)) -> InvalidTypeError: index\.long
compiled(bag()())(tensor([[1, 20]])) -> RowIndexError: is 20
torch.compile(bag()(), backend="aot_eager")(tensor([1, 2])) -> ValueError: offsets has to be a 1D Tensor
compiled(multi)({"item": tensor([1]), "user": tensor([3, 20])}) -> RowIndexError: index\[1\] of feature '.*user' is 20
torch.compile(multi, backend="aot_eager")({"users": tensor([1])}) -> InvalidValueError: feature
torch.export.export(Model().eval(), (batches(1)[0],), strict=True) -> Exception: to_dense
"""


@pytest.mark.parametrize("refusal", refusals(REFUSED), ids=str)
def test_refused(refusal):
    check_refused(
        refusal, lines=True, **globals(), tensor=torch.tensor, multi=features(SIZES)(), emb=st.Embedding(50, 4)
    )


# --- graphs, weights, copies, processes ----------------------------------------------------------------------------------


def test_regions_that_are_compiled_once():
    """Torch loses gradients of what has an effect there: such a lookup is refused."""

    def found(change=lambda run: run, **options):
        torch.manual_seed(0)
        emb = st.Embedding(50, 4, **options)
        region = torch.compiler.nested_compile_region(lambda ids: emb(ids).tanh())
        result = change(lambda ids: region(ids) * region(ids + 1))(TABLES[0][0])
        result.sum().backward()
        return [result, emb.weight.grad.to_dense()]

    torch.testing.assert_close(found(compiled), found())
    with pytest.raises(torch._dynamo.exc.UncapturedHigherOrderOpError):
        found(compiled, max_norm=0.8)


def test_one_graph_for_layers_that_share_code():
    layers = [nn.Sequential(st.Embedding(20, 4, dtype=F64), nn.Tanh()) for _ in range(12)]
    plain, ids = copy.deepcopy(layers), torch.tensor([1, 5, 1])
    for layer, other in zip(layers, plain, strict=True):
        layer.compile(backend="aot_eager", fullgraph=True)
        for each in (layer, other):
            each(ids).sum().backward()
        assert torch.equal(layer(ids), other(ids))
        assert torch.equal(layer[0].weight.grad, other[0].weight.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.mark_dynamic(ids, 0)
    assert torch.equal(compiled(layers[0])(ids), plain[0](ids))


@pytest.mark.slow
def test_weights_that_are_swapped():
    model, plain = pair()
    other = {"words.weight": torch.randn(50, 4, dtype=F64, requires_grad=True)}
    ids = batches(1)[0]
    run = torch.compile(model, backend="aot_eager")
    expected = torch.func.functional_call(plain, other, (ids,))
    assert torch.equal(run(ids), plain(ids))
    # Around the compiled model, and within it.
    outside = torch.func.functional_call(run, {"_orig_mod.words.weight": other["words.weight"]}, (ids,))
    inside = torch.compile(lambda ids: torch.func.functional_call(model, other, (ids,)), backend="aot_eager")(ids)
    for found in (outside, inside):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        (grad,) = torch.autograd.grad(found.sum(), [other["words.weight"]])
        assert grad.count_nonzero()
    assert model.words.weight.grad is None
    assert torch.equal(run(ids), plain(ids))


def test_a_copy_has_its_own_rows():
    for model, ids in ((pair()[0], batches(1)[0]), (features(SIZES)(), drawn((4, 3))[0])):
        run = compiled(model)
        before, twin = run(ids).detach().clone(), copy.deepcopy(run)
        for param in model.parameters():
            param.data.zero_()
        assert torch.equal(twin(ids), before)
        assert not torch.equal(run(ids), before)
        twin(ids).mean().backward()
        assert all(param.grad is None for param in model.parameters())


def test_what_is_kept_of_a_lookup_goes_with_its_graph():
    model, _ = pair()
    run, anchor = compiled(model), model.words._handle.anchor
    loss = run(batches(1)[0]).mean()
    assert len(anchor.lookups) == 2
    loss.backward()
    del loss
    assert not anchor.lookups
    unused = run(batches(1)[0])
    del unused
    assert not anchor.lookups
    assert not anchor.leaf.grad.any()
    handle = weakref.ref(model.words._handle)
    del model, run, anchor
    torch.compiler.reset()
    gc.collect()
    assert handle() is None


@forks
@torch.no_grad()
def test_a_forked_process():
    model, plain = pair()
    run, ids = compiled(model), batches(1)[0]
    expected = plain(ids)
    for use in (lambda: run(ids), lambda: copy.deepcopy(model)(ids)):
        assert torch.equal(use(), expected)
        assert in_child(lambda use=use: torch.equal(use(), expected))
