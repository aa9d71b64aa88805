"""What functions of torch give for the gradient of a table is what they give for a dense one, without one of all rows."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import speedtransfer as st
from speedtransfer.optim import row_gradient
from speedtransfer.optim.row_gradient import RowGradient
from speedtransfer.tables import padded_unique

ROWS = 20
# Each on the active rows.
BY_ROW = """
g.pow(2).sum(), (g ** 2).sum().sqrt(), g.square().sum(), torch.sqrt(g ** 2).max(), g.reciprocal().abs().min()
g.mean(), g.std(), g.var(), g.mean(dtype=torch.float64), g.abs().mean(), g.sum(dtype=torch.float32), g.half().mean()
g.norm(p=1), g.norm(float("inf")), g.norm(dim=0), g.norm(2, 1), g.norm(p=0, dim=1), g.norm(dim=1, keepdim=True)
g.mean(1), g.std(1), g.sum((0, 1)), g.sum(0), g.amax(1), g.amin(), g.abs().amax((0, 1)), g.max(), g.count_nonzero()
g.detach().abs().mean(dim=1).topk(3).values, torch.linalg.vector_norm(g, ord=3, dim=-1)
(g != 0).sum(), (g == 0).all(), (g == 0).sum(1), (g >= 0).all(), (g > 0).any(1), (g <= 0).all(1), (g > 0).double().mean()
(g > .1) & (g < .5), (g > .1) | ~(g < .5), (g > .1) ^ (g < .5), ((g > 0) == (g < 1)).sum(), torch.logical_not(g).sum()
torch.isfinite(g).all(), torch.isfinite(g).sum(), (~torch.isfinite(g)).any(), g.isinf().any(), torch._foreach_norm([g])
torch.any(torch.isnan(g) | torch.isinf(g)), torch._foreach_mul([g], [2.0]), (g / g).isnan().sum(), (0 / g).isnan().all()
1 - g, g + 1, 2**g, torch.exp(g).sum(), g.sigmoid().mean(), torch.maximum(g, -g).sum(), g.clamp(min=0.1).sum(), g - g * 2
g[1:3].sum(0), g[1:3].tolist(), g.clone(), g.half(), g[5:2].numel(), g[-3:].sum(), g[2].sum(), g[9].sum()
g[torch.tensor([1, 5, -1])], g[torch.arange(20) < 3], g.index_select(0, torch.tensor([[1, 9]])[0]), g[(g != 0).any(1)]
g.index_select(0, torch.tensor(2)).shape, g.flatten().all(0), g.var(unbiased=False), g + g, g * torch.arange(20).view(-1, 1)
g.view(-1).norm(), g.flatten().abs().max(), g.reshape(-1).std(), torch.isnan(g.flatten()).any()
torch._foreach_clamp_min([g], 0.0), torch._foreach_clamp_max([g, torch.ones(2)], 0.0), g / 0, g * float("nan")
g.clamp_(min=0.0); g.zero_()
g[1:6:3] = 0
g[[0, 2]] = 0
g[-1, :] = 0.0; g[torch.tensor([2, -13])] = 0; g[np.array([1])] = 0
g[torch.arange(20) < 2] = 0
g[2:8].mul_(3); g[:3].div_(2); g[1:9] *= 3; torch._foreach_mul_([g], torch.tensor(0.5))
g[2:4].zero_(); g[7].mul_(2); g.data[:2].zero_()
g.view(-1).mul_(2); g.flatten().clamp_(-0.1, 0.1)
x = g * 2; torch._foreach_zero_([g]); g.copy_(x); g.pow_(2).sqrt_(); g.lerp_(g * 3, 0.5); g.addcmul_(g, g, value=0.1)
x = g[1:9]; x.mul_(2); g.mul_(3); x.div_(5); y = g.view(-1); y.mul_(x.norm())
""".strip()
# Those that make it dense; views go on showing it.
DENSELY = """
g[7] = 1; g[2:4, 1] = 0; g[7].add_(1); g[7][0] = 5; g[9][1] = 4
g.view(-1)[3:9].fill_(2); g.flatten().add_(1)
x = g[1:5]; y = g[2]; z = g.view(-1); g.add_(1); x.mul_(2); y.add_(1); z.div_(2)
x = g[:3]; x.add_(2); g.mul_(x.sum()); x[1].zero_()
g.sub_(g.mean()); g[5:].div_(2); g.view(10, 6)[0].zero_()
emb.weight.grad = g - g.mean(); g.mul_(2)
emb.weight.grad = g * 2; emb.weight.grad[:, 0] = 0
emb.weight.grad = x = g.clone(); emb.weight.grad[4] = 1.0; x.mul_(2)
emb.weight.grad = g[:]; emb.weight.grad[:, 1] = 5; g.add_(1)
v = g[2][None]; w = g[1:3].T; g[:, 1] = 0; v.fill_(7); w.mul_(2)
x = (g == 0).double(); torch.mul(g, 2, out=x); g.copy_(x)
g.clamp(min=0.1).clone(), g / g.norm(dim=1, keepdim=True), g.view(torch.int64), (g + 1).sum((0, 1))
g.T.norm(), g[:, 1], g[::2].sum(), g.unsqueeze(0).sum(), g.cumsum(0), g.argmax(1), g.view(10, 6).sum(1), g.max(1).values
torch.where(g > 0, g, 0).sum(), torch.dot(g.view(-1), g.view(-1)), g.sub_(g.mean(dim=1, keepdim=True)).sum()
g[g != 0], g[2, 1], torch.isfinite(g)[2:3].sum(), torch.isclose(g, g).all(), g[:0].sum(), 0 * g
g.index_select(1, torch.tensor([2])), torch._foreach_clamp_max([g], [0.1]), g.chunk(2)[1]
g.chunk(2)[0].mul_(2), g.unbind()[1].sum(), len(g.nonzero()), g.numpy().sum()
""".strip()


def value_of(code, names):
    """Run code, and return its value if it is an expression."""
    return exec(code, names) if any(sign in code for sign in (" = ", "*=", ";")) else eval(code, names)


def assert_same(got, expected):
    dense = [value.to_dense() if isinstance(value, RowGradient) else value for value in tree_leaves(got)]
    expected = tree_leaves(expected)
    assert [type(value) for value in dense] == [type(value) for value in expected]
    for one, other in zip(dense, expected, strict=True):
        close = {"rtol": 1e-3, "atol": 1e-3} if isinstance(one, Tensor) and one.dtype == torch.float16 else {}
        torch.testing.assert_close(one, other, equal_nan=True, **close)


def ran(lib, code, ids, is_by_row=False, inference=False):
    """Run code on the gradient `g` before two steps; return what it gives, gradients and weights."""
    torch.manual_seed(0)
    emb = lib.Embedding(ROWS, 3, dtype=torch.float64)
    opt = torch.optim.Adam(emb.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        opt.zero_grad()
        (emb(torch.tensor(ids)).pow(3).sum() * 2).backward()
        emb(torch.tensor([2, 17])).sum().backward()
        grad = emb.weight.grad
        names = {"torch": torch, "np": np, "g": grad, "emb": emb}
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode(inference):
            if is_by_row:
                patch.setattr(row_gradient, "_densely", lambda func, args, kwargs: pytest.fail(f"{func} has all rows"))
            found.append(value_of(code, names))
        if not inference:  # torch adds nothing to a gradient that was made there
            emb(torch.tensor([2, 4])).sum().backward()
        found.append(emb.weight.grad.to_dense().clone())
        opt.step()
    return [*found, emb.weight.detach().clone()]


@pytest.mark.parametrize("kind", ["some", "all", "inference"])
@pytest.mark.parametrize("code", [*BY_ROW.split("\n"), *DENSELY.split("\n")])
def test_as_of_a_dense_gradient(code, kind):
    ids = range(ROWS) if kind == "all" else [1, 2, 2, 7]
    is_by_row, inference = code in BY_ROW.split("\n"), kind == "inference"
    expected, got = (ran(lib, code, ids, is_by_row, inference) for lib in (nn, st))
    assert_same(got, expected)


@pytest.mark.parametrize("index", [[5, 2, 2, 5, 2], [1], [*range(ROWS), 3, 3, 0], [-1, 2, 40]], ids=str)
def test_as_of_a_dense_gradient_with_padded_rows(index):
    """Lookups on a CUDA device leave such a gradient."""
    ids, *_, known = padded_unique(torch.tensor(index), ROWS)
    rows = torch.randn(len(ids), 3, generator=torch.Generator().manual_seed(0))
    rows[ids == ROWS] = 0
    for code in BY_ROW.split("\n"):
        made, dense = RowGradient(ROWS, ids, rows.clone(), None, False, known), torch.zeros(ROWS, 3)
        dense[ids[ids < ROWS]] = rows[ids < ROWS]
        expected, got = ((value_of(code, {"torch": torch, "np": np, "g": grad}), grad) for grad in (dense, made))
        assert_same(got, expected)


def test_a_batch_without_ids():
    for lib in (nn, st):
        emb = lib.Embedding(5, 2)
        emb(torch.tensor([], dtype=torch.int64)).sum().backward()
        kept = emb.weight.grad
        assert [(kept == 0).sum((0, 1)), (kept + 1).mean(dim=(0, 1)), (kept + 1).count_nonzero()] == [10, 1, 10]
        emb.zero_grad()
        emb(torch.tensor([], dtype=torch.int64)).sum().backward()
        kept.add_(1)
        assert not emb.weight.grad.any()


def test_a_gradient_that_was_assigned():
    for lib in (nn, st):
        emb = lib.Embedding(6, 2)

        def batch(ids, emb=emb):
            emb.zero_grad()
            emb(torch.tensor(ids)).sum().backward()
            return emb.weight.grad

        # Of other rows, and of another dtype.
        first = batch([1, 2])
        assert (batch([3, 3]) + first.double()).dtype == torch.float64
        assert ((first != 0) + batch([0, 1])).sum() == 8
        mine = batch([1, 2]) * 2
        emb.weight.grad = mine
        emb(torch.tensor([3])).sum().backward()
        assert emb.weight.grad is mine
        assert mine.sum() == 10
        mine.mul_(0)
        assert not emb.weight.grad.any()
    sparse = st.Embedding(6, 2, sparse=True)
    sparse(torch.tensor([1, 2])).sum().backward()
    sparse.weight.grad[1].mul_(3)
    assert sparse.weight.grad.to_dense().sum() == 4


@pytest.mark.parametrize("order", [["emb", "head"], ["head", "emb"]], ids=str)
def test_a_gradient_is_converted_with_its_weight(order):
    found = []
    for lib in (nn, st):
        emb, head = lib.Embedding(20, 4), nn.Linear(4, 20, bias=False)
        head.weight = emb.weight
        nn.init.ones_(emb.weight)
        model = nn.ModuleDict({name: {"emb": emb, "head": head}[name] for name in order})
        emb(torch.tensor([1, 2, 2])).sum().backward()
        model.double()
        found.append(emb.weight.grad.to_dense().clone())
        torch.optim.SGD(model.parameters(), 0.1).step()
        found.append(emb.weight.detach().clone())
    torch.testing.assert_close(found[:2], found[2:])


@pytest.mark.parametrize("code", ["g[20] = 0", "g[torch.tensor([1, -21])] = 0", "g[torch.ones(3) > 0] = 0", "g[[20]]"])
def test_rows_that_do_not_exist(code):
    for lib in (nn, st):
        with pytest.raises(IndexError):
            ran(lib, f"x = 1; {code}", [1, 2])
