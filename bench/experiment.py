"""What the experiments of this folder share: arguments, errors, results and pictures.

The package is imported where it is needed: a process that measures gensim must not hold it in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from store import write

PLOT_BYTES = 150_000  # at most: a repository keeps every picture for ever


class DataError(ValueError):
    """Data or a package are missing, or not as they must be; the message says what to do."""


class RunError(RuntimeError):
    """A process that was started failed."""


class OutOfTimeError(RuntimeError):
    """A process was stopped at its time limit."""


def require(*modules: str) -> None:
    """Raise `DataError` where a package is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise DataError(f"this benchmark needs {module}, which is not installed; run: pip install {module}")


# --- the command line -----------------------------------------------------------------------------------------------------


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser for a script of this folder, described by the first line of its docstring, with ``--out``."""
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file to write", metavar="FILE")
    return parser


def positive_int(text: str) -> int:
    """Return a number of one or more, for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


positive_int.__name__ = "positive int"  # in the line that refuses another


def exit_code(run: Callable[[], int]) -> int:
    """Return what `run` returns; print an error in one line and return 2 (arguments, data), 1 (a process) or 130 (Ctrl-C)."""
    from speedtransfer.errors import SpeedtransferError

    try:
        return run()
    except (DataError, SpeedtransferError) as error:
        code, message = 2, str(error)
    except (RunError, OutOfTimeError) as error:
        code, message = 1, str(error)
    except KeyboardInterrupt:
        code, message = 130, "stopped"
    print(f"error: {message}", file=sys.stderr)
    return code


def stop_on_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, also in the background, where a shell has SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


# --- results --------------------------------------------------------------------------------------------------------------


def write_result(
    result: dict[str, Any], out: Path, draw: Callable[[dict[str, Any]], Any] | None, lines: Sequence[str] = ()
) -> None:
    """Write a result, and by `draw` a picture beside it; print `lines` and the path."""
    write(out, result)
    print(*(["", *lines] if lines else []), f"wrote {out}", sep="\n")
    if draw is not None and (problem := save_picture(draw, result, out.with_suffix(".png"))):
        print(problem, file=sys.stderr)


def save_picture(draw: Callable[[dict[str, Any]], Any], result: dict[str, Any], path: Path) -> str:
    """Write what `draw` makes of a result, a figure or the bytes of a PNG, to `path`; return what is wrong, if anything."""
    from speedtransfer.errors import SpeedtransferError

    try:
        from PIL import Image  # matplotlib brings it

        picture = draw(result)
    except (ImportError, SpeedtransferError) as error:
        return f"no picture {path}: {error}"
    if picture is None:
        path.unlink(missing_ok=True)
        return ""
    file = io.BytesIO(picture if isinstance(picture, bytes) else b"")
    if not isinstance(picture, bytes):
        picture.savefig(file, format="png")
    with Image.open(file) as image:  # few colours are enough for bars and lines, and a third of the bytes
        image.convert("RGB").quantize(64).save(path, optimize=True)
    size = path.stat().st_size
    return f"{path} has {size} bytes, more than {PLOT_BYTES}: is it worth that?" if size > PLOT_BYTES else ""


def blocks_of(picture: str, title: str, *blocks: str) -> str:
    """Return blocks of markdown, the picture (its path or nothing) first."""
    return "\n\n".join(filter(None, [f"![{title}]({picture})" if picture else "", *blocks]))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table as markdown, all columns but the first aligned to the right."""
    lines = [rows[0], ["---", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
