"""What a lookup returns: changed in place as torch's may be, at every size and in every dtype, and differentiated twice."""

import copy
import functools

import pytest
import torch
from cases import dtype_name, take_step
from lazy_oracle import both, dense_grad
from torch import nn

import speedtransfer as st
from speedtransfer import buffers, jit
from speedtransfer.engines import host
from speedtransfer.errors import InvalidValueError
from speedtransfer.nn.lookup import lookup
from speedtransfer.nn.tracing import ONE_GRAPH

DIM = 64
ROW_BYTES = 4 * DIM
# Around each size (in float32) from which memory or copies are others: recycled blocks and compiled copies, two threads,
# streaming stores.
LIMITS = (buffers.SMALL_BYTES, host._COMPILED_BYTES, 2 * jit.THREAD_BYTES, host._STREAMING_BYTES)
SIZES = sorted({1, *(limit // ROW_BYTES + d for limit in LIMITS for d in (-1, 0, 1))})
NEAR = buffers.SMALL_BYTES // ROW_BYTES  # the first of the recycled ones
FORMS = {
    **{dtype_name(t): {"dtype": t} for t in (torch.float32, torch.float64, torch.bfloat16)},
    "float8": {"storage_dtype": torch.float8_e4m3fn},
    "split24": {"storage_dtype": "split24"},
    "exact": {"idle": "exact"},
    "by frequency": {"scale_grad_by_freq": True},
    "padding": {"padding_idx": 0},
    "max_norm": {"max_norm": 5.0},
    **{mode: {"mode": mode} for mode in ("sum", "mean", "max")},
}
IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


def pair(num, **options):
    """Return a module, torch's with the same rows, and `num` ids or bags of three: of every row, if there are enough."""
    torch.manual_seed(0)
    rows, kind = min(num, 500), "EmbeddingBag" if "mode" in options else "Embedding"
    ours = getattr(st, kind)(rows, DIM, **options)
    shared = {k: v for k, v in options.items() if k in ("padding_idx", "max_norm", "scale_grad_by_freq", "mode")}
    weight = ours.state_dict()["weight"].to(options.get("dtype", torch.float32), copy=True)
    dense = getattr(nn, kind).from_pretrained(weight, freeze=False, **shared)
    ids = torch.randperm(num) % rows
    return ours, dense, torch.stack([ids, ids.flip(0), ids], 1) if "mode" in options else ids


def compare(ours, dense, ids):
    """Scale what both return, in place; check that values, and the gradients of the rows and the scale, are torch's."""
    results = []
    for module in (ours, dense):
        scale = torch.tensor(1.5, dtype=dense.weight.dtype, requires_grad=True)
        out = module(ids)
        out *= scale
        out.sum().backward()
        results.append((out.detach(), scale.grad))
    values, scales = zip(*results, strict=True)
    size = dense.weight.element_size()
    torch.testing.assert_close(*values, rtol=0, atol=0)
    torch.testing.assert_close(*scales, rtol=1e-2 if size == 2 else 1e-5, atol=1e-5)
    tolerance, grad = {2: 3e-2, 4: 2e-5, 8: 1e-12}[size], dense.weight.grad
    torch.testing.assert_close(dense_grad(ours), grad, rtol=tolerance, atol=tolerance * float(grad.abs().max()))


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_at_every_size(num, threads, request):
    request.addfinalizer(functools.partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    compare(*pair(num))


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    compare(*pair(NEAR * 2 + 2, **FORMS[form]))


@pytest.mark.parametrize("num", [NEAR - 1, NEAR])
def test_a_value_that_is_still_needed_cannot_be_changed_unnoticed(num):
    for module in pair(num)[:2]:
        out = module(torch.arange(num) % len(module.state_dict()["weight"]))
        loss = out.square().sum()
        out *= 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("from_bytes", [1, buffers.SMALL_BYTES], ids=["large", "small"])
@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_gradgradcheck_through_the_active_rows(padding_idx, from_bytes, monkeypatch):
    monkeypatch.setattr(buffers, "SMALL_BYTES", from_bytes)
    active = st.Embedding(12, 5, padding_idx, dtype=torch.float64).activate(IDS)

    def look_up(rows):
        active.rows = rows
        return lookup(active).sin()

    rows = active.rows.detach().clone().requires_grad_()
    if padding_idx is None:  # with it the gradient is another by definition
        assert torch.autograd.gradcheck(look_up, rows)
    assert torch.autograd.gradgradcheck(look_up, rows)


def test_backward_with_create_graph(request):
    ours, dense = both(dtype=torch.float64)
    # Torch warns of it once a process, and another test may have been the first.
    request.addfinalizer(functools.partial(torch.set_warn_always, False))
    torch.set_warn_always(True)
    with pytest.warns(UserWarning, match="create_graph=True"):
        ours(IDS).pow(3).sum().backward(create_graph=True)
    dense(IDS).pow(3).sum().backward()
    grad = ours.weight.grad
    assert not grad.requires_grad
    # A penalty on it would train nothing, and nothing would say so.
    for penalty in (torch.norm, torch.square, lambda given: 2 * given):
        with pytest.raises(InvalidValueError, match=r"take torch\.autograd\.grad"):
            penalty(grad)
    assert torch.equal(dense_grad(ours).detach(), dense.weight.grad)
    assert torch.equal(grad.detach().norm(), dense.weight.grad.norm())
    torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
    ours.zero_grad()
    ours(IDS).sum().backward()
    ours.weight.grad.norm()


@pytest.mark.skipif(ONE_GRAPH, reason="test_nn_compile.py has what there is no break in")
@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_a_compiled_model_trains_the_same(kind):
    """The lookup breaks the graph; what is around it is compiled."""
    model = nn.Sequential(getattr(st, kind)(12, 5), nn.Linear(5, 1))
    plain = copy.deepcopy(model)
    for run, trained in ((torch.compile(model, backend="aot_eager"), model), (plain, plain)):
        opt = torch.optim.AdamW(trained.parameters(), lr=0.1)
        for shift in range(3):
            take_step(opt, run((IDS + shift) % 12).square().sum())
    assert torch.equal(model[0].table.torch(), plain[0].table.torch())
    torch.compiler.reset()
