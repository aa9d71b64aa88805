"""Quantiles of the normal distribution by operations that are exact to the last bit everywhere, so the same on any machine.

Wichura's algorithm AS 241 (PPND16, relative error about 1e-16). The functions work on arrays of NumPy, and `numba_initial`
compiles them for scalars: only ``+ - * /`` and square roots of float64, since the logarithm of a C library may differ from
another's in the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

CENTRAL = 0.425  # `central` is for probabilities no farther than this from 1/2
NEAR = 5.0  # `near_tail` is for depths up to this
_ROOT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453


def central(q: Any) -> Any:
    """Return the quantile of the probability ``1/2 + q``."""
    r = 0.180625 - q * q
    above = 2.5090809287301226727e3
    above = above * r + 3.3430575583588128105e4
    above = above * r + 6.7265770927008700853e4
    above = above * r + 4.5921953931549871457e4
    above = above * r + 1.3731693765509461125e4
    above = above * r + 1.9715909503065514427e3
    above = above * r + 1.3314166789178437745e2
    above = above * r + 3.3871328727963666080e0
    below = 5.2264952788528545610e3
    below = below * r + 2.8729085735721942674e4
    below = below * r + 3.9307895800092710610e4
    below = below * r + 2.1213794301586595867e4
    below = below * r + 5.3941960214247511077e3
    below = below * r + 6.8718700749205790830e2
    below = below * r + 4.2313330701600911252e1
    below = below * r + 1.0
    return q * above / below


def depth(fraction: Any, exponent: Any) -> Any:
    """Return the square root of minus the logarithm of ``fraction * 2**exponent``, of a fraction from 1/2 to 1."""
    s = (fraction - _ROOT_HALF) / (fraction + _ROOT_HALF)
    t = s * s
    # The series of 2 * artanh(s), with t up to 0.0295: the next term is below 1e-18.
    series = 1.0 / 21.0
    series = series * t + 1.0 / 19.0
    series = series * t + 1.0 / 17.0
    series = series * t + 1.0 / 15.0
    series = series * t + 1.0 / 13.0
    series = series * t + 1.0 / 11.0
    series = series * t + 1.0 / 9.0
    series = series * t + 1.0 / 7.0
    series = series * t + 1.0 / 5.0
    series = series * t + 1.0 / 3.0
    series = series * t + 1.0
    return np.sqrt((0.5 - exponent) * _LN_2 - 2.0 * s * series)


def near_tail(depth: Any) -> Any:
    """Return minus the quantile of a probability below 0.075 and not very small."""
    r = depth - 1.6
    above = 7.74545014278341407640e-4
    above = above * r + 2.27238449892691845833e-2
    above = above * r + 2.41780725177450611770e-1
    above = above * r + 1.27045825245236838258e0
    above = above * r + 3.64784832476320460504e0
    above = above * r + 5.76949722146069140550e0
    above = above * r + 4.63033784615654529590e0
    above = above * r + 1.42343711074968357734e0
    below = 1.05075007164441684324e-9
    below = below * r + 5.47593808499534494600e-4
    below = below * r + 1.51986665636164571966e-2
    below = below * r + 1.48103976427480074590e-1
    below = below * r + 6.89767334985100004550e-1
    below = below * r + 1.67638483018380384940e0
    below = below * r + 2.05319162663775882187e0
    below = below * r + 1.0
    return above / below


def far_tail(depth: Any) -> Any:
    """Return minus the quantile of a probability below exp(-25)."""
    r = depth - 5.0
    above = 2.01033439929228813265e-7
    above = above * r + 2.71155556874348757815e-5
    above = above * r + 1.24266094738807843860e-3
    above = above * r + 2.65321895265761230930e-2
    above = above * r + 2.96560571828504891230e-1
    above = above * r + 1.78482653991729133580e0
    above = above * r + 5.46378491116411436990e0
    above = above * r + 6.65790464350110377720e0
    below = 2.04426310338993978564e-15
    below = below * r + 1.42151175831644588870e-7
    below = below * r + 1.84631831751005468180e-5
    below = below * r + 7.86869131145613259100e-4
    below = below * r + 1.48753612908506148525e-2
    below = below * r + 1.36929880922735805310e-1
    below = below * r + 5.99832206555887937690e-1
    below = below * r + 1.0
    return above / below


def half_range(word: Any) -> Any:
    """Return the middle of one of 2**52 equal parts between -1/2 and 1/2, by the upper bits of a random word."""
    return ((word >> np.uint64(12)) + 0.5) * 2.0**-52 - 0.5


def unit_range(word: Any) -> Any:
    """Return one of the 2**53 multiples of 2**-53 from 0 to below 1, by the upper bits of a random word."""
    return (word >> np.uint64(11)) * 2.0**-53


def normal(words: np.ndarray) -> np.ndarray:
    """Return a standard normal value for each random word (uint64), from -8.21 to 8.21."""
    places = half_range(words)
    values = central(places)
    tail = np.abs(places) > CENTRAL
    fractions, exponents = np.frexp(0.5 - np.abs(places[tail]))
    depths = depth(fractions, exponents)
    values[tail] = np.copysign(np.where(depths <= NEAR, near_tail(depths), far_tail(depths)), places[tail])
    return values
