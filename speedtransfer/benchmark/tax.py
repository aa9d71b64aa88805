"""Suite `tax`: compute against transfer. The device is fast, but is it worth the way there and back?

The classic experiment: a matrix product in NumPy, on the device, and on the device with copies both ways each time; and a
small network trained in the same three ways.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.report import TextTable, pivot, show_time
from speedtransfer.benchmark.results import GroupResult, case_names, sorted_by, split_by
from speedtransfer.drawing import INK, legend_below, line, line_style, plain_numbers, tidy

NOTE = (
    "Copies go from and to page-locked memory. Without CUDA the CPU is the device as well: what is copied then is memory to "
    "memory, and the lines show what copies and the overhead of torch cost, not what a device gains."
)
HOST, RESIDENT, COPIES = "NumPy", "on the device", "device, copies both ways"

_MATMUL_SIZES = (50, 100, 200, 400, 800, 1600, 4000)  # 200 is the classic one
_MLP_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_CPU_LIMIT = {"matmul": 1600, "mlp": 1024}  # larger sizes take seconds, and the lines have met
_QUICK_LIMIT = {"matmul": 400, "mlp": 128}
_BATCH, _LR = 256, 1e-2
_SPIN_S = 0.15


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each size of both experiments. On the CPU copies go from memory to memory."""
    cuda, found = device.type == "cuda", []
    for experiment, sizes, what, make in (
        ("matmul", _MATMUL_SIZES, "product of two {0:,} x {0:,} matrices", _matmul),
        ("mlp", _MLP_SIZES, f"training step of an MLP, width {{:,}}, batch {_BATCH}", _mlp),
    ):
        limit = _QUICK_LIMIT[experiment] if quick else math.inf if cuda else _CPU_LIMIT[experiment]
        for size in (s for s in sizes if s <= limit):
            params = {"experiment": experiment, "size": size, "cuda": cuda}
            found.append(Group(what.format(size), functools.partial(make, size, device, seed), params))
    return found


