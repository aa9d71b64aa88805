"""The methods of suite `exchange`: how the gradients of a model are sent, and the bytes of that."""

# DistributedDataParallel checks the annotations of a hook, which must not be strings.
import functools
import warnings
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from speedtransfer.ranks.averaging import BlockMomentumAverager
from speedtransfer.ranks.comm_hooks import OneBitState, one_bit_hook

with warnings.catch_warnings():
    # torch.jit.script, by torch itself.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer

# Steps whose gradients are sent whole, with all methods; and those between two averages of models, which divide them.
WARMUP, PERIOD = 8, 8
POWER_RANK = 2

ALL_REDUCE, FP16 = "all-reduce", "fp16_compress_hook"
EIGHT_BITS = "quantization_pertensor_hook, 8 bits"
POWER_SGD = f"powerSGD_hook, rank {POWER_RANK}"
ONE_BIT, NO_ERRORS = "st.one_bit_hook", "1 bit, errors dropped"
LOCAL_SGD = f"PeriodicModelAverager, {PERIOD} steps"
BLOCK_MOMENTUM = f"st.BlockMomentumAverager, {PERIOD} steps"
ROWS, ROWS_BFLOAT16, ROWS_INT8 = "comm_dtype=None", "comm_dtype=torch.bfloat16", "comm_dtype=torch.int8"
COMM_DTYPES = {ROWS: None, ROWS_BFLOAT16: torch.bfloat16, ROWS_INT8: torch.int8}


@functools.cache
def _alone() -> Any:
    """Return a group of this process alone, which all make together and keep."""
    return dist.new_subgroups(1)[0]


class Forgetful(OneBitState):
    """Keeps no errors: what the signs miss is never sent."""

    def error(self, number: int, size: int) -> Tensor:  # noqa: D102
        return torch.zeros(size)


def send_by(
    method: str,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    warmup: int = WARMUP,
    period: int = PERIOD,
    momentum: float | None = None,
) -> Any:
    """Have `model` and `optimizer` send gradients by `method`; return the optimizer to use.

    `warmup` steps send them whole before; models are averaged every `period` steps, with a `momentum` of 1 - 1 / W by default.
    """
    if method in (LOCAL_SGD, BLOCK_MOMENTUM):
        state = post_localSGD_hook.PostLocalSGDState(None, _alone(), start_localSGD_iter=warmup)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        # It counts from 0: the models are averaged after each step whose number is a multiple of the period.
        first = max(0, warmup - 1)
        if method == LOCAL_SGD:
            return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period, first))
        if momentum is None:
            momentum = 1 - 1 / dist.get_world_size()
        return PostLocalSGDOptimizer(optimizer, BlockMomentumAverager(period, first, momentum))
    if method == POWER_SGD:
        power = powerSGD_hook.PowerSGDState(None, POWER_RANK, start_powerSGD_iter=max(2, warmup))
        model.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    elif method in (ONE_BIT, NO_ERRORS):
        kind = OneBitState if method == ONE_BIT else Forgetful
        model.register_comm_hook(kind(start_step=warmup), one_bit_hook)
    elif method == FP16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == EIGHT_BITS:
        model.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)
    else:
        # What DistributedDataParallel does by itself, but by a call that is counted.
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    return optimizer


class Sent:
    """Counts the bytes that this process sends by ``torch.distributed.all_reduce`` and ``all_gather`` while it is entered.

    A ring of W processes, as gloo and NCCL make for all but small messages, sends ``2 (W - 1) / W`` times the bytes of a
    tensor that is reduced, and ``W - 1`` times those of one that is gathered. With `nested`, those who wait for a gathering
    get a list in a list, as NCCL gives it: torch's quantization hooks rely on that, so that they fail on gloo.
    """

    def __init__(self, nested: bool) -> None:
        self.bytes = 0.0
        self._nested = nested
        self._real: tuple[Any, Any] = dist.all_reduce, dist.all_gather

    def __enter__(self) -> None:
        self._real = dist.all_reduce, dist.all_gather
        dist.all_reduce = self._all_reduce
        dist.all_gather = self._all_gather

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        dist.all_reduce, dist.all_gather = self._real

    def _all_reduce(
        self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        ranks = dist.get_world_size(group)
        self.bytes += 2 * (ranks - 1) / ranks * tensor.nbytes
        return self._real[0](tensor, op, group, async_op)

    def _all_gather(self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        self.bytes += (dist.get_world_size(group) - 1) * tensor.nbytes
        work = self._real[1](tensor_list, tensor, group, async_op)
        return _Nested(work) if self._nested else work


class _Nested:
    def __init__(self, work: Any) -> None:
        self._work = work

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda future: [future.value()])
