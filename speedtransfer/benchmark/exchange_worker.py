"""Processes of suite `exchange`: each trains on its part of every batch, sends gradients by a method, and counts bytes."""

# Without postponed annotations: DistributedDataParallel checks those of a hook, which must not be strings.
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from speedtransfer.benchmark.world import sent_by_tables
from speedtransfer.nn import Embedding, table_parameters
from speedtransfer.once import once
from speedtransfer.ranks.averaging import BlockMomentumAverager
from speedtransfer.ranks.comm_hooks import OneBitState, one_bit_hook

with warnings.catch_warnings():
    # torch.jit.script, by torch itself.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer

# Initial steps with all-reduce, for all methods, and steps between two averages of models, which must divide them.
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

_INPUTS, _TEACHER, _EXAMPLES = 8, 8, 1024
_FIELDS = 8


# --- sending gradients --------------------------------------------------------------------------------------------------


@once
def _alone() -> Any:
    """Return a group of this process alone; created collectively, so it is kept."""
    return dist.new_subgroups(1)[0]


class Forgetful(OneBitState):
    """One-bit compression without error feedback."""

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
    """Make `model` and `optimizer` send gradients by `method`, and return the optimizer to use.

    The first `warmup` steps use all-reduce. Models are averaged every `period` steps, by default with momentum 1 - 1 / W.
    """
    if method in (LOCAL_SGD, BLOCK_MOMENTUM):
        state = post_localSGD_hook.PostLocalSGDState(None, _alone(), start_localSGD_iter=warmup)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        # Averagers count from 0, and average after each step whose number is a multiple of the period.
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
    else:
        # The default of DistributedDataParallel makes no call that could be counted.
        hooks: dict[str, Any] = {
            FP16: default_hooks.fp16_compress_hook,
            EIGHT_BITS: quantization_hooks.quantization_pertensor_hook,
        }
        model.register_comm_hook(None, hooks.get(method, default_hooks.allreduce_hook))
    return optimizer


class Sent:
    """Counts the bytes that this process sends by ``all_reduce`` and ``all_gather`` of torch.distributed within it.

    In a ring of W processes, as gloo and NCCL use it for all but small messages, these are ``2 (W - 1) / W`` times the bytes
    of a reduced tensor and ``W - 1`` times those of a gathered one. With `nested`, the future of a gathering has a list in a
    list, as with NCCL: torch's quantization hooks rely on that and fail on gloo.
    """

    def __init__(self, nested: bool) -> None:
        self.bytes = 0.0
        self._nested = nested

    def __enter__(self) -> None:
        self._real = dist.all_reduce, dist.all_gather
        dist.all_reduce, dist.all_gather = self._all_reduce, self._all_gather

    def __exit__(self, *error: Any) -> None:
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


# --- what is trained ----------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a network `width` wide, of a table of `rows` x `dim`, and of batches of `examples`."""

    width: int
    rows: int
    dim: int
    examples: int
    lr: float
    table_lr: float
    seed: int


