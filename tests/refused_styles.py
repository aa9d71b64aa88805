"""Optimizers, written from their published formulas, that cannot train rows apart from their table."""

from __future__ import annotations

from typing import Any

import torch
from third_party import RowOptimizer

ROW_BY_ROW = "is not row by row: the update of a row depends on the other rows"
OUTSIDE = r"keeps something of the rows outside optimizer\.state"


class Lamb(RowOptimizer):
    """Trust ratio of norms, which are clipped: a table of large weights would not show it."""

    def update(self, p, g, state, group) -> None:
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.001)
        step = m / (v.sqrt() + 1e-6)
        p.sub_(step * (p.norm().clamp(0, 10) / step.norm().clamp(min=1e-9)), alpha=group["lr"])


class Factored(RowOptimizer):
    """Second moments of rows and of columns, as in Adafactor."""

    def update(self, p, g, state, group) -> None:
        rows = state.setdefault("rows", torch.zeros(p.shape[0]))
        columns = state.setdefault("columns", torch.zeros(p.shape[1]))
        rows.lerp_(g.square().mean(1), 0.1)
        columns.lerp_(g.square().mean(0), 0.1)
        p.sub_(g / (torch.outer(rows, columns) / (rows.mean() + 1e-9) + 1e-9).sqrt(), alpha=group["lr"])


class FaintNorm(RowOptimizer):
    """The decay alone, a ten thousandth of the step, knows the other rows."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, weight_decay=1e-4)

    def update(self, p, g, state, group) -> None:
        p.mul_(1 - group["lr"] * group["weight_decay"] / (1 + float(g.square().mean()))).sub_(
            g.sign(), alpha=group["lr"]
        )


class Watches(RowOptimizer):
    """Steps row by row, but writes down a mean that only all rows have."""

    def update(self, p, g, state, group) -> None:
        state["mean"] = g.square().mean()
        p.sub_(g, alpha=group["lr"])


class Held(RowOptimizer):
    """Momenta in an attribute, made anew where they do not fit."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.momenta: dict[Any, torch.Tensor] = {}

    def update(self, p, g, state, group) -> None:
        if p not in self.momenta or self.momenta[p].shape != p.shape:
            self.momenta[p] = torch.zeros_like(p)
        p.sub_(self.momenta[p].mul_(0.9).add_(g), alpha=group["lr"])


class InGroup(RowOptimizer):
    """A momentum in the parameter group."""

    def update(self, p, g, state, group) -> None:
        old = group.get("momentum_of")
        group["momentum_of"] = g.clone() if old is None or old.shape != g.shape else 0.9 * old + g
        p.sub_(group["momentum_of"], alpha=group["lr"])


class FactorsLarge(RowOptimizer):
    """Factors the second moments of large parameters only."""

    def update(self, p, g, state, group) -> None:
        if p.shape[0] < 128:
            scale = state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.1)
        else:
            rows = state.setdefault("rows", torch.zeros(p.shape[0])).lerp_(g.square().mean(1), 0.1)
            scale = torch.outer(
                rows, state.setdefault("columns", torch.zeros(p.shape[1])).lerp_(g.square().mean(0), 0.1)
            )
        p.sub_(g / (scale + 1e-9).sqrt(), alpha=group["lr"])


class Langevin(RowOptimizer):
    def update(self, p, g, state, group) -> None:
        p.sub_(g + 0.1 * torch.randn_like(p), alpha=group["lr"])


class Transposed(RowOptimizer):
    def update(self, p, g, state, group) -> None:
        m = state.setdefault("m", torch.zeros_like(p.T)).lerp_(g.T, 0.1)
        p.sub_(m.T, alpha=group["lr"])


class OfWeights(RowOptimizer):
    """The norm that a row had when its state was made."""

    def update(self, p, g, state, group) -> None:
        if not state:
            state["norm"] = p.norm(dim=1, keepdim=True)
        p.sub_(g * state["norm"], alpha=group["lr"])


class Complex(RowOptimizer):
    def update(self, p, g, state, group) -> None:
        m = state.setdefault("m", torch.zeros_like(p, dtype=torch.complex64))
        p.sub_(m.mul_(0.9j).add_(g).real, alpha=group["lr"])


class Cleared(RowOptimizer):
    """Forgets its sums every third step."""

    def update(self, p, g, state, group) -> None:
        state["sums"] = [*state.get("sums", []), g.clone()] if len(state.get("sums", [])) < 3 else []
        p.sub_(g + sum(state["sums"]), alpha=group["lr"])


class ScheduleFree(RowOptimizer):
    """The parameter is one thing in training and another in evaluation."""

    def update(self, p, g, state, group) -> None:
        z = state.setdefault("z", p.clone())
        z.sub_(g, alpha=group["lr"])
        p.lerp_(z, 0.1)

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], -0.1)


class Crashes(RowOptimizer):
    def update(self, p, g, state, group) -> None:
        raise ValueError("needs a flat buffer")


REFUSED_STYLES: dict[type[RowOptimizer], str] = {
    Lamb: ROW_BY_ROW,
    Factored: ROW_BY_ROW,
    FaintNorm: ROW_BY_ROW,
    Watches: "is not row by row: state 'mean' depends on the other rows",
    Held: rf"{OUTSIDE} \(momenta\)",
    InGroup: rf"{OUTSIDE} \(momentum_of\)",
    FactorsLarge: ROW_BY_ROW,
    Langevin: "draws random numbers",
    Transposed: r"its state 'm' is \(\d+, 6\) for 6 rows and \(\d+, 5\) for 5, not one entry a row, rows first",
    OfWeights: "state 'norm' of an untouched row has no one value to start from",
    Complex: "its state 'm' is torch.complex64, which no table can hold",
    Cleared: "its state 'sums.0' comes and goes",
    Crashes: "cannot train rows of a table: .*needs a flat buffer",
    ScheduleFree: r"its eval\(\) changes the whole parameter between steps",
}
