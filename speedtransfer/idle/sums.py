r"""For each past step, the combined effect of all steps since: a line of a table, which a step changes and rows look up.

Rows differ in when they were touched last, and a batch may meet thousands of such steps. So each step has one line: what all
steps after it amount to. Nothing is replayed. A new step multiplies products: those of the lines of its own block of 256, and
one line for each block before, which holds the steps since that block was full.

Adam and its relatives divide by a root that no product can express. With :math:`B_{su}` and :math:`R_{su}` the products of
what the steps s+1..u do to numerator m and root x, the steps missed take

.. math:: m \sum_u \frac{c_u B_{su}}{r_u R_{su} x + \epsilon_u} = m \sum_u \frac{w_u}{x + e_u} = m\, G_s(x)

from a weight. :math:`G_s` is the Stieltjes transform of a positive measure (but for a decay of more than the whole weight),
with masses w at the points e, and for such a sum Gaussian quadrature is made: three nodes, as a continued fraction, replace
hundreds of steps (W. Gautschi, Orthogonal Polynomials: Computation and Approximation, 2004, sections 2.2 and 3.1);
`quadrature` adds a step to them. The relative error is of the order of :math:`((\sqrt k - 1) / (\sqrt k + 1))^6`, where
k = (x + max e) / (x + min e), so each line also says from which x on that is small enough; rows with smaller ones go step by
step. m vanishes geometrically: a line is final once a certain number of steps (the horizon) lies behind it.

All of it is kept on the host, whatever device the rows are caught up on: there the lines that have changed are sent.
"""

from __future__ import annotations

import collections
import copy
import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speedtransfer.idle import quadrature
from speedtransfer.idle.device_copy import DeviceCopy, current_stream
from speedtransfer.idle.quadrature import BLOCK, NODES, OWN, STEP, SUMS, Floats
from speedtransfer.idle.rule import IdleStep, Rule
from speedtransfer.jit import compiled_module

_CAPACITY = 256
# Of a mean decay, to bound the horizon.
_SMALLEST_FACTOR = 1e-3


class Missed(NamedTuple):
    """What some rows have missed, a column ``(n, 1)`` each.

    With the numerator m and the root x (or x itself, see `Rule.floor`) the weights become ``decay * weight - (linear + mass /
    (x + centers[0] - spreads[0] / (x + centers[1] - ...))) * m``, which is good from ``x = valid_from`` on. `mix` is as in
    `IdleStep`, and `factors` multiply the planes of `Rule.factors`.
    """

    decay: Tensor
    mix: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    linear: Tensor
    mass: Tensor
    centers: tuple[Tensor, ...]
    spreads: tuple[Tensor, ...]
    valid_from: Tensor


