"""word2vec beside gensim, on the same texts with the same settings: speed, quality and memory.

``make word2vec DATA=FOLDER``, where FOLDER has ``corpora/schools_wiki_2007.text8.xz`` (or ``.txt``) and ``wordsim/`` with the
files that `SETS` names; these data are not part of this repository. The second corpus, the World Factbook, comes with the
package. Each run is a process of its own, gensim's and ours in turn, seed by seed, so that whatever else the machine does hits
all alike. Needs gensim (extra ``dev``).
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from experiments.word2vec_child import MODELS, cores, evaluate, train_gensim, train_ours
from store import ROOT

from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.memory import in_process
from speedtransfer.benchmark.report import Show
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.errors import InvalidValueError, SpeedtransferError, format_bytes
from speedtransfer.word2vec.evaluation import SimilaritySet, load_set
from speedtransfer.word2vec.text import decode, iter_pieces

TUNED, RESERVED = "tuned", "reserved"
# Sets on which settings of the package were chosen are weak evidence for other data. A set that moves from RESERVED to TUNED
# is no longer evidence: never do that silently.
SETS = {
    "WS-353": ("EN-WS-353-ALL.txt", TUNED),
    "RG-65": ("EN-RG-65.txt", TUNED),
    "MTurk-287": ("EN-MTurk-287.txt", TUNED),
    "analogies": ("questions-words.txt", TUNED),
    "analogies, semantic": ("", TUNED),
    "analogies, syntactic": ("", TUNED),
    "SimLex-999": ("EN-SIMLEX-999.txt", RESERVED),
    "RW": ("EN-RW-STANFORD.txt", RESERVED),
}
GENSIM = "gensim"
OPTIMIZERS = {"adamw": "AdamW", "adamax": "Adamax", "adagrad": "Adagrad", "sgd": "SGD"}
BETTER, NOT_WORSE, WORSE = "better", "not worse beyond the confidence interval", "**worse**"
RESAMPLES, SEED = 1000, 15
LEAST_ITEMS = 20  # resamples of fewer vary too little to generalize
LINE_WORDS = 1000  # gensim's workers share out a corpus by lines, and cut one of more than 10,000 words
WARM_WORDS = 20_000
SHARED = {"window": 5, "negative": 5, "restrict": 30_000}
_NAMES = {"skipgram": "skip-gram", "cbow": "CBOW"}
NOTE = (
    f"{SHARED['negative']} negative samples and window {SHARED['window']}, everything else by default; means over seeds with "
    "the 95% confidence interval of the mean (Student's t). Words/s are those of the text, times the epochs, by the wall "
    "clock: counting the vocabulary and training, without imports (counting alone: the text once). Similarities are "
    f"Spearman's, analogies the share of right answers among the {SHARED['restrict']:,} most frequent words, all by one "
    "evaluator, whose figures are gensim's. Memory is the peak of the process, with mapped files and all imports. Tuned sets "
    "are those on which settings of the package were chosen; by reserved ones no setting may be chosen. Differences to gensim "
    "have 95% percentile intervals of a paired bootstrap over word pairs or questions and over seeds "
    f"({RESAMPLES:,} resamples); sets with fewer than {LEAST_ITEMS} known items are not compared. Analogies say nothing on a "
    "small corpus and are not asked there."
)


class Scale(NamedTuple):
    """What is trained: all `models` and `optimizers` in the first of `dims`, only the first of each in the others.

    `seeds` are runs of each: 1, 2, ... Of each corpus only the first `words`, if given.
    """

    dims: tuple[int, ...] = (100, 300)
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    models: tuple[str, ...] = MODELS
    seeds: int = 3
    words: int | None = None


class Corpus(NamedTuple):
    """A text with its settings; `analogies`: whether it is large enough for them."""

    path: Path
    epochs: int = 5
    min_count: int = 5
    sample: float = 1e-4
    analogies: bool = True


FULL, QUICK = Scale(), Scale(dims=(100,), seeds=1, words=3_000_000)
SETTINGS = Scale._fields


def corpora(data: Path) -> list[Corpus]:
    large = find(data, "corpora/schools_wiki_2007.text8.xz", "corpora/schools_wiki_2007.txt")
    shipped = ROOT / "speedtransfer" / "word2vec" / "corpora" / "world_factbook.words.txt.gz"
    return [Corpus(large), Corpus(shipped, epochs=25, sample=1e-3, analogies=False)]


def find(folder: Path, *names: str) -> Path:
    found = next((path for name in names if (path := folder / name).is_file()), None)
    if found is None:
        raise InvalidValueError(f"there is no {names[0]} in {str(folder)!r}; name the folder that has it")
    return found


def groups(device: torch.device, quick: bool, data: str = "", **given: Any) -> list[Group]:
    """Make a group for each corpus, model and dimension."""
    scale = QUICK if quick else FULL
    scale = scale._replace(**{name: value for name, value in given.items() if name in SETTINGS})
    try:
        about = {"gensim": importlib.metadata.version("gensim"), "workers": cores(), "headline": False}
    except importlib.metadata.PackageNotFoundError:
        raise InvalidValueError("this needs gensim, which is not installed; run: pip install gensim") from None
    sets = {name: find(Path(data), "wordsim/" + file).resolve() for name, (file, _) in SETS.items() if file}
    found = []
    for corpus, (place, dim) in itertools.product(corpora(Path(data)), enumerate(scale.dims)):
        for model in scale.models[: 1 if place else None]:
            params = {"corpus": corpus.path.name, "model": model, "dim": dim, "seeds": scale.seeds, **SHARED, **about}
            params |= {name: getattr(corpus, name) for name in ("epochs", "min_count", "sample")}
            make = functools.partial(_measure, corpus, sets, scale, scale.optimizers[: 1 if place else None], params)
            found.append(Group(f"{_NAMES[model]} of {dim} dimensions, {corpus.path.name}", make, params))
    return found


def prepare(corpus: Path, target: Path, words: int | None = None) -> int:
    """Write the first `words` of `corpus` to `target` in lines of `LINE_WORDS`; return how many there are."""
    count = 0
    with target.open("wb") as out:
        left = itertools.islice((word for piece in iter_pieces(corpus) for word in decode(piece).split()), words)
        while line := list(itertools.islice(left, LINE_WORDS)):
            count += len(line)
            out.write(" ".join(line).encode() + b"\n")
    if not count:
        raise InvalidValueError(f"{str(corpus)!r} holds no words; pass a corpus with text in it")
    return count


def _measure(
    corpus: Corpus, sets: dict[str, Path], scale: Scale, optimizers: Sequence[str], params: dict[str, Any]
) -> list[CaseResult]:
    """Train gensim's model and ours, seed by seed, each in a process of its own."""
    cases = {"": CaseResult(GENSIM, "other", 0)}
    cases |= {name: CaseResult(f"speedtransfer, {OPTIMIZERS.get(name, name)}", "ours", 0) for name in optimizers}
    outcomes: dict[str, list[dict[str, Any]]] = {optimizer: [] for optimizer in cases}
    asked = [(name, str(path)) for name, path in sets.items() if corpus.analogies or name != "analogies"]
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        text, warm = Path(folder, "text"), Path(folder, "warm")
        params["words"] = prepare(corpus.path, text, scale.words)
        prepare(text, warm, WARM_WORDS)
        # The first of each compiles and warms up, on a little.
        for seed, (optimizer, case) in itertools.product(range(scale.seeds + 1), cases.items()):
            job = {**params, "optimizer": optimizer, "seed": max(seed, 1), "folder": folder, "sets": asked}
            job |= {"corpus": str(text)} if seed else {"corpus": str(warm), "epochs": 1}
            try:
                found = {} if case.error else in_process(train_ours if optimizer else train_gensim, job)
                if found and seed:
                    outcomes[optimizer].append({**found, **in_process(evaluate, job)})
                    print(f"{case.name}, seed {seed}: {outcomes[optimizer][-1]['scores']}", flush=True)
            except SpeedtransferError as error:
                case.error = str(error)
    known = {name: load_set(path) for name, path in sets.items()}
    gold = {name: np.array(one.scores) if isinstance(one, SimilaritySet) else None for name, one in known.items()}
    for optimizer, case in cases.items():
        if not case.error:
            _fill(case, outcomes[optimizer], outcomes[""] if optimizer and not cases[""].error else [], gold)
    vocabularies = {found["vocabulary"]["sha256"] for runs in outcomes.values() for found in runs}
    params["same_vocabulary"] = len(vocabularies) == 1
    return list(cases.values())


