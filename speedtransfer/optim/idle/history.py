r"""The steps that idle rows have missed, folded into a few numbers for every step that a row may have been touched last at.

Rows differ in when they were touched last, and a batch may meet thousands of such steps. So each step since the last sweep has
one line in a table: what all steps after it amount to. A new step multiplies the products of all lines; nothing is replayed.

Adam and its relatives divide by a root that no product can express. With :math:`B_{su}` and :math:`R_{su}` the products of
what the steps s+1..u do to numerator m and root x, the steps missed take

.. math:: m \sum_u \frac{c_u B_{su}}{r_u R_{su} x + \epsilon_u} = m \sum_u \frac{w_u}{x + e_u} = m\, G_s(x)

from a weight. :math:`G_s` is the Stieltjes transform of a positive measure (but for a decay of more than the whole weight),
with masses w at the points e, and for such a sum Gaussian quadrature is made: three nodes, as a continued fraction whose
coefficients the Lanczos recurrence gives, replace hundreds of steps (W. Gautschi, Orthogonal Polynomials: Computation and
Approximation, 2004, sections 2.2 and 3.1). The relative error is of the order of :math:`((\sqrt k - 1) / (\sqrt k + 1))^6`,
where k = (x + max e) / (x + min e), so each line also says from which x on that is small enough; rows with smaller ones go
step by step. m vanishes geometrically: a line is final once a certain number of steps (the horizon) lies behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.optim.idle.rules import IdleStep, Rule

_NODES = 3
_SUMS = 2 * _NODES + 2  # linear, mass, centers, spreads, valid_from
_SMALLEST_SLOPE = 1e-150
_SMALLEST_FACTOR = 1e-3  # of a mean decay, to bound the horizon
_WINDOW_VALUES = 1 << 20  # a window of this many lines and steps is worked on at once
_FLUSH_STEPS, _FLUSH_BELOW = 16, 1e-150  # products are set to zero before they become subnormal, which is slow


@dataclass
class Missed:
    """What some rows have missed; each ``(n, 1)``.

    Attributes
    ----------
    decay : Tensor
        Multiplies the weights.
    mix : list of Tensor
        As `IdleStep.mix`, for the weights and the partner plane.
    factors : list of Tensor
        Multiply the planes of `Rule.factors`.
    linear, mass : Tensor
        ``(linear + mass / (x + ...)) m`` is taken from the weights.
    centers, spreads : list of Tensor
        Of the continued fraction ``mass / (x + centers[0] - spreads[0] / (x + centers[1] - ...))``.
    valid_from : Tensor
        The smallest x for which that is good.
    """

    decay: Tensor
    mix: list[Tensor]
    factors: list[Tensor]
    linear: Tensor
    mass: Tensor
    centers: list[Tensor]
    spreads: list[Tensor]
    valid_from: Tensor

    @classmethod
    def of(cls, lines: Tensor) -> Missed:
        """Name the columns of `History.lines`."""
        columns = list(lines.split(1, dim=1))
        sums = len(columns) - _SUMS
        centers = sums + 2
        return cls(
            decay=columns[0],
            mix=columns[1:5],
            factors=columns[5:sums],
            linear=columns[sums],
            mass=columns[sums + 1],
            centers=columns[centers : centers + _NODES],
            spreads=columns[centers + _NODES : -1],
            valid_from=columns[-1],
        )


class History:
    """Steps made, counted from 1; a row that was last touched at step s has missed the steps ``s + 1 .. now``.

    Parameters
    ----------
    rule : Rule
    dtype : torch.dtype
        Of the weights: how good the sums must be.
    device : torch.device
        Where rows are caught up.
    """

    def __init__(self, rule: Rule, dtype: torch.dtype, device: torch.device) -> None:
        self.rule, self.device = rule, device
        self.now = 0
        self.eps = 0.0  # of the newest step
        self.base = 0  # no row was last touched before this step
        self._tolerance, self._largest = (1e-13, 1e300) if dtype == torch.float64 else (1e-7, 1e37)
        self.horizon = 1
        self._growth, self._shrink = 0.0, 0.0  # largest |B| / |R| and |B| of a step so far
        self._final = 0  # lines before this one have their quadrature for good
        self._summed = 0  # `now` when the quadrature was made
        self._unflushed = 0
        self._allocate(256)

    def _allocate(self, capacity: int) -> None:
        count = len(self.rule.factors)
        f64: Any = {"dtype": torch.float64, "device": self.device}
        # Lines by last step - base. Products over the steps missed: decay, four of mix, one for each factor.
        self._products = torch.ones(capacity + 1, 5 + count, **f64)
        self._products[:, 2:4] = 0
        self._quadrature = torch.zeros(capacity + 1, _SUMS, **f64)
        # Index of the line whose decay belongs to the sums of this line: they were made when that was the newest.
        self._made_at = torch.zeros(capacity + 1, dtype=torch.int64, device=self.device)
        # Steps: scale, root, eps, what happens to numerator and root, decay.
        self._nothing = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], **f64)
        self._steps = self._nothing.repeat(capacity, 1)

    @property
    def length(self) -> int:
        """Number of steps that are remembered."""
        return self.now - self.base

    def _grow(self) -> None:
        old = self._products, self._quadrature, self._made_at, self._steps
        self._allocate(2 * len(self._steps))
        for new, previous in zip((self._products, self._quadrature, self._made_at, self._steps), old, strict=True):
            new[: len(previous)] = previous

    def record(self, step: IdleStep) -> None:
        """Take in one more step."""
        count = self.length
        if count == len(self._steps):
            self._grow()
        products = self._products[: count + 1]
        a, b, c, d = step.mix
        if step.mix != (1.0, 0.0, 0.0, 1.0):
            weights, partners = products[:, 1:3].clone(), products[:, 3:5].clone()  # rows of each 2 x 2 product
            products[:, 1:3] = a * weights + b * partners
            products[:, 3:5] = c * weights + d * partners
        if step.decay != 1.0:
            products[:, 0] *= step.decay
        for column, factor in enumerate(step.factors, start=5):
            if factor != 1.0:
                products[:, column] *= factor
        self._unflushed += 1
        if self._unflushed >= _FLUSH_STEPS:
            products[products.abs() < _FLUSH_BELOW] = 0
            self._unflushed = 0
        self.now += 1
        self.eps = step.eps
        if self.rule.denominator is not None:
            self._take_term(step, count)

    def _take_term(self, step: IdleStep, index: int) -> None:
        numerator = step.factors[0]
        if self.rule.denominator in self.rule.factors:
            square = step.factors[self.rule.factors.index(self.rule.denominator)]
            root = square if self.rule.floor else math.sqrt(square)
        else:
            root = 1.0  # amsgrad: a maximum, which stays
        self._steps[index] = torch.tensor(
            [step.scale, step.root, step.eps, numerator, root, step.decay], dtype=torch.float64
        )
        self._growth = max(self._growth, abs(numerator) / max(root, 1e-300))
        self._shrink = max(self._shrink, abs(numerator))
        self.horizon = max(self.horizon, self._needed_horizon())

    def _needed_horizon(self) -> int:
        """Return the number of missed steps after which no term adds anything, whatever x is."""
        steps = 1 << 20
        for factor, small in ((self._growth, self._tolerance), (self._shrink, 1e-24)):
            if factor < 1:
                steps = min(steps, math.ceil(math.log(small) / math.log(max(factor, _SMALLEST_FACTOR))))
        return max(steps, 1)

    def _sum_terms(self) -> None:
        """Make the quadrature of all lines that are not final."""
        count = self.length
        if self.rule.denominator is None or self._summed == self.now:
            return
        width = min(self.horizon, count - self._final)
        at_once = max(1, _WINDOW_VALUES // width)
        for first in range(self._final, count, at_once):
            self._sum_terms_of(first, min(first + at_once, count), width)
        self._made_at[self._final : count] = count
        self._final = max(self._final, count - self.horizon)
        self._summed = self.now

    def _sum_terms_of(self, first: int, stop: int, width: int) -> None:
        scale, root, eps, numerators, roots, decay = self._windows(first, stop, width)
        b, r = numerators.cumprod(1), roots.cumprod(1)
        mass, slope = scale * b * decay, root * r
        divides = slope > _SMALLEST_SLOPE  # else x does not count, and the term is m / eps
        linear = torch.where(divides | (mass == 0), 0.0, mass / eps).sum(1)
        weight = torch.where(divides, mass / slope, 0.0)
        point = torch.where(divides & (weight != 0), eps / slope, 0.0)
        lines = self._quadrature[first:stop]
        lines[:, 0] = linear
        if self.rule.floor:
            lines[:, 1] = weight.sum(1)
            lines[:, -1] = point.amax(1)
        else:
            self._lanczos(weight, point, lines)
        # No measure (decay of more than all turns signs around), or beyond the numbers that rows have: step by step.
        useless = (weight < 0).any(1) | (lines.abs() > self._largest).any(1) | lines.isnan().any(1)
        lines[useless] = 0
        lines[useless, -1] = math.inf

    def _windows(self, first: int, stop: int, width: int) -> list[Tensor]:
        """Return, for the lines `first` to `stop`, columns of the `width` steps after each; past the newest: nothing."""
        have = min(stop + width - 1, self.length)
        lacking = stop + width - 1 - have
        steps = torch.cat([self._steps[first:have], self._nothing.expand(lacking, 6)])
        columns = [steps[:, column].unfold(0, width, 1) for column in range(5)]
        # What comes off the weights in a step decays in all later ones.
        later = torch.cat([self._products[first + 1 : have + 1, 0], self._nothing[1:2].expand(lacking)])
        return [*columns, later.unfold(0, width, 1)]

    def _lanczos(self, weight: Tensor, point: Tensor, lines: Tensor) -> None:
        total = weight.sum(1)
        unit = point.amax(1).clamp_min(1e-300)  # of the points, so that nothing here is very small
        e = point / unit[:, None]
        vector = (weight.clamp_min(0) / total.clamp_min(1e-300)[:, None]).sqrt()
        before, spread = torch.zeros_like(vector), torch.zeros_like(total)
        lines[:, 1] = total
        for node in range(_NODES):
            moved = e * vector
            center = (moved * vector).sum(1)
            lines[:, 2 + node] = center * unit
            if node == _NODES - 1:
                break
            moved -= center[:, None] * vector + spread[:, None] * before
            norm = moved.norm(dim=1)
            spread = torch.where(norm > 1e-13, norm, 0.0)  # below: rounding, all points have their node already
            lines[:, 2 + _NODES + node] = spread.square() * unit.square()
            before, vector = vector, torch.where(spread > 0, 1 / norm, 0.0)[:, None] * moved
        # From here on the ratio of largest to smallest x + e is one that three nodes are good for.
        rate = self._tolerance ** (1 / (2 * _NODES))
        ratio = ((1 + rate) / (1 - rate)) ** 2
        smallest = torch.where(weight > 0, point, math.inf).amin(1).nan_to_num(posinf=0.0)
        lines[:, -1] = ((point.amax(1) - ratio * smallest) / (ratio - 1)).clamp_min(0)

    def steps_after(self, line: Tensor, number: int) -> tuple[Tensor, ...]:
        """Return scale, root, eps, factors of numerator and root, and decay of a step, ``(n, 1)`` each.

        Parameters
        ----------
        line : Tensor
            ``(n,)``: last step of each row, less `base`.
        number : int
            Which step after it, from 0; one that has not been made does nothing.
        """
        index = line + number
        made = (index < self.length)[:, None]
        return torch.where(made, self._steps[index.clamp_max(self.length - 1)], self._nothing).split(1, dim=1)

    def decay_after(self, line: Tensor) -> Tensor:
        """Return what multiplies weights, ``(n, 1)``, in the steps beyond the horizon of each line."""
        return self._products[(line + self.horizon).clamp_max(self.length), 0:1]

    def to(self, device: torch.device) -> None:
        """Keep everything on `device`."""
        if device != self.device:
            self.device = device
            names = "_products", "_quadrature", "_made_at", "_steps", "_nothing"
            vars(self).update({name: vars(self)[name].to(device) for name in names})

    def sweep(self) -> None:
        """Forget all steps: every row has been brought up to date."""
        self.base, self._summed, self._final, self._unflushed = self.now, self.now, 0, 0
        self._allocate(256)

    def lines(self, index: Tensor) -> Tensor:
        """Return the lines `index`, (n,) int64 (last steps of rows, less `base`), in float64; for `Missed.of`."""
        self._sum_terms()
        products, sums = self._products[index], self._quadrature[index]
        if self.rule.denominator is not None:
            sums[:, :2] *= self._products[self._made_at[index], 0:1]  # the decay of the steps after they were made
        return torch.cat([products, sums], dim=1)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return products, sums and where these were made, by line, and the steps, over the same memory (on the CPU)."""
        self._sum_terms()
        return self._products.numpy(), self._quadrature.numpy(), self._made_at.numpy(), self._steps.numpy()
