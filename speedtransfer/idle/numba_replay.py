"""Compile with numba the steps of `replay`: a row takes all that it has missed while it is in the nearest cache.

It rounds as the dtype of the rows does, like torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from speedtransfer.jit import compile_function

_ADAM, _ADAMAX, _RMSPROP, _ADADELTA, _ADAGRAD = range(5)
KINDS = {"adam": _ADAM, "adamax": _ADAMAX, "rmsprop": _RMSPROP, "adadelta": _ADADELTA, "adagrad": _ADAGRAD}


@njit(inline="always")
def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Return what ``torch.lerp`` does: exactly `end` where the weight is 1."""
    if weight < 0.5:
        return start + weight * (end - start)
    return end - (end - start) * (type(weight)(1) - weight)


@njit(inline="always")
def _adam(p: Any, m: Any, v: Any, numbers: Any) -> None:
    decay, first, second, added = numbers[0], numbers[1], numbers[2], numbers[3]
    root, eps, scale, gradient_scale = numbers[4], numbers[5], numbers[6], numbers[7]
    for i in range(len(p)):
        grad = decay * p[i]
        moment = _lerp(m[i], grad, first)
        square = v[i] * second + added * grad * grad
        m[i], v[i] = moment, square
        p[i] -= (scale * moment + gradient_scale * grad) / (np.sqrt(square) * root + eps)


@njit(inline="always")
def _amsgrad(p: Any, m: Any, v: Any, largest: Any, numbers: Any) -> None:
    decay, first, second, added = numbers[0], numbers[1], numbers[2], numbers[3]
    root, eps, scale, gradient_scale = numbers[4], numbers[5], numbers[6], numbers[7]
    for i in range(len(p)):
        grad = decay * p[i]
        moment = _lerp(m[i], grad, first)
        square = v[i] * second + added * grad * grad
        m[i], v[i] = moment, square
        largest[i] = max(largest[i], square)
        divisor = np.sqrt(largest[i]) * root + eps
        p[i] -= scale * moment / divisor + gradient_scale * grad / divisor


@njit(inline="always")
def _adamax(p: Any, m: Any, u: Any, numbers: Any) -> None:
    decay, first, second, eps, scale = numbers[0], numbers[1], numbers[2], numbers[5], numbers[6]
    for i in range(len(p)):
        grad = decay * p[i]
        moment = _lerp(m[i], grad, first)
        largest = max(u[i] * second, abs(grad) + eps)
        m[i], u[i] = moment, largest
        p[i] -= scale * moment / largest


@njit(inline="always")
def _rmsprop(p: Any, squares: Any, means: Any, buffers: Any, numbers: Any) -> None:
    decay, alpha, added, eps, lr, momentum = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    centered, moves = numbers[6] != 0, momentum != 0
    for i in range(len(p)):
        grad = decay * p[i]
        squares[i] = squares[i] * alpha + added * grad * grad
        spread = squares[i]
        if centered:
            means[i] = _lerp(means[i], grad, added)
            spread -= means[i] * means[i]
        step = grad / (np.sqrt(spread) + eps)
        if moves:
            step += buffers[i] * momentum
            buffers[i] = step
        p[i] -= lr * step


@njit(inline="always")
def _adadelta(p: Any, squares: Any, moved: Any, numbers: Any) -> None:
    decay, rho, added, eps, lr = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    for i in range(len(p)):
        grad = decay * p[i]
        size = squares[i] * rho + added * grad * grad
        delta = np.sqrt(moved[i] + eps) / np.sqrt(size + eps) * grad
        squares[i], moved[i] = size, moved[i] * rho + added * delta * delta
        p[i] -= lr * delta


@njit(inline="always")
def _adagrad(p: Any, totals: Any, numbers: Any) -> None:
    decay, lr, eps = numbers[0], numbers[1], numbers[2]
    for i in range(len(p)):
        grad = decay * p[i]
        size = totals[i] + grad * grad
        totals[i] = size
        p[i] -= lr * grad / (np.sqrt(size) + eps)


@compile_function
def take_steps(
    kind: int,
    weight: Any,
    a: Any,
    b: Any,
    c: Any,
    numbers: Any,
    last: Any,
    until: Any,
    base: int,
    start: int,
    stop: int,
) -> None:
    """Let the rows `start` to `stop` take the steps that they have missed.

    Parameters
    ----------
    kind : int
        Of `KINDS`.
    weight, a, b, c : array
        ``(n, dim)``: weights and state planes, in the order of `replay.PLANES`; one of no columns where there is none.
    numbers : array
        ``(steps, 8)`` in the dtype of the rows, of the steps after step number `base`.
    last, until : array
        ``(n,)`` int32: the step that a row has taken last, and the one that it shall have.
    """
    for j in range(start, stop):
        for number in range(last[j] - base, until[j] - base):
            if kind == _ADAM and c.shape[1]:
                _amsgrad(weight[j], a[j], b[j], c[j], numbers[number])
            elif kind == _ADAM:
                _adam(weight[j], a[j], b[j], numbers[number])
            elif kind == _ADAMAX:
                _adamax(weight[j], a[j], b[j], numbers[number])
            elif kind == _RMSPROP:
                _rmsprop(weight[j], a[j], b[j], c[j], numbers[number])
            elif kind == _ADADELTA:
                _adadelta(weight[j], a[j], b[j], numbers[number])
            else:
                _adagrad(weight[j], a[j], numbers[number])
