"""Train a small GPT with hashed n-gram tables, held and trained in several ways, and compare them: ``make ngram-lm``.

``python examples/ngram_lm/run.py`` trains on the text that comes with the package, ``--data FILE`` on one of yours: each line
is a document; ``.gz`` and ``.xz`` too. Results go to the folder ``--out``: results.json, curves.png and bars.png. Ctrl-C
ends it and keeps what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package, also where it is not installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ngram_lm.comparison import compare
from ngram_lm.data import DataError, read_corpus, windows_of
from ngram_lm.pictures import save_pictures
from ngram_lm.settings import Settings, SettingsError, flag_of
from ngram_lm.table_text import show
from speedtransfer.errors import format_bytes
from speedtransfer.system import available_bytes

HERE = Path(__file__).resolve().parent
# Weights, gradient and two planes of state; a sparse gradient is small.
_PLANES = {"none": 0, "dense": 4, "sparse": 3}
NAMES = ("none", "dense", "sparse", "lazy", "lazy-prefetch", "exact", "exact-prefetch")


class Interrupted(Exception):  # noqa: N818
    """Ctrl-C was pressed, or the process was asked to end."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        args, settings = _parsed(arguments)
        corpus = read_corpus(args.data, settings.vocabulary)
        _check(settings, corpus)
        _check_folder(args.out)
    except (DataError, SettingsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    about = {
        "settings": asdict(settings),
        "data": corpus.name,
        "vocabulary": corpus.vocabulary,
        "tokens": {"train": len(corpus.train), "validation": len(corpus.validation)},
        "environment": _environment(),
    }
    del corpus
    results: dict[str, dict[str, Any]] = {}
    code = 0
    with tempfile.TemporaryDirectory(prefix="ngram-lm-") as folder:
        tables = {name: Path(folder, f"{name}.bin") for name in args.only}
        try:
            with _listening():
                for name in args.only:
                    results[name] = {"losses": [], "validation": [], "complete": False}
                    _train(name, settings, args.data, tables[name], results[name])
        except (Interrupted, KeyboardInterrupt):
            print("\nstopped; this is what there is", file=sys.stderr)
            code = 130
        found = {name: one for name, one in results.items() if one["losses"] or one.get("error")}
        comparisons = compare(found, tables, settings.dtype)
    result = {**about, "contenders": found, "comparisons": comparisons, "complete": code == 0}
    _write(args.out / "results.json", result)
    print(show(result))
    for problem in save_pictures(result, args.out):
        print(problem, file=sys.stderr)
    print(f"wrote {args.out}{os.sep}")
    return code or int(any(one.get("error") for one in found.values()))


def _parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, Settings]:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="examples/ngram_lm/run.py", description=lines[0])
    parser.add_argument(
        "--data", type=Path, help="a text, by default the one that comes with the package", metavar="FILE"
    )
    parser.add_argument("--out", type=Path, default=Path("ngram-lm"), help="folder of the results", metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="these ways alone", metavar="NAME")
    for one in fields(Settings):
        kind = type(one.default[0]) if isinstance(one.default, tuple) else type(one.default)
        default = " ".join(map(str, one.default)) if isinstance(one.default, tuple) else one.default
        parser.add_argument(
            flag_of(one.name),
            type=kind,
            nargs="+" if isinstance(one.default, tuple) else None,
            default=one.default,
            choices=one.metadata.get("choices"),
            help=f"{one.metadata['help']}, by default {default}",
            metavar=None if "choices" in one.metadata else "N",
        )
    args = parser.parse_args(arguments)
    args.only = list(dict.fromkeys(args.only))
    given = {one.name: getattr(args, one.name) for one in fields(Settings)}
    return args, Settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _check(settings: Settings, corpus: Any) -> None:
    """Raise unless the text has a batch to train on and a window to validate on."""
    windows = len(windows_of(corpus.train, settings.context)) if len(corpus.train) > settings.context else 0
    if windows < settings.batch or len(corpus.validation) <= settings.context:
        raise DataError(
            f"{corpus.name} has {len(corpus.train) + len(corpus.validation):,} tokens, which is too short for batches of "
            f"{settings.batch} windows of {settings.context} tokens; pass a longer text, or a smaller --batch or --context"
        )


def _train(name: str, settings: Settings, data: Path | None, table: Path, found: dict[str, Any]) -> None:
    """Train a contender in a process of its own, whose memory is its own too, and note in `found` what it says."""
    row_bytes = settings.dim * (8 if settings.dtype == "float64" else 4)
    needed = _PLANES.get(name, 3) * settings.heads * settings.rows * row_bytes
    if needed > 0.8 * available_bytes():
        found["error"] = f"takes {format_bytes(needed)} of memory but {format_bytes(available_bytes())} are free"
        return
    job = {
        "settings": asdict(settings),
        "data": None if data is None else str(data.resolve()),
        "contender": name,
        "table": str(table),
    }
    file = table.with_suffix(".json")
    file.write_text(json.dumps(job), encoding="utf-8")
    with table.with_suffix(".txt").open("w+", encoding="utf-8") as said, _progress(name, settings.steps) as advance:
        command = [sys.executable, str(HERE / "training.py"), str(file)]
        # A session of its own: Ctrl-C is for this process, which ends the other.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, start_new_session=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _note(json.loads(line), found, advance)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            code = process.wait()
        found["complete"] = "step_s" in found
        if not found["complete"]:
            said.seek(0)
            lines = said.read().strip().splitlines()
            found["error"] = lines[-1] if lines else f"ended with exit code {code}"


def _note(line: dict[str, Any], found: dict[str, Any], advance: Any) -> None:
    if "result" in line:
        found.update(line["result"])
        return
    found["losses"].append(line["loss"])
    if "validation" in line:
        found["validation"].append([line["step"], line["validation"]])
    advance(line["step"], line["loss"])


@contextlib.contextmanager
def _progress(name: str, steps: int) -> Iterator[Any]:
    """Show a bar on a terminal, and else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=steps)

        def advance(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"{name}, loss {loss:.3f}")
            if not console.is_terminal and (step in (1, steps) or step % max(1, steps // 3) == 0):
                print(f"{name}: step {step:,} of {steps:,}, loss {loss:.4f}", flush=True)

        yield advance


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does; also Ctrl-C where the shell has it ignored, as in background jobs."""

    def stop(number: int, frame: Any) -> None:
        raise Interrupted

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment() -> dict[str, Any]:
    from speedtransfer.benchmark.environment import environment
    from speedtransfer.cuda import resolve_device

    return environment(resolve_device("cpu"))


def _check_folder(folder: Path) -> None:
    """Make the folder, and raise OSError unless files can be written there: better before the training than after it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _write(path: Path, result: dict[str, Any]) -> None:
    """Write the results; whoever is stopped while writing leaves the old ones."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
