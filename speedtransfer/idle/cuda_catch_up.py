"""Let rows on a CUDA device take the steps that they have missed by one kernel, in place and without a wait of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from speedtransfer.cuda import VALUE_TYPES, KernelArgument, launch_over
from speedtransfer.idle.rule import IdleStep, Rule
from speedtransfer.idle.sums import Sums
from speedtransfer.idle.unsure import Unsure

_KINDS = {"adam": 0, "adamax": 1, "rmsprop": 2, "adadelta": 3, "adagrad": 4}


def are_suitable(planes: Iterable[Tensor]) -> bool:
    """Tell whether a kernel can change rows of these planes on a CUDA device: all ``(n, dim)`` and of one dtype."""
    kinds = {(plane.dtype, plane.shape, plane.is_contiguous()) for plane in planes}
    return len(kinds) == 1 and all(dtype in VALUE_TYPES and contiguous for dtype, _, contiguous in kinds)


def pack_missed(
    rule: Rule, sums: Sums, rows: dict[str, Tensor], last: Tensor, base: int, unsure: Unsure | None = None
) -> np.ndarray:
    """Return the argument of the kernel take_missed; the other arguments are those of `missed.take_missed_steps`."""
    weight, (lines, blocks) = rows["weight"], sums.tensors(last.device)
    names = "weight", *(*rule.factors, None, None)[:2], rule.partner, rule.denominator
    pointers = [rows[name].data_ptr() if name in rows else 0 for name in names]
    pointers += lines.data_ptr(), blocks.data_ptr(), last.data_ptr()
    shapes = *weight.shape, lines.shape[1], blocks.shape[1]
    steps = base, sums.count, sums.horizon, rule.partner is not None, rule.floor
    further = IdleStep() if unsure is None else unsure.step
    numbers = further.decay, *(*further.factors, 1.0, 1.0)[:2], *further.mix, further.scale, further.root, further.eps
    skipped = 0 if unsure is None else unsure.skipped.data_ptr()
    return KernelArgument("19q11d").pack(
        *pointers, *shapes, *steps, VALUE_TYPES[weight.dtype], skipped, sums.eps, *numbers
    )


def pack_replayed(
    kind: str,
    planes: Sequence[Tensor | None],
    numbers: Tensor,
    last: Tensor,
    base: int,
    now: int,
    unsure: Unsure | None = None,
) -> np.ndarray:
    """Return the argument of the kernel replay_steps, by which rows take the steps after the step `last` of each, up to `now`.

    Parameters
    ----------
    kind : str
        Of `replay.PLANES`.
    planes : sequence of Tensor or None
        ``(n, dim)``: weights and the planes that `replay.PLANES` lists.
    numbers : Tensor
        ``(any, 8)``: of the steps after step number `base`; float64 for such rows, else float32.
    last : Tensor
        ``(n, 1)`` int32.
    base, now : int
    unsure : Unsure, optional
        The last of the steps.
    """
    pointers = [0 if plane is None else plane.data_ptr() for plane in (*planes, None, None)[:4]]
    weight = planes[0]
    assert weight is not None
    steps = base, now, _KINDS[kind], VALUE_TYPES[weight.dtype], 0 if unsure is None else unsure.skipped.data_ptr()
    return KernelArgument("13q").pack(*pointers, numbers.data_ptr(), last.data_ptr(), *weight.shape, *steps)


def launch(name: str, weight: Tensor, packed: np.ndarray) -> None:
    """Launch a kernel over the values of `weight`, ``(n, dim)``."""
    launch_over(weight.numel(), "catch_up.cu", name, weight.device, packed)
