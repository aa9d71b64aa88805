"""Where results are: ``bench/results/<device>/<part>.json``.

A run that is under way or was interrupted has its own in ``<part>.partial.json``, a quick one in ``<part>.quick.json``:
neither takes the place of a complete one. Each names its commit: ``git log COMMIT.. -- PATH`` tells what has changed since.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Also where the package is not installed.
sys.path[:0] = [name for name in (str(ROOT), str(ROOT / "bench")) if name not in sys.path]

CHECKS = ("tests", "sanitizer")  # need a GPU
SUITES = ("transfer", "step", "memory", "precision", "lookup", "prefetch", "cache")  # of speedtransfer bench
EXPERIMENTS = {  # bench/experiments/NAME.py, declared as those are
    "tax": "Compute against transfer",
    "mixed": "Mixed precision by batch size: time, memory, accuracy",
    "exchange": "Gradients in fewer bytes: to the same loss",
    "gpu": "What a training step takes of a GPU",
    "peers": "Training steps beside other libraries",
    "plan_accuracy": "Planned beside measured times of a step",
    "hosts": "Planned beside measured steps of two hosts",
}
MEASURED = (*SUITES, *EXPERIMENTS)
# Of scripts of their own: idle.py and word2vec.py need data that are not here, record_examples.py runs examples.
IDLE, WORD2VEC, NGRAM_EXAMPLE, PARALLEL_EXAMPLE = OTHERS = "idle", "word2vec", "ngram_example", "parallel_example"
FULL, PARTIAL, QUICK = "", ".partial", ".quick"  # runs


def suites() -> dict[str, Any]:
    """Return the suites of the command and the experiments by name, also for the reports of the package."""
    from speedtransfer.benchmark.suites import SUITES as KNOWN
    from speedtransfer.benchmark.suites import Suite

    KNOWN.update({name: Suite(name, title, package="experiments") for name, title in EXPERIMENTS.items()})
    return KNOWN


def header(root: Path, part: str) -> dict[str, Any]:
    """Return what identifies a result: machine, versions, and the commit, by $COMMIT where there is no git."""
    from speedtransfer.benchmark.environment import commit_of, environment

    facts = environment()
    facts["commit"], facts["dirty"] = commit_of(root)
    if facts["commit"] == "unknown":
        facts["commit"], changes, _ = os.environ.get("COMMIT", "unknown").partition("+changes")
        facts["dirty"] = True if changes else None
    return {"part": part, "environment": facts, "complete": False}


def path_of(root: Path, device: str, part: str, run: str = FULL) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return root / "bench" / "results" / slug / f"{part}{run}.json"


def recorded(root: Path, *runs: str) -> Iterator[tuple[str, Path]]:
    """Yield the part and path of every result of `runs` (by default full ones), device by device."""
    for folder in sorted((root / "bench" / "results").glob("*/")):
        paths = (
            (part, folder / f"{part}{run}.json") for part in (*CHECKS, *MEASURED, *OTHERS) for run in runs or (FULL,)
        )
        yield from ((part, path) for part, path in paths if path.exists())


def read(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result; an interrupted write leaves the old one."""
    from speedtransfer.benchmark.results import to_text
    from speedtransfer.system import replace_file

    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(f"{to_text(result)}\n".encode())
