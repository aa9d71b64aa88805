"""Gradients sent whole, in fewer bits, or seldom: how many bytes and seconds until a model is as good?

All methods of a group train the same model on the same batches, each process its part, until the loss is that of one process.
``python bench/record.py here --only exchange``.
"""

# Without postponed annotations: DistributedDataParallel checks those of a hook, which must not be strings.
import datetime
import functools
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
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

from examples.compressed_exchange import BlockMomentumAverager, OneBitState, one_bit_hook
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.errors import format_bytes
from speedtransfer.nn import Embedding
from speedtransfer.once import once
from speedtransfer.ranks import exchange_of

# Initial steps with all-reduce, for all methods, and steps between two averages of models, which must divide them.
WARMUP, PERIOD = 8, 8
POWER_RANK = 2

ALL_REDUCE, FP16 = "all-reduce", "fp16_compress_hook"
EIGHT_BITS = "quantization_pertensor_hook, 8 bits"
POWER_SGD = f"powerSGD_hook, rank {POWER_RANK}"
ONE_BIT, NO_ERRORS = "one_bit_hook", "1 bit, errors dropped"
LOCAL_SGD = f"PeriodicModelAverager, {PERIOD} steps"
BLOCK_MOMENTUM = f"BlockMomentumAverager, {PERIOD} steps"
ROWS, ROWS_BFLOAT16, ROWS_INT8 = "comm_dtype=None", "comm_dtype=torch.bfloat16", "comm_dtype=torch.int8"
COMM_DTYPES = {ROWS: None, ROWS_BFLOAT16: torch.bfloat16, ROWS_INT8: torch.int8}

# A network, its optimizer, and what draws so many inputs and targets.
Task = tuple[nn.Module, torch.optim.Optimizer, Callable[[int], tuple[Tensor, Tensor]]]
_INPUTS, _TEACHER, _EXAMPLES = 8, 8, 1024
_FIELDS = 8
GRADIENTS, TABLE = "gradients", "rows of a table"
METHODS = {
    GRADIENTS: (ALL_REDUCE, FP16, EIGHT_BITS, POWER_SGD, ONE_BIT, NO_ERRORS, LOCAL_SGD, BLOCK_MOMENTUM),
    TABLE: tuple(COMM_DTYPES),
}
SLACK = 0.01  # by which the loss that is reached may be above that of one process: methods round
TOLERANCE = 0.01  # relative difference of the loss of all-reduce from that of one process: sums in another order
TIMEOUT_S = 300
NOTE = (
    "Processes of one machine: with gloo the times show what compressing costs, not what a slow network gains. Batches are "
    "sorted, so that each process sees inputs of its own. The loss to reach is that of one process with the whole batches and "
    f"{SLACK:.0%} more; it is looked at every {PERIOD} steps. Methods that keep errors or average models begin with {WARMUP} "
    "steps of all-reduce. Network: SGD with one learning rate and no momentum, so that block momentum also gains what a "
    "higher rate would. Table: AdamW, sharded rows. Bytes are those that one process sends, counted at each call of "
    "torch.distributed as a ring sends them, and of tables by their counters. Seconds are of training alone."
)


class Sizes(NamedTuple):
    """Sizes of a network `width` wide, of a table of `rows` x `dim`, and of batches of `examples`."""

    width: int
    rows: int
    dim: int
    examples: int
    lr: float
    table_lr: float
    seed: int


_FULL, _QUICK = Sizes(256, 4096, 64, 128, 0.1, 0.03, 0), Sizes(32, 256, 8, 64, 0.1, 0.03, 0)
_STEPS, _QUICK_STEPS = 256, 32
_MOST = 3  # a method may take this many times the steps of one process
_RANKS, _QUICK_RANKS = (2, 4), (2,)
_REPEATS, _QUICK_REPEATS = 4, 1


def describe(group: GroupResult, case: CaseResult) -> str:
    steps = case.figures["steps"]
    return f"{format_bytes(case.figures['sent_bytes'] * steps)} sent in {steps:,.0f} steps"


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    sizes = (_QUICK if quick else _FULL)._replace(seed=seed)
    steps, repeats = (_QUICK_STEPS, _QUICK_REPEATS) if quick else (_STEPS, _REPEATS)
    about = {GRADIENTS: f"a network {sizes.width} wide", TABLE: f"a sharded table of {sizes.rows:,} x {sizes.dim}"}
    return [
        Group(
            f"train {about[kind]} to the loss of {steps} steps of one process, {ranks} processes",
            functools.partial(_measured, kind, sizes, ranks, steps, repeats),
            {**sizes._asdict(), "kind": kind, "ranks": ranks, "most": _MOST * steps},
        )
        for kind in METHODS
        for ranks in (_QUICK_RANKS if quick else _RANKS)
    ]


