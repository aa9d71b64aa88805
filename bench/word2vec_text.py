"""What bench/word2vec.py has found, in words and tables; sets that settings were chosen on apart from the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from word2vec_sets import RESERVED, TUNED
from word2vec_statistics import (
    BETTER,
    GENSIM,
    NOT_WORSE,
    STUDENT,
    UNSURE,
    WORSE,
    Difference,
    Interval,
    System,
    differences,
    in_group,
    mean,
    ratio,
    runs_of,
    score_names,
    scores,
    speeds,
    systems,
)

from speedtransfer.errors import format_bytes

OPTIMIZERS = {"adamw": "AdamW", "adamax": "Adamax", "adagrad": "Adagrad", "sgd": "SGD", "adam": "Adam"}
_MODELS = {"skipgram": "skip-gram", "cbow": "CBOW"}
GROUPS = (TUNED, RESERVED)


def label(system: System, with_dim: bool = True) -> str:
    """Return the name of a system for people, without its corpus."""
    optimizer = OPTIMIZERS.get(system.optimizer, system.optimizer)
    parts = [_MODELS[system.model], system.name, optimizer, f"dim {system.dim}" if with_dim else ""]
    return ", ".join(filter(None, parts))


def table(result: dict[str, Any], corpus: str) -> str:
    """Return a row of markdown for each system of a corpus: means over the seeds with their intervals."""
    names = score_names(result, corpus)
    head = ["model", "system", "optimizer", "dim", "words/s", "training alone", "vocabulary alone"]
    head += [f"{name} ({group})" for group in GROUPS for name in names if in_group(result, name, group)]
    lines = [[*head, "peak memory"], ["---", "---", "---", *("---:" for _ in head[2:])]]
    for system in systems(result, corpus):
        runs = runs_of(result, system)
        measured = zip(*(speeds(result, run) for run in runs), strict=True)
        cells = [_thousands(mean(values)) for values in measured]
        cells += [_score(mean(found)) if (found := scores(result, system, name)) else "" for name in names]
        peak = format_bytes(max(run["peak_bytes"] for run in runs))
        optimizer = OPTIMIZERS.get(system.optimizer, system.optimizer) or "its own SGD"
        lines.append([_MODELS[system.model], system.name, optimizer, str(system.dim), *cells, peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _thousands(found: Interval) -> str:
    half = "" if found.half is None else f" ± {found.half / 1e3:,.0f}"
    return f"{found.value / 1e3:,.0f}{half} k"


def _score(found: Interval) -> str:
    return f"{found.value:.3f}" + ("" if found.half is None else f" ± {found.half:.3f}")


def verdicts(result: dict[str, Any], corpus: str) -> list[str]:
    """Return for each of our systems its speed beside gensim's and, for either group of sets, the differences to gensim."""
    lines = []
    for system in systems(result, corpus):
        beside = ratio(result, system)
        if system.name == GENSIM or beside is None:
            continue
        paired = f" (seed by seed {min(beside.paired):.2f}x to {max(beside.paired):.2f}x)" if beside.paired else ""
        lines.append(
            f"- {label(system)}: {beside.medians:.2f}x gensim's words/s{paired}{', slower' if beside.medians < 1 else ''}"
        )
        lines += [f"  - {group}: {told}" for group in GROUPS if (told := _verdicts_of(result, system, group))]
    return lines


def _verdicts_of(result: dict[str, Any], system: System, group: str) -> str:
    found: dict[str, list[str]] = {BETTER: [], NOT_WORSE: [], WORSE: [], UNSURE: []}
    for name, measured, verdict in differences(result, system):
        if in_group(result, name, group):
            found[verdict].append(f"{name} {_difference(measured)}")
    return "; ".join(f"{_emphasised(verdict)}: {', '.join(sets)}" for verdict, sets in found.items() if sets)


def _difference(found: Difference) -> str:
    interval = "" if found.low is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
    return f"{found.value:+.3f}{interval}"


def _emphasised(verdict: str) -> str:
    return f"**{verdict}**" if verdict == WORSE else verdict


