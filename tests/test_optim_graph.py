"""The weight in the graph of autograd: its node, and many lookups in one graph, as a decoder makes one for each word."""

import copy
import functools
import importlib
import weakref

import pytest
import torch
from cases import concurrently
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointError, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from weight_world import LinearHead

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.optim import merge

IDS = torch.tensor([1, 3, 3, 8])


def test_the_weight_of_a_feature_in_a_function():
    grads = []
    for module in (
        nn.ModuleDict({"a": nn.Embedding(3, 4), "b": nn.Embedding(7, 4)}),
        st.MultiEmbedding({"a": 3, "b": 7}, 4),
    ):
        module.double()
        with torch.no_grad():
            for name in ("a", "b"):
                module[name].weight.copy_(torch.arange(module[name].weight.numel()).view(-1, 4))
        hidden = module["a"](torch.tensor([0, 2]))
        LinearHead.apply(hidden, module["b"].weight).sum().backward()
        grads.append(torch.cat([p.grad.to_dense() for p in module.parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_rows_of_ids_have_no_node():
    emb = st.Embedding(10, 4, vocabulary=st.Vocabulary())
    with pytest.raises(InvalidValueError, match="used by its node in the graph"):
        graph.get_gradient_edge(emb.weight)
    loss = LinearHead.apply(emb(IDS), emb.weight).sum()
    with pytest.raises(InvalidValueError, match=r"weight is used by its node .* ids of a vocabulary"):
        loss.backward()


def test_active_rows_are_not_changed_in_place_and_go_with_their_graph(no_gc):
    emb = st.Embedding(10, 4)
    rows = emb.activate(IDS).rows
    with pytest.raises(RuntimeError, match="modified inplace"):
        rows *= 2
    for change in (Tensor.mul_, lambda weight, factor: torch._foreach_mul_([weight], factor)):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            change(emb.weight, 2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        emb.weight.view(-1).mul_(2)
    out = emb(IDS)
    table, node = weakref.ref(emb.table), weakref.ref(rows)
    del rows
    assert node() is None
    del emb
    assert table() is not None, "its graph has the table"
    del out
    assert table() is None


# --- many lookups -------------------------------------------------------------------------------------------------------

ROWS, DIM, WORDS = 50, 4, 12


def decode(module, seed=0, call=lambda module, ids: module(ids)):
    ids = torch.randint(ROWS, (WORDS, 6), generator=torch.Generator().manual_seed(seed))
    state = torch.zeros(6, DIM, dtype=torch.float64)
    for row in ids:
        state = torch.tanh(state + call(module, row))
    return state.square().sum()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return rows.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("fails")


def failed(module, optimizer):
    calls = iter(range(WORDS))
    with pytest.raises(RuntimeError, match="fails"):
        decode(module, 0, lambda m, ids: Fails.apply(m(ids)) if next(calls) == 3 else m(ids)).backward()
    optimizer.zero_grad()
    decode(module, 1).backward()


def reentrant(module, ids):
    return checkpoint(lambda _: module(ids), torch.zeros(1, requires_grad=True), use_reentrant=True)


PROGRAMS = {
    "many": lambda module, _: sum(decode(module, seed) for seed in range(20)).backward(),
    "with the whole": lambda module, _: (decode(module) + module.weight.square().sum() + decode(module, 1)).backward(),
    "all reentrant": lambda module, _: decode(module, 0, reentrant).backward(),
    "failed": failed,
}


@pytest.mark.parametrize("rows", [1 << 16, 8])
@pytest.mark.parametrize("program", PROGRAMS)
def test_many_lookups(program, rows, monkeypatch):
    monkeypatch.setattr(merge, "MANY_ROWS", rows)
    weights = []
    for kind in (nn.Embedding, st.Embedding):
        torch.manual_seed(0)
        module = kind(ROWS, DIM, dtype=torch.float64)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        # What is left of the first would show in a second step.
        for part in (PROGRAMS[program], lambda module, optimizer: decode(module, 7).backward()):
            part(module, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(module.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=1e-14)


def test_backwards_of_several_threads_are_added():
    emb, rounds = st.Embedding(50, 8, idle="lazy"), 200
    ids = torch.arange(50)

    def run(_):
        for _ in range(rounds):
            emb(ids).sum().backward()

    concurrently(run, range(4))
    assert emb.weight.grad.to_dense().eq(4 * rounds).all()


# --- functions of torch that take a parameter for a tensor of its own: each raises by the name of the table -------


def model_of(lib):
    torch.manual_seed(0)
    model = nn.Sequential(lib.Embedding(20, 4), nn.Linear(4, 2)).double()
    st.summary(model)
    return model


REFUSED = {
    "parameter": lambda model: nn.Parameter(model[0].weight),
    "parameter by name": lambda model: nn.Parameter(data=model[0].weight, requires_grad=False),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0]),
    "swap": lambda model: torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.ones(20, 4))),
    "swapped": lambda model: torch.utils.swap_tensors(nn.Parameter(torch.ones(20, 4)), model[0].weight),
}


@pytest.mark.parametrize("how", REFUSED)
def test_raises_by_name(how):
    REFUSED[how](model_of(nn))
    model = model_of(st)
    names, before = model[0].table, model[0].weight.detach().clone()
    with pytest.raises(InvalidTypeError, match=r"weight is the weight of a table, .* \("):
        REFUSED[how](model)
    assert model[0].table is names
    assert torch.equal(model[0].weight, before)


def test_a_weight_emptied_as_zero_3_does():
    model = model_of(st)
    with pytest.raises(InvalidValueError, match=r"\(20, 4\) but the values assigned are \(0,\).*st.table_parameters"):
        model[0].weight.data = torch.empty(0)
    with pytest.raises(InvalidValueError, match="pass rows of 4 values"):
        model[0].weight.data = torch.empty(20, 3)


def test_conversion_and_loading_where_torch_swaps_tensors(monkeypatch):
    monkeypatch.setattr("torch.__future__._swap_module_params_on_conversion", True)
    model = nn.Sequential(st.Embedding(20, 4), st.MultiEmbedding([20, 3], 4))
    state = model.state_dict()
    for other in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64)):
        for module in other:
            nn.init.zeros_(module.weight)
        other.load_state_dict(state)
        assert all(torch.equal(value.float(), state[name]) for name, value in other.state_dict().items())
    meta = st.Embedding(20, 4, device="meta")
    meta.load_state_dict({"weight": state["0.weight"]}, assign=True)
    assert torch.equal(meta.table.torch(), state["0.weight"])


