"""Compile with numba the initial values of new ids: quantiles by operations that are exact to the last bit on any machine.

Normal values are by Wichura's algorithm AS 241 (PPND16, relative error about 1e-16): only ``+ - * /`` and square roots of
float64, since the logarithm of a C library may differ from another's in the last bit. What is `inlined` takes arrays of NumPy
too, where it is called from Python.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from speedtransfer.jit import compile_function
from speedtransfer.vocabulary import mixing
from speedtransfer.vocabulary.mixing import GOLDEN

_CENTRAL = 0.425  # `central` is for probabilities no farther than this from 1/2
_NEAR = 5.0  # depths up to which the tail is near
_ROOT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
# Polynomials, above and below a fraction, from the highest power on.
# fmt: off
_MIDDLE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)
_NEAR_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)
# fmt: on
# 2 * artanh(s) / (2 * s) in s * s, up to 0.0295: the next term is below 1e-18.
_ARTANH = tuple(1.0 / power for power in range(21, 0, -2))

mix64 = register_jitable(inline="always")(mixing.mix64)
inlined = register_jitable(inline="always", error_model="numpy")


# LLVM inlines it, and unrolls the loop.
@register_jitable(error_model="numpy")
def _polynomial(coefficients: Any, r: Any) -> Any:
    value = coefficients[0]
    for power in range(1, len(coefficients)):
        value = value * r + coefficients[power]
    return value


@inlined
def central(q: Any) -> Any:
    """Return the quantile of the probability ``1/2 + q``."""
    r = 0.180625 - q * q
    return q * _polynomial(_MIDDLE[0], r) / _polynomial(_MIDDLE[1], r)


@inlined
def depth(fraction: Any, exponent: Any) -> Any:
    """Return the square root of minus the logarithm of ``fraction * 2**exponent``, of a fraction from 1/2 to 1."""
    s = (fraction - _ROOT_HALF) / (fraction + _ROOT_HALF)
    return np.sqrt((0.5 - exponent) * _LN_2 - 2.0 * s * _polynomial(_ARTANH, s * s))


@inlined
def tail(depth: Any) -> Any:
    """Return minus the quantile of a probability below 0.075, whose `depth` that is."""
    if depth <= _NEAR:
        r = depth - 1.6
        return _polynomial(_NEAR_TAIL[0], r) / _polynomial(_NEAR_TAIL[1], r)
    r = depth - 5.0
    return _polynomial(_FAR_TAIL[0], r) / _polynomial(_FAR_TAIL[1], r)


@inlined
def half_range(word: Any) -> Any:
    """Return the middle of one of 2**52 equal parts between -1/2 and 1/2, by the upper bits of a random word."""
    return ((word >> np.uint64(12)) + 0.5) * 2.0**-52 - 0.5


@compile_function
def fill(
    values: Any, streams: Any, normal: bool, first: float, scale: float, highest: float, start: int, stop: int
) -> None:
    """Fill the rows `start` to `stop` of values (n, dim), float32 or float64, by `initial.stream_starts` (n,), uint64.

    They are normal or else uniform; `first` and `scale` are added and multiplied to the standard value, `highest` is what it
    may not exceed then.
    """
    dim = values.shape[1]
    places = np.empty(dim)
    for j in range(start, stop):
        word = streams[j]
        if normal:
            # The middle part for all, without a branch, so that several columns are computed at once.
            for i in range(dim):
                q = half_range(mix64(word + np.uint64(i + 1) * GOLDEN))
                places[i] = q
                values[j, i] = min(central(q) * scale + first, highest)
            for i in range(dim):
                q = places[i]
                if abs(q) > _CENTRAL:
                    fraction, exponent = math.frexp(0.5 - abs(q))
                    size = tail(depth(fraction, exponent))
                    values[j, i] = min(math.copysign(size, q) * scale + first, highest)
        else:
            # One of the 2**53 multiples of 2**-53 from 0 to below 1, by the upper bits of a random word.
            for i in range(dim):
                bits = mix64(word + np.uint64(i + 1) * GOLDEN) >> np.uint64(11)
                values[j, i] = min(bits * 2.0**-53 * scale + first, highest)