def about_all(result: dict[str, Any]) -> list[str]:
    """Return what was trained, where, how it is compared, and what is not as one would have it."""
    settings, environment = result["settings"], result["environment"]
    versions = environment["versions"]
    commit = environment["commit"][:12] + (" with changes" if environment["dirty"] else "")
    trained_ones = [system.model for system in systems(result)] or settings["models"]
    models = " and ".join(_MODELS[model] for model in dict.fromkeys(trained_ones))
    seeds = _plural(settings["seeds"], "seed")
    interval = (
        f"means of {seeds} with the 95% confidence interval of the mean (Student's t)"
        if settings["seeds"] > 1
        else "one seed"
    )
    trained = (
        f"{models} with {settings['negative']} negative samples and window {settings['window']}, everything else by default; "
        f"{interval}; {environment['device']}, gensim {versions['gensim']} on {_plural(result['workers'], 'worker')}, torch "
        f"{versions['torch']}, commit {commit}, {environment['date'][:10]}."
    )
    told = (
        "Words/s are those of the text, times the epochs, by the wall clock: counting the vocabulary and training, without "
        "imports (counting alone: the text once). Similarities are Spearman's, analogies the share of right answers among the "
        f"{settings['restrict']:,} most frequent words, all by one evaluator, whose figures are gensim's. "
        "Memory is resident memory with child processes, mapped files and all imports."
    )
    lines = [trained[0].upper() + trained[1:], told, " ".join(_protocol(result))]
    if not result["same_vocabulary"]:
        lines.append("**The vocabularies were not the same**, so the figures cannot be compared.")
    for failure in result["failures"]:
        lines.append(f"**Failed**: {failure['title']}, seed {failure['seed']}: {failure['error']}")
    return lines


def _protocol(result: dict[str, Any]) -> Iterator[str]:
    tuned, reserved = ([name for name in result["groups"] if in_group(result, name, group)] for group in GROUPS)
    if tuned:
        yield f"Tuned sets, on which settings of the package were chosen: {', '.join(tuned)}."
    yield f"Reserved sets, by which no setting may be chosen (see docs/word2vec.md): {', '.join(reserved) or 'none'}."
    found = result["differences"]
    if found["method"] == STUDENT:
        yield "Differences to gensim have Student's 95% confidence interval over seeds."
        return
    over = {one["seeds"] > 1 for one in found["found"]}
    what = "word pairs or questions" + (" and over seeds" if over == {True} else "")
    only = " only: one seed says nothing about others" if over == {False} else ""
    yield (
        f"Differences to gensim have 95% percentile intervals of a paired bootstrap over {what}{only} "
        f"({found['resamples']:,} resamples); sets with fewer than {found['least_items']} known items are not compared."
    )


def about_corpus(result: dict[str, Any], about: dict[str, Any]) -> str:
    """Return what is to be known of a corpus: its size, its settings, and how much of the sets its vocabulary covers."""
    asked: dict[str, int] = {}
    for run in result["runs"]:
        if run["corpus"] == about["name"]:
            asked |= {name: count for name, count in run.get("asked", {}).items() if name in result["groups"]}
    parts = [
        f"**{about['name']}**: {about['words']:,} words, {_plural(about['epochs'], 'epoch')}, sample {about['sample']:g}, "
        f"words that occur {about['min_count']} times or more."
    ]
    if asked:
        parts.append(f"In its vocabulary: {', '.join(f'{count:,} of {name}' for name, count in asked.items())}.")
    if not about["analogies"]:
        parts.append("Analogies say nothing on a corpus of this size and are not asked.")
    return " ".join(parts)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def blocks(result: dict[str, Any]) -> list[str]:
    """Return all of it as blocks of markdown."""
    found = about_all(result)
    for about in result["corpora"]:
        if systems(result, about["name"]):
            lines = verdicts(result, about["name"])
            found += [about_corpus(result, about), table(result, about["name"])]
            found += (
                ["Against gensim, with the 95% confidence interval of the difference:", "\n".join(lines)]
                if lines
                else []
            )
    return found
