"""Times a training step of word2vec on vocabularies of half a million to fifty million words, tables in files.

``python bench/word2vec_scale.py`` needs no data: word numbers are drawn by Zipf's law. Each size is a process of its own. The
files of fifty million rows span 19 GB, of which only what is written takes room on the disk; to delete such scattered pages
takes minutes on a disk that is mounted with ``discard`` (a --folder on another spares that). The result goes to
``bench/results/<device>/word2vec_scale.json``; bench/readme.py puts a line of it into docs/word2vec.md. Needs psutil.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from store import FULL, PARTIAL, QUICK, ROOT, SCALE, header, path_of, write
from word2vec_process import ProcessError, run_job
from word2vec_scale_figure import markdown, told

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from speedtransfer.errors import SpeedtransferError, format_bytes
from speedtransfer.word2vec.optimizers import find_optimizer

ROWS = (500_000, 5_000_000, 50_000_000)
STEPS, WARM = 100, 10
_PLANES = {"sgd": 1, "adagrad": 2}  # with the weights; three for most
_UNITS = {"k": 1e3, "M": 1e6}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(arguments)
    settings = {name: getattr(args, name) for name in ("dim", "steps", "memory", "device_gb")} | {"warm": WARM}
    quick = (args.rows, args.steps) != (ROWS, STEPS)
    try:
        for optimizer in args.optimizers:
            find_optimizer(optimizer)
        if args.memory == "mmap":
            _check_disk(max(args.rows), args.dim, args.optimizers, args.folder)
    except (SpeedtransferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = header(ROOT, SCALE)  # before: the sources as they are when it starts
    out = args.out or path_of(ROOT, about["environment"]["device"], SCALE, QUICK if quick else FULL)
    partial = out.with_name(f"{out.stem}{PARTIAL}.json")
    result: dict[str, Any] = {**about, "quick": quick, "settings": settings, "measured": []}
    for optimizer in args.optimizers:
        for rows in args.rows:
            with tempfile.TemporaryDirectory(prefix="speedtransfer-", dir=args.folder) as folder:
                job = {**settings, "rows": rows, "optimizer": optimizer, "folder": folder}
                try:
                    found = run_job("word2vec_scale_child.py", job)
                except ProcessError as error:
                    print(f"error: {rows:,} rows with {optimizer}: {error}", file=sys.stderr)
                    return 1
            result["measured"].append({"rows": rows, "optimizer": optimizer, **found})
            write(partial, result)
            print(told(result["measured"][-1]), flush=True)
    write(out, {**result, "complete": True})
    partial.unlink()
    print("", markdown(result, ""), f"wrote {out}", sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench/word2vec_scale.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=_rows, default=ROWS, metavar="N,N", help="by default 0.5M,5M,50M")
    parser.add_argument("--dim", type=_count, default=16, help="by default 16")
    parser.add_argument("--steps", type=_count, default=STEPS, help=f"that are timed, by default {STEPS}")
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
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    return parser


def _check_disk(rows: int, dim: int, optimizers: tuple[str, ...], folder: Path) -> None:
    needed = 2 * rows * dim * 4 * max(_PLANES.get(optimizer, 3) for optimizer in optimizers)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
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


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


_count.__name__ = "positive int"

if __name__ == "__main__":
    sys.exit(main())
