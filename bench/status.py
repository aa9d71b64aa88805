"""Lists the recorded results: which are stale, what no GPU has run yet, and how devices compare with the bars."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import bars
from device_tests import SANITIZER, verdict
from gpu_parts import FEATURES
from store import (
    DRIFT,
    EXPERIMENTS,
    FULL,
    IDLE,
    LAUNCHES,
    LOOP,
    NGRAM_EXAMPLE,
    PARTIAL,
    QUICK,
    ROOT,
    SCALE,
    SUITES,
    WORD2VEC,
    is_current,
    read,
    recorded,
)

WIDTH = 120  # of the table where there is no terminal
HEADING = ("part", "date", "commit", "state", "result")
STALE = "STALE"
NO_DEVICE = "test_processes"  # of tests/gpu, which needs none
HEADLINES = {WORD2VEC: "word2vec_statistics", SCALE: "word2vec_scale", LOOP: "speedtorch_loop"}  # modules of `headline`


def status(root: Path = ROOT) -> int:
    """Print every result and whether it is current, and the bars for each GPU."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    gpu = False
    suites: dict[str, dict[str, Any]] = {}
    cpus: dict[str, dict[str, Any]] = {}
    for part, path in recorded(root, FULL, PARTIAL, QUICK):
        try:
            result = read(path)
            facts = result["environment"]
            state = "current" if is_current(root, part, result) else STALE
            commit = facts["commit"][:7] + ("+changes" if facts["dirty"] else "")
            row = (part, facts["date"][:10], commit, state, _outcome(part, result))
            rows.setdefault(facts["device"], []).append(row)
            gpu = gpu or _is_gpu(facts)
            if part in SUITES:
                devices = suites if facts["cuda"] else cpus
                devices.setdefault(facts["device"], {}).setdefault(part, result)  # the full one where there is one
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"unreadable ({type(error).__name__}); record it again"
            rows.setdefault(path.parent.name, []).append((part, "-", "-", "-", problem))
    if not rows:
        print("no results yet; run `make gpu` on a machine with a CUDA device, `make bench` on any other")
        return 0
    print("\n".join(table(rows)))
    if any(row[3] == STALE for of_device in rows.values() for row in of_device):
        print(f"\n{STALE}: the code that it depends on has changed since, or git cannot compare it")
    if not gpu:
        print("\nno GPU results yet; run `make gpu` on a machine with a CUDA device")
    if missing_tests := never_run(root):
        print("\nnever run on a GPU (no test of it has passed there):", *missing_tests, sep="\n  ")
    for device, results in (*suites.items(), *cpus.items()):
        _show_bars(device, results, device in suites)
    return 0


def table(rows: dict[str, list[tuple[str, ...]]]) -> list[str]:
    """Return the lines of a table: the rows of each device below its name, long results wrapped."""
    width = shutil.get_terminal_size((WIDTH, 0)).columns if sys.stdout.isatty() else WIDTH
    every = [HEADING, *(row for of_device in rows.values() for row in of_device)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)][:-1]
    indent = " " * (sum(widths) + 2 * len(widths))

    def shown(row: tuple[str, ...]) -> list[str]:
        start = "".join(f"{cell:{size + 2}}" for cell, size in zip(row, widths, strict=False))
        return textwrap.wrap(start + row[-1], max(width, len(indent) + 20), subsequent_indent=indent)

    return [
        *shown(HEADING),
        *(line for device in rows for line in ["", device, *(text for row in rows[device] for text in shown(row))]),
    ]


def _show_bars(device: str, results: dict[str, dict[str, Any]], cuda: bool) -> None:
    incomplete = any(result["quick"] or not result["complete"] for result in results.values())
    note = ", of quick or incomplete runs in part" if incomplete else ""
    try:
        found = bars.judge(results) if cuda else bars.judge_step(results, cuda=False)
        if cuda or found[0].measured is not None:
            print(f"\n{device}, the bars{note}", *found, sep="\n")
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # foreign figures
        print(f"\n{device}: the bars cannot be judged ({type(error).__name__}: {error}); record the suites again")


def never_run(root: Path = ROOT) -> list[str]:
    """Return the features, and the other files of tests/gpu, of which no recorded run on a GPU has passed a test."""
    passed: set[str] = set()
    for path in sorted((root / "bench" / "results").glob("*/*.json")):
        if path.name.partition(".")[0] == "tests":
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
                result = read(path)
                passed |= set(result["files"]) if _is_gpu(result["environment"]) else set()
    features = {what: f"test_{name}" for what, name in FEATURES.items() if f"test_{name}" not in passed}
    needed = {path.stem for path in (root / "tests" / "gpu").glob("test_*.py")} - {NO_DEVICE}
    files = needed - passed - set(features.values())
    return [
        *(f"{what}: tests/gpu/{name}.py" for what, name in features.items()),
        *(f"tests/gpu/{name}.py" for name in sorted(files)),
    ]


def _is_gpu(facts: dict[str, Any]) -> bool:
    """Tell whether a result is of a GPU, and not of an emulated one."""
    return bool(facts["cuda"]) and not facts["device"].endswith("(fake)")


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
    elif part == DRIFT:
        text = ", ".join(f"{name} {len(stream['runs'])} tables" for name, stream in result["streams"].items())
    elif part == NGRAM_EXAMPLE:
        text = f"{len(result['contenders'])} contenders"
    elif part == EXPERIMENTS:
        cases = [case for every in result["experiments"].values() for case in every]
        failed = sum("error" in case for case in cases)
        text = f"{len(cases) - failed} measured" + (f", {failed} not" if failed else "")
        text += ", quick" if result["quick"] else ""
    elif part == LAUNCHES:
        text = f"{len(result['forms'])} forms counted"
    elif part in HEADLINES:
        text = importlib.import_module(HEADLINES[part]).headline(result) + (", quick" if result["quick"] else "")
    elif part not in SUITES:
        text = "came to its end"
    else:
        skipped = sum(bool(group["skipped"]) for group in result["groups"])
        text = f"{len(result['groups']) - skipped} groups measured" + (f", {skipped} not" if skipped else "")
        text += f", {len(result['failures'])} FAILED" if result["failures"] else ""
        text += ", quick" if result["quick"] else ""
    return text + ("" if result["complete"] else ", INCOMPLETE")
