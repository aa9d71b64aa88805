"""Where results lie, ``bench/results/<device>/<part>.json``, and whether the sources they depend on have changed since.

A run that is under way or was interrupted has its own in ``<part>.partial.json``, a quick one in ``<part>.quick.json``:
neither takes the place of a complete one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sources import Sources, normal_form
from tree import in_commit, in_folder

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

# Where what is measured begins, for sources.py. Of a suite it is `groups`, and how cases are measured.
_MEASURE = "speedtransfer.benchmark.measure:measure"
BEGINS = {
    **{suite: (f"speedtransfer.benchmark.{suite}:groups", _MEASURE) for suite in SUITES},
    IDLE: ("idle_training:train", "idle_data:read_data"),
    WORD2VEC: ("word2vec_child:*", "word2vec_data:prepare", "word2vec_process:run_job"),
    SCALE: ("word2vec_scale_child:*", "word2vec_process:run_job"),
    NODE2VEC: ("node2vec:measure", "node2vec:summary", "node2vec_data:read_data"),
    GOWALLA: ("gowalla:train_here", "gowalla:run_processes", "gowalla:distance", "idle_data:read_data"),
    DRIFT: (*(f"vocabulary_drift_training:{name}" for name in ("train_zipf", "train_gowalla")), "idle_data:read_data"),
    PLAN: ("plan_accuracy_cases:planned", "plan_accuracy_cases:measured", "plan_accuracy_cases:CASES"),
    LOOP: ("speedtorch_loop_training:train",),
    LAYOUT: ("layout:measure",),
    NGRAM_EXAMPLE: ("ngram_lm.training:*", "ngram_lm.run:_train", "ngram_lm.comparison:compare"),
    PARALLEL_EXAMPLE: ("parallel.run:_train", "parallel.run:_check"),
}
# The tests of a device depend on every module but those that move no rows, and on what tests/gpu needs.
_CHECKED = re.compile(
    r"speedtransfer/(?!(benchmark|planning|speedtorch|word2vec)/|cli\.|__main__\.).*\.(py|cu|cuh)"
    r"|tests/((gpu|table_cases)/.*|[^/]*_cases|cases|table_contract)\.py"
)


class Tree:
    """The sources of this repository, as they lie in a folder or as a commit has them.

    Raises
    ------
    LookupError
        git does not know the commit.
    """

    def __init__(self, root: Path, commit: str = "") -> None:
        self._root, self._commit = root, commit
        self._files = in_commit(root, commit, "speedtransfer/", "bench/", "examples/", "tests/") if commit else None
        self.sources = Sources(in_folder(root) if self._files is None else self._files.get)

    def digest(self, part: str) -> str:
        """Return the SHA-256 of the code that the result `part` depends on, as it is here and now."""
        if part not in CHECKS:
            return self.sources.digest(BEGINS.get(part, (f"{part}:main",)))
        found = hashlib.sha256()
        for name, text in sorted(self._checked()):
            found.update(f"{name}\0{normal_form(name, text)}\0".encode())
        return found.hexdigest()

    def _checked(self) -> Iterator[tuple[str, str]]:
        if self._files is not None:
            yield from ((name, text) for name, text in self._files.items() if _CHECKED.fullmatch(name))
            return
        for path in (path for folder in ("speedtransfer", "tests") for path in (self._root / folder).rglob("*.*")):
            name = path.relative_to(self._root).as_posix()
            if _CHECKED.fullmatch(name):
                yield name, path.read_text(encoding="utf-8")

    def modules(self, part: str) -> set[str]:
        """Return the modules and kernels that the result `part`, of no check, depends on, see `Sources.modules`."""
        return self.sources.modules(BEGINS[part])


def digest(root: Path, part: str) -> str:
    """Return the SHA-256 of the code in folder `root` that the result `part` depends on."""
    return Tree(root).digest(part)


class Current:
    """Tells whether results still hold: the code that they depend on is what it was."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = functools.cache(Tree)

    def __call__(self, part: str, result: dict[str, Any]) -> bool:
        """Compare the digests of code; of a result with a digest of another kind, the code of its commit, where git has it."""
        now = self._tree(self._root).digest(part)
        if result["digest"] == now:
            return True
        commit, changed = (result["environment"][key] for key in ("commit", "dirty"))
        try:
            return not changed and self._tree(self._root, commit).digest(part) == now
        except LookupError:
            return False


def header(root: Path, part: str) -> dict[str, Any]:
    """Return what every result says about where it comes from; a copy of the tree without git is told its $COMMIT."""
    from speedtransfer.benchmark.environment import commit_of, environment

    facts = environment()
    facts["commit"], facts["dirty"] = commit_of(root)
    if facts["commit"] == "unknown":
        facts["commit"], changes, _ = os.environ.get("COMMIT", "unknown").partition("+changes")
        facts["dirty"] = True if changes else None
    return {"part": part, "environment": facts, "digest": digest(root, part), "complete": False}


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
