"""What bench/word2vec_scale.py has found, in words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any


def in_short(result: dict[str, Any]) -> str:
    """Return a line for the list of results."""
    return "step " + ", ".join(f"{_millions(m['rows'])} {_ms(m)}" for m in result["measured"])


def told(measured: dict[str, Any]) -> str:
    """Return a line about one size."""
    first, again, files = measured["first"], measured["again"], measured["weight_files"]
    centers, contexts = measured["touched"]
    disk = f" (weights {_gb(files['on_disk'])} of {_gb(files['bytes'])} on disk)" if files["bytes"] else ""
    parts = [
        f"{measured['rows']:,} rows, {measured['optimizer']}: {_ms(measured)} a step over {centers + contexts:,.0f} rows",
        f"{1e3 * first['step_s']:.1f} ms (mean {1e3 * first['mean_step_s']:.1f} ms) when they are touched first",
        f"{1e3 * measured['written']['step_s']:.1f} ms when they have been written to the disk",
        f"block drawn in {1e3 * again['block_s']:.1f} ms",
        f"tables of {_gb(measured['table_bytes'])}{disk} made in {measured['start_s']:.1f} s",
        f"peak memory {_gb(measured['peak_bytes'])}",
    ]
    if "rssanon_bytes" in measured:
        parts.append(
            f"at the end {_gb(measured['rssanon_bytes'])} of its own and {_gb(measured['rssfile_bytes'])} of files"
        )
    if measured["device_bytes"]:
        parts.append(f"{_gb(measured['device_bytes'])} on the device")
    return ", ".join(parts)


def sentences(result: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each optimizer."""
    settings, environment = result["settings"], result["environment"]
    commit = environment["commit"][:12] + (" with changes" if environment["dirty"] else "")
    for optimizer, group in itertools.groupby(result["measured"], key=lambda m: m["optimizer"]):
        measured = list(group)
        sizes, times = (
            ", ".join(parts) for parts in (map(_millions, (m["rows"] for m in measured)), map(_ms, measured))
        )
        first, written = (
            ", ".join(f"{1e3 * m[when]['step_s']:.1f} ms" for m in measured) for when in ("first", "written")
        )
        small, large = measured[0], measured[-1]
        times_of = large["again"]["step_s"] / small["again"]["step_s"]
        yield (
            f"A training step over vocabularies of {sizes} words (Zipf's law, dim {settings['dim']}, {optimizer}, "
            f'memory="{settings["memory"]}"; medians of {settings["steps"]} steps): {times}, {times_of:.2f}x from the '
            f"smallest to the largest; where its rows are touched for the first time {first}; once the system has written "
            f"them to the disk {written}. The largest tables span "
            f"{_gb(large['table_bytes'])}, peak memory {_gb(large['peak_bytes'])}, mapped pages of the files included; "
            f"{environment['device']}, torch {environment['versions']['torch']}, commit {commit}, {environment['date'][:10]}."
        )


def markdown(result: dict[str, Any], picture: str) -> str:
    """Return the lines of docs/word2vec.md; there is no picture."""
    return "\n".join(sentences(result))


def save(result: dict[str, Any], path: Any) -> str:
    """Draw nothing: a sentence says it all."""
    return ""


def _ms(measured: dict[str, Any]) -> str:
    return f"{1e3 * measured['again']['step_s']:.1f} ms"


def _millions(rows: int) -> str:
    return f"{rows / 1e6:g}M"


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f} GB"
