"""Ways to send less than all gradients in every step: each trains to the loss of DDP's all-reduce."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import speedtransfer as st
from examples.compressed_exchange import BlockMomentumAverager, OneBitState, one_bit_hook

# bf16_compress_hook is not here: gloo has no all-reduce of bfloat16.

NUM_IDS, STEPS, WARMUP, PERIOD = 200, 60, 10, 4


def model(has_table: bool) -> nn.Module:
    """A regression whose target is the mean of numbers that the ids have."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    torch.manual_seed(1)
    if has_table:
        return nn.Sequential(st.EmbeddingBag(NUM_IDS, 16, process_group=dist.group.WORLD), head)
    return nn.Sequential(nn.EmbeddingBag(NUM_IDS, 16), head)


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank has ids of its own: what the others learn comes to it by their messages alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.randn(NUM_IDS, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2 + rank)
    for _ in range(STEPS):
        ids = torch.randint(NUM_IDS // world, (64, 4), generator=generator) * world + rank
        yield ids, values[ids].mean(1)


def train(way: Callable, has_table: bool) -> tuple[float, list[Tensor]]:
    """Return the loss on ids of all ranks, and the parameters of this rank."""
    # In one bucket: on gloo, PowerSGD hangs with several.
    ddp = DistributedDataParallel(model(has_table), bucket_cap_mb=1000)
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    opt = way(ddp, opt) or opt
    for ids, target in batches():
        opt.zero_grad()
        (ddp(ids) - target).square().mean().backward()
        opt.step()
    values = torch.randn(NUM_IDS, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(NUM_IDS, (1000, 4), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        loss = (ddp.module(ids) - values[ids].mean(1)).square().mean()
    tables = st.table_parameters(ddp)
    return loss.item(), [param.detach() for param in ddp.parameters() if param not in tables]


def all_reduce(ddp, opt) -> None:
    """DDP's own."""


def fp16(ddp, opt) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd(ddp, opt) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=WARMUP)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def one_bit(ddp, opt) -> None:
    ddp.register_comm_hook(OneBitState(start_step=WARMUP), one_bit_hook)


def apart(ddp, opt, averager) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        # torch.jit.script, by torch itself; here, as importing it takes a second of every process.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import PostLocalSGDOptimizer

    alone, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=WARMUP)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return PostLocalSGDOptimizer(opt, averager)


def local_sgd(ddp, opt) -> torch.optim.Optimizer:
    # One step later, so that the last step averages.
    # That of torch takes no table.
    if st.table_parameters(ddp):
        return apart(ddp, opt, BlockMomentumAverager(PERIOD, WARMUP + 1, momentum=0.0))
    return apart(ddp, opt, PeriodicModelAverager(PERIOD, WARMUP + 1))


def block_momentum(ddp, opt) -> torch.optim.Optimizer:
    return apart(ddp, opt, BlockMomentumAverager(PERIOD, WARMUP + 1))


# Times the loss of all-reduce. Measured on three ranks: 1.00, 1.09, 1.25, 2.6, 1.6; without an exchange after the warm-up 5.4.
# (On two these are smaller.)
MARGINS = {fp16: 1.02, power_sgd: 1.2, one_bit: 1.4, local_sgd: 3, block_momentum: 1.9}


def losses(has_table: bool, ways: tuple[Callable, ...]) -> dict[str, float]:
    found = {}
    for way in (all_reduce, *ways):
        found[way.__name__], params = train(way, has_table)
        for param in params:
            of_first = param.clone()
            dist.broadcast(of_first, 0)
            assert torch.equal(param, of_first), way.__name__
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "has_table", "ways"),
    [
        pytest.param(3, False, tuple(MARGINS), marks=pytest.mark.slow, id="dense"),
        pytest.param(3, True, tuple(MARGINS), marks=pytest.mark.slow, id="sharded table"),
        pytest.param(2, True, (one_bit, block_momentum), id="sharded table, some"),
    ],
)
def test_trains_to_the_loss_of_all_reduce(pool, world, has_table, ways):
    for found in pool.of(world)(losses, has_table, ways):
        for way in ways:
            print(way.__name__, found[way.__name__] / found["all_reduce"])
            assert found[way.__name__] < MARGINS[way] * found["all_reduce"], way.__name__
