"""Every optimizer, of torch.optim and of others, trains a table as ``nn.Embedding``, idle rows apart: weights and state."""

from __future__ import annotations

import copy

import pytest
import torch
from lazy_oracle import LazyOracle, Twins, start_value, tensors_in
from optimizer_cases import CASES, ONCE, OptimizerCase, case_named, some
from third_party import STYLES, Decayed
from torch import nn
from torch.optim import lr_scheduler

import speedtransfer


# Bit-equal: 16 columns fill whole vector registers, so no kernel treats a row differently for its place in the array.
@pytest.mark.parametrize("case", some(CASES, ONCE), ids=str)
def test_thirty_skewed_steps_equal_the_oracle(case: OptimizerCase) -> None:
    twins = Twins(case.make)
    # From a rate of zero, then down and up.
    rate = twins.schedulers(
        lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(step / 6, 1.0) * (1 - step % 9 / 10))
    )
    twins.train(twins.batches(30), *rate)
    twins.assert_same()
    assert set(twins.opt.state[twins.ours.weight]) == {*case.planes, *case.shared}
    assert set(twins.ours.table.planes) == {"weight", *case.planes}
    never = twins.num_rows - 1
    assert torch.equal(twins.ours.table.torch()[never], twins.start[never])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd-momentum", "adamw", "adagrad-initial", "nadam-foreach", "adam-fused"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    case = case_named(name)
    eps = {"eps": 1e-4} if "eps" in case.make([nn.Parameter(torch.zeros(1))]).defaults else {}  # 1e-8 is 0 in float16
    # 64 halves fill the registers; scalar tails round once more.
    twins = Twins(lambda params: case.make(params, **eps), dim=64, dtype=dtype)
    twins.train(twins.batches(8))
    twins.assert_same()


def test_the_numbers_are_those_written_here() -> None:
    """Two steps of SGD with momentum by hand: row 1 in both, row 0 in the first, row 3 in the second, row 2 in none."""
    emb = speedtransfer.Embedding.from_pretrained(torch.zeros(4, 1), freeze=False, idle="lazy")
    opt = torch.optim.SGD([emb.weight], lr=1.0, momentum=0.5)
    for ids in ([0, 1, 1], [1, 3]):
        opt.zero_grad()
        emb(torch.tensor(ids)).sum().backward()
        opt.step()
    assert emb.table.torch().flatten().tolist() == [-1.0, -2.0 - (0.5 * 2 + 1), 0.0, -1.0]
    assert opt.state[emb.weight]["momentum_buffer"].flatten().tolist() == [1.0, 2.0, 0.0, 1.0]


def test_a_gradient_by_hand_of_other_ids_than_those_that_were_looked_up() -> None:
    """The step reads their rows: those of the lookup are other rows."""
    emb = speedtransfer.Embedding(10, 2, memory="pageable", idle="lazy")
    opt = torch.optim.SGD(emb.parameters(), lr=1.0)
    for _ in range(2):
        wanted = emb.table.gather(torch.arange(10))
        wanted[5:7] -= 1
        active = emb.activate(torch.tensor([1, 2]))
        active.ids = torch.tensor([5, 6])
        active.add_grad(torch.ones(2, 2))
        opt.step()
        opt.zero_grad()
        assert torch.equal(emb.table.gather(torch.arange(10)), wanted)


# --- optimizers that nobody here has heard of ---------------------------------------------------------------------------

# What a row starts from in these is not zero. (The oracle finds averages of weights by their name.)
STARTS = {("yogi", "m"): 1e-3, ("yogi", "v"): 1e-3, ("counts", "level"): 7, ("skips zeros", "sum"): 0.5}


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def start(key, group, weight):
        value = STARTS.get((request.param, key))
        return start_value(key, group, weight) if value is None else value

    monkeypatch.setattr("lazy_oracle.start_value", start)
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
    twins, other = (Twins(STYLES[style][0], dim=8) for _ in range(2))
    batches = twins.batches(20)
    twins.train(batches[:9])
    whole = tensors_in(twins.opt.state_dict()["state"])
    other.ours.load_state_dict(twins.ours.state_dict())
    other.opt.load_state_dict(copy.deepcopy(twins.opt.state_dict()))
    torch.testing.assert_close(tensors_in(other.opt.state_dict()["state"]), whole, rtol=0, atol=0)
    other.dense, other.dense_opt, other.oracle = twins.dense, twins.dense_opt, twins.oracle
    other.train(batches[9:])
    other.assert_same(1e-6)


def test_state_is_over_the_table() -> None:
    """Containers stay what they are between steps; bools live in bytes."""
    twins = Twins(STYLES["buffers"][0])
    twins.train(twins.batches(2))
    state = twins.opt.state[twins.ours.weight]
    buffers, more = state["buffers"], state["more"]
    assert isinstance(state["pair"], tuple)
    assert buffers[0].data_ptr() == twins.ours.table.plane("buffers.0").data_ptr()
    twins.train(twins.batches(2))
    assert state["buffers"] is buffers
    assert state["more"] is more
    twins = Twins(STYLES["counts"][0])
    twins.train(twins.batches(6))
    seen, plane = twins.opt.state[twins.ours.weight]["seen"], twins.ours.table.plane("seen")
    assert (seen.dtype, plane.dtype) == (torch.bool, torch.uint8)
    assert seen.data_ptr() == plane.data_ptr()


def test_a_step_that_fails_leaves_containers_whole() -> None:
    emb = speedtransfer.Embedding(9, 4, idle="lazy")
    opt = STYLES["buffers"][0](emb.parameters())
    emb(torch.tensor([1, 2])).sum().backward()
    opt.step()
    before = copy.deepcopy(tensors_in(opt.state_dict()["state"]))
    emb(torch.tensor([3])).sum().backward()
    opt._optimizer_step_code = lambda: [].pop()
    with pytest.raises(IndexError):
        opt.step()
    after = tensors_in(opt.state_dict()["state"])
    assert all(torch.equal(before[name], after[name]) for name in ("0.buffers.0", "0.pair.0", "0.more.sum"))


# --- what a step may be -------------------------------------------------------------------------------------------------


class NeedsModel(torch.optim.SGD):
    """A constructor that a trial cannot call."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.names = dict(model.named_parameters())
        super().__init__(model.parameters(), lr=lr, momentum=0.9)


def test_a_constructor_that_takes_the_model() -> None:
    twins = Twins(torch.optim.SGD)
    twins.opt, twins.dense_opt = (NeedsModel(module, lr=0.05) for module in twins.modules)
    twins.oracle = LazyOracle(twins.dense_opt, twins.dense)
    calls = []
    twins.opt.register_step_pre_hook(lambda *args: calls.append(1))
    twins.train(twins.batches(8))
    twins.assert_same()
    assert len(calls) == 8  # the trials do not count


def test_a_closure_that_is_never_called() -> None:
    twins = Twins(Decayed)
    twins.backward(*twins.batches(1)[0])
    twins.opt.step(lambda: 1.0)
    twins.oracle.step(lambda: twins.dense_opt.step(lambda: 1.0))
    twins.assert_same()  # torch takes the gradient that there is
    twins.zero_grad()
    twins.opt.step(lambda: 1.0)  # nothing to train
    twins.assert_same()
