"""Trains on ids that drift, in tables with a tenth, a quarter and half of the rows, and compares policies of eviction.

``python bench/vocabulary_drift.py --data FOLDER``, where FOLDER has ``train.txt`` and ``test.txt`` (or ``.txt.xz``) as the
Gowalla of LightGCN's repository (https://github.com/kuandeng/LightGCN) has them; the data are not part of this one. Without
them only the stream that is made here is trained on, and the result is not a complete one. It goes to
``bench/results/<device>/vocabulary_drift.json``, with a picture beside it; bench/readme.py puts both into docs/vocabulary.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import vocabulary_drift_training as training
from experiment import blocks_of, exit_code, make_parser, markdown_table, provenance, write_result
from idle_data import read_data
from store import DRIFT, QUICK, ROOT, header, path_of
from vocabulary_drift_training import FULL, HASHED, LFU, LRU, POLICIES, SEEN_TWICE, TOP, TTL, Blocks, Settings, Zipf

from speedtransfer.drawing import COLOURS, INK, QUIET, legend_below, require_matplotlib, tidy
from speedtransfer.units import format_count, format_share


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser("vocabulary_drift", __doc__)
    parser.add_argument("--data", type=Path, help="the folder of train.txt and test.txt", metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=Settings.seed, help=f"by default {Settings.seed}")
    parser.add_argument("--quick", action="store_true", help="little of everything, to see that it runs")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _measure(args, root))


def _measure(args: argparse.Namespace, root: Path) -> int:
    settings = replace(training.QUICK if args.quick else Settings(), seed=args.seed)
    data = None if args.data is None else read_data(args.data)
    about = header(ROOT, DRIFT)  # before: the sources as they are when it starts
    complete = data is not None and not args.quick
    out = args.out or path_of(root, about["environment"]["device"], DRIFT, "" if complete else QUICK)
    start = time.perf_counter()
    streams: dict[str, Any] = {}
    zipf = Zipf(settings)
    streams["zipf"] = compare("zipf", lambda *one: training.train_zipf(zipf, *one, settings), settings)
    if data is not None:
        blocks = Blocks(data, settings)
        streams["gowalla"] = compare("gowalla", lambda *one: training.train_gowalla(blocks, *one, settings), settings)
        users = sum(len(block) for block, _ in blocks.blocks)
        streams["gowalla"] |= {"users": users, "steps": len(blocks.steps)}
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "settings": asdict(settings), "streams": streams, "seconds": seconds, "complete": complete}
    write_result(result, out, draw, [*sentences(result)])
    return 0


def compare(name: str, train: Callable[[str, float], dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Train with a row for each id, and with each policy in tables of each share."""
    runs = []
    for policy, share in [(FULL, 1.0), *((policy, share) for share in settings.shares for policy in POLICIES)]:
        run = {"policy": policy, "share": share, **train(policy, share)}
        runs.append({key: round(value, 5) if isinstance(value, float) else value for key, value in run.items()})
        print(f"{name}, {run['rows']:,} rows, {policy}: {run['quality']:.4f}, found {run['found']:.1%}", flush=True)
    return {"runs": runs}


# --- words and picture --------------------------------------------------------------------------------------------------


