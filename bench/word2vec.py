"""Trains word2vec beside gensim, on the same texts with the same settings, and compares speed, quality and memory.

``python bench/word2vec.py --data FOLDER``, where FOLDER has ``corpora/schools_wiki_2007.text8.xz`` (or ``.txt``) and
``wordsim/`` with the files that `SETS` names; these data are not part of this repository. The second corpus, the World
Factbook, comes with the package. Some of the sets are those that settings of the package were chosen on, the others are
reserved: they are reported apart. Each run is a process of its own, gensim's and ours in turn, seed by seed, so that whatever
else the machine does hits all alike. The result goes to ``bench/results/<device>/word2vec.json``; bench/readme.py draws it,
and puts it into docs/results.md. Needs gensim (extra ``dev``).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from store import (
    FULL,
    PARTIAL,
    QUICK,
    ROOT,
    WORD2VEC,
    RunError,
    exit_code,
    header,
    make_parser,
    path_of,
    read,
    run_job,
    write,
)
from word2vec_child import EVALUATE, GENSIM, MODELS, OURS, cores
from word2vec_report import RESERVED, TUNED, System, label, markdown, speeds, system_of, with_differences

from speedtransfer.errors import InvalidValueError, check_size, format_bytes
from speedtransfer.word2vec.evaluation import SimilaritySet, load_set
from speedtransfer.word2vec.text import decode, iter_pieces

CORPUS = ("schools_wiki_2007.text8.xz", "schools_wiki_2007.txt")
SHIPPED = ROOT / "speedtransfer" / "word2vec" / "corpora" / "world_factbook.words.txt.gz"
# Sets on which settings of the package were chosen are weak evidence for other data. A set that moves from RESERVED to TUNED
# is no longer evidence: never do that silently.
SETS = {
    "EN-WS-353-ALL.txt": ("WS-353", TUNED),
    "EN-RG-65.txt": ("RG-65", TUNED),
    "EN-MTurk-287.txt": ("MTurk-287", TUNED),
    "questions-words.txt": ("analogies", TUNED),
    "EN-SIMLEX-999.txt": ("SimLex-999", RESERVED),
    "EN-RW-STANFORD.txt": ("RW", RESERVED),
}
LINE_WORDS = 1000  # gensim's workers share out a corpus by lines, and cut one of more than 10,000 words
WARM_WORDS = 20_000


@dataclass(frozen=True)
class Settings:
    """What is trained, by whom and how: the same for gensim, except for the optimizers, and on every corpus.

    All `models` and our `optimizers` are trained in the first of `dims`, only the first of each in the others; `seeds` are
    runs of each: 1, 2, ... Of each corpus only the first `words`, if given. Analogies are evaluated among the `restrict` most
    frequent words.
    """

    dims: tuple[int, ...] = (100, 300)
    optimizers: tuple[str, ...] = ("adamw", "adamax", "adagrad", "sgd")
    models: tuple[str, ...] = MODELS
    seeds: int = 3
    window: int = 5
    negative: int = 5
    words: int | None = None
    restrict: int = 30_000


class CorpusSettings(NamedTuple):
    """Settings for a corpus of some size, the same for gensim; `analogies`: whether it is large enough for them."""

    epochs: int = 5
    min_count: int = 5
    sample: float = 1e-4
    analogies: bool = True


SETTINGS, LARGE = Settings(), CorpusSettings()
SMALL = CorpusSettings(epochs=25, sample=1e-3, analogies=False)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("word2vec", __doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder of corpora/ and wordsim/")
    parser.add_argument("--seeds", type=int, default=SETTINGS.seeds, help=f"by default {SETTINGS.seeds}")
    parser.add_argument("--words", type=int, metavar="N", help="only the first N words of each text")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has left")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    about = header(ROOT, WORD2VEC)  # before: the sources as they are when it starts
    try:
        about["environment"]["versions"]["gensim"] = importlib.metadata.version("gensim")
    except importlib.metadata.PackageNotFoundError:
        raise InvalidValueError(
            "this benchmark needs gensim, which is not installed; run: pip install gensim"
        ) from None
    out = args.out or path_of(ROOT, about["environment"]["device"], WORD2VEC, QUICK if args.words else FULL)
    corpora, sets = {find(args.data, "corpora", *CORPUS): LARGE, SHIPPED: SMALL}, find_sets(args.data)
    words = None if args.words is None else check_size(args.words, "--words", 1)
    settings = replace(SETTINGS, seeds=check_size(args.seeds, "--seeds", 1), words=words)
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        session = Session(Path(folder), settings, sets, out.with_name(f"{out.stem}{PARTIAL}.json"))
        session.prepare(corpora, about, args.resume)
        stopped = session.run_all()
    result = with_differences(session.result, {one.name: one.gold for one in sets})
    print("", markdown(result), sep="\n")
    if stopped or result["failures"]:
        raise RunError(f"{stopped or 'a run failed'}; what was measured is in {session.partial}: --resume goes on")
    write(out, {**result, "complete": True})
    print(f"wrote {out}")
    session.partial.unlink()
    return 0


# --- data ---------------------------------------------------------------------------------------------------------------


def find(folder: Path, below: str, *names: str) -> Path:
    found = next((path for name in names if (path := folder / below / name).is_file()), None)
    if found is None:
        raise InvalidValueError(
            f"there is no {below}/{names[0]} in {str(folder)!r}; name the folder that has it with --data"
        )
    return found


class EvaluationSet(NamedTuple):
    """A file of questions, whether settings were chosen on it, and people's scores of its pairs, None for analogies."""

    name: str
    group: str
    path: Path
    gold: np.ndarray | None


