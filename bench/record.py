"""Records tests and benchmarks: `gpu` all of them on a CUDA device, `here` the benchmarks on whatever this machine has.
`status` tells which results exist, which still hold, and how those of a GPU compare with the bars.

Each part goes to ``bench/results/<device>/<part>.json`` as soon as it is done, with device, versions, commit and a digest of
the sources it depends on; where that has changed since, the result is stale. What quick and interrupted runs leave lies beside
it (see store.py). Needs only what the tests need; the package need not be installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bars
import speedtorch_loop_words
import word2vec_scale_figure
import word2vec_statistics
from gpu_parts import FACTS, FEATURES, FIRST_FILES, FIRST_LOOK, FIRST_TESTS, GPU_PARTS, Task
from running import logged, run, say
from store import (
    DRIFT,
    FULL,
    IDLE,
    LOOP,
    NGRAM_EXAMPLE,
    PARTIAL,
    PARTS,
    QUICK,
    ROOT,
    SCALE,
    SUITES,
    WORD2VEC,
    digest,
    path_of,
    read,
    recorded,
    write,
)

STARTED = time.monotonic()
LIMIT_S = 300.0  # of one part, as the next must have its turn
SPARE_S = 25.0  # of a part of `make gpu`, for stopping its last task and what comes after
MARGIN_S = 10.0  # that a program ends by itself before it is stopped
NO_TESTS_COLLECTED = 5  # pytest's exit code
SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")
SANITIZER_FOUND = 86  # our choice, for findings where pytest is content
STOPPED, REFUSED = "stopped at its time limit", "could not run"
SANITIZED = ["tests/gpu", "-m", "sanitizer"]  # every kernel, little of each: all of it runs many times slower

HELP = """\
On a machine that is lent for ten minutes a command, thirty minutes are three commands, each in the order of what matters most:
  make gpu PY=python3 ARGS="--part 1 --archive $OUT/part1.tgz"   8 min: facts, tests of devices, kernels, streams and faults,
                                                                 the first look (bench/first_look.py), transfer --quick
  make gpu PY=python3 ARGS="--part 2 --archive $OUT/part2.tgz"   9 min: all tests of tests/gpu
  make gpu PY=python3 ARGS="--part 3 --archive $OUT/part3.tgz"   9 min: transfer, step, speedtorch
  make gpu PY=python3 ARGS="--part 4 --archive $OUT/part4.tgz"   9 min: sanitizer, precision, mixed, memory; if time is left
Each ends by itself in its time and leaves two files: the archive (results, pictures, JUnit files and logs; kept up to date
while tasks run), to be unpacked at the root of the repository, where bench/readme.py then draws the results, and a plain log
beside it. A task that fails costs no other. --total gives a part another time. COMMIT=1a2b3c+changes names the commit where
there is no git; "+changes" says that the tree had some."""

sys.path.insert(0, str(ROOT))  # also where the package is not installed


def cuda_missing() -> str:
    """Return why there is no CUDA, nothing where there is."""
    from speedtransfer.cuda import cuda_status

    return cuda_status().reason


def header(root: Path, part: str) -> dict[str, Any]:
    """Return what every result says about where it comes from; a copy of the tree without git is told its $COMMIT."""
    from speedtransfer.benchmark.environment import commit_of, environment

    facts = environment()
    facts["commit"], facts["dirty"] = commit_of(root)
    if facts["commit"] == "unknown":
        facts["commit"], changes, _ = os.environ.get("COMMIT", "unknown").partition("+changes")
        facts["dirty"] = True if changes else None
    return {"part": part, "environment": facts, "digest": digest(root, part), "complete": False}


# --- the parts ----------------------------------------------------------------------------------------------------------


def run_tests(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run the GPU tests; return what went wrong."""
    chosen = FIRST_FILES if about["part"] == FIRST_TESTS else ["tests/gpu"]
    junit = logs_beside(path) / f"{about['part']}.xml"
    junit.unlink(missing_ok=True)
    options = ["-q", "--tb=short", "-p", "failures_at_once", f"--junitxml={junit}"]
    code, _ = run([sys.executable, "-m", "pytest", *chosen, "-m", "gpu", *options], limit_s, cwd=root)
    if code == NO_TESTS_COLLECTED:
        return "there are none"
    if not junit.exists():
        return _ending(code)
    complete = code in (0, 1)
    result = {**about, **summary(junit, complete), "complete": complete}
    write(path, result)
    return f"{result['failed']} failed" if code == 1 else _ending(code)


