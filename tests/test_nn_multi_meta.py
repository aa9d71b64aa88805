"""A MultiEmbedding on the meta device: as a ``ModuleList`` there, it has no rows until it is given some."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError

SIZES = [4, 2, 3]
IDS = torch.tensor([[1, 0, 2], [3, 1, 1]])


def dense(**options: Any) -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([nn.Embedding(size, 2, **options) for size in SIZES])


def there(**options: Any) -> st.MultiEmbedding:
    return st.MultiEmbedding(SIZES, 2, device="meta", **options)


def assert_same(multi: st.MultiEmbedding, wanted: nn.ModuleList) -> None:
    assert all(torch.equal(a.weight.detach(), b.weight.detach()) for a, b in zip(multi, wanted, strict=True))


def trained(net: nn.Module) -> list[torch.Tensor]:
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        torch.stack([each(IDS[:, n]) for n, each in enumerate(net)]).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return [each.weight.detach().clone() for each in net]


@pytest.mark.parametrize(
    "born", [there, lambda: st.MultiEmbedding(SIZES, 2).to("meta"), lambda: copy.deepcopy(there())]
)
@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_gives_it_rows(born, assign):
    multi = born()
    assert multi.weight.is_meta
    assert {name: tuple(rows.shape) for name, rows in multi.state_dict().items()} == {
        f"{n}.weight": (size, 2) for n, size in enumerate(SIZES)
    }
    assert multi(IDS.to("meta")).shape == (2, 3, 2)
    assert multi[0](IDS[:, 0].to("meta")).shape == (2, 2)
    if not assign:
        multi.to_empty(device="cpu")
    multi.load_state_dict(dense().state_dict(), assign=assign)
    assert_same(multi, dense())
    for ours, theirs in zip(trained(multi), trained(dense()), strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_a_pickle_and_first_values():
    multi = pickle.loads(pickle.dumps(there(storage_dtype=torch.bfloat16))).to_empty(device="cpu")
    assert multi.table.dtype == torch.bfloat16
    multi = there(padding_idx=0).to_empty(device="cpu")
    torch.manual_seed(1)
    multi.reset_parameters()
    assert_same(multi, dense(padding_idx=0))


def test_a_weight_that_is_assigned():
    multi = there()
    multi.weight = nn.Parameter(torch.arange(18.0).view(9, 2))
    assert multi[1](torch.tensor([1])).tolist() == [[10.0, 11.0]]
    with pytest.raises(InvalidValueError, match="assign one of that shape"):
        there().weight = nn.Parameter(torch.zeros(8, 2))
    with pytest.raises(InvalidValueError, match="the weight of another"):
        there().weight = multi.weight


def test_without_assign_nothing_is_loaded_as_torch_says():
    multi = there()
    with pytest.warns(UserWarning, match="no-op"):
        multi.load_state_dict(dense().state_dict())
    assert multi.weight.is_meta


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("1.weight"),
        lambda state: state.update({"1.weight": torch.zeros(3, 2)}),
        lambda state: state.update({"1.weight": torch.zeros(2, 2, dtype=torch.float64)}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no-op")
def test_rows_that_one_table_cannot_have_are_refused(change):
    multi, state = there(), dict(dense().state_dict())
    change(state)
    with pytest.raises(RuntimeError, match="give those of all"):
        multi.load_state_dict(state, assign=True, strict=False)
    assert multi.weight.is_meta


def test_with_a_vocabulary():
    multi = there(vocabulary=st.Vocabulary(seed=1)).to_empty(device="cpu")
    found = multi(IDS)
    other = there(vocabulary=st.Vocabulary(seed=1))
    other.load_state_dict(multi.state_dict(), assign=True)
    assert torch.equal(other.eval()(IDS), found)
    with pytest.raises(InvalidTypeError, match="meta device"):
        there(vocabulary=st.Vocabulary())[0](IDS[:, 0])


def test_what_needs_rows_raises():
    multi = there()
    for use in (multi.activate, multi.prefetch, lambda ids: multi.table, lambda ids: multi[0].prefetch(ids[:, 0])):
        with pytest.raises(InvalidValueError, match=r"meta device .*to_empty"):
            use(IDS)
