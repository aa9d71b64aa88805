"""Remember steps that rows take one after the other: of adaptive optimizers whose weight decay is added to the gradient.

The gradient of an idle row is then ``decay * weight``, so that each step depends on all before it and no formula sums them up.
What is kept of a step are up to eight numbers; by kind of optimizer:

========== ===========================================================================
adam       decay, 1 - beta1, beta2, 1 - beta2, root, eps, scale, scale of the gradient
adamax     the same
rmsprop    decay, alpha, 1 - alpha, eps, lr, momentum, centered
adadelta   decay, rho, 1 - rho, eps, lr
adagrad    decay, lr, eps
========== ===========================================================================

Here in torch, with the operations of ``torch.optim``; `numba_replay` does the same in one pass, and so does a CUDA kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from speedtransfer.cuda import is_trusted
from speedtransfer.idle import cuda_catch_up
from speedtransfer.idle.device_copy import current_stream, send
from speedtransfer.idle.quadrature import Floats
from speedtransfer.idle.rule import Numbers, Rule
from speedtransfer.idle.unsure import Unsure
from speedtransfer.jit import compiled_module, run_on_threads

PLANES = {
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    "rmsprop": ("square_avg", "grad_avg", "momentum_buffer"),
    "adadelta": ("square_avg", "acc_delta"),
    "adagrad": ("sum",),
}
_CAPACITY = 64
_WIDTH = 128  # values whose steps, computed at once, take little longer than those of a few


class Replay:
    """Steps made, counted from 1, as a `History` counts them.

    Parameters
    ----------
    rule : Rule
    now : int
        Steps that every row has taken already.
    """

    def __init__(self, rule: Rule, now: int = 0) -> None:
        assert rule.replay is not None
        self.kind = rule.replay
        # The largest second moments stay as they are while amsgrad is off.
        idle = ("max_exp_avg_sq",) if rule.denominator != "max_exp_avg_sq" else ()
        self._planes = tuple(name for name in PLANES[self.kind] if name not in idle)
        self.now = self.base = now  # no row was last touched before step `base`
        self._numbers: Floats = np.zeros((_CAPACITY, 8))
        # Copies of them by device, stream and dtype, and how many steps these have.
        self._sent = dict[tuple[torch.device, int, torch.dtype], tuple[Tensor, int]]()

    def copy(self) -> Replay:
        """Return one that remembers the same steps."""
        made = copy.copy(self)
        made._numbers, made._sent = self._numbers.copy(), {}
        return made

    @property
    def length(self) -> int:
        """Number of steps that are remembered."""
        return self.now - self.base

    def record(self, numbers: Numbers) -> None:
        """Take in one more step."""
        self._note(numbers)
        self.now += 1

    def _note(self, numbers: Numbers) -> None:
        """Set the numbers of the step after those that are remembered."""
        count = self.length
        if count == len(self._numbers):
            self._numbers = np.concatenate([self._numbers, np.zeros((count, 8))])
        self._numbers[count, : len(numbers)] = numbers

    def sweep(self) -> None:
        """Forget all steps: every row has been caught up."""
        self.base = self.now
        self._numbers = self._numbers[:_CAPACITY]
        self._sent.clear()

    def takes_unsure(self, rows: dict[str, Tensor], last: Tensor) -> bool:
        """Tell whether `catch_up` can take an unsure step of such rows: a kernel does."""
        device = last.device
        suitable = last.is_cuda and cuda_catch_up.are_suitable([rows[name] for name in self._names(rows)])
        return suitable and is_trusted("rows that replay steps", device, lambda: _check_kernel(device))

    def _names(self, rows: dict[str, Tensor]) -> tuple[str, ...]:
        return "weight", *(name for name in self._planes if name in rows)

    def catch_up(self, rows: dict[str, Tensor], last: Tensor, unsure: Unsure | None = None) -> None:
        """Let rows take the steps that they have missed.

        Parameters
        ----------
        rows : dict of str to Tensor
            ``weight`` and the state planes, ``(n, dim)`` each, changed in place.
        last : Tensor
            ``(n, 1)`` int32: the step that touched each row last.
        unsure : Unsure, optional
            A step after those that are remembered, where `takes_unsure`.
        """
        if not (self.length or unsure) or not len(last):
            return
        if self.takes_unsure(rows, last):
            self._catch_up_on_cuda(rows, last, unsure)
            return
        names = self._names(rows)
        if not self._catch_up_compiled(rows, names, last):
            self._catch_up(rows, names, last)

    def _catch_up_on_cuda(self, rows: dict[str, Tensor], last: Tensor, unsure: Unsure | None = None) -> None:
        names, length = self._names(rows), self.length
        if unsure is not None:
            self._note(unsure.step)
            length += 1
        planes = [rows[name] if name in names else None for name in ("weight", *PLANES[self.kind])]
        dtype = torch.float64 if rows["weight"].dtype == torch.float64 else torch.float32
        key = last.device, current_stream(last.device), dtype
        numbers, sent = self._sent.get(key, (None, 0))
        host = self._numbers if dtype == torch.float64 else self._numbers.astype(np.float32)
        numbers = send(numbers, last.device, host, sent, length)
        self._sent[key] = numbers, self.length  # an unsure step may be replaced by another
        steps = self.base, self.base + length, unsure
        packed = cuda_catch_up.pack_replayed(self.kind, planes, numbers, last, *steps)
        cuda_catch_up.launch("replay_steps", rows["weight"], packed)

    def _catch_up_compiled(self, rows: dict[str, Tensor], names: tuple[str, ...], last: Tensor) -> bool:
        planes = [rows[name] for name in names]
        dtype = planes[0].dtype
        suit = [plane for plane in planes if not plane.is_cuda and plane.dtype == dtype and plane.is_contiguous()]
        if dtype not in (torch.float32, torch.float64) or len(suit) < len(planes):
            return False
        compiled = compiled_module("speedtransfer.idle.numba_replay")
        by_name = {name: plane.numpy() for name, plane in zip(names, planes, strict=True)}
        numbers = self._numbers[: self.length].astype(by_name["weight"].dtype)
        # A plane that there is not is one of no columns.
        missing = np.empty((len(last), 0), numbers.dtype)
        arrays = [by_name.get(name, missing) for name in ("weight", *PLANES[self.kind], "", "")[:4]]
        steps, dim = last.numpy().ravel(), arrays[0].shape[1]

        def take(values: list[np.ndarray], last: np.ndarray, until: np.ndarray) -> None:
            # A step of a value costs about what moving as many bytes does.
            cost = 4 * int((until - last).sum(dtype=np.int64)) * values[0].shape[1]
            part = compiled.take_steps, (compiled.KINDS[self.kind], *values, numbers, last, until, self.base)
            run_on_threads([part], len(last), cost, ())

        now = np.full(len(steps), self.now, np.int32)
        together = _WIDTH // max(dim, 1)
        if together < 2 or len(steps) < together:
            take(arrays, steps, now)
            return True
        # Narrow rows leave most of the processor idle. Those that have missed about as many steps go on together, as one row.
        order = np.argsort(steps, kind="stable")
        values, steps = [array[order] for array in arrays], steps[order]
        count = len(steps) // together * together
        level = now.copy()
        level[:count] = np.repeat(steps[together - 1 : count : together], together)
        take(values, steps, level)
        wide = [v[:count].reshape(count // together, together * v.shape[1]) for v in values]
        take(wide, level[:count:together].copy(), now[: count // together])
        for array, result in zip(arrays, values, strict=True):
            array[order] = result
        return True

    def _catch_up(self, rows: dict[str, Tensor], names: tuple[str, ...], last: Tensor) -> None:
        index, order = (last.flatten().long() - self.base).sort()
        part = {name: rows[name][order] for name in names}
        # How many rows have missed each step: the first ones.
        edges = np.searchsorted(index.cpu().numpy(), np.arange(self.length), side="right")
        step = _STEPS[self.kind]
        for number, count in enumerate(edges.tolist()):
            if count:
                step({name: values[:count] for name, values in part.items()}, self._numbers[number].tolist())
        for name, values in part.items():
            rows[name][order] = values


@torch.inference_mode(False)
def _check_kernel(device: torch.device) -> bool:
    rule = Rule(torch.float32)
    rule.replay = "adam"  # type: ignore[misc]
    replay = Replay(rule)
    for t in range(1, 6):
        replay.record((0.1, 0.1, 0.99, 0.01, (1 - 0.99**t) ** -0.5, 1e-8, 0.01 / (1 - 0.9**t), 0.0))
    values = torch.linspace(-1, 1, 6 * 9, dtype=torch.float32, device=device).view(6, 9)
    rows = {"weight": values, "exp_avg": values.flip(0), "exp_avg_sq": values.square()}
    found, rows = ({name: plane.clone() for name, plane in rows.items()} for _ in range(2))
    last = torch.arange(6, dtype=torch.int32, device=device)[:, None]
    replay._catch_up_on_cuda(found, last)
    replay._catch_up(rows, tuple(rows), last)
    return all(torch.allclose(plane, rows[name], rtol=1e-5, atol=1e-6) for name, plane in found.items())


# --- a step in torch, of rows by plane, with its numbers ------------------------------------------------------------------


def _adam(rows: dict[str, Tensor], numbers: list[float]) -> None:
    decay, first, second, second_added, root, eps, scale, gradient_scale = numbers
    weight, m, v = rows["weight"], rows["exp_avg"], rows["exp_avg_sq"]
    grad = weight * decay
    m.lerp_(grad, first)
    v.mul_(second).addcmul_(grad, grad, value=second_added)
    if "max_exp_avg_sq" in rows:
        v = torch.maximum(rows["max_exp_avg_sq"], v, out=rows["max_exp_avg_sq"])
    divisor = v.sqrt().mul_(root).add_(eps)
    if gradient_scale:
        weight.addcdiv_(grad, divisor, value=-gradient_scale)
    weight.addcdiv_(m, divisor, value=-scale)


def _adamax(rows: dict[str, Tensor], numbers: list[float]) -> None:
    decay, first, second, _, _, eps, scale, _ = numbers
    weight, m, u = rows["weight"], rows["exp_avg"], rows["exp_inf"]
    grad = weight * decay
    m.lerp_(grad, first)
    torch.maximum(u.mul_(second), grad.abs_().add_(eps), out=u)
    weight.addcdiv_(m, u, value=-scale)


def _rmsprop(rows: dict[str, Tensor], numbers: list[float]) -> None:
    decay, alpha, added, eps, lr, momentum, centered, _ = numbers
    weight, square = rows["weight"], rows["square_avg"]
    grad = weight * decay
    square.mul_(alpha).addcmul_(grad, grad, value=added)
    if centered:
        mean = rows["grad_avg"].lerp_(grad, added)
        square = square.addcmul(mean, mean, value=-1)
    divisor = square.sqrt().add_(eps)
    if momentum:
        buffer = rows["momentum_buffer"].mul_(momentum).addcdiv_(grad, divisor)
        weight.add_(buffer, alpha=-lr)
    else:
        weight.addcdiv_(grad, divisor, value=-lr)


def _adadelta(rows: dict[str, Tensor], numbers: list[float]) -> None:
    decay, rho, added, eps, lr, *_ = numbers
    weight, square, moved = rows["weight"], rows["square_avg"], rows["acc_delta"]
    grad = weight * decay
    square.mul_(rho).addcmul_(grad, grad, value=added)
    delta = (moved + eps).sqrt_().div_((square + eps).sqrt_()).mul_(grad)
    moved.mul_(rho).addcmul_(delta, delta, value=added)
    weight.add_(delta, alpha=-lr)


def _adagrad(rows: dict[str, Tensor], numbers: list[float]) -> None:
    decay, lr, eps, *_ = numbers
    weight, total = rows["weight"], rows["sum"]
    grad = weight * decay
    total.addcmul_(grad, grad, value=1)
    weight.addcdiv_(grad, total.sqrt().add_(eps), value=-lr)


_STEPS: dict[str, Callable[[dict[str, Tensor], list[float]], None]] = {
    "adam": _adam,
    "adamax": _adamax,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "adagrad": _adagrad,
}
