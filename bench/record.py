"""Records tests and benchmarks: `gpu` all of them on a CUDA device, `here` the benchmarks on whatever this machine has.
`status` lists the results with their commits; ``git log COMMIT.. -- PATH`` tells what has changed since.

Each part goes to ``bench/results/<device>/<part>.json`` as soon as it is done, with device, versions and commit. Quick and
interrupted runs have files of their own beside it (see store.py). Needs only what the tests need.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from device_tests import SANITIZER, ending, logs_beside, run_sanitizer, run_tests, verdict
from gpu_parts import FACTS, GPU_PARTS, Task
from running import log, logged, run
from store import (
    CLASSIC,
    EXPERIMENTS,
    FULL,
    PARTIAL,
    PARTS,
    QUICK,
    ROOT,
    SUITES,
    header,
    path_of,
    read,
    recorded,
)

STARTED = time.monotonic()
LIMIT_S = 300.0  # of one part, as the next must have its turn
SPARE_S = 25.0  # of a part of `make gpu`, for stopping its last task and what comes after
MARGIN_S = 10.0  # that a program ends by itself before it is stopped
EXPERIMENT_S = 20.0  # the same where one measurement takes longer
SCRIPTS = {FACTS: "facts.py", EXPERIMENTS: "experiments/gpu.py"}
NO_DEVICE = "test_processes"  # of tests/gpu, which needs none

HELP = """\
On a machine that is lent for ten minutes a command, three commands do it, each in the order of what tells most:
  make gpu PY=python3 ARGS="--part 1 --archive $OUT/part1.tgz"   9 min: facts, all tests of tests/gpu, experiments/gpu.py
  make gpu PY=python3 ARGS="--part 2 --archive $OUT/part2.tgz"   9 min: step, transfer, cache, prefetch --quick; step, transfer
  make gpu PY=python3 ARGS="--part 3 --archive $OUT/part3.tgz"   9 min: sanitizer, precision, mixed, memory