def _host(array: np.ndarray, device: torch.device) -> Tensor:
    """Return `array` in host memory, page-locked for CUDA so that copies are as fast as possible."""
    tensor = torch.from_numpy(array.astype(np.float32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _assert_close(got: Any, expected: np.ndarray, what: str, tolerance: float) -> None:
    difference = np.linalg.norm(np.asarray(got, dtype=np.float64) - expected) / np.linalg.norm(expected)
    assert difference < tolerance, f"{what} is {difference:.1e} of its norm off"


class _Cores:
    """Keeps NumPy's threads from disturbing torch: those of OpenBLAS spin for 0.1 s after a product.

    The untimed first run of a torch case waits until they sleep.
    """

    def __init__(self) -> None:
        self._busy = True

    def busy_after(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return `run`, marking the cores as busy."""

        def running() -> Any:
            self._busy = True
            return run()

        return running

    def free_before(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return `run`, which first waits for busy cores."""

        def running() -> Any:
            if self._busy:
                time.sleep(_SPIN_S)
                self._busy = False
            return run()

        return running


# --- a matrix product ---------------------------------------------------------------------------------------------------


def _matmul(size: int, device: torch.device, seed: int) -> list[Case]:
    generator = np.random.default_rng(seed)
    a, b, fetched = (_host(generator.standard_normal((size, size)), device) for _ in range(3))
    there, room = [t.to(device, copy=True) for t in (a, b)], [torch.zeros(size, size, device=device) for _ in range(2)]
    products = [torch.zeros(size, size, device=device) for _ in range(2)]
    in_numpy = np.zeros((size, size), dtype=np.float32)
    expected = a.double().numpy() @ b.double().numpy()

    def copies() -> None:
        for here, host in zip(room, (a, b), strict=True):
            here.copy_(host, non_blocking=True)
        # Blocks, since the host wants the result.
        fetched.copy_(torch.mm(*room, out=products[1]))

    def case(name: str, run: Callable[[], Any], found: Callable[[], np.ndarray]) -> Case:
        return Case(name, run, lambda: _assert_close(found(), expected, "the product", 1e-5))

    cores = _Cores()
    return [
        case(HOST, cores.busy_after(lambda: np.matmul(a.numpy(), b.numpy(), out=in_numpy)), lambda: in_numpy),
        case(RESIDENT, cores.free_before(lambda: torch.mm(*there, out=products[0])), lambda: products[0].cpu().numpy()),
        case(COPIES, cores.free_before(copies), lambda: fetched.numpy()),
    ]


# --- a small network ----------------------------------------------------------------------------------------------------


def _mlp(size: int, device: torch.device, seed: int) -> list[Case]:
    generator = np.random.default_rng(seed)
    batch = [_host(generator.standard_normal((_BATCH, size)), device), _host(generator.standard_normal(_BATCH), device)]
    first = [generator.standard_normal(shape) / size**0.5 for shape in ((size, size), (size, 1))]
    x, y = (t.numpy() for t in batch)
    exact = [w.astype(np.float32).astype(np.float64) for w in first]
    _numpy_step(x.astype(np.float64), y.astype(np.float64), exact)

    weights = [w.astype(np.float32) for w in first]
    resident, copied = _TorchMLP(first, batch, device), _TorchMLP(first, [torch.zeros_like(t) for t in batch], device)

    def check(found: Callable[[], Sequence[Any]]) -> None:
        """Compare the weights after one step with those of the same step in float64."""
        for got, before, after in zip(found(), first, exact, strict=True):
            # A unit whose sum is nearly zero may round to either side of the kink, and its gradient with it.
            _assert_close(got - before.astype(np.float32), after - before, "the first update", 1e-2)

    cores = _Cores()
    return [
        Case(HOST, cores.busy_after(lambda: _numpy_step(x, y, weights)), lambda: check(lambda: weights)),
        Case(RESIDENT, cores.free_before(resident.step), lambda: check(resident.weights)),
        Case(COPIES, cores.free_before(lambda: copied.step_with_copies(batch)), lambda: check(copied.weights)),
    ]


def _numpy_step(x: np.ndarray, y: np.ndarray, weights: list[np.ndarray]) -> float:
    """Take an SGD step on ``mean((relu(x @ w1) @ w2 - y)**2)`` and return the loss before it."""
    w1, w2 = weights
    hidden = np.maximum(x @ w1, 0)
    error = (hidden @ w2)[:, 0] - y
    loss = float(np.mean(error**2))
    grad_out = (2 / len(y) * error)[:, None]
    grad_w2 = hidden.T @ grad_out
    grad_w1 = x.T @ (grad_out @ w2.T * (hidden > 0))
    w1 -= _LR * grad_w1
    w2 -= _LR * grad_w2
    return loss


class _TorchMLP:
    def __init__(self, first: list[np.ndarray], batch: list[Tensor], device: torch.device) -> None:
        self.layers = [nn.Parameter(torch.from_numpy(w.astype(np.float32)).to(device)) for w in first]
        self.opt = torch.optim.SGD(self.layers, lr=_LR)
        self.batch = [t.to(device, copy=True) for t in batch]

    def step(self) -> Tensor:
        x, y = self.batch
        loss = F.mse_loss((torch.relu(x @ self.layers[0]) @ self.layers[1])[:, 0], y)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss

    def step_with_copies(self, batch: list[Tensor]) -> float:
        """Copy the batch from the host, and the loss to it."""
        for there, host in zip(self.batch, batch, strict=True):
            there.copy_(host, non_blocking=True)
        return self.step().item()

    def weights(self) -> list[np.ndarray]:
        return [w.detach().cpu().numpy() for w in self.layers]


# --- report -------------------------------------------------------------------------------------------------------------


def crossing(sizes: Sequence[float], slow: Sequence[float], fast: Sequence[float]) -> float | None:
    """Return the size from which on `fast` takes less time than `slow`; None if it does not at the largest size.

    Both are seconds at each of the ascending `sizes`, interpolated on logarithmic axes. If `fast` always takes less time, it
    is the smallest size.
    """
    gaps = [math.log(b / a) for a, b in zip(slow, fast, strict=True)]  # below zero: `fast` is faster
    if not gaps or gaps[-1] >= 0:
        return None
    last = max((i for i, gap in enumerate(gaps) if gap >= 0), default=-1)
    if last < 0:
        return sizes[0]
    share = gaps[last] / (gaps[last] - gaps[last + 1])
    return math.exp(math.log(sizes[last]) * (1 - share) + math.log(sizes[last + 1]) * share)


def pays(groups: Sequence[GroupResult], slow: str, fast: str) -> tuple[str, float | None]:
    """Return from which size on case `fast` beats case `slow`, in words ("pays from size 185 on") and as a number.

    The groups are those of one experiment, by size. There is a number only if the lines cross once, and the quartiles of the
    cases do not overlap on either side.
    """
    unclear = "is not clear at this noise", None
    both = [
        (group.params["size"], group.by_name[slow], group.by_name[fast])
        for group in groups
        if {slow, fast} <= group.by_name.keys()
    ]
    if not both:
        return unclear
    faster = [f.median_s < s.median_s for _, s, f in both]
    clear = [s.quartiles_s[1] < f.quartiles_s[0] or f.quartiles_s[1] < s.quartiles_s[0] for _, s, f in both]
    turns = [i for i in range(1, len(both)) if faster[i] != faster[i - 1]]
    if not turns and clear[0] and clear[-1]:
        return ("pays at every size measured" if faster[0] else "does not pay at any size measured"), None
    if len(turns) != 1 or faster[0] or not (clear[turns[0] - 1] and clear[turns[0]]):
        return unclear
    sizes = [size for size, _, _ in both]
    size = crossing(sizes, [s.median_s for _, s, _ in both], [f.median_s for _, _, f in both])
    return f"pays from size {size:,.0f} on", size


def sentences(groups: list[GroupResult]) -> list[str]:
    """Say from which size on the device pays, for each experiment."""
    lines = []
    # Where the CPU is the device, nothing can pay.
    groups = [group for group in groups if group.params.get("cuda")]
    for experiment, part in split_by(groups, "experiment").items():
        part = sorted_by(part, "size")
        lines += [f"{experiment}: {fast} {pays(part, HOST, fast)[0]}" for fast in (RESIDENT, COPIES)]
    return lines


def tables(groups: list[GroupResult]) -> list[TextTable]:
    """Return the times by size, a table for each experiment."""
    return [
        pivot(f"{experiment}, time by size", part, lambda group: f"{group.params['size']:,}", show_time)
        for experiment, part in split_by(groups, "experiment").items()
    ]


def draw(make_figure: Callable[..., Any], groups: list[GroupResult]) -> Any:
    """Draw the times by size, a panel for each experiment, and mark where lines cross."""
    titles = {"matmul": "matrix product, n x n", "mlp": "training step of an MLP, width n"}
    parts = {experiment: sorted_by(part, "size") for experiment, part in split_by(groups, "experiment").items()}
    figure = make_figure(5.5 * len(parts), 4.8)
    panels = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (experiment, part) in zip(panels, parts.items(), strict=True):
        sizes = [group.params["size"] for group in part]
        times = {name: [group.milliseconds(name) for group in part] for name in case_names(part)}
        for number, (name, values) in enumerate(times.items()):
            line(axes, sizes, values, name, line_style(number, False))
        for fast in (RESIDENT, COPIES) if all(group.params.get("cuda") for group in part) else ():
            size = pays(part, HOST, fast)[1]
            if size is not None:
                there = [(n, ms) for n, ms in zip(sizes, times[fast], strict=True) if ms is not None]
                _mark(axes, size, *zip(*there, strict=True))
        axes.set(xscale="log", yscale="log", xlabel="n", ylabel="milliseconds")
        axes.set_title(titles.get(experiment, experiment), fontsize=11, color=INK)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
        axes.minorticks_off()
        tidy(axes)
        plain_numbers(axes)
    legend_below(figure, panels[0])
    return figure


def _mark(axes: Any, size: float, sizes: Sequence[float], values: Sequence[Any]) -> None:
    """Mark where two lines cross, on the line of `values`."""
    at = float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(values))))
    style = {"textcoords": "offset points", "fontsize": 8.5, "color": INK}
    axes.plot([size], [at], "o", ms=13, mfc="none", mec=INK, mew=1.4, zorder=5)
    axes.annotate(f"crossing at {size:,.0f}", (size, at), (12, -16), **style)
