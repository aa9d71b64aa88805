"""`one_bit_hook`: what it does not send it keeps, whatever DDP does with its buckets."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from examples import compressed_exchange as comm_hooks
from examples.compressed_exchange import OneBitState, one_bit_hook
from speedtransfer.errors import InvalidTypeError, InvalidValueError


class Pulls(nn.Module):
    """Parameters of several shapes, whose gradients are what it is called with."""

    SHAPES = [(3, 5), (9,), (2, 3, 4), (), (0,), (3, 5), (16, 2)]

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in self.SHAPES)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum((weight * grad).sum() for weight, grad in zip(self.weights, grads, strict=True))


def gradients(step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(shape, generator=generator).to(dtype) for shape in Pulls.SHAPES]


def pull(state: OneBitState, steps: Iterable[list[Tensor]]) -> tuple[nn.Module, list[list[Tensor]]]:
    """Return the module, and the gradients of each step as the hook returned them."""
    steps = list(steps)
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
    state, steps = OneBitState(start_step=2), [gradients(step, dtype) for step in range(6)]
    module, received = pull(state, steps)
    assert state.step == len(steps)
    worst, most = 0.0, 0.0
    for place, weight in enumerate(module.weights):
        if weight.numel():
            kept = state.errors[state.numbers([weight])[0]].view(weight.shape)
            assert kept.dtype == torch.promote_types(dtype, torch.float32)
            given = sum(grads[place].double() for grads in steps) - kept
            dist.all_reduce(given)
            came = sum(grads[place].double() for grads in received)
            worst = max(worst, (came - given / dist.get_world_size()).abs().max().item())
            most = max(most, kept.abs().max().item())
    return worst, most


@pytest.mark.parametrize(("dtype", "margin"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_what_one_bit_does_not_send_it_keeps(three, dtype, margin):
    for worst, most in three(balance, dtype):
        assert worst < margin
        assert 0.5 < most < 10


class Forgetful(OneBitState):
    def error(self, number: int, size: int) -> Tensor:
        return torch.zeros(size)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 5))

    def forward(self, aim: Tensor) -> Tensor:
        return (self.weight - aim).square().sum() / 2


def distance(state: OneBitState) -> float:
    """Return how far a weight ends from the mean of where the ranks pull it to, where gradients of a rank are never zero."""
    aims = torch.randn(dist.get_world_size(), 4, 5)
    ddp = DistributedDataParallel(Pair())
    ddp.register_comm_hook(state, one_bit_hook)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for _ in range(200):
        opt.zero_grad()
        ddp(aims[dist.get_rank()]).backward()
        opt.step()
    return (ddp.module.weight - aims.mean(0)).abs().max().item()


@pytest.mark.slow
def test_one_bit_needs_what_it_keeps(three):
    assert max(three(distance, OneBitState(start_step=0))) < 0.1
    assert min(three(distance, Forgetful(start_step=0))) > 0.3


def halves() -> tuple[list, list]:
    steps = [gradients(step) for step in range(8)]
    state = OneBitState(start_step=1)
    _, first = pull(state, steps[:4])
    # The buckets of a new model are those of a first step again.
    _, second = pull(pickle.loads(pickle.dumps(state)), steps[4:])
    return first + second, pull(OneBitState(start_step=1), steps)[1]


def test_the_state_of_one_bit_can_be_saved(two):
    for parts, whole in two(halves):
        torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def overflow() -> tuple[list[list[bool]], bool]:
    steps = [gradients(step) for step in range(3)]
    if dist.get_rank() == 0:
        steps[1][1][4] = torch.inf
    state = OneBitState(start_step=0)
    _, received = pull(state, steps)
    kept = all(bool(error.isfinite().all()) for error in state.errors.values())
    return [[bool(grad.isfinite().all()) for grad in grads] for grads in received], kept


def test_an_overflow_is_seen_by_all_ranks_and_not_kept(two):
    fine = [True] * len(Pulls.SHAPES)
    assert two(overflow) == [([fine, [True, False, *fine[2:]], fine], True)] * 2


def other_model() -> None:
    state = OneBitState(start_step=0)
    state.errors = {0: torch.zeros(1000)}
    with pytest.raises(InvalidValueError, match="1000 values for a parameter of 15: it is of another model"):
        pull(state, [gradients(0)])


def sparse() -> None:
    ddp = DistributedDataParallel(nn.Embedding(10, 3, sparse=True))
    ddp.register_comm_hook(OneBitState(start_step=0), one_bit_hook)
    with pytest.raises(InvalidTypeError, match="sparse=False"):
        ddp(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("function", [other_model, sparse])
def test_one_bit_refuses_by_name(two, function):
    two(function)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 1000])
def test_signs_are_packed(length):
    signs = torch.rand(length) > 0.5
    packed = comm_hooks._pack(signs)
    assert packed.shape == (-(-length // 8),)
    assert comm_hooks._unpack(packed)[:length].equal(signs)
