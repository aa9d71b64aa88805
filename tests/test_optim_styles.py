"""Optimizers that nobody here has heard of train a table as the oracle, however they keep their state."""

from __future__ import annotations

import copy

import pytest
import torch
from lazy_oracle import LazyOracle, Twins, tensors_in
from third_party import STYLES, Decayed
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer
from speedtransfer.optim.probe import probe_optimizer

# What a row starts from in these is not zero. (The oracle finds averages of weights by their name.)
STARTS = {("yogi", "m"): 1e-3, ("yogi", "v"): 1e-3, ("counts", "level"): 7, ("skips zeros", "sum"): 0.5}


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    import lazy_oracle

    usual = lazy_oracle.start_value

    def start(key, group, weight):
        if request.param == "skips zeros":
            return 0.5
        return STARTS[request.param, key] if (request.param, key) in STARTS else usual(key, group, weight)

    monkeypatch.setattr(lazy_oracle, "start_value", start)
    return request.param


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [16, 6, 1])
def test_trains_as_the_oracle(style: str, dim: int) -> None:
    kind, planes = STYLES[style]
    twins = Twins(kind, dim=dim)
    schedulers = [lr_scheduler.StepLR(opt, 4, 0.8) for opt in twins.optimizers if "lr" in opt.defaults]
    twins.train(twins.batches(20), *schedulers)
    twins.assert_same(1e-6)
    assert set(twins.ours.table.planes) == {"weight", *planes}


def test_rows_as_many_as_columns(style: str) -> None:
    """Shared state as long as the active rows, and planes as wide as the table is long, are told apart."""
    twins = Twins(STYLES[style][0], num_rows=6, dim=6)
    for rows in ([0, 1, 2], [0, 1, 2, 3, 4, 5], [2], [1, 2, 3, 4, 5], [0, 4, 5]):
        twins.train([(torch.tensor(rows), torch.ones(len(rows), 6))])
    twins.assert_same(1e-6)


def test_state_goes_through_state_dicts(style: str) -> None:
    kind, _ = STYLES[style]
    twins = Twins(kind, dim=8)
    batches = twins.batches(20)
    twins.train(batches[:9])
    whole = tensors_in(twins.opt.state_dict()["state"])
    other = Twins(kind, dim=8)
    other.ours.load_state_dict(twins.ours.state_dict())
    other.opt.load_state_dict(copy.deepcopy(twins.opt.state_dict()))
    again = tensors_in(other.opt.state_dict()["state"])
    assert whole.keys() == again.keys()
    for name, value in whole.items():
        assert torch.equal(value, again[name])
    other.dense, other.oracle = twins.dense, twins.oracle
    other.train(batches[9:])
    other.assert_same(1e-6)


def test_containers_stay_what_they_are_between_steps() -> None:
    twins = Twins(STYLES["buffers"][0])
    twins.train(twins.batches(2))
    state = twins.opt.state[twins.ours.weight]
    buffers, more = state["buffers"], state["more"]
    assert isinstance(state["pair"], tuple)
    assert buffers[0].data_ptr() == twins.ours.table.plane("buffers.0").data_ptr()
    twins.train(twins.batches(2))
    assert state["buffers"] is buffers
    assert state["more"] is more
    assert more["deep"][0].shape == (3,)


def test_bool_state_lives_in_bytes() -> None:
    twins = Twins(STYLES["counts"][0])
    twins.train(twins.batches(6))
    state, table = twins.opt.state[twins.ours.weight], twins.ours.table
    assert state["seen"].dtype == state["signs"].dtype == torch.bool
    assert table.plane("seen").dtype == torch.uint8
    assert state["seen"].data_ptr() == table.plane("seen").data_ptr()
    assert state["seen"].any()
    assert not state["seen"][-1]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_probe_of_other_dtypes(style: str, dtype: torch.dtype) -> None:
    kind, planes = STYLES[style]
    param = nn.Parameter(torch.empty(0, 6, dtype=dtype))
    opt = kind([param])
    specs = probe_optimizer(opt, opt.param_groups[0], param)
    assert set(specs) == planes
    for name, spec in specs.items():
        start = None if name == "slow" else STARTS.get((style, name), 0.0)
        assert spec.initial == (None if start is None else pytest.approx(start, rel=1e-2))


def test_a_step_that_fails_leaves_containers_whole() -> None:
    kind, _ = STYLES["buffers"]

    class Fails(kind):  # type: ignore[misc, valid-type]
        broken = False

        def update(self, *args) -> None:
            super().update(*args)
            if self.broken:
                raise KeyboardInterrupt

    emb = speedtransfer.Embedding(9, 4, idle="lazy")
    opt = Fails(emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    opt.step()
    before = copy.deepcopy(tensors_in(opt.state_dict()["state"]))
    emb(torch.tensor([3])).sum().backward()
    Fails.broken = True
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    after = tensors_in(opt.state_dict()["state"])
    for name in ("0.buffers.0", "0.pair.0", "0.more.sum"):
        assert torch.equal(before[name], after[name])


# --- what a step may be -------------------------------------------------------------------------------------------------


class NeedsModel(torch.optim.SGD):
    """A constructor that a trial cannot call."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.names = dict(model.named_parameters())
        super().__init__(model.parameters(), lr=lr, momentum=0.9)


def test_a_constructor_that_takes_the_model() -> None:
    twins = Twins(torch.optim.SGD)
    twins.opt = NeedsModel(twins.ours, lr=0.05)
    twins.oracle = LazyOracle(NeedsModel(twins.dense, lr=0.05), twins.dense)
    calls = []
    twins.opt.register_step_pre_hook(lambda *args: calls.append(1))
    schedulers = [lr_scheduler.StepLR(opt, 3) for opt in twins.optimizers]
    twins.train(twins.batches(8), *schedulers)
    twins.assert_same()
    assert len(calls) == 8  # the trials do not count


def test_a_closure_that_is_never_called() -> None:
    twins = Twins(Decayed)
    twins.backward(*twins.batches(1)[0])
    twins.opt.step(lambda: 1.0)
    twins.oracle.step(lambda: twins.oracle.optimizer.step(lambda: 1.0))
    twins.assert_same()  # torch takes the gradient that there is
    twins.zero_grad()
    twins.opt.step(lambda: 1.0)  # nothing to train
    twins.assert_same()