def _fill(
    case: CaseResult, runs: list[dict[str, Any]], theirs: list[dict[str, Any]], gold: dict[str, np.ndarray | None]
) -> None:
    """Put what the runs of all seeds have found into `case`, beside gensim's."""
    case.samples_s = [run["vocabulary_s"] + run["training_s"] for run in runs]
    case.memory = {"host_bytes": max(run["peak_bytes"] for run in runs)}
    case.values = {name: [run[name] for run in runs] for name in ("vocabulary_s", "training_s", "peak_bytes")}
    for name in runs[0]["scores"]:
        if any(run["scores"][name] is None for run in runs):
            continue
        case.values |= {name: [run["scores"][name] for run in runs], f"{name}, known": [runs[0]["asked"][name]]}
        if theirs:
            sides = [np.array([run["items"][name] for run in some], dtype=float) for some in (runs, theirs)]
            if interval := bootstrap(*sides, gold[name.partition(",")[0]]):
                case.values[_beside(name)] = interval


def _beside(name: str) -> str:
    return f"{name}, beside gensim"


def bootstrap(ours: np.ndarray, theirs: np.ndarray, gold: np.ndarray | None) -> list[float] | None:
    """Return how far the mean score of `ours` is above that of `theirs`, and the ends of its 95% percentile interval.

    Both are the outcome of each item, ``(seeds, items)``, nan where unknown; only items known to all count, and with fewer
    than `LEAST_ITEMS` the result is None. The score is Spearman's correlation with `gold`, people's scores of the items, or
    without these the mean outcome. Each resample draws seeds and items with replacement, the same for both sides, and scores
    each drawn seed on the drawn items. With one seed the interval is over items only. With a few seeds it is somewhat too
    narrow for other seeds, as any bootstrap of so few.
    """
    known = ~np.isnan([*ours, *theirs]).any(axis=0)
    ours, theirs, gold = ours[:, known], theirs[:, known], None if gold is None else gold[known]
    seeds, items = ours.shape
    if items < LEAST_ITEMS:
        return None
    value = np.mean([_score(one, gold) - _score(two, gold) for one, two in zip(ours, theirs, strict=True)])
    if np.isnan(value):  # correlation with equal numbers
        return None
    random, drawn = np.random.default_rng((SEED, items, seeds)), []
    for _ in range(RESAMPLES):
        some, chosen = random.integers(items, size=items), random.integers(seeds, size=seeds)
        people = None if gold is None else gold[some]
        each = [_score(ours[seed, some], people) - _score(theirs[seed, some], people) for seed in chosen]
        drawn.append(np.mean(each))
    return [round(float(number), 6) for number in (value, *np.nanpercentile(drawn, [2.5, 97.5]))]


