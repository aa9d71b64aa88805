"""Optimizers as libraries write them, from their published formulas: every shape that state of a row comes in."""

import functools

import torch
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam


class RowOptimizer(Optimizer):
    """An optimizer that its `update` of one parameter defines."""

    def __init__(self, params, lr=0.05, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p, g, state, group):
        raise NotImplementedError


class Yogi(RowOptimizer):
    """Starts from an accumulator of its own, which zero cannot stand for."""

    def update(self, p, g, state, group):
        if not state:
            state["m"], state["v"] = torch.full_like(p, 1e-3), torch.full_like(p, 1e-3)
        state["m"].lerp_(g, 0.1)
        square = g * g
        state["v"].addcmul_((state["v"] - square).sign_(), square, value=-0.01)
        p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-3), value=-group["lr"])


class AdaBound(RowOptimizer):
    """Counts its steps in the group, bounds the rate of every weight, and throws the gradients away after its step."""

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()

    def update(self, p, g, state, group):
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        group["count"] = group.get("count", 0) + 1
        state["m"].lerp_(g, 0.1)
        state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        low, high = 0.1 * (1 - 1 / (0.01 * group["count"] + 1)), 0.1 * (1 + 1 / (0.01 * group["count"]))
        p.sub_((group["lr"] / (state["v"].sqrt() + 1e-8)).clamp_(low, high) * state["m"])


class Lookahead(RowOptimizer):
    """Descends, and pulls the weights to slow ones every fifth step; the slow ones are made when first needed."""

    def update(self, p, g, state, group):
        state["step"] = state.get("step", 0) + 1
        p.sub_(g, alpha=group["lr"])
        if state["step"] % 5 == 0:
            if "slow" not in state:
                state["slow"] = p.clone()
            state["slow"].lerp_(p, 0.5)
            p.copy_(state["slow"])


class Buffers(RowOptimizer):
    """Momenta in a list, a tuple and a dict, of which one holds something shared."""

    def update(self, p, g, state, group):
        if not state:
            state["buffers"] = [torch.zeros_like(p) for _ in range(2)]
            state["pair"] = (torch.zeros_like(p), torch.zeros(()))
            state["more"] = {"sum": torch.zeros(p.shape[0]), "deep": [torch.ones(3)]}
        for buffer, beta in zip(state["buffers"], (0.5, 0.9), strict=True):
            buffer.mul_(beta).add_(g)
        state["pair"] = (state["pair"][0].lerp(g, 0.1), state["pair"][1] + 1)
        state["more"]["sum"] += g.square().sum(1)
        state["more"]["deep"][0] *= 0.99
        rate = group["lr"] / (1 + state["more"]["sum"].sqrt()).unsqueeze(1)
        p.sub_((sum(state["buffers"]) + state["pair"][0]) * rate * state["more"]["deep"][0][0])


class History(RowOptimizer):
    """Remembers the last three gradients in a list that grows at first."""

    def update(self, p, g, state, group):
        last = state.setdefault("last", [])
        last.append(g.clone())
        if len(last) > 3:
            last.pop(0)
        p.sub_(torch.stack(last).mean(0), alpha=group["lr"])


class RowCounts(RowOptimizer):
    """Counts per row: of its steps (rows,), of those with a gradient (rows, 1), whether it had one at all; a shared (1,)."""

    def update(self, p, g, state, group):
        if not state:
            state["steps"] = torch.zeros(p.shape[0], dtype=torch.int64)
            state["hits"] = torch.zeros(p.shape[0], 1, dtype=torch.int16)
            state["seen"] = torch.zeros(p.shape[0], dtype=torch.bool)
            state["signs"] = torch.zeros(p.shape, dtype=torch.bool)
            state["level"] = torch.full((p.shape[0],), 7, dtype=torch.uint8)
            state["scale"] = torch.ones(1)
        state["scale"] *= 0.99
        some = (g != 0).any(1)
        state["steps"] += 1
        state["hits"] += some.unsqueeze(1)
        state["level"] -= (some & (state["level"] > 0)).to(torch.uint8)
        rate = state["scale"] * torch.where(state["seen"], 1.0, 0.1) / (state["steps"] + state["level"])
        flipped = state["signs"] != (g > 0)
        p.sub_(g * rate.unsqueeze(1) * torch.where(flipped, 0.5, 1.0) / state["hits"].clamp(min=1), alpha=group["lr"])
        state["seen"] |= some
        state["signs"] = g > 0


class Precise(RowOptimizer):
    """Keeps its sums in double precision, several of them for a row: (rows, 2, 3)."""

    def update(self, p, g, state, group):
        if not state:
            state["sums"] = torch.zeros(p.shape[0], 2, 3, dtype=torch.float64)
        state["sums"][:, 0] += g.double().square().mean(1, keepdim=True)
        state["sums"][:, 1, 1] += 1
        p.sub_(g / (1 + state["sums"][:, 0, :1]).sqrt().float(), alpha=group["lr"])


