r"""The steps that idle rows have missed, folded into a few numbers for every step that a row may have been touched last at.

Rows differ in when they were touched last, and a batch may meet thousands of such steps. So each step since the last sweep has
one line in a table: what all steps after it amount to. Nothing is replayed. A new step multiplies products: those of the lines
of its own block of 256, and one line for each block before, which holds the steps since that block was full.

Adam and its relatives divide by a root that no product can express. With :math:`B_{su}` and :math:`R_{su}` the products of
what the steps s+1..u do to numerator m and root x, the steps missed take

.. math:: m \sum_u \frac{c_u B_{su}}{r_u R_{su} x + \epsilon_u} = m \sum_u \frac{w_u}{x + e_u} = m\, G_s(x)

from a weight. :math:`G_s` is the Stieltjes transform of a positive measure (but for a decay of more than the whole weight),
with masses w at the points e, and for such a sum Gaussian quadrature is made: three nodes, as a continued fraction, replace
hundreds of steps (W. Gautschi, Orthogonal Polynomials: Computation and Approximation, 2004, sections 2.2 and 3.1). `sums` adds
a step to them. The relative error is of the order of :math:`((\sqrt k - 1) / (\sqrt k + 1))^6`, where k = (x + max e) /
(x + min e), so each line also says from which x on that is small enough; rows with smaller ones go step by step. m vanishes
geometrically: a line is final once a certain number of steps (the horizon) lies behind it.

All of it is kept on the host, whatever device the rows are caught up on: there the lines that have changed are sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer import jit
from speedtransfer.idle import quadrature as sums
from speedtransfer.idle.mirror import Mirror
from speedtransfer.idle.quadrature import BLOCK, NODES, OWN, STEP, SUMS, Floats
from speedtransfer.idle.rule import IdleStep, Rule

_CAPACITY = 256
_SMALLEST_FACTOR = 1e-3  # of a mean decay, to bound the horizon


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
        products = len(columns) - SUMS
        centers = products + 2
        return cls(
            decay=columns[0],
            mix=columns[1:5],
            factors=columns[5:products],
            linear=columns[products],
            mass=columns[products + 1],
            centers=columns[centers : centers + NODES],
            spreads=columns[centers + NODES : -1],
            valid_from=columns[-1],
        )


class History:
    """Steps made, counted from 1; a row that was last touched at step s has missed the steps ``s + 1 .. now``.

    Parameters
    ----------
    rule : Rule
    dtype : torch.dtype
        Of the weights: how good the sums must be.
    now : int
        Steps that every row has taken already.
    """

    def __init__(self, rule: Rule, dtype: torch.dtype, now: int = 0) -> None:
        self.rule = rule
        self.now = self.base = now  # no row was last touched before step `base`
        self.eps = 0.0  # of the newest step
        self._tolerance, largest = (1e-13, 1e300) if dtype == torch.float64 else (1e-7, 1e37)
        # From here on the ratio of largest to smallest x + e is one that three nodes are good for.
        rate = self._tolerance ** (1 / (2 * NODES))
        self._limits = np.array([((1 + rate) / (1 - rate)) ** 2, largest])
        self.horizon = 1
        self._growth, self._shrink = 0.0, 0.0  # largest |B| / |R| and |B| of a step so far
        self._has_sums = rule.denominator is not None
        self._products = 5 + len(rule.factors)
        self._step = np.ones(self._products + (STEP if self._has_sums else 0))
        self._mirror = Mirror()
        self._allocate(_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        line = sums.identity(self._products, self._has_sums)
        self._lines: Floats = np.tile(line, (capacity + 1, 1))
        self._blocks: Floats = np.tile(line[: self._products], (capacity // BLOCK + 1, 1))
        self._final = 0  # lines before this one have their sums for good
        self._hard_final = False  # whether one of them is not good for every x
        self._mirror.reset()

    @property
    def length(self) -> int:
        """Number of steps that are remembered."""
        return self.now - self.base

    @property
    def memory_bytes(self) -> int:
        """What the lines take."""
        return self._lines.nbytes + self._blocks.nbytes

    def _grow(self) -> None:
        lines, blocks, final, hard = self._lines, self._blocks, self._final, self._hard_final
        self._allocate(2 * (len(lines) - 1))
        self._lines[: len(lines)], self._blocks[: len(blocks)] = lines, blocks
        self._final, self._hard_final = final, hard

    def record(self, step: IdleStep) -> None:
        """Take in one more step."""
        count, products = self.length, self._products
        if count == len(self._lines) - 1:
            self._grow()
        values = self._step
        values[0], values[1:5], values[5:products] = step.decay, step.mix, step.factors
        if self._has_sums:
            values[products:] = self._term(step)
        compiled = compiled_module()
        take = sums.take_step if compiled is None else compiled.take_step
        take(self._lines, self._blocks, count, self._final, values, self._limits, self.rule.floor)
        self.now += 1
        self.eps = step.eps
        if self._has_sums:
            final = max(self._final, count + 1 - self.horizon)
            self._hard_final = self._hard_final or bool((self._valid_from(self._final, final) > 0).any())
            self._final = final

    def _valid_from(self, first: int, stop: int) -> Floats:
        return self._lines[first:stop, self._products + SUMS - 1]

    def _term(self, step: IdleStep) -> tuple[float, ...]:
        numerator = step.factors[0]
        if self.rule.denominator in self.rule.factors:
            square = step.factors[self.rule.factors.index(self.rule.denominator)]
            root = square if self.rule.floor else math.sqrt(square)
        else:
            root = 1.0  # amsgrad: a maximum, which stays
        growth, shrink = abs(numerator) / max(root, 1e-300), abs(numerator)
        if growth > self._growth or shrink > self._shrink:
            self._growth, self._shrink = max(self._growth, growth), max(self._shrink, shrink)
            self.horizon = max(self.horizon, self._needed_horizon())
        return step.scale, step.root, step.eps, numerator, root, step.decay

    def _needed_horizon(self) -> int:
        """Return the number of missed steps after which no term adds anything, whatever x is."""
        steps = 1 << 20
        for factor, small in ((self._growth, self._tolerance), (self._shrink, 1e-24)):
            if factor < 1:
                steps = min(steps, math.ceil(math.log(small) / math.log(max(factor, _SMALLEST_FACTOR))))
        return max(steps, 1)

    @property
    def any_hard(self) -> bool:
        """Whether there may be a row that must go step by step."""
        return self._hard_final or bool((self._valid_from(self._final, self.length) > 0).any())

    def sweep(self) -> None:
        """Forget all steps: every row has been brought up to date."""
        self.base = self.now
        self._allocate(_CAPACITY)

    # --- for rows -----------------------------------------------------------------------------------------------------

    def arrays(self) -> tuple[Floats, Floats]:
        """Return lines and blocks, for compiled code."""
        return self._lines, self._blocks

    def _tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return lines and blocks on `device`."""
        if device.type == "cpu":
            return torch.from_numpy(self._lines), torch.from_numpy(self._blocks)
        return self._mirror.tensors(device, self._lines, self._blocks, self.length, self._final)

    def lines(self, index: Tensor) -> Tensor:
        """Return the lines `index`, (n,) int64 (last steps of rows, less `base`), in float64; for `Missed.of`."""
        lines, blocks = self._tensors(index.device)
        count = self._products
        found, later = lines[index], blocks[index // BLOCK]
        products = found[:, :count] * later
        if self.rule.partner is not None:
            (a, b, c, d), (e, f, g, h) = found[:, 1:5].unbind(1), later[:, 1:5].unbind(1)
            products[:, 1:5] = torch.stack([e * a + f * c, e * b + f * d, g * a + h * c, g * b + h * d], dim=1)
        if not self._has_sums:
            return torch.cat([products, products.new_zeros(len(index), SUMS)], dim=1)
        terms = found[:, count : count + SUMS]
        valid_from = terms[:, -1:]
        terms = torch.where(valid_from.isinf(), 0.0, terms)  # of which 0 * m might be NaN
        terms[:, :2] *= products[:, :1]
        terms[:, -1:] = valid_from
        return torch.cat([products, terms], dim=1)

    def steps_after(self, line: Tensor, number: int) -> tuple[Tensor, ...]:
        """Return scale, root, eps, factors of numerator and root, and decay of a step, ``(n, 1)`` each.

        Parameters
        ----------
        line : Tensor
            ``(n,)``: last step of each row, less `base`.
        number : int
            Which step after it, from 0; one that has not been made does nothing.
        """
        lines, _ = self._tensors(line.device)
        return lines[(line + number).clamp_max(self.length), self._products + SUMS + OWN :].split(1, dim=1)

    def decay_after(self, line: Tensor) -> Tensor:
        """Return what multiplies weights, ``(n, 1)``, in the steps beyond the horizon of each line."""
        return self.lines((line + self.horizon).clamp_max(self.length))[:, :1]


def compiled_module() -> Any:
    """Return the module `compiled`, or None without numba."""
    return jit.compiled_module("speedtransfer.idle.numba_catch_up")