def _measured(kind: str, sizes: Sizes, ranks: int, steps: int, repeats: int) -> list[CaseResult]:
    """Train by each method; all-reduce must give the loss of one process, and each method the same loss every time."""
    first = METHODS[kind][0]
    alone = train(1, [first], sizes, 0.0, _MOST * steps)[first]["losses"]
    target = (1 + SLACK) * alone[steps // PERIOD - 1]
    found = []
    for method, done in train(ranks, METHODS[kind], sizes, target, _MOST * steps, repeats).items():
        ours = kind == TABLE or method in (ONE_BIT, BLOCK_MOMENTUM)
        case, loss = CaseResult(method, "ours" if ours else "other", 0), done["losses"][-1]
        found.append(case)
        if loss > target:
            case.error = f"did not come to a loss of {target:.4g} in {_MOST * steps} steps"
            continue
        one = alone[len(done["losses"]) - 1]
        assert method != first or abs(loss - one) <= TOLERANCE * one, f"{loss:.6g}, but one process {one:.6g}"
        case.samples_s = case.host_s = done["seconds"]
        taken = PERIOD * len(done["losses"])
        case.figures = {"steps": float(taken), "sent_bytes": done["sent_bytes"] / taken, "loss": loss}
    return found


def train(
    ranks: int, methods: Sequence[str], sizes: Sizes, target: float, steps: int, repeats: int = 0
) -> dict[str, dict[str, Any]]:
    """Train by each method in `ranks` processes to a loss of `target`, in so many `steps` at most, then `repeats` times again.

    Returns by method the "losses" every `PERIOD` steps, the "sent_bytes" of a process, and the "seconds" of each repetition.
    """
    with tempfile.TemporaryDirectory(prefix="speedtransfer-bench-") as folder:
        arguments = ranks, folder, tuple(methods), sizes, target, steps, repeats
        torch.multiprocessing.spawn(_process, arguments, ranks)
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


def _process(rank: int, ranks: int, folder: str, methods: Sequence[str], *how: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if sys.platform == "linux":
        # The host name may not resolve to an address of this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    found = {method: _train(method, rank, ranks, *how) for method in methods}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _train(method: str, rank: int, ranks: int, sizes: Sizes, target: float, most: int, repeats: int) -> dict[str, Any]:
    training, losses, seconds = Training(method, sizes, rank, ranks), list[float](), list[float]()
    while not losses or (losses[-1] > target and PERIOD * len(losses) < most):
        training.steps(PERIOD)
        losses.append(training.loss())
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, (losses[-1], training.sent()))
    assert len({loss for loss, _ in every}) == 1, "the processes have different models"
    for _ in range(repeats if losses[-1] <= target else 0):
        again = Training(method, sizes, rank, ranks)
        dist.barrier()
        start = time.perf_counter()
        again.steps(PERIOD * len(losses))
        seconds.append(round(time.perf_counter() - start, 6))
        assert again.loss() == losses[-1], "the same steps give another loss"
    return {"losses": losses, "sent_bytes": sum(sent for _, sent in every) / ranks, "seconds": seconds}


# --- sending gradients --------------------------------------------------------------------------------------------------


@once
def _alone() -> Any:
    """Return a group of this process alone; created collectively, so it is kept."""
    return dist.new_subgroups(1)[0]


class Forgetful(OneBitState):
    """One-bit compression without error feedback."""

    def error(self, param: Tensor) -> Tensor:
        return torch.zeros(param.numel())


def send_by(method: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    """Make `model` and `optimizer` send gradients by `method`, and return the optimizer to use."""
    if method in (LOCAL_SGD, BLOCK_MOMENTUM):
        with warnings.catch_warnings():
            # torch.jit.script, by torch itself.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import PostLocalSGDOptimizer
        state = post_localSGD_hook.PostLocalSGDState(None, _alone(), start_localSGD_iter=WARMUP)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        # Averagers count from 0, and average after each step whose number is a multiple of the period.
        averager = PeriodicModelAverager(PERIOD, WARMUP - 1)
        if method == BLOCK_MOMENTUM:
            averager = BlockMomentumAverager(PERIOD, WARMUP - 1, momentum=1 - 1 / dist.get_world_size())
        return PostLocalSGDOptimizer(optimizer, averager)
    # The default of DistributedDataParallel makes no call that could be counted.
    state, hook = {
        FP16: lambda: (None, default_hooks.fp16_compress_hook),
        EIGHT_BITS: lambda: (None, quantization_hooks.quantization_pertensor_hook),
        POWER_SGD: lambda: (
            powerSGD_hook.PowerSGDState(None, POWER_RANK, start_powerSGD_iter=WARMUP),
            powerSGD_hook.powerSGD_hook,
        ),
        ONE_BIT: lambda: (OneBitState(start_step=WARMUP), one_bit_hook),
        NO_ERRORS: lambda: (Forgetful(start_step=WARMUP), one_bit_hook),
    }.get(method, lambda: (None, default_hooks.allreduce_hook))()
    model.register_comm_hook(state, hook)
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


def _regression(method: str, sizes: Sizes) -> Task:
    """Return a network that learns the outputs of another one; batches are sorted, so that processes see different inputs."""
    draw = torch.Generator().manual_seed(sizes.seed)
    into = torch.randn(_INPUTS, _TEACHER, generator=draw) * 1.5 / _INPUTS**0.5
    out = torch.randn(_TEACHER, 1, generator=draw) / _TEACHER**0.5
    width = sizes.width

    def batch(examples: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(examples, _INPUTS, generator=draw)
        inputs = inputs[inputs[:, 0].argsort()]
        return inputs, torch.tanh(inputs @ into) @ out

    torch.manual_seed(sizes.seed)
    layers = [nn.Linear(_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
    net = nn.Sequential(*layers)
    return net, torch.optim.SGD(net.parameters(), lr=sizes.lr), batch


class _Values(nn.Module):
    """A linear layer on the mean of the rows of an example, whose gradients are sent as `method` says."""

    def __init__(self, method: str, sizes: Sizes) -> None:
        super().__init__()
        group, comm_dtype = dist.group.WORLD, COMM_DTYPES[method]
        self.emb = Embedding(sizes.rows, sizes.dim, idle="lazy", process_group=group, comm_dtype=comm_dtype)
        self.head = nn.Linear(sizes.dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.head(self.emb(ids).mean(1))
        return values


def _lookups(method: str, sizes: Sizes) -> Task:
    """Return a table that learns a number for each id, small ones more frequent."""
    draw = torch.Generator().manual_seed(sizes.seed)
    values = torch.randn(sizes.rows, 1, generator=draw)

    def batch(examples: int) -> tuple[Tensor, Tensor]:
        ids = (torch.rand(examples, _FIELDS, generator=draw) ** 3 * sizes.rows).long()
        return ids, values[ids].mean(1)

    torch.manual_seed(sizes.seed)
    net = _Values(method, sizes)
    return net, torch.optim.AdamW(net.parameters(), lr=sizes.table_lr), batch


class Training:
    """A model whose gradients are sent by one method, in one of `ranks` processes."""

    def __init__(self, method: str, sizes: Sizes, rank: int, ranks: int) -> None:
        self.net, optimizer, self.batch = (_lookups if method in COMM_DTYPES else _regression)(method, sizes)
        self.held_out = self.batch(_EXAMPLES)
        # In one bucket: on gloo, PowerSGD and the quantization hooks hang with several.
        self.model = DistributedDataParallel(self.net, bucket_cap_mb=1000)
        self.optimizer = send_by(method, self.model, optimizer)
        each = sizes.examples // ranks
        self._examples, self._part = sizes.examples, slice(rank * each, (rank + 1) * each)
        self._sent = Sent(nested=method == EIGHT_BITS)
        self._before = _sent_by_tables()

    def steps(self, count: int) -> None:
        with self._sent:
            for _ in range(count):
                inputs, targets = (values[self._part] for values in self.batch(self._examples))
                take_step((self.model(inputs) - targets).square().mean(), self.optimizer)

    @torch.no_grad()
    def loss(self) -> float:
        inputs, targets = self.held_out
        return float((self.net(inputs) - targets).square().mean())

    def sent(self) -> float:
        """Return the bytes sent so far to other processes, for gradients and, of tables, for ids and rows."""
        return self._sent.bytes + _sent_by_tables() - self._before


def _sent_by_tables() -> int:
    traffic = exchange_of(dist.group.WORLD).traffic
    return traffic.control + traffic.ids + traffic.rows + traffic.gradients