class _Regression:
    """A network that learns the outputs of another one. Batches are sorted, so that processes see different inputs."""

    def __init__(self, sizes: Sizes) -> None:
        self._draw = torch.Generator().manual_seed(sizes.seed)
        self._into = torch.randn(_INPUTS, _TEACHER, generator=self._draw) * 1.5 / _INPUTS**0.5
        self._out = torch.randn(_TEACHER, 1, generator=self._draw) / _TEACHER**0.5
        self._sizes = sizes

    def model(self) -> nn.Module:
        torch.manual_seed(self._sizes.seed)
        width = self._sizes.width
        layers = [nn.Linear(_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
        return nn.Sequential(*layers)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self._sizes.lr)

    def batch(self, examples: int) -> tuple[Tensor, Tensor]:
        """Return inputs ``(examples, 8)`` sorted by their first number, and targets ``(examples, 1)``."""
        inputs = torch.randn(examples, _INPUTS, generator=self._draw)
        inputs = inputs[inputs[:, 0].argsort()]
        return inputs, torch.tanh(inputs @ self._into) @ self._out


class _Values(nn.Module):
    """A linear layer on the mean of the rows of an example, whose gradients are sent as `method` says."""

    def __init__(self, method: str, sizes: Sizes) -> None:
        super().__init__()
        torch.manual_seed(sizes.seed)
        group, comm_dtype = dist.group.WORLD, COMM_DTYPES[method]
        self.emb = Embedding(sizes.rows, sizes.dim, idle="lazy", process_group=group, comm_dtype=comm_dtype)
        self.head = nn.Linear(sizes.dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.head(self.emb(ids).mean(1))
        return values


class _Lookups:
    """A table that learns a number for each id."""

    def __init__(self, method: str, sizes: Sizes) -> None:
        self._draw = torch.Generator().manual_seed(sizes.seed)
        self._values = torch.randn(sizes.rows, 1, generator=self._draw)
        self._method, self._sizes = method, sizes

    def model(self) -> nn.Module:
        return _Values(self._method, self._sizes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self._sizes.table_lr)

    def batch(self, examples: int) -> tuple[Tensor, Tensor]:
        """Return ids ``(examples, 8)``, small ones more frequent, and targets ``(examples, 1)``."""
        ids = (torch.rand(examples, _FIELDS, generator=self._draw) ** 3 * self._sizes.rows).long()
        return ids, self._values[ids].mean(1)


# --- the process --------------------------------------------------------------------------------------------------------


class Training:
    """A model whose gradients are sent by one method, in one of `ranks` processes."""

    def __init__(self, method: str, sizes: Sizes, rank: int, ranks: int) -> None:
        self.cuda = "cuda:nccl" in dist.get_backend_config()
        self.device = torch.device("cuda", rank) if self.cuda else torch.device("cpu")
        self.task: Any = _Lookups(method, sizes) if method in COMM_DTYPES else _Regression(sizes)
        self.held_out = [values.to(self.device) for values in self.task.batch(_EXAMPLES)]
        self.net: nn.Module = self.task.model().to(self.device)
        # In one bucket: on gloo, PowerSGD and the quantization hooks hang with several.
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=1000)
        self.optimizer = send_by(method, self.model, self.task.optimizer(self.net))
        each = sizes.examples // ranks
        self._examples, self._part = sizes.examples, slice(rank * each, (rank + 1) * each)
        self._sent = Sent(nested=method == EIGHT_BITS and not self.cuda)
        self._before = sent_by_tables()

    def steps(self, count: int) -> None:
        """Take training steps."""
        with self._sent:
            for _ in range(count):
                inputs, targets = (values[self._part].to(self.device) for values in self.task.batch(self._examples))
                self.optimizer.zero_grad()
                (self.model(inputs) - targets).square().mean().backward()
                self.optimizer.step()
        if self.cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def loss(self) -> float:
        """Return the mean squared error of the model of this process on held out examples."""
        inputs, targets = self.held_out
        return float((self.net(inputs) - targets).square().mean())

    def sent(self) -> float:
        """Return the bytes sent so far to other processes, for gradients and, of tables, for ids and rows."""
        return self._sent.bytes + sent_by_tables() - self._before

    def parameters(self) -> Any:
        """Return all parameters but the rows of tables, as a flat array."""
        tables = table_parameters(self.net)
        found = [p.detach().cpu() for p in self.net.parameters() if p not in tables]
        return nn.utils.parameters_to_vector(found).numpy()


class Worker:
    """Commands of a process: `begin`, and the methods of a `Training`."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._place = rank, ranks
        self._training: Training | None = None

    def begin(self, method: str, sizes: Sizes) -> None:
        """Make a new model in place of the previous one."""
        self._training = None
        self._training = Training(method, sizes, *self._place)

    def __getattr__(self, command: str) -> Any:
        """Return a method of the training."""
        return getattr(self._training, command)
