"""Runs an example and keeps what it found in ``bench/results``, with a picture."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store import ROOT, header, path_of, write


def record_example(
    part: str,
    run: Callable[[list[str]], int],
    save: Callable[[dict[str, Any], Path], str],
    runs: str,
    arguments: list[str] | None,
    root: Path,
) -> int:
    """Run the `main` of an example; where it ends well, write its results and picture. Return its exit code.

    `runs` is the key of what has losses.
    """
    given = sys.argv[1:] if arguments is None else arguments
    about = header(ROOT, part)  # before: the sources as they are when it starts
    with tempfile.TemporaryDirectory(prefix="speedtransfer-example-") as folder:
        code = run([*given, "--out", folder])
        if code:
            return code
        found: dict[str, Any] = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    for one in found[runs].values():
        # Their digits beyond these are of no use in a picture, and a repository keeps them for ever.
        one["losses"] = [float(f"{loss:.5g}") for loss in one["losses"]]
    out = path_of(root, about["environment"]["device"], part)
    result = {**found, **about, "complete": True}
    write(out, result)
    print(f"wrote {out}")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0
