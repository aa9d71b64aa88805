"""Lookups in compiled models: operators of one graph, with the numbers of the model that is not compiled."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import COPIES
from in_child import forks, in_child
from test_nn_compile_kinds import F64, Model, _compiled_anew, compiled  # noqa: F401 - a fixture
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import Program, parse

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError
from speedtransfer.nn.lookup_ops import _modules, register
from speedtransfer.nn.tracing import ONE_GRAPH

pytestmark = [
    pytest.mark.skipif(not ONE_GRAPH, reason="older versions of torch break the graph"),
    # Of torch: inductor's own use of torch.jit, and tensors that come from one graph into the next.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def pair(**options) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model(**options)
    return model, copy.deepcopy(model)


def batches(count=4, shape=(6, 7)):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, shape, generator=generator) for _ in range(count)]


def train(model, params, given, step=None, optimizer=torch.optim.AdamW, **options):
    opt = optimizer(params, lr=0.1, **options)
    losses = []
    for ids in given:
        opt.zero_grad()
        loss = model(ids).mean() if step is None else step(model, ids)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def check_same(one: nn.Module, other: nn.Module) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


# --- training ----------------------------------------------------------------------------------------------------------


def test_one_graph_and_one_for_layers_that_share_code() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = st.Embedding(20, 4, dtype=F64)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rows(ids).tanh()

    layers = [Layer() for _ in range(12)]
    plain = copy.deepcopy(layers)
    torch._dynamo.utils.counters.clear()
    for layer, other in zip(layers, plain, strict=True):
        layer.compile(backend="aot_eager", fullgraph=True)
        ids = torch.tensor([1, 5, 1])
        assert torch.equal(layer(ids), other(ids))
        layer(ids).sum().backward()
        other(ids).sum().backward()
        assert torch.equal(layer.rows.weight.grad, other.rows.weight.grad)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_dimension_that_is_marked_dynamic() -> None:
    model, plain = pair()
    marked = batches(1, (11,))[0]
    torch._dynamo.mark_dynamic(marked, 0)
    assert torch.equal(compiled(model)(marked), plain(marked))


PROGRAMS = parse(
    """
# activation checkpointing around the model
for number, ids in enumerate(batches):
    start = torch.zeros((), dtype=torch.float64, requires_grad=True)
    step(checkpoint(lambda x: run(ids) + x, start, use_reentrant=number % 2 == 0).mean())

# accumulation, clipping and scaling
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
for first, second in zip(batches[::2], batches[1::2]):
    opt.zero_grad()
    for ids in (first, second, first):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(ids).mean()
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    st.clip_grad_norm_([*model.parameters()], 0.5)
    scaler.step(opt)
    scaler.update()

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

# a step between forward and backward of a graph that is kept
own = torch.optim.SGD(words.parameters(), lr=0.1)
first, second = (run(ids).mean() for ids in batches[:2])
first.backward()
own.step()
own.zero_grad()
second.backward()
own.step()

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

# lookups without gradients
for number, ids in enumerate((batches[0], batches[0].int(), torch.tensor(4), torch.empty(0, 3).long())):
    with (torch.inference_mode, torch.no_grad)[number % 2]():
        seen.append(run(ids))
model.requires_grad_(False)
words.table.reset_stats()
seen += [run(batches[0]).requires_grad, words.table.stats().gathered_rows]

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

