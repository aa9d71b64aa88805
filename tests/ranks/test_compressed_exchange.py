"""examples/compressed_exchange.py: what `one_bit_hook` does not send it keeps; `BlockMomentumAverager` beside its formula."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from examples.compressed_exchange import BlockMomentumAverager, OneBitState, one_bit_hook
from speedtransfer.errors import InvalidTypeError, InvalidValueError


class Pulls(nn.Module):
    """Parameters of several shapes, whose gradients are what it is called with."""

    SHAPES = [(3, 5), (9,), (2, 3, 4), (), (0,), (3, 5), (16, 2)]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in self.SHAPES)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum((weight * grad).sum() for weight, grad in zip(self.weights, grads, strict=True))


def gradients(steps: range, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    draws = [torch.Generator().manual_seed(100 * step + dist.get_rank()) for step in steps]
    return [[torch.randn(shape, generator=draw).to(dtype) for shape in Pulls.SHAPES] for draw in draws]


def pull(state: OneBitState, steps: list[list[Tensor]]) -> tuple[nn.Module, list[list[Tensor]]]:
    """Return the module, and the gradients of each step as the hook returned them."""
    # In several buckets, which are others after the first step.
    ddp = DistributedDataParallel(Pulls(steps[0][0].dtype), bucket_cap_mb=1e-4)
    ddp.register_comm_hook(state, one_bit_hook)
    received = []
    for grads in steps:
        ddp.zero_grad()
        ddp(grads).backward()
        received.append([weight.grad.clone() for weight in ddp.module.weights])
    return ddp.module, received


def balance(dtype: torch.dtype) -> tuple[float, float]:
    """Return how far what came and what is kept differ from what was given, and the most that is kept."""
    state, steps = OneBitState(start_step=2), gradients(range(6), dtype)
    module, received = pull(state, steps)
    worst, most = 0.0, 0.0
    for place, weight in enumerate(module.weights):
        if weight.numel():
            kept = state.errors[state.numbers([weight])[0]].view(weight.shape)
            given = sum(grads[place].double() for grads in steps) - kept
            dist.all_reduce(given)
            came = sum(grads[place].double() for grads in received)
            worst = max(worst, (came - given / dist.get_world_size()).abs().max().item())
            most = max(most, kept.abs().max().item())
    return worst, most


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_what_one_bit_does_not_send_it_keeps(three, dtype, margin):
    for worst, most in three(balance, dtype):
        assert worst < margin
        assert 0.5 < most < 10


def saved_and_overflown() -> None:
    steps, state = gradients(range(6)), OneBitState(start_step=1)
    first = pull(state, steps[:3])[1]
    # The buckets of a new model are those of a first step again.
    second = pull(pickle.loads(pickle.dumps(state)), steps[3:])[1]
    torch.testing.assert_close(first + second, pull(OneBitState(start_step=1), steps)[1], rtol=0, atol=0)
    # An overflow is seen by all ranks, and not kept.
    if dist.get_rank() == 0:
        steps[1][1][4] = torch.inf
    state = OneBitState(start_step=0)
    received = pull(state, steps)[1]
    assert [place for place, grads in enumerate(received) if not all(grad.isfinite().all() for grad in grads)] == [1]
    assert all(error.isfinite().all() for error in state.errors.values())
    state = OneBitState(start_step=0)
    state.errors = {0: torch.zeros(1000)}
    with pytest.raises(InvalidValueError, match="1000 values for a parameter of 15: it is of another model"):
        pull(state, steps)
    ddp = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    ddp.register_comm_hook(OneBitState(start_step=0), one_bit_hook)
    with pytest.raises(InvalidTypeError, match="sparse=False"):
        ddp(torch.tensor([1])).sum().backward()


def test_the_state_of_one_bit(two):
    two(saved_and_overflown)


# --- block momentum -------------------------------------------------------------------------------------------------------

PERIOD, WARMUP = 2, 1


def expected(momentum: float, steps: int) -> list[float]:
    """A value of the model after each average, where rank r adds (r + 1) times the number of the step."""
    found: list[float] = []
    model = move = since = 0.0
    for step in range(steps):
        since += (step + 1) * (dist.get_world_size() + 1) / 2
        if step >= WARMUP and (step - WARMUP) % PERIOD == 0:
            move = momentum * move + since if found else 0.0
            model += move if found else since
            since = 0.0
            found.append(model)
    return found


def average(momentum: float) -> None:
    weights = [nn.Parameter(torch.zeros(3, 2, dtype=torch.float64)), nn.Parameter(torch.zeros((), dtype=torch.float16))]
    if dist.get_rank() == 0:
        # Gradients may be missing on a rank.
        weights[0].grad = torch.ones_like(weights[0])
    frozen = nn.Parameter(torch.tensor(float(dist.get_rank())), requires_grad=False)
    table = st.Embedding(3, 2)
    table.table.torch().fill_(dist.get_rank())
    averager = BlockMomentumAverager(PERIOD, WARMUP, momentum)
    found = []
    for step in range(8):
        with torch.no_grad():
            for weight in weights:
                weight += (step + 1) * (dist.get_rank() + 1)
        params = [*weights, frozen, table.weight]
        averager.average_parameters(params if step % 2 else [{"params": params[:1]}, {"params": params[1:]}])
        if step % 2:
            found.append(weights[0][0, 0].item())
            assert weights[1].item() == pytest.approx(found[-1], rel=1e-3)
        if step == 4:
            saved = averager.state_dict()
            averager = BlockMomentumAverager(PERIOD, WARMUP, momentum)
            averager.load_state_dict(saved)
    assert found == pytest.approx(expected(momentum, 8))
    assert frozen.item() == dist.get_rank()
    assert table.table.torch().eq(dist.get_rank()).all()
    with pytest.raises(InvalidValueError, match=r"momentum is 1\.0 but must be in"):
        BlockMomentumAverager(4, momentum=1.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_moves_by_the_formula(three, momentum):
    three(average, momentum)
