"""The steps of `replay` compiled by numba: a row takes all that it has missed while it is in the nearest cache.

Each function lets the rows `start` to `stop` take steps. It is called without the GIL, with the weights and the state planes
of its kind, ``(n, dim)`` (one of no columns where there is none), then ``numbers`` (steps, 8) in their dtype, ``last`` and
``until`` (n,) int32, the step that a row has taken last and the one that it shall have, and the step `base` that the numbers
begin after. It rounds as the dtype does, like torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from speedtransfer.jit import compile_function


@compile_function
def _adam(
    weight: Any, m: Any, v: Any, largest: Any, numbers: Any, last: Any, until: Any, base: int, start: int, stop: int
) -> None:
    dim, amsgrad = weight.shape[1], largest.shape[1] > 0
    for j in range(start, stop):
        p_row, m_row, v_row = weight[j], m[j], v[j]
        x_row = largest[j] if amsgrad else v_row
        for number in range(last[j] - base, until[j] - base):
            decay, first, second, added = numbers[number, 0], numbers[number, 1], numbers[number, 2], numbers[number, 3]
            root, eps, scale, gradient_scale = (
                numbers[number, 4],
                numbers[number, 5],
                numbers[number, 6],
                numbers[number, 7],
            )
            if amsgrad:
                for i in range(dim):
                    grad = decay * p_row[i]
                    moment = m_row[i] + first * (grad - m_row[i])
                    square = v_row[i] * second + added * grad * grad
                    m_row[i], v_row[i] = moment, square
                    x_row[i] = max(x_row[i], square)
                    divisor = np.sqrt(x_row[i]) * root + eps
                    p_row[i] -= scale * moment / divisor + gradient_scale * grad / divisor
            else:
                for i in range(dim):
                    grad = decay * p_row[i]
                    moment = m_row[i] + first * (grad - m_row[i])
                    square = v_row[i] * second + added * grad * grad
                    m_row[i], v_row[i] = moment, square
                    p_row[i] -= (scale * moment + gradient_scale * grad) / (np.sqrt(square) * root + eps)


@compile_function
def _adamax(weight: Any, m: Any, u: Any, numbers: Any, last: Any, until: Any, base: int, start: int, stop: int) -> None:
    for j in range(start, stop):
        p_row, m_row, u_row = weight[j], m[j], u[j]
        for number in range(last[j] - base, until[j] - base):
            decay, first, second = numbers[number, 0], numbers[number, 1], numbers[number, 2]
            eps, scale = numbers[number, 5], numbers[number, 6]
            for i in range(len(p_row)):
                grad = decay * p_row[i]
                moment = m_row[i] + first * (grad - m_row[i])
                largest = max(u_row[i] * second, abs(grad) + eps)
                m_row[i], u_row[i] = moment, largest
                p_row[i] -= scale * moment / largest


@compile_function
def _rmsprop(
    weight: Any,
    square: Any,
    mean: Any,
    buffer: Any,
    numbers: Any,
    last: Any,
    until: Any,
    base: int,
    start: int,
    stop: int,
) -> None:
    for j in range(start, stop):
        p_row, s_row, a_row, b_row = weight[j], square[j], mean[j], buffer[j]
        for number in range(last[j] - base, until[j] - base):
            decay, alpha, added = numbers[number, 0], numbers[number, 1], numbers[number, 2]
            eps, lr, momentum = numbers[number, 3], numbers[number, 4], numbers[number, 5]
            centered, moves = numbers[number, 6] != 0, momentum != 0
            for i in range(len(p_row)):
                grad = decay * p_row[i]
                s_row[i] = s_row[i] * alpha + added * grad * grad
                spread = s_row[i]
                if centered:
                    a_row[i] += added * (grad - a_row[i])
                    spread -= a_row[i] * a_row[i]
                step = grad / (np.sqrt(spread) + eps)
                if moves:
                    step += b_row[i] * momentum
                    b_row[i] = step
                p_row[i] -= lr * step


@compile_function
def _adadelta(
    weight: Any, square: Any, moved: Any, numbers: Any, last: Any, until: Any, base: int, start: int, stop: int
) -> None:
    for j in range(start, stop):
        p_row, s_row, d_row = weight[j], square[j], moved[j]
        for number in range(last[j] - base, until[j] - base):
            decay, rho, added = numbers[number, 0], numbers[number, 1], numbers[number, 2]
            eps, lr = numbers[number, 3], numbers[number, 4]
            for i in range(len(p_row)):
                grad = decay * p_row[i]
                size = s_row[i] * rho + added * grad * grad
                delta = np.sqrt(d_row[i] + eps) / np.sqrt(size + eps) * grad
                s_row[i], d_row[i] = size, d_row[i] * rho + added * delta * delta
                p_row[i] -= lr * delta


@compile_function
def _adagrad(weight: Any, total: Any, numbers: Any, last: Any, until: Any, base: int, start: int, stop: int) -> None:
    for j in range(start, stop):
        p_row, s_row = weight[j], total[j]
        for number in range(last[j] - base, until[j] - base):
            decay, lr, eps = numbers[number, 0], numbers[number, 1], numbers[number, 2]
            for i in range(len(p_row)):
                grad = decay * p_row[i]
                size = s_row[i] + grad * grad
                s_row[i] = size
                p_row[i] -= lr * grad / (np.sqrt(size) + eps)


KINDS: dict[str, Any] = {
    "adam": _adam,
    "adamax": _adamax,
    "rmsprop": _rmsprop,
    "adadelta": _adadelta,
    "adagrad": _adagrad,
}
