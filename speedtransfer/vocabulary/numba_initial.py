"""Compile with numba the initial values of new ids: the operations of `quantiles`, in the same order, so the same bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from speedtransfer.jit import compile_function
from speedtransfer.vocabulary import mixing, quantiles
from speedtransfer.vocabulary.mixing import GOLDEN
from speedtransfer.vocabulary.quantiles import CENTRAL, NEAR

mix64 = register_jitable(inline="always")(mixing.mix64)
_inlined = register_jitable(inline="always", error_model="numpy")
_half_range, _unit_range, _central = (
    _inlined(f) for f in (quantiles.half_range, quantiles.unit_range, quantiles.central)
)
_depth, _near_tail, _far_tail = (_inlined(f) for f in (quantiles.depth, quantiles.near_tail, quantiles.far_tail))


@compile_function
def fill(
    values: Any, streams: Any, normal: bool, first: float, scale: float, highest: float, start: int, stop: int
) -> None:
    """Fill the rows `start` to `stop`.

    Parameters
    ----------
    values : array
        (n, dim) float32 or float64.
    streams : array
        (n,) uint64: `initial.stream_starts`.
    normal : bool
        Else uniform.
    first, scale, highest : float
        Added and multiplied to the standard value, and what it may not exceed then.
    """
    dim = values.shape[1]
    places = np.empty(dim)
    for j in range(start, stop):
        word = streams[j]
        if normal:
            # The middle part for all, without a branch, so that several columns are computed at once.
            for i in range(dim):
                q = _half_range(mix64(word + np.uint64(i + 1) * GOLDEN))
                places[i] = q
                values[j, i] = min(_central(q) * scale + first, highest)
            for i in range(dim):
                q = places[i]
                if abs(q) > CENTRAL:
                    fraction, exponent = math.frexp(0.5 - abs(q))
                    depth = _depth(fraction, exponent)
                    size = _near_tail(depth) if depth <= NEAR else _far_tail(depth)
                    values[j, i] = min(math.copysign(size, q) * scale + first, highest)
        else:
            for i in range(dim):
                values[j, i] = min(_unit_range(mix64(word + np.uint64(i + 1) * GOLDEN)) * scale + first, highest)
