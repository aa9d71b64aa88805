"""Times a training step of word2vec on vocabularies of half a million to fifty million words, tables in files.

``python bench/word2vec_scale.py`` needs no data: word numbers are drawn by Zipf's law. Each size is a process of its own. The
files of fifty million rows span 19 GB, of which only what is written takes room on the disk; to delete such scattered pages
takes minutes on a disk that is mounted with ``discard`` (a --folder on another spares that). The result goes to
``bench/results/<device>/word2vec_scale.json``; bench/readme.py puts a line of it into docs/word2vec.md. Needs psutil.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiment import RunError, exit_code, make_parser, positive_int, provenance, write_result
from process import run_job
from store import FULL, PARTIAL, QUICK, ROOT, SCALE, header, path_of, write

from speedtransfer.errors import StorageError, format_bytes
from speedtransfer.word2vec.optimizers import find_optimizer

ROWS = (500_000, 5_000_000, 50_000_000)
STEPS, WARM = 100, 10
_PLANES = {"sgd": 1, "adagrad": 2}  # with the weights; three for most
_UNITS = {"k": 1e3, "M": 1e6}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(arguments)
    return exit_code(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    settings = {name: getattr(args, name) for name in ("dim", "steps", "memory", "device_gb")} | {"warm": WARM}
    quick = (args.rows, args.steps) != (ROWS, STEPS)
    for optimizer in args.optimizers:
        find_optimizer(optimizer)
    if args.memory == "mmap":
        _check_disk(max(args.rows), args.dim, args.optimizers, args.folder)
    about = header(ROOT, SCALE)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], SCALE, QUICK if quick else FULL)
    partial = out.with_name(f"{out.stem}{PARTIAL}.json")
    result: dict[str, Any] = {**about, "quick": quick, "settings": settings, "measured": []}
    for optimizer, rows in itertools.product(args.optimizers, args.rows):
        with tempfile.TemporaryDirectory(prefix="speedtransfer-", dir=args.folder) as folder:
            job = {**settings, "rows": rows, "optimizer": optimizer, "folder": folder}
            try:
                found = run_job("word2vec_scale_child.py", job)
            except RunError as error:
                raise RunError(f"{rows:,} rows with {optimizer}: {error}") from error
        result["measured"].append({"rows": rows, "optimizer": optimizer, **found})
        write(partial, result)
        print(describe(result["measured"][-1]), flush=True)
    write_result({**result, "complete": True}, out, None, [markdown(result, "")])
    partial.unlink()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("word2vec_scale", __doc__)
    parser.add_argument("--rows", type=_rows, default=ROWS, metavar="N,N", help="by default 0.5M,5M,50M")
    parser.add_argument("--dim", type=positive_int, default=16, help="by default 16")
    parser.add_argument("--steps", type=positive_int, default=STEPS, help=f"that are timed, by default {STEPS}")
    parser.add_argument(
        "--optimizers",
        type=lambda text: tuple(text.lower().split(",")),
        default=("adamw",),
        metavar="A,B",
        help="by default adamw",
    )
    parser.add_argument("--memory", default="mmap", help="where the rows live, by default mmap")
    parser.add_argument(
        "--device-gb", type=float, metavar="GB", help="memory of a GPU that may be used, by default all"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on a disk with room for the tables"
    )
    return parser


def _check_disk(rows: int, dim: int, optimizers: tuple[str, ...], folder: Path) -> None:
    needed = 2 * rows * dim * 4 * max(_PLANES.get(optimizer, 3) for optimizer in optimizers)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise StorageError(str(error)) from error
    if needed > free:
        raise StorageError(
            f"the tables of {rows:,} rows span {format_bytes(needed)} but {str(folder)!r} has {format_bytes(free)} free; "
            "pass a --folder on a larger disk, or fewer --rows"
        )


def _rows(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    rows = tuple(round(float(part.rstrip("kM")) * _UNITS.get(part[-1:], 1)) for part in parts)
    if min(rows) < 100:
        raise ValueError
    return rows


_rows.__name__ = "list of at least 100 rows"  # for argparse, in the line that refuses another


# --- words and picture --------------------------------------------------------------------------------------------------


def headline(result: dict[str, Any]) -> str:
    """Return a line for the list of results."""
    return "step " + ", ".join(f"{_millions(m['rows'])} {_ms(m)}" for m in result["measured"])


def describe(measured: dict[str, Any]) -> str:
    """Return a line about one size."""
    first, again, files = measured["first"], measured["again"], measured["weight_files"]
    centers, contexts = measured["touched"]
    disk = f" (weights {_gb(files['on_disk'])} of {_gb(files['bytes'])} on disk)" if files["bytes"] else ""
    parts = [
        f"{measured['rows']:,} rows, {measured['optimizer']}: {_ms(measured)} a step over {centers + contexts:,.0f} rows",
        f"{1e3 * first['step_s']:.1f} ms (mean {1e3 * first['mean_step_s']:.1f} ms) when they are touched first",
        f"{1e3 * measured['written']['step_s']:.1f} ms when they have been written to the disk",
        f"block drawn in {1e3 * again['block_s']:.1f} ms",
        f"tables of {_gb(measured['table_bytes'])}{disk} made in {measured['start_s']:.1f} s",
        f"peak memory {_gb(measured['peak_bytes'])}",
    ]
    if "rssanon_bytes" in measured:
        parts.append(
            f"at the end {_gb(measured['rssanon_bytes'])} of its own and {_gb(measured['rssfile_bytes'])} of files"
        )
    if measured["device_bytes"]:
        parts.append(f"{_gb(measured['device_bytes'])} on the device")
    return ", ".join(parts)


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each optimizer."""
    settings = result["settings"]
    for optimizer, group in itertools.groupby(result["measured"], key=lambda m: m["optimizer"]):
        measured = list(group)
        sizes, times = (
            ", ".join(parts) for parts in (map(_millions, (m["rows"] for m in measured)), map(_ms, measured))
        )
        first, written = (
            ", ".join(f"{1e3 * m[when]['step_s']:.1f} ms" for m in measured) for when in ("first", "written")
        )
        small, large = measured[0], measured[-1]
        times_of = large["again"]["step_s"] / small["again"]["step_s"]
        yield (
            f"A training step over vocabularies of {sizes} words (Zipf's law, dim {settings['dim']}, {optimizer}, "
            f'memory="{settings["memory"]}"; medians of {settings["steps"]} steps): {times}, {times_of:.2f}x from the '
            f"smallest to the largest; where its rows are touched for the first time {first}; once the system has written "
            f"them to the disk {written}. The largest tables span "
            f"{_gb(large['table_bytes'])}, peak memory {_gb(large['peak_bytes'])}, mapped pages of the files included; "
            f"{provenance(result)}."
        )


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the lines of docs/word2vec.md; there is no picture."""
    return "\n".join(sentences(result))


def _ms(measured: dict[str, Any]) -> str:
    return f"{1e3 * measured['again']['step_s']:.1f} ms"


def _millions(rows: int) -> str:
    return f"{rows / 1e6:g}M"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
