"""Gradients between processes in fewer bytes, beside tables or without: a hook of one bit a value, and block momentum.

Copy this file; ``bench/experiments/exchange.py`` measures what it saves. torch's own hooks (fp16, PowerSGD, post-local SGD)
work beside tables as they are.
"""

# DDP checks the annotations of a hook, which must not be strings.
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional

# In the __dict__ of a parameter whose values a table has.
_TABLE_KEY = "_speedtransfer_handle"


class OneBitState:
    """State of :func:`one_bit_hook`: the errors of the signs that this rank has sent, to be sent with the next ones.

    The first `start_step` steps send whole gradients: these are large and change fast, which signs follow badly.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, start_step: int = 1000) -> None:
        self.process_group, self.start_step = process_group, start_step
        self.step = 0
        # Flat, by the id() of the parameter: buckets have others after the first step.
        self.errors: dict[int, Tensor] = {}

    def error(self, param: Tensor) -> Tensor:
        """Return the flat error of a parameter."""
        return self.errors.get(id(param), torch.zeros(1)).expand(param.numel())


def one_bit_hook(
    state: OneBitState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Send the signs of gradients and the mean magnitude of each row, ``(rows, ...)``; return the mean over ranks.

    What the signs miss is added to the gradients of the next step (Seide et al., "1-bit stochastic gradient descent", 2014).
    A rank gets a 32nd of a float32 gradient, and the scales, from each other: W / 64 of the bytes of an all-reduce by W ranks.

    Where a gradient is inf or NaN, all ranks get inf or NaN for the parameter, which ``GradScaler`` sees. Gradients are dense.
    """
    buffer, params = bucket.buffer(), bucket.parameters()
    if buffer.layout != torch.strided:
        raise TypeError("one_bit_hook sends signs of dense gradients; make the module with sparse=False")
    whole = state.step < state.start_step
    state.step += bucket.is_last()
    if whole:
        return allreduce_hook(state.process_group, bucket)  # type: ignore[arg-type]  # None too
    # Rows, one scale each; a vector is one row.
    shapes = [(len(p), p[0].numel()) if p.dim() > 1 and len(p) else (1, p.numel()) for p in params]
    sizes = [param.numel() for param in params]
    # Beside gradients errors are small, and float16 would round them away.
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    error = torch.cat([state.error(param).to(buffer.device, dtype) for param in params])
    wanted = buffer + error
    scales = torch.cat(
        [part.view(shape).abs().mean(1) for part, shape in zip(wanted.split(sizes), shapes, strict=True)]
    )
    spread = _spread(scales, shapes)
    # An overflow is not kept: the step is skipped, and the error would be infinite for ever.
    error = torch.where(spread < torch.inf, wanted - spread.copysign(wanted), error)
    state.errors.update(zip(map(id, params), error.split(sizes), strict=True))
    head = scales.view(torch.uint8)
    message = torch.cat([head, _pack(wanted.signbit())])
    received = message.new_empty(dist.get_world_size(state.process_group), len(message))

    def decode(_: torch.futures.Future) -> Tensor:
        if received.is_cuda:
            # The future runs this on a stream of its own.
            received.record_stream(torch.cuda.current_stream(received.device))
        mean = torch.zeros(len(buffer), dtype=dtype, device=buffer.device)
        for row in received:
            # A copy, as those of a row need not be aligned.
            spread = _spread(row[: len(head)].clone().view(dtype), shapes)
            mean += torch.where(_unpack(row[len(head) :])[: len(mean)], -spread, spread)
        return buffer.copy_(mean.div_(len(received)))

    work = dist.all_gather(list(received.unbind()), message, state.process_group, async_op=True)
    return work.get_future().then(decode)


def _spread(scales: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
    """Return the scale of each value, from those of all rows of all `shapes`."""
    parts = scales.split([rows for rows, _ in shapes])
    return torch.cat([part[:, None].expand(shape).reshape(-1) for part, shape in zip(parts, shapes, strict=True)])


def _pack(signs: Tensor) -> Tensor:
    """Pack bools, ``(n,)``, into ``ceil(n / 8)`` bytes."""
    # Eight bytes of 0 or 1 as one integer; the product brings byte i to bit 56 + i.
    eight = functional.pad(signs.view(torch.uint8), (0, -len(signs) % 8)).view(torch.int64)
    return (eight * sum(1 << 56 - 7 * i for i in range(8)) >> 56).to(torch.uint8)


def _unpack(packed: Tensor) -> Tensor:
    """Return the bools that `_pack` packed, and those that fill the last byte."""
    # Each byte eight times, of which byte i keeps bit i.
    eight = packed.to(torch.int64) * sum(1 << 8 * i for i in range(8)) & sum(1 << 9 * i for i in range(8)) - (1 << 64)
    return eight.view(torch.uint8) != 0


class BlockMomentumAverager(PeriodicModelAverager):
    """Every `period` steps, move all ranks to the mean of their models, and on by a momentum of these moves.

    Block momentum (Chen and Huo, "Scalable training of deep learning machines by incremental block training", 2016), for
    torch's ``PostLocalSGDOptimizer``. The mean of W models moves less than each of them; the momentum makes up for it.
    Tables are left out, as every row has one owner, and so are frozen parameters; all others must be the same on all ranks.

    `period` steps lie between averages: with an optimizer that has a momentum itself, such as Adam, rather 8 than 4. In the
    `warmup_steps` before the first a hook of DDP averages the gradients. With `momentum`, in [0, 1), a move goes
    1 / (1 - momentum) times as far in the end. Chen and Huo use 1 - 1 / W, for which it goes as far as the moves of all ranks
    together; the default is that of two ranks. 0: the mean alone.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, momentum: float = 0.5, process_group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum} but must be in [0, 1); pass 1 - 1 / (number of ranks)")
        self.momentum = momentum
        # Flat: all parameters after the last average, and the last move.
        self._model: Tensor | None = None
        self._move: Tensor | None = None

    @torch.no_grad()
    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Count a step; average parameters, or those of parameter groups, after the warm-up and every `period` steps."""
        due = self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0
        self.step += 1
        # A process that is not in the group has rank -1.
        averaged = _averaged(params) if due and dist.get_rank(self.process_group) >= 0 else []
        if not averaged:
            return
        # At least float32: half-precision parameters would lose small moves.
        parts = [averaged[0].new_empty(0, dtype=torch.float32), *(param.flatten() for param in averaged)]
        model = torch.cat(parts)
        model /= dist.get_world_size(self.process_group)
        dist.all_reduce(model, group=self.process_group)
        if self._model is None or self._move is None or len(self._model) != len(model):
            # The first average, or other parameters are trained than at the last one.
            self._move = torch.zeros_like(model)
        else:
            self._move = self.momentum * self._move + (model - self._model)
            model = self._model + self._move
        self._model = model
        for param, values in zip(averaged, model.split([param.numel() for param in averaged]), strict=True):
            param.copy_(values.view_as(param))


def _averaged(params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters to average. Not those with a gradient, as torch does, which may be others on another rank."""
    every = itertools.chain.from_iterable(p["params"] if isinstance(p, dict) else [p] for p in params)
    return [param for param in every if param.requires_grad and _TABLE_KEY not in param.__dict__]
