"""Trains a recommender with dense, exact, lazy and SparseAdam's idle rows and draws the four curves.

``python bench/idle.py --data FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the Gowalla of
LightGCN's repository (https://github.com/kuandeng/LightGCN) has them; the data are not part of this one. The result goes to
``bench/results/<device>/idle.json``, with a picture beside it; bench/readme.py puts both into docs/results.md.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import Any

from experiment import blocks_of, exit_code, make_parser, positive_int, write_result
from idle_training import DENSE, DOUBLE, EXACT, LAZY, SPARSE, TOP, WAYS, Settings, read_data, train
from store import IDLE, ROOT, header, path_of

from speedtransfer.benchmark.report import provenance
from speedtransfer.cuda import resolve_device
from speedtransfer.drawing import COLOURS, INK, QUIET, legend_below, require_matplotlib, tidy
from speedtransfer.units import format_share


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser("idle", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of train.txt and test.txt")
    kinds = {"steps": positive_int, "batch": positive_int, "seed": int, "lr": float, "weight-decay": float}
    for name, kind in kinds.items():
        default = getattr(Settings, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"by default {default}")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    data = read_data(args.data)
    about = header(ROOT, IDLE)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], IDLE)
    settings = Settings(args.steps, args.batch, seed=args.seed, lr=args.lr, weight_decay=args.weight_decay)
    start = time.perf_counter()
    result = train(data, settings, resolve_device(None), _print_point)
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "data": args.data.resolve().name, **result, "seconds": seconds, "complete": True}
    write_result(result, out, draw, sentences(result))
    return 0


def _print_point(number: int, curves: dict[str, dict[str, list[float]]]) -> None:
    shown = (f"{way} {curves[way]['loss'][-1]:.4f} / {curves[way]['recall'][-1]:.4f}" for way in WAYS)
    print(f"step {number:,}, loss / recall: {', '.join(shown)}", flush=True)


# Exact is dashed over a broad dense line: both are visible where they coincide.
_STYLES: dict[str, dict[str, Any]] = {
    DENSE: {"color": "#b8bec8", "lw": 7, "solid_capstyle": "round", "zorder": 2},
    EXACT: {"color": COLOURS[0], "lw": 2, "ls": (0, (4, 2)), "zorder": 5},
    LAZY: {"color": COLOURS[1], "lw": 2, "zorder": 4},
    SPARSE: {"color": COLOURS[2], "lw": 2, "ls": (0, (1, 1)), "zorder": 4},
    DOUBLE: {"color": QUIET, "lw": 1.5, "ls": ":", "zorder": 3},
}
_NAMES = {
    DENSE: "nn.Embedding + AdamW (dense)",
    EXACT: 'speedtransfer, idle="exact" + AdamW',
    LAZY: 'speedtransfer, idle="lazy" + AdamW',
    SPARSE: "nn.Embedding(sparse=True) + SparseAdam",
    DOUBLE: "dense in float64: rounding",
}


def draw(result: dict[str, Any]) -> Any:
    """Return the picture."""
    figure = require_matplotlib()(12, 4.4)
    panels = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    counts, curves = result["counts"], result["curves"]
    middles = [(a + b) / 2 for a, b in itertools.pairwise(counts)]  # each loss is a mean from count to count
    titles = {
        "loss": "training loss",
        "recall": f"recall@{TOP} on held-out items (higher is better)",
        "distance": "farthest weight from dense\n(1: as far as dense has moved any)",
    }
    places = {"loss": middles, "recall": counts, "distance": counts[1:]}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for way, style in _STYLES.items():
            if key in curves[way] and (key, way) != ("distance", DENSE):
                axes.plot(places[key], curves[way][key], label=_NAMES[way], **style)
        axes.set_title(title, fontsize=11, color=INK)
        axes.set_xlabel("step")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        tidy(axes)
    for axes in panels[:2]:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    panels[2].set_yscale("log")
    panels[0].plot([], [], label=_NAMES[DOUBLE], **_STYLES[DOUBLE])  # for the legend, which is that of the first
    legend_below(figure, panels[0])
    return figure


def sentences(result: dict[str, Any]) -> list[str]:
    """Return what was trained, and the results."""
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
        f'idle="exact" is farther from dense than {far[EXACT]:.1e} of the longest way that one went (by rounding alone '
        f"dense in float64 is {far[DOUBLE]:.1e} away; lazy {far[LAZY]:.2f}); no loss of any step differs by more than "
        f"{result['loss_difference'][EXACT]:.0e}."
    )
    return [trained, found]


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/results.md; `picture` is its path or nothing."""
    return blocks_of(picture, "Training with dense, exact, lazy and SparseAdam's idle rows", *sentences(result))


if __name__ == "__main__":
    sys.exit(main())