# --- DataParallel: one device calls the model, several are refused ----------------------------------------------------


def test_with_several_gpus_it_is_refused(monkeypatch):
    """DataParallel takes models as if there were two GPUs; it could not run them."""
    # In torch.nn.parallel the name is that of a function.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(data_parallel, "_check_balance", lambda devices: None)
    message = r"DataParallel was given .*0\.weight, the weight of a table, and 2 GPUs: .*use DistributedDataParallel"
    with pytest.raises(InvalidValueError, match=message):
        nn.DataParallel(model_of(st), device_ids=[0, 1])
    wrapped = nn.DataParallel(model_of(nn), device_ids=[0, 1])
    st.replace_embeddings(wrapped.module, min_rows=1)
    with pytest.raises(InvalidValueError, match=message):
        wrapped.replicate(wrapped.module, wrapped.device_ids)


@pytest.mark.parametrize("second", [[1, 3, 3, 9], [0, 1, 2, 9], range(40)])
@pytest.mark.parametrize("kind", [st.Embedding, st.EmbeddingBag])
def test_a_checkpoint_that_looks_up_other_ids_in_backward(kind, second):
    """In torch the gradient is then that of the other ids, as far as autograd saves them: here some of both."""
    emb, batches = kind(50, 3, device="cpu"), iter([IDS, torch.tensor(second)])
    scale = torch.ones(1, requires_grad=True)
    out = checkpoint(lambda scale: emb(next(batches).view(1, -1)).sum() * scale, scale, use_reentrant=False)
    # Torch itself tells where there are more or fewer rows than before.
    with pytest.raises((InvalidValueError, CheckpointError), match=r"computed again with other ids|different metadata"):
        out.backward()
    assert emb.weight.grad is None


@pytest.mark.parametrize("kind", ["MUST_SAVE", "MUST_RECOMPUTE"])
def test_selective_checkpoints(kind):
    """They return what functions of torch have returned before, whichever a table calls."""
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy[kind])

    def trained(module, emb):
        nn.init.ones_(emb.weight)
        opt = torch.optim.Adam(module.parameters())
        for ids in (IDS, IDS + 20, IDS):
            opt.zero_grad()
            for use in (lambda x: emb(x).sin(), lambda x: emb.weight[x] * emb.weight.square().sum()):
                checkpoint(use, ids, use_reentrant=False, context_fn=contexts).sum().backward()
            opt.step()
        return emb.weight.detach().clone()

    expected = trained(*[nn.Embedding(50, 3)] * 2)
    for options in ({}, {"cache_rows": 6}):
        features = st.MultiEmbedding({"a": 50}, 3, **options)
        for found in (trained(*[st.Embedding(50, 3, **options)] * 2), trained(features, features["a"])):
            torch.testing.assert_close(found, expected)