class Rebinds(RowOptimizer):
    """Puts other tensors in place of the weights and of its state instead of writing into them."""

    def update(self, p, g, state, group):
        state["m"] = 0.9 * state["m"] + g if "m" in state else g.clone()
        p.data = p.data - group["lr"] * state["m"]


class SkipsZeros(RowOptimizer):
    """Leaves rows without a gradient alone, as optimizers for sparse gradients do."""

    def update(self, p, g, state, group):
        if not state:
            state["sum"] = torch.full_like(p, 0.5)
        rows = (g != 0).any(1).nonzero().squeeze(1)
        state["sum"][rows] += g[rows].square()
        p[rows] -= group["lr"] * g[rows] / state["sum"][rows].sqrt()


class Proximal(RowOptimizer):
    """Computes weights from its sums alone, so that its first step without a gradient makes all of them zero."""

    def update(self, p, g, state, group):
        if not state:
            state["z"], state["n"] = torch.zeros_like(p), torch.zeros_like(p)
        before = state["n"].sqrt()
        state["n"].addcmul_(g, g)
        after = state["n"].sqrt()
        state["z"].add_(g).sub_((after - before) / group["lr"] * p)
        p.copy_(torch.where(state["z"] == 0, 0.0, -group["lr"] * state["z"] / after))


class OddConstructor(RowOptimizer):
    """Parameters come last, and the learning rate has a name of its own."""

    def __init__(self, rate, beta, params):
        Optimizer.__init__(self, params, {"rate": rate, "beta": beta})

    def update(self, p, g, state, group):
        state["steps"] = state.get("steps", 0) + 1
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 1 - group["beta"])
        p.add_(m.sign(), alpha=-group["rate"] / state["steps"])


# Name -> optimizer and the planes that it needs.
STYLES = {
    "yogi": (Yogi, {"m", "v"}),
    "adabound": (AdaBound, {"m", "v"}),
    "lookahead": (Lookahead, {"slow"}),
    "buffers": (Buffers, {"buffers.0", "buffers.1", "pair.0", "more.sum"}),
    "history": (History, {"last.0", "last.1", "last.2"}),
    "counts": (RowCounts, {"steps", "hits", "seen", "signs", "level"}),
    "precise": (Precise, {"sums"}),
    "rebinds": (Rebinds, {"m"}),
    "skips zeros": (SkipsZeros, {"sum"}),
    "proximal": (Proximal, {"z", "n"}),
    "odd constructor": (functools.partial(OddConstructor, 0.2, 0.8), {"m"}),
}


# --- by sparse gradients ------------------------------------------------------------------------------------------------


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum a row for sparse gradients, and plain Adagrad for dense ones."""

    def update(self, p, g, state, group):
        if not g.is_sparse:
            squares = state.setdefault("squares", torch.zeros_like(p)).addcmul_(g, g)
            p.addcdiv_(g, squares.sqrt() + 1e-9, value=-group["lr"])
            return
        g = g.coalesce()
        rows, values = g.indices()[0], g.values()
        sums = state.setdefault("momentum", torch.full((len(p),), group.get("initial", 0.0), dtype=p.dtype))
        sums.index_add_(0, rows, values.square().mean(1))
        p.index_add_(0, rows, values / (sums[rows].sqrt() + 1e-9).unsqueeze(1), alpha=-group["lr"])


class DecaysNamed(RowOptimizer):
    """Decays the rows that a sparse gradient names, whatever it holds for them, and counts how often it did."""

    def update(self, p, g, state, group):
        g = g.coalesce()
        rows = g.indices()[0]
        state.setdefault("times", torch.zeros(len(p), dtype=torch.int32))[rows] += 1
        p[rows] = 0.9 * p[rows] - group["lr"] * g.values()


class Uncoalesced(RowOptimizer):
    """Takes the square of every lookup by itself."""

    def update(self, p, g, state, group):
        rows, values = g._indices()[0], g._values()
        sums = state.setdefault("sum", torch.zeros_like(p)).index_add_(0, rows, values.square())
        p.index_add_(0, rows, values / (sums[rows].sqrt() + 1e-9), alpha=-group["lr"])


class FadesAll(RowOptimizer):
    """Lets all rows fade with each sparse gradient, by another factor than with a dense one."""

    def update(self, p, g, state, group):
        p.mul_(0.99 if g.is_sparse else 0.9).sub_(g.to_dense(), alpha=group["lr"])


class ByLength(RowOptimizer):
    """Divides a sparse gradient by the number of rows that the parameter has."""

    def update(self, p, g, state, group):
        p.add_(g, alpha=-group["lr"] / (len(p) if g.is_sparse else 1))


class NoisySparse(RowOptimizer):
    """Adds noise to the values of a sparse gradient."""

    def update(self, p, g, state, group):
        g = g.coalesce()
        p[g.indices()[0]] -= group["lr"] * (g.values() + torch.randn_like(g.values()))


class SingleSparse(RowOptimizer):
    """Takes sparse gradients of single and double precision only; dense ones otherwise."""

    def update(self, p, g, state, group):
        if g.is_sparse and p.dtype not in (torch.float32, torch.float64):
            raise TypeError("no kernel for sparse gradients of this dtype")
        RowWiseAdagrad.update(self, p, g, state, group)


TAKERS = {
    "sparse-adam": functools.partial(SparseAdam, lr=0.05),
    "sparse-adam-maximize": functools.partial(SparseAdam, lr=0.01, maximize=True),
    "row-wise": RowWiseAdagrad,
    "row-wise-initial": functools.partial(RowWiseAdagrad, initial=0.3),
    "decays-named": DecaysNamed,
    # These do the same with dense gradients.
    "sgd": functools.partial(SGD, lr=0.1),
    "adagrad": functools.partial(Adagrad, lr=0.1, initial_accumulator_value=0.2),
}
# Optimizer -> words of the reason for which it cannot train a table made with sparse=True.
REFUSED_SPARSE = {
    Uncoalesced: "tells the lookups of one row in a batch apart",
    FadesAll: "depends on rows that the step does not name, or those do not stay as they are",
    ByLength: "the update of a row depends on",
    NoisySparse: "its update draws random numbers",
}


# --- that cannot train rows apart from their table -----------------------------------------------------------------------

ROW_BY_ROW = "is not row by row: the update of a row depends on the other rows"
OUTSIDE = r"keeps something of the rows outside optimizer\.state"


class Lamb(RowOptimizer):
    """Trust ratio of norms, which are clipped: a table of large weights would not show it."""

    def update(self, p, g, state, group):
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.001)
        step = m / (v.sqrt() + 1e-6)
        p.sub_(step * (p.norm().clamp(0, 10) / step.norm().clamp(min=1e-9)), alpha=group["lr"])


class FaintNorm(RowOptimizer):
    """The decay alone, a ten thousandth of the step, knows the other rows."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr, weight_decay=1e-4)

    def update(self, p, g, state, group):
        decay = group["lr"] * group["weight_decay"] / (1 + float(g.square().mean()))
        p.mul_(1 - decay).sub_(g.sign(), alpha=group["lr"])


