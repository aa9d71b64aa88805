"""Records tests and benchmarks: `gpu` all of them on a CUDA device, `here` the benchmarks on whatever this machine has.
`status` lists the results with their commits; ``git log COMMIT.. -- PATH`` tells what has changed since.

Each part goes to ``bench/results/<device>/<part>.json`` as soon as it is done, with device, versions and commit. Quick and
interrupted runs have files of their own beside it (see store.py). Needs only what the tests need.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import store
from store import CHECKS, MEASURED, PARTIAL, QUICK, read, write

STARTED = time.monotonic()
LIMIT_S = 300.0  # of one part, as the next must have its turn
SPARE_S = 25.0  # of a part of `make gpu`, for stopping its last task and what comes after
MARGIN_S = 10.0  # that a suite ends by itself before it is stopped


class Task(NamedTuple):
    """A part to run, its time limit, whether to run its quick form or to go on with a run, and what its suite is given."""

    name: str
    limit_s: float
    quick: bool = False
    resume: bool = False
    options: dict[str, Any] = {}


REST, PART_S = 1000.0, 540.0
# Time that a task leaves goes to the next.
GPU_PARTS = {
    1: (Task("tests", 250), Task("gpu", REST)),
    2: (
        *(Task(name, limit, True) for name, limit in (("step", 60), ("transfer", 45), ("cache", 35), ("prefetch", 35))),
        Task("step", 190),
        Task("transfer", REST),
    ),
    3: (Task("sanitizer", 200), Task("precision", 80), Task("mixed", 120), Task("memory", REST)),
}
# Tables are sized for that much memory: with more, the step on the largest would not be reached.
HOST_BYTES = {1: 110e9, 2: 67e9, 3: 67e9}

HELP = """\
docs/benchmarks.md says how to run `gpu` in parts on a machine that is lent for ten minutes a command, and what --archive has.
COMMIT=1a2b3c+changes names the commit where there is no git; "+changes" means that the tree had some."""


# --- a suite in a process of its own ------------------------------------------------------------------------------------


def run_suite(path: Path, about: dict[str, Any], limit_s: float, task: Task) -> str:
    """Measure a suite in another process; return what went wrong."""
    job = {"about": about, "path": str(path), "seconds": max(1.0, limit_s - MARGIN_S)}
    job |= {"quick": task.quick, "resume": task.resume, "options": task.options}
    code, _ = store.run([sys.executable, __file__, "suite", json.dumps(job)], limit_s)
    if code == 0 and not read(path)["complete"]:
        return "the time was up before some groups"
    return "a group failed" if code == 1 else store.ending(code)


def measure_here(
    about: dict[str, Any], path: str, quick: bool, seconds: float, options: dict[str, Any], resume: bool = False
) -> int:
    """Measure a suite and write its result after every group; return 1 where a group failed, 2 where none can begin."""
    from rich.console import Console

    from speedtransfer.benchmark import commands as runner
    from speedtransfer.cuda import resolve_device
    from speedtransfer.errors import SpeedtransferError

    def keep(result: dict[str, Any]) -> None:
        # The header was made before: its commit is that of the sources that were measured.
        write(Path(path), {**about, **result, "environment": about["environment"]})

    console, suite = Console(width=120, force_terminal=False), store.suites()[about["part"]]
    try:
        check_options(suite, options)
        done = done_before(Path(path), about, options) if resume else []
        result = runner.run_suite(suite, resolve_device(None), quick, console, keep, seconds, done, **options)
    except SpeedtransferError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    keep(result)
    return int(bool(result["failures"]))


def check_options(suite: Any, options: dict[str, Any]) -> None:
    """Raise unless all are settings of a suite: arguments of its `groups`, and what it has in `SETTINGS`."""
    from speedtransfer.errors import InvalidValueError, suggest

    known = {*inspect.signature(suite.module.groups).parameters, *suite.declared("SETTINGS", ())}
    known -= {"device", "quick", "others", "given"}
    for name in options:
        if name not in known:
            raise InvalidValueError(f"--set {name}=: {suite.name} has no such setting{suggest(name, sorted(known))}")


def done_before(path: Path, about: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """Return the groups that a stopped run has measured, if it is one of the same code with the same options."""
    from speedtransfer.benchmark.report import groups_of
    from speedtransfer.errors import InvalidValueError

    try:
        old = read(path)
    except (OSError, ValueError) as error:
        raise InvalidValueError(f"cannot read {str(path)!r} ({error!r}); drop --resume to start over") from error
    same = ("commit", "dirty", "versions")
    if old["options"] != options or any(
        old["environment"].get(name) != about["environment"].get(name) for name in same
    ):
        raise InvalidValueError(f"{str(path)!r} is of another commit or of other options; drop --resume to start over")
    return [group for group in groups_of(old) if not group.skipped]


def record_part(number: int, quick: bool, total_s: float, archive: Path | None = None) -> int:
    """Run a part of `make gpu`; `total_s` is the most it may take, in place of its own time."""
    from speedtransfer.system import physical_bytes

    seconds, cache = min(total_s, PART_S), device_folder() / "cache"
    room = min(HOST_BYTES[number], physical_bytes() or HOST_BYTES[number])
    os.environ.setdefault("SPEEDTRANSFER_HOST_BYTES", f"{room:.0f}")
    os.environ.setdefault("SPEEDTRANSFER_CACHE", str(cache))
    os.environ.setdefault("CUPY_CACHE_DIR", str(cache / "cupy"))
    tasks = [Task(one.name, one.limit_s * seconds / PART_S, one.quick or quick) for one in GPU_PARTS[number]]
    return record(tasks, STARTED + seconds - SPARE_S, archive, f"part{number}")


def device_folder() -> Path:
    return store.folder_of(store.header("")["environment"]["device"])


def record(tasks: Sequence[Task], end: float, archive: Path | None = None, label: str = "parts") -> int:
    """Run `tasks` until `end`; write their results, also into `archive`; return 1 after failures, else 0."""
    problems: dict[str, str] = {}
    folder = device_folder()
    keep = functools.partial(pack, archive, folder) if archive is not None else lambda: None
    with contextlib.ExitStack() as stack:
        stack.callback(store.logs.clear)
        stack.callback(keep)
        for path in (folder / "logs" / f"{label}.log", *([archive.with_suffix(".log")] if archive is not None else [])):
            path.parent.mkdir(parents=True, exist_ok=True)
            store.logs.append(stack.enter_context(path.open("w", encoding="utf-8", errors="replace")))
        for task in tasks:
            limit = min(task.limit_s, end - time.monotonic())
            if limit < 5:
                problems[task.name] = "no time was left for it"
                continue
            store.log(f"--- {task.name}, {limit:.0f} s at most\n")
            problem = _run_task(task, limit)
            keep()
            if problem:
                problems[task.name] = problem
            store.log(f"--- {task.name}: {problem or 'done'}\n")
        status()
        for name, problem in problems.items():
            print(f"{name}: {problem}", file=sys.stderr)
    return int(bool(problems))


def _run_task(task: Task, limit_s: float) -> str:
    """Run a task and put its result where results of its kind lie; return what went wrong."""
    about = store.header(task.name)  # before: the commit as it is when it starts
    quick, folder = task.quick and task.name not in CHECKS, store.folder_of(about["environment"]["device"])
    path = folder / f"{task.name}{QUICK if quick else PARTIAL}.json"
    if not task.resume:
        path.unlink(missing_ok=True)
    if task.name in CHECKS:
        from device_tests import run_sanitizer, run_tests

        problem = (run_tests if task.name == "tests" else run_sanitizer)(path, about, limit_s)
    else:
        problem = run_suite(path, about, limit_s, task)
    if not quick and path.exists() and read(path)["complete"]:
        path.replace(folder / f"{task.name}.json")
    return problem


def pack(archive: Path, folder: Path) -> None:
    """Put the results, plots, logs and caches of `folder` into a file, to be unpacked at the root of another copy."""
    new = archive.with_name(archive.name + ".new")  # an interrupted write leaves the old one
    try:
        with tarfile.open(new, "w:gz") as file:
            for path in (path for name in ("*.json", "*.png", "logs", "cache") for path in sorted(folder.glob(name))):
                file.add(path, path.relative_to(store.ROOT).as_posix())
        new.replace(archive)
    except OSError as error:  # the results themselves are not affected
        print(f"cannot write {archive}: {error}", file=sys.stderr)


def status() -> int:
    """Print every result with its date, its commit and its outcome, and the tests that no GPU has run."""
    device, passed = "", set[str]()
    for part, path in store.recorded("", PARTIAL, QUICK):
        result = read(path)
        facts = result["environment"]
        commit = facts["commit"][:12] + ("+changes" if facts["dirty"] else "")
        row = f"{part:16}  {facts['date'][:10]}  {commit:20}  {outcome(part, result)}"
        print(*([f"\n{facts['device']}"] if facts["device"] != device else []), row, sep="\n")
        device = facts["device"]
        passed |= set(result["files"]) if part == "tests" and facts["cuda"] else set()
    if not device:
        print("no results yet; run `make gpu` on a machine with a CUDA device, `make bench` on any other")
        return 0
    if never := sorted({path.stem for path in (store.ROOT / "tests" / "gpu").glob("test_*.py")} - passed):
        print("\nno recorded run on a GPU has passed a test of", *never, sep="\n  ")
    return 0


def outcome(part: str, result: dict[str, Any]) -> str:
    """Return in a few words what a part has come to."""
    if part in CHECKS:
        from device_tests import outcome_of

        text = outcome_of(result)
    else:
        skipped = sum(bool(group["skipped"]) for group in result["groups"])
        text = f"{len(result['groups']) - skipped} groups measured" + (f", {skipped} not" if skipped else "")
        text += f", {len(result['failures'])} FAILED" if result["failures"] else ""
    return text + (", quick" if result.get("quick") else "") + ("" if result["complete"] else ", INCOMPLETE")


def setting(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE, a number where it is one."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main(arguments: list[str] | None = None) -> int:
    parts = {"gpu": (*CHECKS, *store.USUAL, "gpu"), "here": store.USUAL}
    parser = argparse.ArgumentParser(prog="bench/record.py", description=__doc__, epilog=HELP)
    parser.add_argument("command", choices=(*parts, "status"))
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {','.join((*CHECKS, *MEASURED))}")
    parser.add_argument("--quick", action="store_true", help="small sizes and few samples")
    parser.add_argument("--resume", action="store_true", help="go on with what a stopped run of a suite has left")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], type=setting, metavar="NAME=VALUE", help="for the suite"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="stop a part after that")
    parser.add_argument("--total", type=float, default=float("inf"), metavar="SECONDS", help="for all parts")
    parser.add_argument("--archive", type=Path, metavar="FILE.tgz", help="all results of this device, to take home")
    parser.add_argument(
        "--part", type=int, choices=GPU_PARTS, help="of `gpu`, in place of --only and --limit: see below"
    )
    args = parser.parse_args(arguments)
    if args.command == "status":
        return status()
    only = args.only or parts[args.command]
    if unknown := set(only) - {*MEASURED, *(CHECKS if args.command == "gpu" else ())}:
        parser.error(f"there is no part {', '.join(sorted(unknown))} of {args.command}")
    from speedtransfer.cuda import cuda_status

    if (args.command == "gpu" or args.part) and (reason := cuda_status().reason):
        print(f"error: the GPU tests and benchmarks need CUDA, but {reason}", file=sys.stderr)
        return 2
    # Stopping this process stops what it has started and completes the archive.
    with contextlib.suppress(ValueError):  # in a thread
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.part is not None:
        return record_part(args.part, args.quick, args.total, archive=args.archive)
    tasks = [Task(part, args.limit, args.quick, args.resume, dict(args.set)) for part in only]
    return record(tasks, time.monotonic() + args.total, archive=args.archive)


if __name__ == "__main__":
    sys.exit(measure_here(**json.loads(sys.argv[2])) if sys.argv[1:2] == ["suite"] else main())
