"""Where results are, ``bench/results/<device>/<part>.json``, and whether the code they depend on has changed since.

A run that is under way or was interrupted has its own in ``<part>.partial.json``, a quick one in ``<part>.quick.json``:
neither takes the place of a complete one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUITES = (
    "transfer",
    "speedtorch",
    "tax",
    "step",
    "precision",
    "mixed",
    "memory",
    "prefetch",
    "cache",
    "lookup",
    "vocabulary",
    "ranks",
    "exchange",
    "ngram",
)
CHECKS = ("tests", "sanitizer")  # need a GPU
PARTS = (*CHECKS, *SUITES)
IDLE = "idle"  # of bench/idle.py, which needs data that are not here
NODE2VEC = "node2vec"  # of bench/node2vec.py
NGRAM_EXAMPLE = "ngram_example"  # of bench/ngram_example.py, shown in docs/ngrams.md
PARALLEL_EXAMPLE = "parallel_example"  # of bench/parallel_example.py, shown in docs/parallel.md
GOWALLA = "gowalla"  # of bench/gowalla.py
WORD2VEC = "word2vec"  # of bench/word2vec.py, which needs such data, too
SCALE = "word2vec_scale"  # of bench/word2vec_scale.py
LOOP = "speedtorch_loop"  # of bench/speedtorch_loop.py
DRIFT = "vocabulary_drift"  # of bench/vocabulary_drift.py, shown in docs/vocabulary.md
PLAN = "plan_accuracy"  # of bench/plan_accuracy.py, shown in docs/plan.md
LAYOUT = "layout"  # of bench/layout.py, which no page shows
EXPERIMENTS = "experiments"  # of bench/experiments.py, shown in docs/gpu.md
LAUNCHES = "launches"  # of bench/launches.py, on an emulated GPU
OTHERS = (
    EXPERIMENTS,
    IDLE,
    WORD2VEC,
    SCALE,
    LOOP,
    NODE2VEC,
    NGRAM_EXAMPLE,
    PARALLEL_EXAMPLE,
    GOWALLA,
    DRIFT,
    PLAN,
    LAYOUT,
    LAUNCHES,
)
FULL, PARTIAL, QUICK = "", ".partial", ".quick"  # runs

# What results depend on. Parts of the package that count for few of them:
_OUTER = ("benchmark", "checkpoint", "cli.py", "__main__.py", "ngrams", "planning", "speedtorch", "word2vec")
# For all suites but those that only move rows:
_TRAINING = ("idle", "nn", "optim", "ranks", "vocabulary")
# Modules of `benchmark` that measure nothing:
_PRESENTING = ("commands", "drawing", "html", "report", "run", "suites", "units")
# The parts of `_OUTER` that count for a result, and the files that do its work (by default the script of its name).
_MORE = {
    "mixed": ("checkpoint", "word2vec"),
    "ngram": ("ngrams",),
    EXPERIMENTS: ("word2vec",),
    LAUNCHES: ("word2vec",),
    WORD2VEC: ("word2vec",),
    SCALE: ("word2vec",),
    NODE2VEC: ("word2vec",),
    PLAN: ("planning",),
    LOOP: ("checkpoint", "speedtorch", "word2vec"),
    NGRAM_EXAMPLE: ("ngrams",),
}
_SCRIPTS = {
    EXPERIMENTS: ("bench/experiments*.py", "bench/warm_steps.py", ":!bench/experiments_report.py"),
    LAUNCHES: ("bench/launches*.py", "bench/warm_steps.py"),
    IDLE: ("bench/idle_*.py",),
    WORD2VEC: ("bench/word2vec_child.py", "bench/word2vec_data.py", "bench/process.py"),
    SCALE: ("bench/word2vec_scale_child.py", "bench/process.py"),
    NODE2VEC: ("bench/node2vec*.py",),
    GOWALLA: ("bench/gowalla*.py", "bench/idle_data.py"),
    DRIFT: ("bench/vocabulary_drift_training.py", "bench/idle_data.py"),
    PLAN: ("bench/plan_accuracy.py",),
    LOOP: ("bench/speedtorch_loop_training.py",),
    NGRAM_EXAMPLE: ("examples/ngram_lm", ":!examples/ngram_lm/pictures.py", ":!examples/ngram_lm/table_text.py"),
    PARALLEL_EXAMPLE: ("examples/parallel", ":!examples/parallel/pictures.py"),
}


def _package(left_out: Iterable[str]) -> list[str]:
    return ["speedtransfer", *(f":!speedtransfer/{name}" for name in left_out)]


def paths_of(part: str) -> list[str]:
    """Return what the result `part` depends on: files and folders, as git takes them, and with ``:!`` what is left out."""
    if part in CHECKS:
        tests = ["tests/gpu", "tests/table_cases", "tests/*_cases.py", "tests/cases.py", "tests/table_contract.py"]
        return [*_package(name for name in _OUTER if name not in ("checkpoint", "ngrams")), *tests]
    if part not in SUITES:
        left_out = [name for name in _OUTER if name not in _MORE.get(part, ())]
        return [*_package(left_out), *_SCRIPTS.get(part, (f"bench/{part}.py",))]
    shown = [f":!speedtransfer/benchmark/{name}.py" for name in _PRESENTING]
    others = [f":!speedtransfer/benchmark/{suite}*.py" for suite in SUITES if suite != part]
    if part == "tax":  # of CuPy and torch alone
        return ["speedtransfer/benchmark", *shown, *others]
    more = ("benchmark", *_MORE.get(part, ()))
    left_out = [name for name in _OUTER if name not in more]
    return [*_package([*left_out, *(_TRAINING if part in ("transfer", "speedtorch") else ())]), *shown, *others]


def digest(root: Path) -> str:
    """Return the SHA-256 of all code, which identifies a state that git does not know."""
    found = hashlib.sha256()
    for folder in ("bench", "examples", "speedtransfer", "tests"):
        for path in sorted(path for path in (root / folder).rglob("*.*") if path.suffix in (".py", ".cu", ".cuh")):
            found.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()


def is_current(root: Path, part: str, result: dict[str, Any]) -> bool:
    """Tell whether a result still holds: the code that it depends on is what it was.

    git compares it with the commit of the result. Without git, or where the result is of uncommitted changes, it is
    current only if no code has changed at all.
    """
    facts = result["environment"]
    if not facts["dirty"] and (root / ".git").exists():  # else git would find whatever repository is around it
        git = ["git", "-C", str(root), "diff", "--quiet", "--end-of-options", facts["commit"], "--"]
        with contextlib.suppress(OSError):  # git is not installed
            code = subprocess.run([*git, *paths_of(part)], capture_output=True, check=False).returncode
            if code in (0, 1):
                return code == 0
    return bool(result["digest"] == digest(root))


def header(root: Path, part: str) -> dict[str, Any]:
    """Return what identifies a result: machine, versions, and the commit, by $COMMIT where there is no git."""
    from speedtransfer.benchmark.environment import commit_of, environment

    facts = environment()
    facts["commit"], facts["dirty"] = commit_of(root)
    if facts["commit"] == "unknown":
        facts["commit"], changes, _ = os.environ.get("COMMIT", "unknown").partition("+changes")
        facts["dirty"] = True if changes else None
    return {"part": part, "environment": facts, "digest": digest(root), "complete": False}


def path_of(root: Path, device: str, part: str, run: str = FULL) -> Path:
    """Return where the result of `part` on `device` lies."""
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return root / "bench" / "results" / slug / f"{part}{run}.json"


def recorded(root: Path, *runs: str) -> Iterator[tuple[str, Path]]:
    """Yield the part and path of every result of `runs` (by default full ones), device by device."""
    for folder in sorted((root / "bench" / "results").glob("*/")):
        paths = ((part, folder / f"{part}{run}.json") for part in (*PARTS, *OTHERS) for run in runs or (FULL,))
        yield from ((part, path) for part, path in paths if path.exists())


def read(path: Path) -> dict[str, Any]:
    """Return a result."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result; an interrupted write leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