def _score(outcomes: np.ndarray, gold: np.ndarray | None) -> float:
    if gold is None:
        return float(outcomes.mean())
    from scipy.stats import rankdata

    with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 where all that was drawn is equal
        return float(np.corrcoef(rankdata(outcomes), rankdata(gold))[0, 1])


# --- how it is shown ----------------------------------------------------------------------------------------------------


def speeds(group: GroupResult, case: CaseResult, what: str = "") -> list[float]:
    """Return words a second of each seed: by the wall clock, or of training or of counting the vocabulary alone."""
    words = group.params["words"] * (1 if what == "vocabulary_s" else group.params["epochs"])
    return [words / seconds for seconds in (case.values[what] if what else case.samples_s)]


def _mean_of(values: Callable[..., list[float]], scale: float = 1.0, digits: int = 3, unit: str = "") -> Show:
    """Return what shows the mean of values, of each seed, and half of Student's 95% confidence interval."""

    def show(group: GroupResult, case: CaseResult) -> str:
        found = values(group, case)
        text = f"{scale * statistics.fmean(found):,.{digits}f}" if found else ""
        if len(found) > 1:
            from scipy import stats

            text += f" ± {scale * stats.sem(found) * stats.t.ppf(0.975, len(found) - 1):,.{digits}f}"
        return text + unit * bool(found)

    return show