class Sums:
    """The lines of a sequence of steps, a function of the steps alone.

    Parameters
    ----------
    rule : Rule
        Its dtype says how good they must be.
    """

    def __init__(self, rule: Rule) -> None:
        self.count = 0  # of the steps that the lines hold
        self.eps = 0.0  # of the newest step
        self.horizon = 1
        self._floor, self._mixes = rule.floor, rule.partner is not None
        self._has_sums = rule.denominator is not None
        # Which factor the denominator has; with amsgrad it is a maximum, which stays.
        self._root = rule.factors.index(rule.denominator) if rule.denominator in rule.factors else None
        self._tolerance, largest = (1e-13, 1e300) if rule.dtype == torch.float64 else (1e-7, 1e37)
        # From here on the ratio of largest to smallest x + e is one that three nodes are good for.
        rate = self._tolerance ** (1 / (2 * NODES))
        self._limits = np.array([((1 + rate) / (1 - rate)) ** 2, largest])
        self._growth, self._shrink = 0.0, 0.0  # largest |B| / |R| and |B| of a step so far
        self._products = 5 + len(rule.factors)
        self._step = np.ones(self._products + (STEP if self._has_sums else 0))
        self._device_copies = dict[tuple[torch.device, int], DeviceCopy]()
        self._final = 0  # lines before this one have their sums for good
        self._hard_final = False  # whether one of them is not good for every x
        self.table, self.blocks = self._allocated(_CAPACITY)

    def _allocated(self, capacity: int) -> tuple[Floats, Floats]:
        line = quadrature.identity(self._products, self._has_sums)
        return np.tile(line, (capacity + 1, 1)), np.tile(line[: self._products], (capacity // BLOCK + 1, 1))

    def copy(self) -> Sums:
        """Return sums of the same steps, for other steps to come."""
        other = copy.copy(self)
        other.table, other.blocks, other._step = self.table.copy(), self.blocks.copy(), self._step.copy()
        other._device_copies = {}
        return other

    def _grow(self) -> None:
        count, size = len(self.table), len(self.blocks)
        lines, blocks = self._allocated(2 * (count - 1))
        lines[:count], blocks[:size] = self.table, self.blocks
        self.table, self.blocks = lines, blocks

    def take(self, step: IdleStep) -> None:
        """Take in one more step."""
        count, products = self.count, self._products
        if count == len(self.table) - 1:
            self._grow()
        values = self._step
        values[0], values[1:5], values[5:products] = step.decay, step.mix, step.factors
        if self._has_sums:
            values[products:] = self._term(step)
        rest = count, self._final, values, self._limits, self._floor
        take_step = compiled_module("speedtransfer.idle.numba_sums").take_step
        # One loop of C: signals are handled before it or after it.
        parts = (
            functools.partial(take_step, self.table, self.blocks, *rest),
            functools.partial(setattr, self, "count", count + 1),
            functools.partial(setattr, self, "eps", step.eps),
        )
        collections.deque(map(functools.partial.__call__, parts), maxlen=0)
        if self._has_sums:
            final = max(self._final, self.count - self.horizon)
            if final > self._final and not self._hard_final:
                self._hard_final = self._any_hard(self._final, final)
            self._final = final

    def _any_hard(self, first: int, stop: int) -> bool:
        column = self._products + SUMS - 1
        if stop - first == 1:
            return bool(self.table[first, column] > 0)
        return bool((self.table[first:stop, column] > 0).any())

    def _term(self, step: IdleStep) -> tuple[float, ...]:
        numerator, root = step.factors[0], 1.0
        if self._root is not None:
            root = step.factors[self._root] if self._floor else math.sqrt(step.factors[self._root])
        growth, shrink = abs(numerator) / max(root, 1e-300), abs(numerator)
        if growth > self._growth or shrink > self._shrink:
            if growth >= 1 > self._growth:
                self._reopen()
            growth, shrink = max(self._growth, growth), max(self._shrink, shrink)
            self.horizon = max(self.horizon, self._needed_horizon(growth, shrink))
            # Last: after an interrupt all is done again.
            self._growth, self._shrink = growth, shrink
        return step.scale, step.root, step.eps, numerator, root, step.decay

    def _reopen(self) -> None:
        """Let further steps change all lines: their terms grow from now on, and may come to matter again."""
        own, number = self._products + SUMS, np.arange(self._final)
        products = self.table[number, : self._products] * self.blocks[number // BLOCK]
        self.table[number, own], self.table[number, own + 1] = products[:, 0], products[:, 5]
        if self._root is not None:
            root = products[:, 5 + self._root]
            self.table[number, own + 2] = root if self._floor else np.sqrt(root)
        # They are sent from the first line that may have changed.
        self._device_copies.clear()
        self._final = 0

    def _needed_horizon(self, growth: float, shrink: float) -> int:
        """Return the number of missed steps after which no term adds anything, whatever x is."""
        steps = 1 << 20
        for factor, small in ((growth, self._tolerance), (shrink, 1e-24)):
            if factor < 1:
                steps = min(steps, math.ceil(math.log(small) / math.log(max(factor, _SMALLEST_FACTOR))))
        return max(steps, 1)

    @property
    def any_hard(self) -> bool:
        """Whether there may be a row that must go step by step."""
        return self._hard_final or self._any_hard(self._final, self.count)

    # --- for rows -----------------------------------------------------------------------------------------------------

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return lines and blocks on `device`."""
        if device.type == "cpu":
            return torch.from_numpy(self.table), torch.from_numpy(self.blocks)
        device_copy = self._device_copies.setdefault((device, current_stream(device)), DeviceCopy())
        return device_copy.tensors(device, self.table, self.blocks, self.count, self._final)

    def lines(self, index: Tensor) -> Tensor:
        """Return what rows last touched at the steps `index` (n,) int64, counted from 0, have missed, in float64."""
        lines, blocks = self.tensors(index.device)
        count = self._products
        found, later = lines[index], blocks[index // BLOCK]
        products = found[:, :count] * later
        if self._mixes:
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

    def factors(self, index: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return `Missed.factors` alone, as `missed` does."""
        lines, blocks = self.tensors(index.device)
        products = lines[:, 5 : self._products][index] * blocks[:, 5:][index // BLOCK]
        return products.to(dtype).split(1, dim=1)

    def missed(self, index: Tensor, dtype: torch.dtype) -> Missed:
        """Return the columns of `lines` by name, in `dtype`."""
        decay, *others = self.lines(index).to(dtype).split(1, dim=1)
        products = self._products - 1
        linear, mass, *fraction, valid_from = others[products:]
        mix, factors = tuple(others[:4]), tuple(others[4:products])
        return Missed(decay, mix, factors, linear, mass, tuple(fraction[:NODES]), tuple(fraction[NODES:]), valid_from)

    def steps_after(self, line: Tensor, number: int) -> tuple[Tensor, ...]:
        """Return scale, root, eps, factors of numerator and root, and decay of a step, ``(n, 1)`` each.

        Parameters
        ----------
        line : Tensor
            ``(n,)``: last step of each row.
        number : int
            Which step after it, from 0; one that has not been made does nothing.
        """
        lines, _ = self.tensors(line.device)
        return lines[(line + number).clamp_max(self.count), self._products + SUMS + OWN :].split(1, dim=1)

    def decay_after(self, line: Tensor) -> Tensor:
        """Return what multiplies weights, ``(n, 1)``, in the steps beyond the horizon of each line."""
        return self.lines((line + self.horizon).clamp_max(self.count))[:, :1]
