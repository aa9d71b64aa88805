"""Records the example of a GPT with n-gram tables: ``python bench/ngram_example.py``, with any flags of the example's run.py.

The result of a run that came to its end goes to ``bench/results/<device>/ngram_example.json``, with a picture beside it;
bench/readme.py puts both into docs/ngrams.md.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import header
from store import NGRAM_EXAMPLE, ROOT, path_of, write

sys.path.insert(0, str(ROOT))  # also where the package is not installed
sys.path.insert(0, str(ROOT / "examples"))

from ngram_example_figure import save

from ngram_lm import run


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the example and keep what it found; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    about = header(ROOT, NGRAM_EXAMPLE)  # before: the sources as they are when it starts
    with tempfile.TemporaryDirectory(prefix="ngram-lm-") as folder:
        code = run.main([*given, "--out", folder])
        if code:
            return code
        found: dict[str, Any] = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    for one in found["contenders"].values():
        # Their digits beyond these are of no use in a picture, and a repository keeps them for ever.
        one["losses"] = [float(f"{loss:.5g}") for loss in one["losses"]]
    out = path_of(root, about["environment"]["device"], NGRAM_EXAMPLE)
    result = {**found, **about, "complete": True}
    write(out, result)
    print(f"wrote {out}")
    if problem := save(result, out.with_suffix(".png")):
        print(problem, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
