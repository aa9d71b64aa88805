"""Trains a recommender with dense, exact, lazy and SparseAdam's idle rows, on the same batches, and draws the four curves.

``python bench/idle.py --data FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the Gowalla of
LightGCN's repository (https://github.com/kuandeng/LightGCN) has them, a line for each user: its number, then its items. The
data are not part of this repository. Matrix factorisation with the pairwise loss of BPR (Rendle et al., 2009):
``softplus(score of a random item - score of the user's item)``. The result goes to ``bench/results/<device>/idle.json``;
bench/readme.py draws it, and puts it into docs/results.md.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from store import IDLE, ROOT, exit_code, header, make_parser, path_of, write
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.benchmark.report import provenance
from speedtransfer.cuda import resolve_device
from speedtransfer.drawing import COLOURS, INK, QUIET, legend_below, require_matplotlib, tidy
from speedtransfer.errors import InvalidValueError, check_size
from speedtransfer.units import format_share

DENSE, EXACT, LAZY, SPARSE = WAYS = ("dense", "exact", "lazy", "SparseAdam")
DOUBLE = "dense, float64"  # its distance to dense is that of rounding alone
TOP = 20
_START = 0.1  # standard deviation of the first weights
_MOST = 10_000_000  # users or items

Weights = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Settings:
    """What is trained and how; `lr` and `weight_decay` are AdamW's, as SparseAdam has no decay.

    The ways are compared `points` times, and at most so many `users` scored on held-out items.
    """

    steps: int = 2000
    batch: int = 2048
    dim: int = 32
    lr: float = 0.01
    weight_decay: float = 0.1
    seed: int = 0
    points: int = 20
    users: int = 1500


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("idle", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of train.txt and test.txt")
    for name in ("steps", "batch", "seed", "lr", "weight-decay"):
        default = getattr(Settings, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"by default {default}")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    data = read_data(args.data)
    about = header(ROOT, IDLE)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], IDLE)
    steps, batch = check_size(args.steps, "--steps", 1), check_size(args.batch, "--batch", 1)
    settings = Settings(steps, batch, seed=args.seed, lr=args.lr, weight_decay=args.weight_decay)
    start = time.perf_counter()
    result = train(data, settings, resolve_device(None))
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "data": args.data.resolve().name, **result, "seconds": seconds, "complete": True}
    write(out, result)
    print(markdown(result), f"wrote {out}", sep="\n")
    return 0


# --- data ---------------------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    """Pairs of user and item, ``(n, 2)`` int64 sorted by user."""

    train: Tensor
    test: Tensor

    @property
    def sizes(self) -> tuple[int, int]:
        users, items = (torch.cat([self.train, self.test]).amax(0) + 1).tolist()
        return users, items


def read_data(folder: Path) -> Data:
    return Data(_read_pairs(folder, "train.txt"), _read_pairs(folder, "test.txt"))


def _read_pairs(folder: Path, name: str) -> Tensor:
    path = next((path for path in (folder / name, folder / f"{name}.xz") if path.is_file()), None)
    if path is None:
        raise InvalidValueError(f"there is no {name} or {name}.xz in {str(folder)!r}; name the folder that has them")
    try:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
            lines = [list(map(int, line.split())) for line in file]
    except (ValueError, OSError, EOFError, lzma.LZMAError) as error:
        what = "lines with the number of a user, then those of its items, as in LightGCN's Gowalla"
        raise InvalidValueError(f"cannot read {str(path)!r} ({error}); it must have {what}") from error
    pairs = torch.tensor(sorted((user, item) for user, *items in lines for item in items))
    # Each has a row, also for the dense optimizer.
    if not len(pairs) or pairs.min() < 0 or pairs.max() >= _MOST:
        raise InvalidValueError(f"{str(path)!r} names no item, or a number that is negative or not below {_MOST:,}")
    return pairs


def batches(data: Data, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield users, and their items followed by as many random ones, epoch by epoch in a new order."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    count, items = min(settings.batch, len(data.train)), data.sizes[1]
    while True:
        order = torch.randperm(len(data.train), generator=generator)
        for first in range(0, len(order) - count + 1, count):
            users, wanted = data.train[order[first : first + count]].unbind(1)
            yield users, torch.cat([wanted, torch.randint(items, (count,), generator=generator)])


class Recall:
    """The share of a user's held-out items among the `TOP` best of all items that it has not been trained with."""

    def __init__(self, data: Data, settings: Settings) -> None:
        users = data.test[:, 0].unique()
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(settings.seed))
        self.users, self._data = users[order[: settings.users]].sort().values, data

    def __call__(self, users: Tensor, items: Tensor) -> float:
        scores = users[self.users.to(users.device)] @ items.T
        known, wanted = (self._marked(pairs, scores) for pairs in self._data)
        best = scores.masked_fill_(known, -torch.inf).topk(min(TOP, scores.shape[1]), dim=1).indices
        return float((wanted.gather(1, best).sum(1).float() / wanted.sum(1)).mean())

    def _marked(self, pairs: Tensor, scores: Tensor) -> Tensor:
        """Return where the items of the users are, like `scores`, bool."""
        place = torch.searchsorted(self.users, pairs[:, 0].contiguous()).clamp_max(len(self.users) - 1)
        own = self.users[place] == pairs[:, 0]
        marked = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        marked[place[own].to(scores.device), pairs[own, 1].to(scores.device)] = True
        return marked