class Watches(RowOptimizer):
    """Steps row by row, but writes down a mean that only all rows have."""

    def update(self, p, g, state, group):
        state["mean"] = g.square().mean()
        p.sub_(g, alpha=group["lr"])


class Held(RowOptimizer):
    """Momenta in an attribute, made anew where they do not fit."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.momenta = {}

    def update(self, p, g, state, group):
        if p not in self.momenta or self.momenta[p].shape != p.shape:
            self.momenta[p] = torch.zeros_like(p)
        p.sub_(self.momenta[p].mul_(0.9).add_(g), alpha=group["lr"])


class InGroup(RowOptimizer):
    """A momentum in the parameter group."""

    def update(self, p, g, state, group):
        old = group.get("momentum_of")
        group["momentum_of"] = g.clone() if old is None or old.shape != g.shape else 0.9 * old + g
        p.sub_(group["momentum_of"], alpha=group["lr"])


class FactorsLarge(RowOptimizer):
    """Factors the second moments of large parameters only."""

    def update(self, p, g, state, group):
        if p.shape[0] < 128:
            scale = state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.1)
        else:
            rows = state.setdefault("rows", torch.zeros(p.shape[0])).lerp_(g.square().mean(1), 0.1)
            columns = state.setdefault("columns", torch.zeros(p.shape[1])).lerp_(g.square().mean(0), 0.1)
            scale = torch.outer(rows, columns)
        p.sub_(g / (scale + 1e-9).sqrt(), alpha=group["lr"])


class Langevin(RowOptimizer):
    def update(self, p, g, state, group):
        p.sub_(g + 0.1 * torch.randn_like(p), alpha=group["lr"])


class Transposed(RowOptimizer):
    def update(self, p, g, state, group):
        m = state.setdefault("m", torch.zeros_like(p.T)).lerp_(g.T, 0.1)
        p.sub_(m.T, alpha=group["lr"])


class OfWeights(RowOptimizer):
    """The norm that a row had when its state was made."""

    def update(self, p, g, state, group):
        if not state:
            state["norm"] = p.norm(dim=1, keepdim=True)
        p.sub_(g * state["norm"], alpha=group["lr"])


class Complex(RowOptimizer):
    def update(self, p, g, state, group):
        m = state.setdefault("m", torch.zeros_like(p, dtype=torch.complex64))
        p.sub_(m.mul_(0.9j).add_(g).real, alpha=group["lr"])


class Cleared(RowOptimizer):
    """Forgets its sums every third step."""

    def update(self, p, g, state, group):
        state["sums"] = [*state.get("sums", []), g.clone()] if len(state.get("sums", [])) < 3 else []
        p.sub_(g + sum(state["sums"]), alpha=group["lr"])


class ScheduleFree(RowOptimizer):
    """The parameter is one thing in training and another in evaluation."""

    def update(self, p, g, state, group):
        z = state.setdefault("z", p.clone())
        z.sub_(g, alpha=group["lr"])
        p.lerp_(z, 0.1)

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], -0.1)


class Crashes(RowOptimizer):
    def update(self, p, g, state, group):
        raise ValueError("needs a flat buffer")


REFUSED_STYLES = {
    Lamb: ROW_BY_ROW,
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
