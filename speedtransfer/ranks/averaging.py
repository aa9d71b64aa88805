"""Average the models of ranks that train apart, with momentum."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from speedtransfer.errors import InvalidValueError

# In the __dict__ of a parameter whose values a table has: optim.binding.KEY, of a layer above this one.
_TABLE_KEY = "_speedtransfer_handle"


class BlockMomentumAverager(PeriodicModelAverager):
    """Every `period` steps, move all ranks to the mean of their models, and on by a momentum of these moves.

    Block momentum (Chen and Huo, "Scalable training of deep learning machines by incremental block training", 2016), for
    torch's ``PostLocalSGDOptimizer``. The mean of W models moves less than each of them; the momentum makes up for it.
    Tables are left out, as every row has one owner, and so are frozen parameters; all others must be the same on all ranks.

    Parameters
    ----------
    period : int
        Steps between averages. With an optimizer that has a momentum itself, such as Adam, rather 8 than 4.
    warmup_steps : int
        Steps before the first average, in which a hook of DDP averages the gradients.
    momentum : float
        In [0, 1). A move goes 1 / (1 - momentum) times as far in the end. Chen and Huo use 1 - 1 / W, for which it goes as far
        as the moves of all ranks together; the default is that of two ranks. 0: the mean alone.
    process_group : ProcessGroup, optional
        Default: all ranks.

    Raises
    ------
    InvalidValueError
        `momentum` is out of its range.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        momentum: float = 0.5,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(period, warmup_steps, process_group)
        if not 0 <= momentum < 1:
            raise InvalidValueError(
                f"momentum is {momentum} but must be in [0, 1); pass 0.5 or 1 - 1 / (number of ranks)"
            )
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
        dtypes = [torch.float32, *(param.dtype for param in averaged)]
        dtype = functools.reduce(torch.promote_types, dtypes)
        model = torch.cat([param.detach().flatten().to(dtype) for param in averaged])
        model /= dist.get_world_size(self.process_group)
        dist.all_reduce(model, group=self.process_group)
        if self._model is None or self._move is None or len(self._model) != len(model):
            # The first average, or other parameters are trained than at the last one.
            self._move = torch.zeros_like(model)
        else:
            # A loaded state may be on another device.
            last = self._model.to(model)
            self._move = self.momentum * self._move.to(model) + (model - last)
            model = last + self._move
        self._model = model
        for param, values in zip(averaged, model.split([param.numel() for param in averaged]), strict=True):
            param.copy_(values.view_as(param))

    def state_dict(self) -> dict[str, Any]:
        """Return the count of steps, the last average and the last move, the same on all ranks."""
        return {"step": self.step, "model": self._model, "move": self._move}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.step, self._model, self._move = (state_dict[name] for name in ("step", "model", "move"))


def _averaged(params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters to average. Not those with a gradient, as torch does, which may be others on another rank."""
    every = itertools.chain.from_iterable(p["params"] if isinstance(p, dict) else [p] for p in params)
    return [param for param in every if param.requires_grad and _TABLE_KEY not in param.__dict__]