# a model that is converted
run(batches[0])
model.float()
loss = run(batches[0]).sum()
loss.backward()
seen += [loss, words.weight.grad]
"""
)


def outcome(program: Program, run: Any, model: nn.Module) -> list[Any]:
    """Run a program and return what it saw, dense and without gradients."""
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(loss: Tensor) -> None:
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen.append(loss)

    seen: list[Any] = []
    names = {"torch": torch, "st": st, "checkpoint": checkpoint, "run": run, "model": model, "words": model.words}
    names |= {"tags": model.tags, "opt": opt, "step": step, "batches": batches(), "seen": seen}
    exec(compile(program.code, f"<{program}>", "exec"), names)
    return [it.detach().to_dense() if isinstance(it, Tensor) else it for it in names["seen"]]


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.parametrize("options", [{}, {"sparse": True}], ids=str)
def test_programs_are_those_of_the_model_itself(program: Program, options, backend: str) -> None:
    model, plain = pair(**options)
    found = outcome(program, compiled(model, backend), model)
    torch.testing.assert_close(found, outcome(program, plain, plain), rtol=1e-14, atol=1e-16)
    check_same(model, plain)


# --- autograd ----------------------------------------------------------------------------------------------------------


def test_gradients_to_be_differentiated_again_are_refused() -> None:
    model, _ = pair()
    loss = compiled(model, "eager")(batches(1)[0]).mean()
    with pytest.raises(InvalidTypeError, match="create_graph"):
        torch.autograd.grad(loss, [model.words.weight], create_graph=True)
    loss.backward()


def test_ids_that_change_before_backward_raise_as_those_of_torch() -> None:
    model, _ = pair()
    ids = batches(1)[0]
    loss = compiled(model.words)(ids).sum()
    ids.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_kept_of_a_lookup_goes_with_its_graph() -> None:
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
    assert not anchor._arrived
    assert not anchor.leaf.grad.any()


def test_threads_that_run_backward_at_the_same_time() -> None:
    model, plain = pair(idle="lazy")
    run = compiled(model)
    losses = [run(ids).mean() for ids in batches(8)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ids in batches(8):
        plain(ids).mean().backward()
    torch.testing.assert_close(model.words.weight.grad.to_dense(), plain.words.weight.grad.to_dense())
    assert not model.words._handle.anchor._arrived


# --- frozen ------------------------------------------------------------------------------------------------------------


def test_ids_out_of_range() -> None:
    model, _ = pair()
    run = compiled(model.words)
    with pytest.raises(RowIndexError, match="index\\[1\\] is 50"):
        run(torch.tensor([0, 50]))
    with torch.no_grad(), pytest.raises(RowIndexError, match="index\\[0\\] is -1"):
        run(torch.tensor([-1, 5]))


# --- what breaks the graph ---------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.words = st.Embedding(20, 4, dtype=F64, **options)
        self.use = "transposed"

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids).tanh()
        if self.use == "transposed":
            return (h @ self.words.weight.T).logsumexp(-1)
        if self.use == "linear":
            return F.linear(h, self.words.weight).logsumexp(-1)
        if self.use == "rows":
            return h.sum(-1) + self.words.weight[ids].sum(-1)
        return h.sum(-1) + self.words.weight.square().mean() + self.words.weight.shape[0]


@pytest.mark.sweep
@pytest.mark.parametrize(
    "use", ["linear", "rows", *(pytest.param(use, marks=pytest.mark.slow) for use in ("transposed", "penalty"))]
)
@pytest.mark.parametrize("options", [{}, {"cache_rows": 4}], ids=str)
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_the_weight_used_beside_the_lookup(use: str, options, backend: str) -> None:
    torch.manual_seed(0)
    model = Tied(**options)
    model.use = use
    plain = copy.deepcopy(model)
    given = [ids % 20 for ids in batches()]
    run = torch.compile(model, backend=backend)
    found = train(run, model.parameters(), given, optimizer=torch.optim.SGD)
    expected = train(plain, plain.parameters(), given, optimizer=torch.optim.SGD)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("use", ["linear", "penalty"])
def test_the_weight_in_one_graph_raises(use: str) -> None:
    model = Tied()
    model.use = use
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(model)(torch.tensor([1, 2]))


def test_what_is_looked_up_outside_of_the_graph() -> None:
    """Tickets and lists are no tensors."""
    ids = torch.tensor([[1, 7, 2], [0, 7, 9]])
    emb = st.Embedding(12, 4)
    run = torch.compile(emb, backend="eager")
    assert torch.equal(run([1, 2]), emb([1, 2]))
    some = [torch.tensor(1), torch.tensor(2)]
    assert torch.equal(run(some), emb(some))
    assert torch.equal(run(emb.prefetch(ids)), emb(ids))
    with pytest.raises(InvalidTypeError, match=r"index\.long"):
        run(torch.tensor([1.0]))


def test_export_still_names_the_remedy() -> None:
    with pytest.raises(Exception, match="to_dense"):
        torch.export.export(Model().eval(), (batches(1)[0],), strict=True)


# --- other weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "aot_eager"])
def test_weights_that_are_swapped(backend: str) -> None:
    model, plain = pair()
    other = {"words.weight": torch.randn(50, 4, dtype=F64, requires_grad=True)}
    ids = batches(1)[0]
    run = torch.compile(model, backend=backend)
    expected = torch.func.functional_call(plain, other, (ids,))
    assert torch.equal(run(ids), plain(ids))
    # Around the compiled model, and within it.
    outside = torch.func.functional_call(run, {"_orig_mod.words.weight": other["words.weight"]}, (ids,))
    inside = torch.compile(lambda ids: torch.func.functional_call(model, other, (ids,)), backend=backend)(ids)
    for found in (outside, inside):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
        (grad,) = torch.autograd.grad(found.sum(), [other["words.weight"]])
        assert grad.count_nonzero()
    assert model.words.weight.grad is None
    assert torch.equal(run(ids), plain(ids))
    # By the weight of another table.
    third, _ = pair()
    with torch.no_grad():
        third.words.weight.add_(1.0)
    swapped = {"_orig_mod.words.weight": third.words.weight}
    torch.testing.assert_close(
        torch.func.functional_call(run, swapped, (ids,)),
        torch.func.functional_call(plain, {"words.weight": third.words.weight}, (ids,)),
    )


def test_a_weight_that_is_shared_or_assigned_later() -> None:
    model, other = pair()
    run, ids = compiled(model), batches(1)[0]
    run(ids)
    with torch.no_grad():
        other.words.weight.mul_(2.0)
    model.words.weight = other.words.weight
    assert torch.equal(run(ids), model(ids))
    run(ids).mean().backward()
    assert other.words.weight.grad is model.words.weight.grad
    assert other.words.weight.grad is not None
    model.words.weight = nn.Parameter(torch.ones(50, 4, dtype=F64))
    assert torch.equal(run(ids), model(ids))
    model.words.weight.data = torch.zeros(50, 4, dtype=F64)
    assert torch.equal(run(ids), model(ids))


def test_transforms_of_torch_func() -> None:
    """The operators know nothing of them, so that these lookups are not in the graph."""
    emb = st.Embedding(20, 4, dtype=F64)
    ids = torch.tensor([[1, 2], [3, 3]])

    def mapped(ids: Tensor) -> Tensor:
        return torch.vmap(lambda one: emb(one).sum(0))(ids)

    with torch.no_grad():
        assert torch.equal(torch.compile(mapped, backend="aot_eager")(ids), emb(ids).sum(1))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(mapped, backend="aot_eager", fullgraph=True)(ids)


# --- copies, keys, processes -------------------------------------------------------------------------------------------


def test_a_copy_of_a_compiled_model_has_its_own_rows() -> None:
    model, _ = pair()
    run, ids = compiled(model), batches(1)[0]
    before = run(ids).detach().clone()
    twin = copy.deepcopy(run)
    with torch.no_grad():
        model.words.weight.zero_()
    assert torch.equal(twin(ids), before)
    assert not torch.equal(run(ids), before)
    twin(ids).mean().backward()
    assert model.words.weight.grad is None
    assert twin._orig_mod.words.weight.grad is not None


@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str) -> None:
    model, _ = pair()
    ids = batches(1)[0]
    again = COPIES[how](model)
    assert torch.equal(compiled(again)(ids), compiled(model)(ids))
    assert int(again.words._key) != int(model.words._key)


def test_no_number_is_used_again() -> None:
    emb = st.Embedding(5, 2)
    key = emb._key
    handle = weakref.ref(emb._handle)
    assert _modules[int(key)] is emb
    assert int(copy.copy(emb)._key) != int(key)
    del emb
    assert handle() is None
    assert int(key) not in _modules
    made = [int(st.Embedding(5, 2)._key) for _ in range(5)]
    assert int(key) not in made
    assert len(set(made)) == 5
    leaf = torch.zeros(1, requires_grad=True)
    with pytest.raises(InvalidValueError, match="is gone"):
        torch.ops.speedtransfer.lookup(*arguments(leaf, key, torch.tensor([0])))


def test_a_compiled_model_goes_with_its_tables() -> None:
    model, _ = pair()
    run = compiled(model)
    run(batches(1)[0]).mean().backward()
    handle = weakref.ref(model.words._handle)
    del model, run
    torch.compiler.reset()
    gc.collect()
    assert handle() is None


@forks
@torch.no_grad()
def test_a_forked_process() -> None:
    model, plain = pair()
    run, ids = compiled(model), batches(1)[0]
    expected = plain(ids)
    for use in (lambda: run(ids), lambda: copy.deepcopy(model)(ids)):
        assert torch.equal(use(), expected)
        assert in_child(lambda use=use: torch.equal(use(), expected))


def arguments(leaf: Tensor, key: Tensor, ids: Tensor, training: bool = True) -> tuple:
    return [ids], None, None, leaf, key, "Embedding.forward", [], 4, None, training, False, False


def test_the_operators_are_what_torch_expects() -> None:
    emb = st.Embedding(20, 4, dtype=F64)
    register()
    leaf, ids = emb._handle.anchor.leaf, torch.tensor([[1, 2], [2, 9]])
    args = arguments(leaf, emb._key, ids)
    # Without test_aot_dispatch_dynamic, which runs twice and compares numbers of lookups.
    tests = ("test_schema", "test_faketensor")
    frozen = arguments(leaf.detach(), emb._key, ids, training=False)
    torch.library.opcheck(torch.ops.speedtransfer.lookup, frozen, test_utils=tests)
    torch.library.opcheck(torch.ops.speedtransfer.lookup, args, test_utils=tests)
    _, number = torch.ops.speedtransfer.lookup(*args)
    grads = [torch.randn(2, 2, 4, dtype=F64)]
    torch.library.opcheck(torch.ops.speedtransfer.deposit, (grads, number, *args), test_utils=("test_faketensor",))
