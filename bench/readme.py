"""Writes the figures of README.md from ``bench/results``: ``python bench/readme.py``; with ``--check`` it only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- figures: made by `python bench/readme.py` from bench/results; do not edit -->"
END = "<!-- end of figures -->"


def figures(root: Path = ROOT) -> str:
    """Return the markdown for every recorded run of the benchmarks: a table for each group, ratios to ours first."""
    parts = []
    for path in sorted((root / "bench" / "results").glob("*/benchmarks.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "cupy") if run["versions"][name])
        commit = run["commit"][:12] + (" with changes" if run["dirty"] else "")
        parts.append(
            f"**{run['device']}**, {versions}, commit {commit}, {run['date'][:10]} (medians; quartiles behind)."
        )
        parts += [_memory(bench) for bench in run["benchmarks"] if "beyond_planes" in bench["extra_info"]]
        parts += [_table(name, cases) for name, cases in _groups(run["benchmarks"]).items()]
    return "\n\n".join(parts)


def _groups(benchmarks: list[dict]) -> dict[str, dict[str, list[float]]]:
    groups: dict[str, dict[str, list[float]]] = {}
    for bench in benchmarks:
        if "beyond_planes" in bench["extra_info"]:
            continue
        groups.setdefault(bench["group"], {}).setdefault(bench["params"]["case"], []).extend(bench["stats"]["data"])
    return groups


def _memory(bench: dict) -> str:
    measured, group = bench["extra_info"], bench["group"]
    peak, planes = measured["peak_bytes"] / 1e9, measured["planes_bytes"] / 1e9
    return (
        f"{group[0].upper()}{group[1:]}: {peak:.2f} GB, {100 * measured['beyond_planes']:.1f}% beyond the {planes:.2f} GB of "
        f"its {len(measured['planes'])} planes."
    )


def _table(group: str, cases: dict[str, list[float]]) -> str:
    reference = next((name for name in ("speedtransfer", "1x rows") if name in cases), next(iter(cases)))
    base = median(cases[reference])
    lines = [f"| {group} | ratio | time, ms | quartiles |", "|---|---|---|---|"]
    for name, samples in sorted(cases.items(), key=lambda item: median(item[1])):
        low, _, high = (1e3 * q for q in quantiles(samples, n=4))
        label = f"**{name}**" if name == reference else name
        lines.append(
            f"| {label} | {median(samples) / base:.2f} | {1e3 * median(samples):.1f} | {low:.1f} to {high:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Write README.md, or with ``--check`` return 1 where it differs."""
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n\n{figures()}\n\n{END}{after}"
    if "--check" in sys.argv:
        if new != old:
            print("README.md does not show the figures in bench/results; run `python bench/readme.py`", file=sys.stderr)
        return int(new != old)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