Each ends by itself in its time and leaves two files: the archive (results, pictures, logs, calibrations and compiled kernels;
kept up to date while tasks run), to be unpacked at the root of the repository, where bench/readme.py then draws the results,
and a plain log beside it. A task that fails costs no other. --total gives a part another time. COMMIT=1a2b3c+changes names the
commit where there is no git; "+changes" means that the tree had some."""


def cuda_missing() -> str:
    """Return why there is no CUDA, nothing where there is."""
    from speedtransfer.cuda import cuda_status

    return cuda_status().reason


# --- the parts ----------------------------------------------------------------------------------------------------------


def run_suite(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Measure a suite; return what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name("suite.py")), about["part"], str(path), json.dumps(about)]
    command += ["--seconds", f"{max(1.0, limit_s - MARGIN_S):.0f}", *(["--quick"] if quick else [])]
    code, _ = run(command, limit_s, cwd=root)
    if code == 0 and not read(path)["complete"]:
        return "the time was up before some groups"
    return "a group failed" if code == 1 else ending(code)


def run_script(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run a script of this folder; return what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name(SCRIPTS[about["part"]]))]
    if about["part"] == EXPERIMENTS:
        command += ["--out", str(path), "--seconds", f"{max(1.0, limit_s - EXPERIMENT_S):.0f}"]
        command += ["--quick"] if quick else []
    code, _ = run(command, limit_s, cwd=root)
    if code == 0 and path.exists() and not read(path)["complete"]:
        return "the time was up before some experiments"
    return ending(code)


def runner_of(name: str) -> Callable[[Path, Path, dict[str, Any], float, bool], str]:
    """Return what runs a task: a function of the root, the path of the result, its header, seconds and whether it is quick."""
    others = {"sanitizer": run_sanitizer, "tests": run_tests, **dict.fromkeys(SCRIPTS, run_script)}
    return others.get(name, run_suite)


# --- the commands -------------------------------------------------------------------------------------------------------


def record(
    parts: Sequence[str], quick: bool, limit_s: float, total_s: float, root: Path = ROOT, archive: Path | None = None
) -> int:
    """Run `parts` and write their results, also into `archive`; return 1 after failures, else 0."""
    tasks = [Task(part, limit_s, quick) for part in parts]
    return record_tasks(tasks, time.monotonic() + total_s, root, archive, "parts")


def record_part(number: int, quick: bool, total_s: float, root: Path = ROOT, archive: Path | None = None) -> int:
    """Run a part of `make gpu`; `total_s` is the most it may take, in place of its own time."""
    part = GPU_PARTS[number]
    part = part if total_s == float("inf") else part.scaled(total_s)
    folder = path_of(root, header(root, EXPERIMENTS)["environment"]["device"], "").parent
    for name, value in part.environment(folder / "cache").items():
        os.environ.setdefault(name, value)
    tasks = [task._replace(quick=task.quick or quick) for task in part.tasks]
    return record_tasks(tasks, STARTED + part.seconds - SPARE_S, root, archive, f"part{number}")


def record_tasks(tasks: Sequence[Task], end: float, root: Path, archive: Path | None, label: str) -> int:
    """Run `tasks` until `end`; write their results, logs and an archive of both while they run."""
    problems: dict[str, str] = {}
    folder = path_of(root, header(root, tasks[0].name)["environment"]["device"], "").parent
    logs = [folder / "logs" / f"{label}.log", *([archive.with_suffix(".log")] if archive is not None else [])]
    with logged(logs, lambda: pack(archive, folder, root) if archive is not None else None):
        for task in tasks:
            limit = min(task.limit_s, end - time.monotonic())
            if limit < 5:
                problems[task.name] = "no time was left for it"
                continue
            log(f"--- {task.name}, {limit:.0f} s at most\n")
            problem = _run_task(task, limit, root)
            if archive is not None:
                pack(archive, folder, root)
            if problem:
                problems[task.name] = problem
            log(f"--- {task.name}: {problem or 'done'}\n")
        status(root)
        for name, problem in problems.items():
            log(f"{name}: {problem}\n", sys.stderr)
    return int(bool(problems))


def _run_task(task: Task, limit_s: float, root: Path) -> str:
    """Run a task and put its result where results of its kind lie; return what went wrong."""
    about = header(root, task.name)  # before: the commit as it is when it starts
    device = about["environment"]["device"]
    small = task.quick and task.name in (*SUITES, *CLASSIC, EXPERIMENTS)
    path = path_of(root, device, task.name, QUICK if small else PARTIAL)
    path.unlink(missing_ok=True)
    logs_beside(path).mkdir(parents=True, exist_ok=True)
    problem = runner_of(task.name)(root, path, about, limit_s, task.quick)
    if path == path_of(root, device, task.name, PARTIAL) and path.exists() and read(path)["complete"]:
        path.replace(path_of(root, device, task.name))
    return problem


def pack(archive: Path, folder: Path, root: Path) -> None:
    """Put the results, plots, logs and caches of `folder` into a file, to be unpacked at the root of another copy."""
    new = archive.with_name(archive.name + ".new")  # an interrupted write leaves the old one
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(new, "w:gz") as file:
            for pattern in ("*.json", "*.png", "logs/*", "cache/**/*"):
                for path in sorted(path for path in folder.glob(pattern) if path.is_file()):
                    file.add(path, path.relative_to(root).as_posix())
        new.replace(archive)
    except OSError as error:  # the results themselves are not affected
        print(f"cannot write {archive}: {error}", file=sys.stderr)


# --- what there is ------------------------------------------------------------------------------------------------------


def status(root: Path = ROOT) -> int:
    """Print every result with its date, its commit and its outcome, and the tests that no GPU has run."""
    device, passed = "", set[str]()
    for part, path in recorded(root, FULL, PARTIAL, QUICK):
        try:
            result = read(path)
            facts = result["environment"]
            commit = facts["commit"][:12] + ("+changes" if facts["dirty"] else "")
            row = f"{part:16}  {facts['date'][:10]}  {commit:20}  {outcome(part, result)}"
            found, files = facts["device"], result["files"] if part == "tests" and facts["cuda"] else ()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            row, found, files = f"{part:16}  unreadable ({type(error).__name__}); record it again", path.parent.name, ()
        print(*([f"\n{found}"] if found != device else []), row, sep="\n")
        device = found
        passed |= set(files)
    if not device:
        print("no results yet; run `make gpu` on a machine with a CUDA device, `make bench` on any other")
        return 0
    never = sorted({path.stem for path in (root / "tests" / "gpu").glob("test_*.py")} - {NO_DEVICE} - passed)
    if never:
        print(
            "\nno recorded run on a GPU has passed a test of", *(f"tests/gpu/{name}.py" for name in never), sep="\n  "
        )
    return 0


def outcome(part: str, result: dict[str, Any]) -> str:
    """Return what a result says, in a few words."""
    if part == "tests":
        text = f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
    elif part == "sanitizer":
        found = (f"{tool} {verdict(facts)}" for tool, facts in result["tools"].items())
        text = f"{SANITIZER} is not installed" if result["absent"] else ", ".join(found)
    elif part == EXPERIMENTS:
        cases = [case for every in result["experiments"].values() for case in every]
        failed = sum("error" in case for case in cases)
        text = f"{len(cases) - failed} measured" + (f", {failed} not" if failed else "")
    elif part in (*SUITES, *CLASSIC):
        skipped = sum(bool(group["skipped"]) for group in result["groups"])
        text = f"{len(result['groups']) - skipped} groups measured" + (f", {skipped} not" if skipped else "")
        text += f", {len(result['failures'])} FAILED" if result["failures"] else ""
    else:
        text = "came to its end"
    return text + (", quick" if result.get("quick") else "") + ("" if result["complete"] else ", INCOMPLETE")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench/record.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, parts in (("gpu", (*PARTS, EXPERIMENTS)), ("here", (*SUITES, *CLASSIC))):
        command = commands.add_parser(name, help=f"run {', '.join(parts)} and write their results")
        command.add_argument("--only", type=lambda text: text.split(","), default=list(parts), help="some of them: a,b")
        command.add_argument("--quick", action="store_true", help="small sizes and few samples")
        command.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="stop a part after that")
        command.add_argument("--total", type=float, default=float("inf"), metavar="SECONDS", help="for all parts")
        command.add_argument(
            "--archive", type=Path, metavar="FILE.tgz", help="all results of this device, to take home"
        )
        if name == "gpu":
            text = "a part of a run that is spread over several commands (see below), in place of --only and --limit"
            command.add_argument("--part", type=int, choices=GPU_PARTS, help=text)
        command.set_defaults(parts=parts, part=None)
    commands.add_parser("status", help="list the results")
    args = parser.parse_args(arguments)
    if args.command == "status":
        return status()
    unknown = set(args.only) - set(args.parts)
    if unknown:
        named = ", ".join(sorted(unknown))
        parser.error(f"there is no part {named} of {args.command}; choose from {', '.join(args.parts)}")
    if args.command == "gpu" and (reason := cuda_missing()):
        print(f"error: the GPU tests and benchmarks need CUDA, but {reason}", file=sys.stderr)
        return 2
    # Stopping this process stops what it has started and completes the archive.
    with contextlib.suppress(ValueError):  # in a thread
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.part is not None:
        return record_part(args.part, args.quick, args.total, archive=args.archive)
    return record(args.only, args.quick, args.limit, args.total, archive=args.archive)


if __name__ == "__main__":
    sys.exit(main())