_SPEED = functools.partial(_mean_of, scale=1e-3, digits=0, unit=" k")
VALUE = (lambda case: case.median_s, "seconds of a run, less is better")
COLUMNS = {
    "words/s": _SPEED(speeds),
    "training alone": _SPEED(functools.partial(speeds, what="training_s")),
    "vocabulary alone": _SPEED(functools.partial(speeds, what="vocabulary_s")),
    **{
        f"{name} ({kind})": _mean_of(lambda group, case, name=name: case.values.get(name, []))
        for name, (_, kind) in SETS.items()
    },
    "peak memory": lambda group, case: format_bytes(case.memory["host_bytes"]),
}


def ratio(group: GroupResult, case: CaseResult) -> float:
    """Return our words a second over gensim's, of the medians."""
    return group.by_name[GENSIM].median_s / case.median_s


def verdicts(case: CaseResult, kinds: Sequence[str] = (TUNED, RESERVED)) -> Iterator[tuple[str, str]]:
    """Yield each set that is compared with its verdict: whether ours are better than gensim's there."""
    for name, (_, kind) in SETS.items():
        if kind in kinds and (found := case.values.get(_beside(name))):
            _, low, high = found
            yield name, BETTER if low > 0 else WORSE if high < 0 else NOT_WORSE


def about(groups: list[GroupResult]) -> list[str]:
    """Return what was trained, and how each of ours compares with gensim."""
    lines = []
    for group in groups:
        found, known = group.params, next(case.values for case in group.ran)
        counts = ", ".join(
            f"{known[key][0]:,} of {name}"
            for name, (file, _) in SETS.items()
            if file and (key := f"{name}, known") in known
        )
        lines.append(
            f"{group.title}: {found['words']:,} words, {found['epochs']} epochs, sample {found['sample']:g}, words that occur "
            f"{found['min_count']} times or more, {found['seeds']} seeds, gensim {found['gensim']} on {found['workers']} "
            f"workers; in the vocabulary: {counts}"
        )
        if not found["same_vocabulary"]:
            lines.append("**The vocabularies were not the same**, so the figures cannot be compared")
        ours = [case for case in group.ran if case.role == "ours" and GENSIM in group.by_name]
        lines += [f"{group.title}, {case.name}: {_compared(group, case)}" for case in ours]
    return lines


def _compared(group: GroupResult, case: CaseResult) -> str:
    each = [a / b for a, b in zip(group.by_name[GENSIM].samples_s, case.samples_s, strict=True)]
    parts = [f"{ratio(group, case):.2f}x gensim's words/s (seed by seed {min(each):.2f}x to {max(each):.2f}x)"]
    for kind in (TUNED, RESERVED):
        found: dict[str, list[str]] = {BETTER: [], NOT_WORSE: [], WORSE: []}
        for name, verdict in verdicts(case, [kind]):
            value, low, high = case.values[_beside(name)]
            found[verdict].append(f"{name} {value:+.3f} [{low:+.3f}, {high:+.3f}]")
        parts += [f"{kind}, {verdict}: {', '.join(shown)}" for verdict, shown in found.items() if shown]
    return "; ".join(parts)


def describe(group: GroupResult, case: CaseResult) -> str:
    """Return how fast ours is beside gensim, and on how many sets it is better or not."""
    found = [verdict.strip("*").partition(" beyond ")[0] for _, verdict in verdicts(case)]
    if not found:
        return ""
    counts = (f"{found.count(verdict)} {verdict}" for verdict in dict.fromkeys(found))
    return f"{ratio(group, case):.2f}x gensim's words/s; of {len(found)} sets {', '.join(counts)}"
