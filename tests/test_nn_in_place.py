"""What a lookup returns may be changed in place, as torch's may: at every size, in every dtype, with and without gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import dtype_name
from lazy_oracle import dense_grad
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer import buffers, jit
from speedtransfer.engines import host

DIM = 64
ROW_BYTES = 4 * DIM
# Around each size (in float32) from which memory or copies are others: recycled blocks and compiled copies, two threads,
# streaming stores.
LIMITS = (buffers.SMALL_BYTES, host._COMPILED_BYTES, 2 * jit.THREAD_BYTES, host._STREAMING_BYTES)
SIZES = sorted({1, *(limit // ROW_BYTES + d for limit in LIMITS for d in (-1, 0, 1))})
NEAR = buffers.SMALL_BYTES // ROW_BYTES  # the first of the recycled ones
FORMS: dict[str, dict[str, Any]] = {
    **{dtype_name(t): {"dtype": t} for t in (torch.float32, torch.float64, torch.float16, torch.bfloat16)},
    "int8": {"storage_dtype": torch.int8},
    "float8": {"storage_dtype": torch.float8_e4m3fn},
    "stored bfloat16": {"storage_dtype": torch.bfloat16},
    "exact": {"idle": "exact"},
    "by frequency": {"scale_grad_by_freq": True},
    "padding": {"padding_idx": 0},
    "max_norm": {"max_norm": 5.0},
}


def pair(num: int, **options: Any) -> tuple[st.Embedding, nn.Embedding, Tensor]:
    """Return an embedding, torch's with the same rows, and `num` ids: of every row, if there are enough."""
    torch.manual_seed(0)
    rows = min(num, 500)
    ours = st.Embedding(rows, DIM, **options)
    shared = {k: v for k, v in options.items() if k in ("padding_idx", "max_norm", "scale_grad_by_freq")}
    dtype = options.get("dtype", torch.float32)
    weight = ours.state_dict()["weight"].to(dtype, copy=True)
    dense = nn.Embedding.from_pretrained(weight, freeze=False, **shared)
    return ours, dense, torch.randperm(num) % rows


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def scaled(out: Tensor, scale: Tensor) -> Tensor:
    out *= scale
    return out


def grow(out: Tensor, scale: Tensor) -> Tensor:
    return out.mul_(scale).add_(1).tanh_().pow(2)


def partly(out: Tensor, scale: Tensor) -> Tensor:
    out[..., ::2] = 0
    out[0] = scale
    return out * out


def by_a_view(out: Tensor, scale: Tensor) -> Tensor:
    out.view(-1)[1::3] *= scale
    return out.exp()


def dropped(out: Tensor, scale: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.relu(F.dropout(out, 0.5, inplace=True), inplace=True) * scale


def masked(out: Tensor, scale: Tensor) -> Tensor:
    return (out + scale).sum() + out.masked_fill_(out > 0, 0).sum()


CHANGES = [scaled, grow, partly, by_a_view, dropped, masked]


def compare(modules: tuple[nn.Module, nn.Module], use: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """Check that values, and the gradients of the rows and of a scale, are those of torch."""
    results = []
    for module in modules:
        scale = torch.tensor(1.5, dtype=modules[1].weight.dtype, requires_grad=True)
        out = use(module, scale)
        out.sum().backward()
        results.append((out.detach(), scale.grad))
    (ours, ours_scale), (dense, dense_scale) = results
    tolerance = {2: 3e-2, 4: 2e-5, 8: 1e-12}[dense.element_size()]
    torch.testing.assert_close(ours, dense, rtol=0, atol=0)
    torch.testing.assert_close(ours_scale, dense_scale, rtol=1e-2 if dense.element_size() == 2 else 1e-5, atol=1e-5)
    grad = modules[1].weight.grad
    torch.testing.assert_close(dense_grad(modules[0]), grad, rtol=tolerance, atol=tolerance * float(grad.abs().max()))


@pytest.mark.parametrize("num", SIZES)
def test_at_every_size(num: int, threads: int) -> None:
    ours, dense, ids = pair(num)
    compare((ours, dense), lambda module, scale: scaled(module(ids), scale))


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num", [NEAR // 2 - 1, NEAR * 2 + 2])
def test_every_form(form: str, change: Callable[[Tensor, Tensor], Tensor], num: int) -> None:
    ours, dense, ids = pair(num, **FORMS[form])
    ids = ids[: num // 2 * 2].view(2, -1)
    compare((ours, dense), lambda module, scale: change(module(ids), scale))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("bags", [NEAR - 1, NEAR, NEAR + 1, 2 * jit.THREAD_BYTES // ROW_BYTES + 1])
def test_bags(mode: str, bags: int) -> None:
    torch.manual_seed(0)
    ours = st.EmbeddingBag(50, DIM, mode=mode)
    dense = nn.EmbeddingBag(50, DIM, mode=mode, _weight=ours.state_dict()["weight"].clone())
    ids = torch.randint(50, (bags, 3))
    compare((ours, dense), lambda module, scale: scaled(module(ids), scale))
    for module in (ours, dense):
        module.zero_grad()
    starts = torch.arange(0, 3 * bags, 3)
    compare((ours, dense), lambda module, scale: partly(module(ids.view(-1), starts), scale))


@pytest.mark.parametrize("num", [NEAR - 1, NEAR])
def test_a_value_that_is_still_needed_cannot_be_changed_unnoticed(num: int) -> None:
    for module in pair(num)[:2]:
        out = module(torch.arange(num) % len(module.state_dict()["weight"]))
        loss = out.square().sum()
        out *= 2
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("num", [NEAR - 1, NEAR])
def test_second_gradients_after_a_change_in_place(num: int) -> None:
    ours, dense, ids = pair(num, dtype=torch.float64)

    def penalty(module: nn.Module, scale: Tensor) -> Tensor:
        out = module(ids)
        out *= scale
        (grad,) = torch.autograd.grad(out.pow(3).sum(), scale, create_graph=True)
        return out + grad

    compare((ours, dense), penalty)


@pytest.mark.parametrize("num", [NEAR - 1, NEAR])
@pytest.mark.parametrize("form", FORMS)
def test_rows_read_without_gradients(form: str, num: int) -> None:
    """What no_grad has made is an ordinary tensor, not a view, which autograd would refuse to change."""
    ours, dense, ids = pair(num, **FORMS[form])
    table, ids = ours.table, ids.view(1, -1)
    with torch.no_grad():
        read = [ours(ids), ours.activate(ids).rows]
        raw = [table.gather(ids), table[ids], table.gather(ids, planes=["weight"])["weight"], table[0:5], table[0]]
    # torch multiplies no float8.
    read += [rows for rows in raw if rows.is_floating_point() and rows.element_size() > 1]
    assert torch.equal(read[0], dense(ids))
    for rows in read:
        scale = torch.tensor(1.5, dtype=rows.dtype, requires_grad=True)
        before = rows.clone().double()
        rows *= scale
        rows.sum().backward()
        torch.testing.assert_close(scale.grad.double(), before.sum(), rtol=2e-2, atol=4.0)
    assert torch.equal(ours(ids), dense(ids)), "the table was changed"
