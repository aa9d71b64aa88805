"""`BlockMomentumAverager` beside its formula."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import speedtransfer as st
from examples.compressed_exchange import BlockMomentumAverager
from speedtransfer.errors import InvalidValueError

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
    weights = [
        nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in [((3, 2), torch.float64), ((), torch.float16)]
    ]
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
            assert weights[0].eq(found[-1]).all()
            assert weights[1].item() == pytest.approx(found[-1], rel=1e-3)
        if step == 4:
            saved = averager.state_dict()
            averager = BlockMomentumAverager(PERIOD, WARMUP, momentum)
            averager.load_state_dict(saved)
    assert found == pytest.approx(expected(momentum, 8))
    assert frozen.item() == dist.get_rank()
    assert table.table.torch().eq(dist.get_rank()).all()


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_moves_by_the_formula(ranks, momentum):
    ranks(average, momentum)


def other_parameters() -> float:
    weights = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3), requires_grad=False)]
    averager = BlockMomentumAverager(2)
    for step in range(5):
        weights[1].requires_grad_(step >= 3)
        with torch.no_grad():
            weights[0] += 1
        averager.average_parameters(weights)
    return weights[0][0].item()


def test_begins_anew_with_other_parameters(two):
    # Step 3 moves by 2 * 1.5 at first; the average of step 5 is the plain one.
    assert two(other_parameters) == [5.0, 5.0]


def bad_momentum() -> None:
    for momentum in (-0.1, 1.0):
        with pytest.raises(InvalidValueError, match=f"momentum is {momentum} but must be in"):
            BlockMomentumAverager(4, momentum=momentum)


def test_refuses_a_momentum_out_of_range(two):
    two(bad_momentum)


def in_a_group() -> float:
    group = dist.new_group([1, 2])
    weight = nn.Parameter(torch.tensor(float(dist.get_rank())))
    BlockMomentumAverager(2, process_group=group).average_parameters([weight])
    return weight.item()


def test_a_rank_outside_of_the_group_is_left_alone(three):
    assert three(in_a_group) == [0.0, 1.5, 1.5]
