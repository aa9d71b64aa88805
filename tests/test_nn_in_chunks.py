"""Changes of every value of a weight in place, in chunks of rows: what torch does to all rows, without these in one tensor."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import speedtransfer as st
from speedtransfer.optim.views import Views
from speedtransfer.tables import chunks

ROWS, DIM = 300, 6
CHANGES = """
w.mul_(0.5)
w.add_(other, alpha=0.25)
w.sub_(row).div_(column)
w.copy_(other)
w.copy_(row)
w.copy_(twin.weight)
w.lerp_(twin.weight, 0.1)
w.lerp_(other, column.abs().clamp_max(1))
w.addcmul_(other, twin.weight.detach(), value=-2)
w.masked_fill_(other > 0, 7)
w.clamp_(-0.5, 0.5).abs_().sqrt_()
w.clamp_(min=row)
w.mul_(w)
w.add_(w.data, alpha=-0.5)
w *= 3; w += other; w -= row; w /= 2
w.fill_(3).add_(1)
w.data.mul_(2); w.detach().add_(1)
torch._foreach_mul_([plain, w], 0.5); torch._foreach_add_([w, plain], [other, other], alpha=2)
torch._foreach_lerp_([w, plain], [twin.weight, other], 0.3)
torch._foreach_addcmul_([w, plain], [other] * 2, [other] * 2, torch.tensor([3.0, 2.0])); torch._foreach_mul_([w], [2.0])
torch._foreach_addcmul_([w], [other], [other], value=0.5)
nn.init.normal_(w, std=0.02)
nn.init.uniform_(w, -1, 2)
nn.init.xavier_normal_(w); w.data.uniform_(0, 0.1)
ema.update_parameters(emb); ema.update_parameters(emb); w.copy_(ema.module.weight)
"""


def trained(of, code, run=exec, **options):
    """Train a little, and change the weight by `code` between backward and step; return what comes of it."""
    torch.manual_seed(0)
    values = torch.randn(3, ROWS, DIM)
    emb, twin = (of.Embedding.from_pretrained(part.clone(), freeze=False, **options) for part in values[:2])
    opt = torch.optim.Adam(emb.parameters(), lr=0.1)
    names = {
        "emb": emb,
        "twin": twin,
        "w": emb.weight,
        "other": values[2],
        "row": values[2, 0],
        "torch": torch,
        "nn": nn,
    }
    names |= {"column": values[2, :, :1] + 5, "plain": values[0] + 1}
    names["ema"] = AveragedModel(emb, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        opt.zero_grad()
        emb(torch.tensor([1, 7, 7, 299])).pow(2).sum().backward()
        with torch.no_grad():
            run(code, names)
        opt.step()
    return emb.weight.detach().clone(), names["plain"]


@pytest.mark.parametrize("options", [{"cache_rows": 20}, {"storage_dtype": "split24"}], ids=str)
@pytest.mark.parametrize("code", CHANGES.strip().split("\n"))
def test_a_change_of_all_rows_as_torch(monkeypatch, code, options):
    expected = trained(nn, code)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 32 * 4 * DIM)

    def without_whole(code, names):
        with monkeypatch.context() as patch:
            patch.setattr(Views, "whole", lambda self, ids=None: pytest.fail("all rows are in one tensor"))
            exec(code, names)

    close = {"rtol": 1e-3, "atol": 1e-3} if "storage_dtype" in options else {}
    torch.testing.assert_close(trained(st, code, without_whole, **options), expected, **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, "split24"])
def test_averages_move_where_rows_have_few_bits(dtype):
    """A thousandth of the way in each update is less than what is rounded away."""
    emb = st.Embedding(40, 6, storage_dtype=dtype)
    average = AveragedModel(emb, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    average.update_parameters(emb)
    before, other = average.module.weight.clone(), st.Embedding(40, 6, storage_dtype=dtype)
    other.load_state_dict(emb.state_dict())
    with torch.no_grad():
        emb.weight.add_(1)
    for _ in range(300):
        average.update_parameters(emb)
        emb.zero_grad()
        emb(torch.arange(20)).sum().backward()
        with torch.no_grad():
            other.weight.sub_(1e-3 * emb.weight.grad)
    assert 0.22 < (average.module.weight - before).mean() < 0.3
    moved = (before - other.weight).detach()
    assert 0.25 < moved[:20].mean() < 0.35
    assert not moved[20:].any()


def test_what_is_not_by_row_has_all_rows():
    """A square weight and its transpose, operands that need gradients, and what a leaf may not have done to it."""
    for of in (nn, st):
        options = {"cache_rows": 20} if of is st else {}
        emb = of.Embedding.from_pretrained(torch.arange(9.0).view(3, 3), freeze=False, **options)
        with torch.no_grad():
            emb.weight.add_(emb.weight.T.clone())
            emb.weight.mul_(emb.weight.clone().t())
        assert emb.weight.tolist() == [[0, 16, 64], [16, 64, 144], [64, 144, 256]]
        with pytest.raises(RuntimeError, match="leaf"):
            emb.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"must match|match the size|not broadcast"):
            emb.weight.data.mul_(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match=r"length|same number"):
            torch._foreach_add_([emb.weight.data, torch.ones(3, 3)], [torch.ones(3, 3)])
        assert emb.weight.tolist() == [[0, 16, 64], [16, 64, 144], [64, 144, 256]]