def _ending(code: int | None) -> str:
    return {0: "", None: STOPPED}.get(code, f"ended with exit code {code}")


def summary(junit: Path, complete: bool) -> dict[str, Any]:
    """Return the counts, seconds and failures in a JUnit file of pytest; of one that was stopped without its last test."""
    cases = list(ElementTree.parse(junit).iter("testcase"))
    cases = cases if complete else cases[:-1]
    failures = {}
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            name = f"{case.get('classname')}.{case.get('name')}"
            failures[name] = (problem.get("message") or "").strip().splitlines()[:1]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = [case for case in cases if len(case) == 0 or {part.tag for part in case} <= _NO_OUTCOME]
    return {
        "files": dict(Counter(name for name in map(_file_of, passed) if name)),
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "failures": failures,
    }


_NO_OUTCOME = {"system-out", "system-err", "properties"}


def _file_of(case: ElementTree.Element) -> str:
    """Return the name of the file of a test without its folder and suffix; nothing where it cannot be told."""
    return next((name for name in (case.get("classname") or "").split(".") if name.startswith("test_")), "")


def run_sanitizer(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run some GPU tests under compute-sanitizer, where it is installed; return what went wrong."""
    tools: dict[str, dict[str, Any]] = {}
    absent = shutil.which(SANITIZER) is None
    result = {**about, "tools": tools, "absent": absent, "complete": absent}
    write(path, result)
    end = time.monotonic() + limit_s
    for number, tool in enumerate(() if absent else TOOLS):
        pytest = [sys.executable, "-m", "pytest", "-q", *SANITIZED]
        command = [SANITIZER, "--tool", tool, "--error-exitcode", str(SANITIZER_FOUND), *pytest]
        # Every tensor an allocation of its own: a cache would hide what lies beyond its end.
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        start = time.monotonic()
        limit = (end - start) / (len(TOOLS) - number)
        code, output = run(command, limit, cwd=root, env=environment)
        lines = output.splitlines()
        findings = [line for line in lines if line.startswith("=========")]
        tools[tool] = {
            "exit": code,
            "seconds": round(time.monotonic() - start, 1),
            "summary": [line for line in findings if "SUMMARY" in line],
            "findings": findings[:40],
            "tests": lines[-5:],
            "ran": any(" passed" in line for line in lines[-20:]),
        }
        result["complete"] = len(tools) == len(TOOLS) and not {STOPPED, REFUSED} & {*map(verdict, tools.values())}
        write(path, result)
    verdicts = {tool: verdict(found) for tool, found in tools.items()}
    return ", ".join(f"{tool}: {text}" for tool, text in verdicts.items() if text not in ("clean", "no tests"))


def verdict(found: dict[str, Any]) -> str:
    """Return what a tool of the sanitizer says about the tests it ran."""
    code, summary = found["exit"], found["summary"]
    if code is None:
        return STOPPED
    if code == NO_TESTS_COLLECTED:
        return "no tests"
    if not summary or (code == 0 and not found["ran"]):
        return REFUSED  # the device, so that nothing starts or all tests are skipped
    if code == 0:
        return "clean"
    # Where a test failed the code is pytest's, whatever was found.
    found_nothing = code != SANITIZER_FOUND and all("SUMMARY: 0 " in line for line in summary)
    return f"tests ended with exit code {code}" if found_nothing else "NOT CLEAN"


def run_suite(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Measure a suite; return what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name("suite.py")), about["part"], str(path), json.dumps(about)]
    command += ["--seconds", f"{max(1.0, limit_s - MARGIN_S):.0f}", *(["--quick"] if quick else [])]
    code, _ = run(command, limit_s, cwd=root)
    if code == 0 and not read(path)["complete"]:
        return "the time was up before some groups"
    return "a group failed" if code == 1 else _ending(code)


def run_script(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run a script of this folder, which writes its results itself; return what went wrong."""
    command = [sys.executable, str(Path(__file__).with_name(f"{about['part']}.py"))]
    if about["part"] == FIRST_LOOK:
        command += ["--seconds", f"{max(1.0, limit_s - MARGIN_S):.0f}"]
        command += ["--sizes", "0.02", "--rows", "1024", "--repeats", "2"] if quick else []
    code, _ = run(command, limit_s, cwd=root)
    return _ending(code)


RUNNERS = {"sanitizer": "run_sanitizer", "tests": "run_tests", FIRST_TESTS: "run_tests"}
RUNNERS |= dict.fromkeys((FACTS, FIRST_LOOK), "run_script")


# --- the commands -------------------------------------------------------------------------------------------------------


def record(
    parts: Sequence[str],
    quick: bool,
    limit_s: float,
    total_s: float,
    root: Path = ROOT,
    archive: Path | None = None,
) -> int:
    """Run `parts` and write their results, also into `archive`; return 1 after failures, else 0."""
    tasks = [Task(part, limit_s, quick) for part in parts]
    return record_tasks(tasks, time.monotonic() + total_s, root, archive, "parts")


def record_part(number: int, quick: bool, total_s: float, root: Path = ROOT, archive: Path | None = None) -> int:
    """Run a part of `make gpu`; `total_s` is the most it may take, in place of its own time."""
    part = GPU_PARTS[number]
    part = part if total_s == float("inf") else part.scaled(total_s)
    for name, value in part.environment().items():
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
            say(f"--- {task.name}, {limit:.0f} s at most\n")
            problem = _run_task(task, limit, root)
            if archive is not None:
                pack(archive, folder, root)
            if problem:
                problems[task.name] = problem
            say(f"--- {task.name}: {problem or 'done'}\n")
        status(root)
        for name, problem in problems.items():
            say(f"{name}: {problem}\n", sys.stderr)
    return int(bool(problems))


def _run_task(task: Task, limit_s: float, root: Path) -> str:
    """Run a task and put its result where results of its kind lie; return what went wrong."""
    about = header(root, task.name)  # before: the sources as they are when it starts
    device = about["environment"]["device"]
    path = path_of(root, device, task.name, QUICK if task.quick and task.name in SUITES else PARTIAL)
    if task.name == FIRST_TESTS:
        path = logs_beside(path) / f"{task.name}.json"  # a choice of the tests is no result of all
    path.unlink(missing_ok=True)
    logs_beside(path).mkdir(parents=True, exist_ok=True)
    runner = globals()[RUNNERS.get(task.name, "run_suite")]
    problem: str = runner(root, path, about, limit_s, task.quick)
    if path == path_of(root, device, task.name, PARTIAL) and path.exists() and read(path)["complete"]:
        path.replace(path_of(root, device, task.name))
    return problem


def logs_beside(path: Path) -> Path:
    """Return the folder for logs and JUnit files of a result; git ignores it."""
    return path.parent if path.parent.name == "logs" else path.parent / "logs"


def pack(archive: Path, folder: Path, root: Path) -> None:
    """Put the results, plots and logs of `folder` into one file, to be unpacked at the root of another copy of the tree."""
    new = archive.with_name(archive.name + ".new")  # who is stopped while writing leaves the old one
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(new, "w:gz") as file:
            for path in sorted((*folder.glob("*.json"), *folder.glob("*.png"), *folder.glob("logs/*"))):
                file.add(path, path.relative_to(root).as_posix())
        new.replace(archive)
    except OSError as error:  # the results are there all the same
        print(f"cannot write {archive}: {error}", file=sys.stderr)


def status(root: Path = ROOT) -> int:
    """Print every result and whether it is current, and the bars for each GPU."""
    lines, gpu = [("device", "part", "date", "commit", "result", "state")], False
    suites: dict[str, dict[str, Any]] = {}
    cpus: dict[str, dict[str, Any]] = {}
    for part, path in recorded(root, FULL, PARTIAL, QUICK):
        try:
            result = read(path)
            facts = result["environment"]
            state = "current" if result["digest"] == digest(root, part) else "STALE (sources changed since)"
            commit = facts["commit"][:12] + ("+changes" if facts["dirty"] else "")
            lines.append((facts["device"], part, facts["date"], commit, _outcome(part, result), state))
            gpu = gpu or facts["cuda"]
            if part in SUITES:
                devices = suites if facts["cuda"] else cpus
                devices.setdefault(facts["device"], {}).setdefault(part, result)  # the full one where there is one
        except (KeyError, TypeError, ValueError) as error:
            problem = f"unreadable ({type(error).__name__}); record it again"
            lines.append((path.parent.name, part, "-", "-", "-", problem))
    if len(lines) == 1:
        print("no results yet; run `make gpu` on a machine with a CUDA device, `make bench` on any other")
        return 0
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if not gpu:
        print("\nno GPU results yet; run `make gpu` on a machine with a CUDA device")
    if lacking_tests := never_run(root):
        print("\nnever run on a GPU (no test of it has passed there):", *lacking_tests, sep="\n  ")
    for device, results in (*suites.items(), *cpus.items()):
        lacking = any(result["quick"] or not result["complete"] for result in results.values())
        note = ", of quick or incomplete runs in part" if lacking else ""
        try:
            found = bars.judge(results) if device in suites else bars.judge_step(results, cuda=False)
            if device in suites or found[0].measured is not None:
                print(f"\n{device}, the bars{note}", *found, sep="\n")
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # foreign figures
            print(f"\n{device}: the bars cannot be judged ({type(error).__name__}: {error}); record the suites again")
    return 0


def never_run(root: Path = ROOT) -> list[str]:
    """Return the features, and the other files of tests/gpu, of which no recorded run on a GPU has passed a test."""
    passed: set[str] = set()
    for path in sorted((root / "bench" / "results").glob("*/*.json")):
        if path.name.partition(".")[0] in ("tests", FIRST_TESTS):
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                result = read(path)
                passed |= set(result["files"]) if result["environment"]["cuda"] else set()
    features = {what: f"test_{name}" for what, name in FEATURES.items() if f"test_{name}" not in passed}
    files = {path.stem for path in (root / "tests" / "gpu").glob("test_*.py")} - passed - set(features.values())
    return [
        *(f"{what}: tests/gpu/{name}.py" for what, name in features.items()),
        *(f"tests/gpu/{name}.py" for name in sorted(files)),
    ]


def _outcome(part: str, result: dict[str, Any]) -> str:
    if part == "tests":
        text = f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
    elif part == "sanitizer":
        found = (f"{tool} {verdict(facts)}" for tool, facts in result["tools"].items())
        text = f"{SANITIZER} is not installed" if result["absent"] else ", ".join(found)
    elif part == IDLE:
        text = "recall " + ", ".join(
            f"{way} {c['recall'][-1]:.3f}" for way, c in result["curves"].items() if "recall" in c
        )
    elif part == LOOP:
        text = speedtorch_loop_words.in_short(result) + (", quick" if result["quick"] else "")
    elif part == DRIFT:
        text = ", ".join(f"{name} {len(stream['runs'])} tables" for name, stream in result["streams"].items())
    elif part == NGRAM_EXAMPLE:
        text = f"{len(result['contenders'])} contenders"
    elif part in (WORD2VEC, SCALE):
        text = (word2vec_statistics if part == WORD2VEC else word2vec_scale_figure).in_short(result)
        text += ", quick" if result["quick"] else ""
    elif part not in SUITES:
        text = "came to its end"
    else:
        skipped = sum(bool(group["skipped"]) for group in result["groups"])
        text = f"{len(result['groups']) - skipped} groups measured" + (f", {skipped} not" if skipped else "")
        text += f", {len(result['failures'])} FAILED" if result["failures"] else ""
        text += ", quick" if result["quick"] else ""
    return text + ("" if result["complete"] else ", INCOMPLETE")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench/record.py",
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, parts in (("gpu", PARTS), ("here", SUITES)):
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
    commands.add_parser("status", help="list the results, which are stale, and the bars")
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
    # Whoever stops this process stops what it has started, and has the archive.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if args.part is not None:
        return record_part(args.part, args.quick, args.total, archive=args.archive)
    return record(args.only, args.quick, args.limit, args.total, archive=args.archive)


if __name__ == "__main__":
    sys.exit(main())