def find_sets(folder: Path) -> list[EvaluationSet]:
    """Return the sets, tuned ones first; a line that is no pair with its score, and no analogy, is an error."""
    sets = []
    for file, (name, group) in SETS.items():
        path = find(folder, "wordsim", file)
        found = load_set(path)
        gold = np.array(found.scores) if isinstance(found, SimilaritySet) else None
        sets.append(EvaluationSet(name, group, path, gold))
    return sets


def prepare(corpus: Path, target: Path, words: int | None = None) -> dict[str, Any]:
    """Write the first `words` of `corpus` to `target` in lines of `LINE_WORDS`; return facts about them."""
    count, content = 0, hashlib.sha256()
    with target.open("wb") as out:
        left = itertools.islice((word for piece in iter_pieces(corpus) for word in decode(piece).split()), words)
        while line := list(itertools.islice(left, LINE_WORDS)):
            count += len(line)
            data = " ".join(line).encode() + b"\n"
            content.update(data)
            out.write(data)
    if not count:
        raise InvalidValueError(f"{str(corpus)!r} holds no words; pass a corpus with text in it")
    return {"name": corpus.name, "words": count, "sha256": content.hexdigest()}


# --- runs ---------------------------------------------------------------------------------------------------------------


class Session:
    """The runs of one command, and the file that always holds what they have found so far."""

    def __init__(self, folder: Path, settings: Settings, sets: list[EvaluationSet], partial: Path) -> None:
        self.settings, self.partial = settings, partial
        self._folder, self._sets = folder, sets
        self._texts: dict[str, Path] = {}  # of each corpus
        self.result: dict[str, Any] = {}

    def prepare(self, corpora: dict[Path, CorpusSettings], about: dict[str, Any], goes_on: bool) -> None:
        """Write the texts, resume or begin, and let each system train for a moment to warm up."""
        facts = []
        for path, own in corpora.items():
            self._texts[path.name] = self._folder / f"{path.name}.txt"
            facts.append({**prepare(path, self._texts[path.name], self.settings.words), **own._asdict()})
        sets = {one.name: hashlib.sha256(one.path.read_bytes()).hexdigest() for one in self._sets}
        self.result = {
            **about,
            "quick": self.settings.words is not None,
            "corpora": facts,
            "groups": {one.name: one.group for one in self._sets},
            "settings": json.loads(json.dumps({**asdict(self.settings), "sets": sets})),
            "workers": cores(),
            "same_vocabulary": True,
            "runs": [],
            "failures": [],
        }
        if goes_on:
            self._take_up()
        print("compiling and trying out every system", flush=True)
        prepare(self._texts[facts[0]["name"]], self._folder / "warm.txt", WARM_WORDS)
        for system in dict.fromkeys(system._replace(corpus=facts[0]["name"]) for system, _ in self.left()):
            self._train(system, 1, warm=True)

    def _take_up(self) -> None:
        try:
            old = read(self.partial)
            before, now = ({**one["environment"], **one, **one["settings"], "seeds": 0} for one in (old, self.result))
            same = ("commit", "dirty", "versions", "corpora", "workers", *self.result["settings"])
            changed = [name for name in same if before[name] != now[name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidValueError(
                f"cannot read {str(self.partial)!r} ({error!r}); drop --resume to start over"
            ) from error
        if changed:
            what = " and ".join(changed)
            raise InvalidValueError(
                f"{str(self.partial)!r} was measured with other {what}; drop --resume to start over"
            )
        wanted = {*self.runs()}
        self.result["runs"] = [run for run in old["runs"] if (system_of(run), run["seed"]) in wanted]

    def runs(self) -> Iterator[tuple[System, int]]:
        """Yield all runs, seed by seed, so that what is stopped leaves whole seeds."""
        for seed, corpus in itertools.product(range(1, self.settings.seeds + 1), self._texts):
            for place, dim in enumerate(self.settings.dims):
                first = 1 if place else None
                for model in self.settings.models[:first]:
                    yield System(corpus, model, GENSIM, "", dim), seed
                    for optimizer in self.settings.optimizers[:first]:
                        yield System(corpus, model, OURS, optimizer, dim), seed

    def left(self) -> list[tuple[System, int]]:
        done = {(system_of(run), run["seed"]) for run in self.result["runs"]}
        return [run for run in self.runs() if run not in done]

    def run_all(self) -> str:
        """Do the remaining runs; return what stopped them, if anything."""
        left = self.left()
        for number, (system, seed) in enumerate(left, start=1):
            title = f"{system.corpus}, {label(system)}"
            try:
                shown = self._describe(self._train(system, seed))
            except RunError as error:
                self.result["failures"].append({"title": title, "seed": seed, "error": str(error)})
                shown = f"FAILED: {error}"
            except KeyboardInterrupt:
                return "stopped"
            finally:
                write(self.partial, self.result)
            print(f"[{number}/{len(left)}] {title}, seed {seed}: {shown}", flush=True)
        return ""

    def _train(self, system: System, seed: int, warm: bool = False) -> dict[str, Any]:
        """Train, evaluate and record a run; `warm`: train a little, to compile and warm up."""
        own = next(corpus for corpus in self.result["corpora"] if corpus["name"] == system.corpus)
        sets = [one for one in self._sets if one.gold is not None or own["analogies"]]
        job = {
            **{name: getattr(self.settings, name) for name in ("window", "negative", "restrict")},
            **{name: own[name] for name in ("epochs", "min_count", "sample")},
            **system._asdict(),
            "task": system.system,
            "seed": seed,
            "corpus": str(self._texts[system.corpus]),
            "folder": str(self._folder),
            "sets": [(one.name, str(one.path.resolve())) for one in sets],
        }
        if warm:
            return run_job("word2vec_child.py", {**job, "epochs": 1, "corpus": str(self._folder / "warm.txt")})
        found = run_job("word2vec_child.py", job)
        answers = run_job("word2vec_child.py", {**job, "task": EVALUATE})
        found = {**system._asdict(), "seed": seed, **found, **answers}
        self.result["runs"].append(found)
        vocabularies = {(other["corpus"], other["vocabulary"]["sha256"]) for other in self.result["runs"]}
        self.result["same_vocabulary"] = len(vocabularies) == len({name for name, _ in vocabularies})
        return found

    def _describe(self, found: dict[str, Any]) -> str:
        wall, training, vocabulary = (f"{speed:,.0f}" for speed in speeds(self.result, found))
        shown = [f"{name} {score:.3f}" for name, score in found["scores"].items() if score is not None]
        shown.append(
            format_bytes(found["peak_bytes"]) + ("" if self.result["same_vocabulary"] else ", ANOTHER VOCABULARY")
        )
        return f"{wall} words/s (training {training}, vocabulary {vocabulary}), {', '.join(shown)}"


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM):  # a shell has SIGINT ignored in the background
        signal.signal(each, signal.default_int_handler)
    sys.exit(main())
