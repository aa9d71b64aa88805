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
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bars
import speedtorch_loop_words
import word2vec_scale_figure
import word2vec_statistics
from store import (
    FULL,
    IDLE,
    LOOP,
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

LIMIT_S, GRACE_S = 300.0, 10.0  # of one part, as the next must have its turn; and to put down what there is
NO_TESTS_COLLECTED = 5  # pytest's exit code
SANITIZER, TOOLS = "compute-sanitizer", ("memcheck", "racecheck")
SANITIZER_FOUND = 86  # our choice, for findings where pytest is content
STOPPED, REFUSED = "stopped at its time limit", "could not run"
SANITIZED = ["tests/gpu", "-m", "sanitizer"]  # every kernel, little of each: all of it runs many times slower

HELP = """\
On a machine that is lent for ten minutes a command, split the parts over several; each brings its results home in one file
(kept up to date after every part), to be unpacked at the root of the repository, where bench/readme.py then draws them:
  COMMIT=1a2b3c+changes make gpu PY=python3 ARGS="--archive $OUT/results.tgz --total 560 --only tests,sanitizer"
  ... --only transfer,speedtorch,tax
  ... --only step,precision,memory
--limit may then be as long as --total. COMMIT names the commit where there is no git; "+changes" behind it says that the tree
had some."""

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


@contextlib.contextmanager
def listening_to_interrupts() -> Iterator[None]:
    """Let programs that are started within have the default action for SIGINT: one that is ignored here they would inherit."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, lambda number, frame: None)  # with a handler nothing is inherited
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(command: Sequence[str], limit_s: float, **kwargs: Any) -> tuple[int | None, str]:
    """Return the exit code of `command`, and its output where `stdout` is a pipe.

    After `limit_s` it is stopped with all that it has started, and the code is None. It finds the package also where that is
    not installed, and listens to SIGINT also where this process does not, as background jobs of a script do not.
    """
    environment = {**os.environ, **kwargs.pop("env", {})}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    with listening_to_interrupts():
        started = subprocess.Popen(command, start_new_session=True, text=True, env=environment, **kwargs)
    with started as process:
        try:
            output, _ = process.communicate(timeout=max(1.0, limit_s))
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # pytest then writes what it has
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


# --- the parts ----------------------------------------------------------------------------------------------------------


def run_tests(root: Path, path: Path, about: dict[str, Any], limit_s: float, quick: bool) -> str:
    """Run the GPU tests; return what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-m", "gpu", f"--junitxml={junit}"]
        code, _ = run(command, limit_s, cwd=root)
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
    return {
        "passed": len(cases) - len(failures) - skipped,
        "failed": len(failures),
        "skipped": skipped,
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "failures": failures,
    }


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
        code, output = run(command, limit, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
    code, _ = run([*command, *(["--quick"] if quick else [])], limit_s, cwd=root)
    return "a group failed" if code == 1 else _ending(code)


# --- the commands -------------------------------------------------------------------------------------------------------


def record(
    parts: Sequence[str],
    quick: bool,
    limit_s: float,
    total_s: float,
    root: Path = ROOT,
    archive: Path | None = None,
) -> int:
    """Run `parts` and write their results, after each of them also into `archive`; return 1 after failures, else 0."""
    end, problems = time.monotonic() + total_s, {}
    for part in parts:
        limit = min(limit_s, end - time.monotonic())
        if limit < 5:
            problems[part] = "no time was left for it"
            continue
        about = header(root, part)  # before: the sources as they are when it starts
        device = about["environment"]["device"]
        path = path_of(root, device, part, QUICK if quick and part in SUITES else PARTIAL)
        path.unlink(missing_ok=True)
        print(f"--- {part}, {limit:.0f} s at most", flush=True)
        runner = {"tests": run_tests, "sanitizer": run_sanitizer}.get(part, run_suite)
        problem = runner(root, path, about, limit, quick)
        full = path_of(root, device, part)
        if path == path_of(root, device, part, PARTIAL) and path.exists() and read(path)["complete"]:
            path.replace(full)
        if archive is not None:
            pack(archive, full.parent, root)
        if problem:
            problems[part] = problem
        print(f"--- {part}: {problem or 'done'}", flush=True)
    status(root)
    for part, problem in problems.items():
        print(f"{part}: {problem}", file=sys.stderr)
    return int(bool(problems))


def pack(archive: Path, folder: Path, root: Path) -> None:
    """Put the results and plots of `folder` into one file, to be unpacked at the root of another copy of the tree."""
    new = archive.with_name(archive.name + ".new")  # who is stopped while writing leaves the old one
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(new, "w:gz") as file:
            for path in sorted((*folder.glob("*.json"), *folder.glob("*.png"))):
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
    elif part in (WORD2VEC, SCALE):
        text = (word2vec_statistics if part == WORD2VEC else word2vec_scale_figure).in_short(result)
        text += ", quick" if result["quick"] else ""
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
        command.set_defaults(parts=parts)
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
    return record(args.only, args.quick, args.limit, args.total, archive=args.archive)


if __name__ == "__main__":
    sys.exit(main())
