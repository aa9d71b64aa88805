"""Times SpeedTorch's word2vec example by its old names, by the drop-in, and in plain torch, dense and sparse.

``python bench/speedtorch_loop.py``, with ``--quick`` small and short. The result goes to
``bench/results/<device>/speedtorch_loop.json``, with a picture beside it; bench/readme.py puts both into docs/migration.md.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import speedtorch_loop_training
from experiment import blocks_of, make_parser, provenance, write_result
from speedtorch_loop_training import DENSE, OURS, SPARSE, SPEEDTORCH, WAYS, Settings, as_data, train
from store import FULL, LOOP, QUICK, ROOT, header, path_of

from speedtransfer.cuda import resolve_device
from speedtransfer.drawing import COLOURS, INK, QUIET, require_matplotlib, tidy
from speedtransfer.errors import format_bytes


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser("speedtorch_loop", __doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few steps")
    args = parser.parse_args(arguments)
    about = header(ROOT, LOOP)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], LOOP, QUICK if args.quick else FULL)
    settings = speedtorch_loop_training.QUICK if args.quick else Settings()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SpeedTorch's classes ask for CUDA")  # the result names the device
        measured = train(settings, resolve_device(None), lambda size: print(describe(size), flush=True))
    seconds = round(time.perf_counter() - start, 1)
    result = {**about, "quick": args.quick, "settings": as_data(settings), "measured": measured, "seconds": seconds}
    result["complete"] = True
    write_result(result, out, draw, [*sentences(result)])
    return 0


# --- words and picture --------------------------------------------------------------------------------------------------


_NAMES = {
    SPEEDTORCH: "speedtransfer.speedtorch, Adamax",
    OURS: "speedtransfer.Embedding, Adamax",
    DENSE: "nn.Embedding, Adamax",
    SPARSE: "nn.Embedding(sparse=True), SparseAdam",
}
_COLOURS = {OURS: COLOURS[0], SPEEDTORCH: COLOURS[5], DENSE: "#b8bec8", SPARSE: "#d5d9e0"}


def headline(result: dict[str, Any]) -> str:
    """Return a line for the list of results."""
    return "step " + "; ".join(describe(size) for size in result["measured"])


def describe(size: dict[str, Any]) -> str:
    """Return a line about one vocabulary."""
    return f"{size['rows']:,} rows: " + ", ".join(f"{way} {milliseconds(size['ways'][way])}" for way in WAYS)


def milliseconds(found: dict[str, Any]) -> str:
    """Return how long a step of a way took."""
    return f"{1e3 * found['step_s']:.3g} ms"


def draw(result: dict[str, Any]) -> Any:
    """Return the picture: for each vocabulary the milliseconds of a step and the bytes, a bar a way."""
    measured = result["measured"]
    figure = require_matplotlib()(12, 0.8 + 2.1 * len(measured))
    grid = figure.subplots(len(measured), 2, squeeze=False)
    for (step, room), size in zip(grid, measured, strict=True):
        ways = [size["ways"][way] for way in reversed(WAYS)]
        _bars(step, [1e3 * way["step_s"] for way in ways], lambda value: f"{value:,.3g} ms")
        _bars(room, [way["bytes"] for way in ways], format_bytes)
        room.set_yticklabels([])
        step.set_title(f"{_title(size)}: a training step", fontsize=11, color=INK, loc="left")
        room.set_title("tables, gradients and state", fontsize=11, color=INK, loc="left")
    return figure


def _bars(axes: Any, values: list[float], show: Any) -> None:
    names = list(reversed(WAYS))
    axes.barh([_NAMES[way] for way in names], values, color=[_COLOURS[way] for way in names])
    for place, value in enumerate(values):
        style = {"fontsize": 9, "color": INK, "va": "center"}
        axes.annotate(show(value), (value, place), (4, 0), textcoords="offset points", **style)
    axes.set_xlim(0, 1.25 * max(values))
    tidy(axes)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.tick_params(axis="y", colors=QUIET)


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield a table of what was measured, and what it was measured with."""
    lines = [
        "| vocabulary | way | step | of dense | tables, gradients, state | loss, first and last |",
        "|" + "---|" * 6,
    ]
    for size in result["measured"]:
        dense = size["ways"][DENSE]["step_s"]
        for way in WAYS:
            found = size["ways"][way]
            first, last = found["losses"]
            cells = (_title(size), _NAMES[way], milliseconds(found), f"{found['step_s'] / dense:.3g}x")
            lines.append(f"| {' | '.join((*cells, format_bytes(found['bytes']), f'{first:.3f}, {last:.3f}'))} |")
    yield "\n".join(lines)
    settings = result["settings"]
    yield (
        f"Skip-gram with {settings['negatives']} negatives, batches of {settings['batch']:,} pairs, dim {settings['dim']}, "
        f"lr {settings['lr']:g}, Adamax (SparseAdam where named); medians of {settings['rounds']} rounds of "
        f"{settings['steps']} steps in which the ways take turns on the same batches; {provenance(result)}."
    )


def markdown(result: dict[str, Any], picture: str = "") -> str:
    """Return the block of the migration page; `picture` is its path or nothing."""
    title = "A word2vec step with SpeedTorch's names, the drop-in, dense and SparseAdam"
    return blocks_of(picture, title, *sentences(result))


def _title(size: dict[str, Any]) -> str:
    return f"{size['words']}, {size['rows']:,} words"


if __name__ == "__main__":
    sys.exit(main())
