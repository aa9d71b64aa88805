"""Give new ids their initial values: a function of id, column and seed alone, with the same bits on every machine.

Whenever an id comes, in whatever batch and process, its row starts the same. Random words are a hash; only operations that
IEEE 754 defines to the last bit follow (``+ - * /`` and square roots of float64), none of a C library, so numba, NumPy and
every processor agree.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_number
from speedtransfer.jit import compiled_module, run_on_threads
from speedtransfer.vocabulary.mixing import GOLDEN, mix64

Initial = tuple[str, float, float] | float

_COMPILED = "speedtransfer.vocabulary.numba_initial"
# By their numbers in saved files and in ids.cu.
KINDS = ("number", "normal", "uniform")
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WORK_BYTES = 32  # a value takes as long as to move so many
FARTHEST = 8.3  # standard deviations: no normal value is farther from 0


def check_initial(initial: Any) -> Initial:
    """Return `initial`, ("normal", mean, std), ("uniform", low, high) or a number, with floats; raise for anything else."""
    if isinstance(initial, numbers.Real):
        return check_number(initial, "initial", -math.inf)
    is_tuple = isinstance(initial, (tuple, list))
    if not is_tuple or len(initial) != 3 or initial[0] not in KINDS[1:]:
        raise (InvalidValueError if is_tuple else InvalidTypeError)(
            f'initial is {initial!r} but must be ("normal", mean, std), ("uniform", low, high) or a number; pass one of these'
        )
    kind, *given = initial
    first, second = (check_number(number, f"a number of initial {initial!r}", -math.inf) for number in given)
    if kind == "normal" and second < 0:
        raise InvalidValueError(f"initial is {initial!r}, whose standard deviation is negative; pass 0 or more")
    if kind == "uniform" and first > second:
        raise InvalidValueError(
            f"initial is {initial!r}, whose lowest value is above its highest; pass them the other way round"
        )
    if not math.isfinite(second - first):
        raise InvalidValueError(f"initial is {initial!r}, a range beyond float64; pass smaller numbers")
    return kind, first, second


def initial_values(
    ids: np.ndarray, dim: int, seed: int, initial: Initial, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the initial rows of ids (n,) int64, ``(n, dim)`` on the CPU; `check_range` says of which dtypes.

    Columns are independent of each other, and of `dim`: those of a narrower table are the first of a wider one. A value is
    computed in float64 and rounded to `dtype` once. Uniform values take 2**53 different steps from `low` up to `high`. 64 bits
    of the seed count.
    """
    check_range(initial, dtype)
    if not isinstance(initial, tuple):
        return _rounded(np.full((len(ids), dim), initial), dtype)
    # float32 is what tables hold: rounded where it is made, it takes no second pass.
    values = np.empty((len(ids), dim), np.float32 if dtype == torch.float32 else np.float64)
    kind, *numbers = scaling(initial)
    part = compiled_module(_COMPILED).fill, (values, stream_starts(ids, seed), kind == "normal", *numbers)
    run_on_threads([part], len(ids), _WORK_BYTES * values.size, ())
    return _rounded(values, dtype)


def check_range(initial: Initial, dtype: torch.dtype) -> None:
    """Raise unless initial values can be of `dtype`: one of four, whose largest number they are not beyond."""
    if dtype not in FLOATS:
        raise InvalidTypeError(
            f"dtype is {dtype} but initial values are float32, float64, float16 or bfloat16; convert them afterwards"
        )
    kind, first, second = as_line(initial)
    largest = abs(first) + FARTHEST * second if kind == "normal" else max(abs(first), abs(second))
    if largest > torch.finfo(dtype).max:
        raise InvalidValueError(
            f"initial is {initial!r}, with values up to {largest:g}, but {dtype} ends at {torch.finfo(dtype).max:g}; "
            "pass smaller numbers"
        )


def as_line(initial: Initial) -> tuple[str, float, float]:
    """Return ("normal", mean, std), ("uniform", low, high) or ("number", value, 0)."""
    return initial if isinstance(initial, tuple) else ("number", initial, 0.0)


def scaling(initial: Initial) -> tuple[str, float, float, float]:
    """Return of `KINDS` the kind, and what is added and multiplied to a standard value, which may not exceed the last."""
    kind, first, second = as_line(initial)
    return (kind, first, second - first, second) if kind == "uniform" else (kind, first, second, math.inf)


def stream_key(seed: int) -> np.ndarray:
    """Return the 64 bits of the seed that ids are scrambled with, (1,) uint64."""
    return np.asarray(mix64(np.array([seed % 2**64], np.uint64) + GOLDEN))


def stream_starts(ids: np.ndarray, seed: int) -> np.ndarray:
    """Return where each id's random words begin, uint64 (n,): that of column j is ``mix64(start + (j + 1) * GOLDEN)``."""
    key = stream_key(seed)
    return mix64(mix64(np.ascontiguousarray(ids).view(np.uint64) ^ key) + key)


def _rounded(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return the values in another dtype, each rounded once: to nearest, ties to even."""
    if dtype in (torch.float32, torch.float64):
        return torch.from_numpy(values).to(dtype)
    # torch goes by way of float32, which would round twice. An inexact value is given the odd one of its two neighbours there:
    # that is no tie between numbers of the narrower dtype, and on the same side of each tie as the value.
    near = values.astype(np.float32)
    exact = near.astype(np.float64)
    bits = near.view(np.int32)  # one more is the next number away from 0, of either sign
    wrong = (exact != values) & (bits & 1 == 0)
    bits += np.where(np.abs(exact) < np.abs(values), np.int32(1), np.int32(-1)) * wrong
    return torch.from_numpy(near).to(dtype)