# --- training -----------------------------------------------------------------------------------------------------------


class Model:
    """A table of users and one of items, with an optimizer."""

    def __init__(self, way: str, start: Weights, settings: Settings) -> None:
        self.losses: list[Tensor] = []
        users, items = (weight.double() if way == DOUBLE else weight.clone() for weight in start)
        self.users, self.items = _table(way, users), _table(way, items)
        parameters = [*self.users.parameters(), *self.items.parameters()]
        if way == SPARSE:
            self.optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters, lr=settings.lr)
        else:
            self.optimizer = torch.optim.AdamW(parameters, settings.lr, weight_decay=settings.weight_decay, fused=True)

    def step(self, users: Tensor, items: Tensor) -> None:
        """Train on users (n,) and their items followed by n others."""
        wanted, other = self.items(items).view(2, len(users), -1)
        loss = F.softplus((self.users(users) * (other - wanted)).sum(1)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def weights(self) -> Weights:
        """Return all rows of users and of items, the idle ones of "exact" after all steps so far too."""
        return self.users.state_dict()["weight"], self.items.state_dict()["weight"]


def _table(way: str, weight: Tensor) -> nn.Embedding:
    if way in (EXACT, LAZY):
        return st.Embedding.from_pretrained(weight, freeze=False, idle=way)
    return nn.Embedding.from_pretrained(weight, freeze=False, sparse=way == SPARSE)


def train(data: Data, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Train all ways side by side on the same batches, and return curves and differences as plain data."""
    generator = torch.Generator().manual_seed(settings.seed)
    users, items = (_START * torch.randn(size, settings.dim, generator=generator) for size in data.sizes)
    start = (users.to(device), items.to(device))
    models, recall = {way: Model(way, start, settings) for way in (*WAYS, DOUBLE)}, Recall(data, settings)
    untrained = recall(*start)
    curves: dict[str, dict[str, list[float]]] = {
        way: {"loss": [], "recall": [untrained], "distance": []} for way in WAYS
    }
    curves[DOUBLE] = {"distance": []}
    counts, touched = [0], torch.zeros(2)
    every = max(1, settings.steps // settings.points)
    for number, batch in enumerate(batches(data, settings), start=1):
        touched += torch.tensor([len(ids.unique()) for ids in batch])
        for model in models.values():
            model.step(*(ids.to(device) for ids in batch))
        if number % every and number != settings.steps:
            continue
        dense = models[DENSE].weights()
        moved = _distance(dense, start)
        for way, model in models.items():
            weights = model.weights()
            curves[way]["distance"].append(_digits(_distance(weights, dense) / moved))
            if way in WAYS:
                curves[way]["loss"].append(_digits(float(torch.stack(model.losses[counts[-1] :]).mean())))
                curves[way]["recall"].append(_digits(recall(*weights)))
        counts.append(number)
        shown = (f"{way} {curves[way]['loss'][-1]:.4f} / {curves[way]['recall'][-1]:.4f}" for way in WAYS)
        print(f"step {number:,}, loss / recall: {', '.join(shown)}", flush=True)
        if number >= settings.steps:
            break
    losses = {way: torch.stack(models[way].losses).double() for way in WAYS}
    return {
        "settings": asdict(settings),
        "sizes": {"users": len(users), "items": len(items), "interactions": len(data.train)},
        "touched": (touched / settings.steps / torch.tensor(data.sizes)).tolist(),
        "counts": counts,  # of steps, where the curves have points; losses are means since the point before
        "curves": curves,
        "loss_difference": {way: float((loss - losses[DENSE]).abs().max()) for way, loss in losses.items()},
    }


def _distance(weights: Weights, others: Weights) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(weights, others, strict=True))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


# --- what is shown ------------------------------------------------------------------------------------------------------

# Exact is dashed over a broad dense line: both are visible where they coincide.
_KEYS = ("label", "color", "lw", "ls", "zorder")
_LINES = {
    DENSE: ("nn.Embedding + AdamW (dense)", "#b8bec8", 7, "-", 2),
    EXACT: ('speedtransfer, idle="exact" + AdamW', COLOURS[0], 2, (0, (4, 2)), 5),
    LAZY: ('speedtransfer, idle="lazy" + AdamW', COLOURS[1], 2, "-", 4),
    SPARSE: ("nn.Embedding(sparse=True) + SparseAdam", COLOURS[2], 2, (0, (1, 1)), 4),
    DOUBLE: ("dense in float64: rounding", QUIET, 1.5, ":", 3),
}


def draw(result: dict[str, Any]) -> Any:
    figure = require_matplotlib()(12, 4.4)
    panels = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    counts, curves = result["counts"], result["curves"]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(counts)]  # each loss is a mean from count to count
    shown = {
        "loss": (middles, "training loss"),
        "recall": (counts, f"recall@{TOP} on held-out items (higher is better)"),
        "distance": (counts[1:], "farthest weight from dense\n(1: as far as dense has moved any)"),
    }
    styles: dict[str, dict[str, Any]] = {way: dict(zip(_KEYS, style, strict=True)) for way, style in _LINES.items()}
    for axes, (key, (places, title)) in zip(panels, shown.items(), strict=True):
        for way, style in styles.items():
            if key in curves[way] and (key, way) != ("distance", DENSE):
                axes.plot(places, curves[way][key], **style)
        axes.set_title(title, fontsize=11, color=INK)
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        tidy(axes)
    for axes in panels[:2]:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    panels[2].set_yscale("log")
    panels[0].plot([], [], **styles[DOUBLE])  # for the legend, which is that of the first
    legend_below(figure, panels[0])
    return figure


def markdown(result: dict[str, Any]) -> str:
    settings, sizes, curves = result["settings"], result["sizes"], result["curves"]
    users, items = map(format_share, result["touched"])
    trained = (
        f"{result['data'].capitalize()}, {sizes['users']:,} users x {sizes['items']:,} items, matrix factorisation with BPR, "
        f"dim {settings['dim']}, {settings['steps']:,} steps of {settings['batch']:,} pairs, each of which touches {users} of "
        f"the users and {items} of the items; AdamW with lr {settings['lr']:g} and weight decay {settings['weight_decay']:g} "
        f"(SparseAdam has none); one seed, {provenance(result)}."
    )
    ends = ", ".join(f"{way} {curves[way]['recall'][-1]:.3f}" for way in WAYS)
    best = ", ".join(f"{way} {max(curves[way]['recall']):.3f}" for way in WAYS)
    losses = ", ".join(f"{way} {curves[way]['loss'][-1]:.3f}" for way in WAYS)
    far = {way: curves[way]["distance"][-1] for way in (EXACT, DOUBLE, LAZY)}
    found = (
        f"Recall@{TOP} at the end: {ends}; at its best: {best}; training loss at the end: {losses}. No weight trained with "
        f'idle="exact" is farther from dense than {far[EXACT]:.1e} of the farthest that one moved (by rounding alone '
        f"dense in float64 is {far[DOUBLE]:.1e} away; lazy {far[LAZY]:.2f}); no loss of any step differs by more than "
        f"{result['loss_difference'][EXACT]:.0e}."
    )
    return f"{trained}\n\n{found}"


if __name__ == "__main__":
    sys.exit(main())
