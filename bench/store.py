"""Where results lie, ``bench/results/<device>/<part>.json``, and whether the sources they depend on have changed since.

A run that is under way or was interrupted has its own in ``<part>.partial.json``, a quick one in ``<part>.quick.json``:
neither takes the place of a complete one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
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
OTHERS = (IDLE, WORD2VEC, SCALE, LOOP, NGRAM_EXAMPLE, PARALLEL_EXAMPLE, DRIFT, PLAN)
FULL, PARTIAL, QUICK = "", ".partial", ".quick"  # runs

_PACKAGE = ("speedtransfer/**/*.py", "speedtransfer/**/*.cu", "speedtransfer/**/*.cuh")
_NO_ROWS = (  # move none for the benchmarks
    "!speedtransfer/cli.py",
    "!speedtransfer/__main__.py",
    "!speedtransfer/planning/**/*.py",
    "!speedtransfer/speedtorch/**/*.py",
    "!speedtransfer/word2vec/**/*.py",
)
_WORD2VEC_KERNEL = "!speedtransfer/kernels/word2vec.cu"
_NO_TRAINING = (
    "!speedtransfer/speedtorch/**/*.py",
    "!speedtransfer/cli.py",
    "!speedtransfer/__main__.py",
    "!speedtransfer/benchmark/**/*.py",
    "!speedtransfer/checkpoint/**/*.py",
    "!speedtransfer/planning/**/*.py",
    *(
        f"!speedtransfer/word2vec/{name}.py"
        for name in (
            "watchers",
            "commands*",
            "config",
            "demo",
            "evaluation*",
            "extras",
            "formats*",
            "lookup",
            "ngram_vectors",
            "output",
            "plot",
        )
    ),
)
# What only shows figures is no part of what was measured.
_SHOWING = (
    "commands",
    "drawing",
    "html",
    "output",
    "report",
    "run",
    "suites",
    "units",
)
_TESTS = (
    "tests/gpu/**/*.py",
    "tests/table_cases/**/*.py",
    "tests/*_cases.py",
    "tests/cases.py",
    "tests/table_contract.py",
)


def _sources(part: str) -> tuple[str, ...]:
    if part == IDLE:
        return (
            *_PACKAGE,
            *_NO_ROWS,
            _WORD2VEC_KERNEL,
            "!speedtransfer/benchmark/**/*.py",
            "bench/idle_data.py",
            "bench/idle_training.py",
        )
    if part in (WORD2VEC, SCALE):
        own = ("data", "child", "process") if part == WORD2VEC else ("scale", "scale_child", "process")
        return (*_PACKAGE, *_NO_TRAINING, *(f"bench/word2vec_{name}.py" for name in own))
    if part == NODE2VEC:
        own = (f"bench/node2vec{name}.py" for name in ("", "_data", "_scores"))
        return (*_PACKAGE, *_NO_TRAINING, *own)
    if part == GOWALLA:
        own = (f"bench/{name}.py" for name in ("gowalla", "gowalla_training", "idle_data"))
        return (*_PACKAGE, *_NO_ROWS, _WORD2VEC_KERNEL, "!speedtransfer/benchmark/**/*.py", *own)
    if part == DRIFT:
        own = (f"bench/{name}.py" for name in ("vocabulary_drift", "vocabulary_drift_training", "idle_data"))
        return (*_PACKAGE, *_NO_ROWS, _WORD2VEC_KERNEL, "!speedtransfer/benchmark/**/*.py", *own)
    if part == PLAN:
        # A plan measures, so that it is among what is measured; how it is shown is not.
        shown = (f"!speedtransfer/planning/{name}.py" for name in ("command", "plan_*", "rank*", "shown_*", "price*"))
        kept = (pattern for pattern in _NO_ROWS if "planning" not in pattern)
        return (*_PACKAGE, *kept, _WORD2VEC_KERNEL, *shown, "bench/plan_accuracy.py", "bench/plan_accuracy_cases.py")
    if part == NGRAM_EXAMPLE:
        aside = (
            "!speedtransfer/benchmark/**/*.py",
            "!examples/ngram_lm/pictures.py",
            "!examples/ngram_lm/table_text.py",
        )
        return (*_PACKAGE, *_NO_ROWS, _WORD2VEC_KERNEL, "examples/ngram_lm/*.py", *aside)
    if part == PARALLEL_EXAMPLE:
        own = ("examples/parallel/run.py", "examples/parallel/training.py")
        return (*_PACKAGE, *_NO_ROWS, _WORD2VEC_KERNEL, "!speedtransfer/benchmark/**/*.py", *own)
    if part == LAYOUT:
        return (*_PACKAGE, *_NO_ROWS, _WORD2VEC_KERNEL, "!speedtransfer/benchmark/**/*.py", "bench/layout.py")
    if part == LOOP:
        others = (f"!speedtransfer/{name}/**/*.py" for name in ("benchmark", "checkpoint", "planning", "word2vec"))
        return (
            *_PACKAGE,
            "!speedtransfer/cli.py",
            "!speedtransfer/__main__.py",
            *others,
            _WORD2VEC_KERNEL,
            "bench/speedtorch_loop_training.py",
        )
    if part in CHECKS:
        return (*_PACKAGE, *_NO_ROWS, "!speedtransfer/benchmark/**/*.py", *_TESTS)
    aside = (*_SHOWING, *(suite for suite in SUITES if suite != part))
    return (
        *_PACKAGE,
        *_NO_ROWS,
        _WORD2VEC_KERNEL,
        *(f"!speedtransfer/benchmark/{name}{more}.py" for name in aside for more in ("", "_*")),
    )


def digest(root: Path, part: str) -> str:
    """Return the SHA-256 of the names and contents of the files that the result `part` depends on."""
    patterns = _sources(part)
    chosen = {path for pattern in patterns if pattern[0] != "!" for path in root.glob(pattern)}
    chosen -= {path for pattern in patterns if pattern[0] == "!" for path in root.glob(pattern[1:])}
    result = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in chosen):
        content = path.read_bytes()
        result.update(f"{name}\0{len(content)}\0".encode() + content)
    return result.hexdigest()


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
    """Write a result; whoever is stopped while writing leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