_NAMES = {
    LRU: 'evict="lru"',
    SEEN_TWICE: 'evict="lru", admit=2',
    LFU: 'evict="lfu"',
    TTL: "evict=steps, as many as fit",
    HASHED: "no vocabulary: id % rows",
    FULL: "a row for each id",
}
_MARKS = {LRU: "o", SEEN_TWICE: "s", LFU: "D", TTL: "^", HASHED: "X"}
_TITLES = {"zipf": "Zipf, ranks that move", "gowalla": "Gowalla"}
_MEASURES = {
    "zipf": "quality on the\nnext batch (1: as good as can be)",
    "gowalla": f"recall@{TOP}\nof users just trained",
}


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: a row of panels for each stream, for a narrow screen."""
    streams = result["streams"]
    figure = require_matplotlib()(7, 0.8 + 3.1 * len(streams))
    panels = figure.subplots(len(streams), 2, squeeze=False)
    for (quality, found), (name, stream) in zip(panels, streams.items(), strict=True):
        for policy in POLICIES:
            runs = _runs(stream, policy)
            shares = [100 * run["share"] for run in runs]
            style = {"color": COLOURS[POLICIES.index(policy)], "marker": _MARKS[policy], "lw": 2, "ms": 6}
            # Dashed, so that both are visible where they coincide.
            style |= {"label": _NAMES[policy], "ls": (0, (3, 2)) if policy == SEEN_TWICE else "-"}
            quality.plot(shares, [run["quality"] for run in runs], **style)
            if policy != HASHED:
                found.plot(shares, [100 * run["found"] for run in runs], **style)
        (full,) = _runs(stream, FULL)
        quality.axhline(full["quality"], color=INK, ls="--", lw=1.5, label=_NAMES[FULL])
        found.axhline(100 * full["found"], color=INK, ls="--", lw=1.5)
        quality.set_title(f"{_TITLES[name]}: {_MEASURES[name]}", fontsize=9.5, color=INK, loc="left")
        found.set_title("lookups that find a row, %", fontsize=9.5, color=INK, loc="left")
        for axes in (quality, found):
            tidy(axes)
            axes.set_xlim(0, 105 * max(run["share"] for run in stream["runs"] if run["policy"] != FULL))
            axes.set_xticks([100 * share for share in result["settings"]["shares"]])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("rows, % of the ids ever seen", fontsize=9, color=QUIET)
    legend_below(figure, panels[0][0])
    return figure


def _runs(stream: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    return sorted((run for run in stream["runs"] if run["policy"] == policy), key=lambda run: run["share"])


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield what was trained, and the quality of full tables."""
    settings = result["settings"]
    for name, stream in result["streams"].items():
        (full,) = _runs(stream, FULL)
        yield f"{_TITLES[name]}: {_about(name, stream, settings)} Full table: {full['quality']:.3f}."
    yield (f'Adagrad; counts of "lfu" halve in {settings["half_life"]:g} steps; one seed, {provenance(result)}.')


def _about(name: str, stream: dict[str, Any], settings: dict[str, Any]) -> str:
    (full,) = _runs(stream, FULL)
    if name == "zipf":
        return (
            f"{settings['steps']:,} batches of {settings['batch']:,} lookups of {full['rows']:,} ids, {settings['moves']} "
            "pairs of which change ranks at each step; each id has a hidden vector, and the model is a logistic regression "
            "that learns it as the row of the id. Measured is the second half."
        )
    return (
        f"{stream['users']:,} users in the order of the file, which has no time stamps, and {full['rows']:,} items; matrix "
        f"factorization (BPR, against the items of others in the batch, dim {settings['dim']}), {settings['block']} users "
        f"at a time, {settings['passes']} passes, after which they are asked for the items held out. Both tables are limited. "
        "Measured is the second half."
    )


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the block of docs/vocabulary.md; `picture` is its path or nothing."""
    parts = []
    for name, stream in result["streams"].items():
        (full,) = _runs(stream, FULL)
        shares = [run["share"] for run in _runs(stream, LRU)]
        about = f"{_TITLES[name]}, of the full table's {full['quality']:.3f}"
        rows = [[about, *(f"{format_share(share)} of the rows" for share in shares)]]
        for policy in POLICIES:
            kept = [format_share(run["quality"] / full["quality"]) for run in _runs(stream, policy)]
            times = [run["lifetime"] for run in _runs(stream, policy)]
            named = _NAMES[policy] + (f" ({', '.join(map(format_count, times))})" if policy == TTL else "")
            rows.append([f"`{named}`" if policy not in (HASHED, TTL) else named, *kept])
        parts.append(markdown_table(rows))
    title = "Quality of tables with fewer rows than ids, by what is evicted"
    return blocks_of(picture, title, *parts, *sentences(result))


if __name__ == "__main__":
    sys.exit(main())
