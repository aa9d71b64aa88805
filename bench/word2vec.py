"""Trains word2vec beside gensim, on the same texts with the same settings, and compares speed, quality and memory.

``python bench/word2vec.py --data FOLDER``, where FOLDER has ``corpora/schools_wiki_2007.text8.xz`` (or ``.txt``) and
``wordsim/`` with the sets that word2vec_data.py names; these data are not part of this repository, and --corpus and --sets
take others. The second corpus, the World Factbook, comes with the package. Some of the sets are those that settings of the
package were chosen on, the others are reserved: they are reported apart. Each run is a process of its own, gensim's and ours
in turn, seed by seed, so that whatever else the machine does hits all alike. The result goes to
``bench/results/<device>/word2vec.json``, with a picture beside it; bench/readme.py puts both into docs/word2vec.md. Needs
gensim and psutil (extra ``dev``).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from experiment import (
    OutOfTimeError,
    RunError,
    exit_code,
    make_parser,
    positive_int,
    require,
    resume,
    stop_on_signals,
    write_result,
)
from process import run_job
from store import FULL, PARTIAL, QUICK, ROOT, WORD2VEC, header, path_of, write
from word2vec_bootstrap import with_differences
from word2vec_child import EVALUATE, GENSIM, OURS, cores
from word2vec_data import (
    ANALOGIES,
    MODELS,
    WARM_WORDS,
    Corpus,
    CorpusSettings,
    EvaluationSet,
    Settings,
    find_corpora,
    find_sets,
    prepare,
)
from word2vec_report import draw, label, markdown
from word2vec_statistics import System, corpus_of, key_of, speeds, system_of

from speedtransfer.errors import format_bytes
from speedtransfer.word2vec.optimizers import find_optimizer

_SCRIPT = "word2vec_child.py"
_WHICH = ("dims", "optimizers", "models", "seeds")  # runs: one may ask for more or fewer another time


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    args = _parser().parse_args(arguments)
    if args.data is None and (args.corpus is None or args.sets is None):
        _parser().error("the following arguments are required: --data, or --corpus and --sets")
    return exit_code(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    settings = Settings(args.dims, args.optimizers, args.models, args.seeds, words=args.words)
    require("gensim", "psutil")
    for optimizer in settings.optimizers:
        find_optimizer(optimizer)
    corpora, sets = find_corpora(args.data, args.corpus, args.epochs), find_sets(args.data, args.sets)
    about = header(ROOT, WORD2VEC)  # before: the sources as they are when it starts
    about["environment"]["versions"]["gensim"] = importlib.metadata.version("gensim")
    out = args.out or path_of(ROOT, about["environment"]["device"], WORD2VEC, QUICK if args.words else FULL)
    partial = out.with_name(f"{out.stem}{PARTIAL}.json")
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        session = Session(Path(folder), settings, sets, partial, args.limit)
        session.prepare(corpora, about, args.resume)
        stopped = session.run_all()
    result = with_differences(session.result, sets)
    if stopped or result["failures"]:
        print("", markdown(result, ""), sep="\n")
        raise RunError(f"{stopped or 'a run failed'}; what was measured is in {partial}: --resume goes on")
    write_result({**result, "complete": True}, out, draw, [markdown(result, "")])
    partial.unlink()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("word2vec", __doc__)
    parser.add_argument("--data", type=Path, help="the folder of corpora/ and wordsim/")
    files = {"type": Path, "nargs": "+", "action": "extend", "metavar": "FILE"}
    parser.add_argument("--corpus", help="other texts", **files)
    parser.add_argument("--sets", help="other word pairs with scores, or analogies", **files)
    parser.add_argument(
        "--dims", type=_list_of(positive_int), default=Settings.dims, metavar="N,N", help="by default 100,300"
    )
    parser.add_argument(
        "--models",
        type=_list_of(_model),
        default=MODELS,
        metavar="A,B",
        help=f"by default {','.join(MODELS)}; only the first of them in further dimensions",
    )
    parser.add_argument(
        "--optimizers",
        type=_list_of(str.lower),
        default=Settings.optimizers,
        metavar="A,B",
        help="ours; only the first of them in further dimensions",
    )
    parser.add_argument("--seeds", type=positive_int, default=Settings.seeds, help=f"by default {Settings.seeds}")
    usual = f"by default {CorpusSettings().epochs}, and more on the corpus of the package"
    parser.add_argument("--epochs", type=positive_int, metavar="N", help=usual)
    parser.add_argument(
        "--words", type=positive_int, metavar="N", help="only the first N words of each text, for a quick look"
    )
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after that; --resume goes on another time")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has left")
    return parser


def _model(text: str) -> str:
    if text.lower() not in MODELS:
        raise ValueError
    return text.lower()


def _list_of(kind: Any) -> Any:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))

    # For argparse, in the line that refuses another.
    parse.__name__ = f"list of {' and '.join(MODELS)}" if kind is _model else "list"
    return parse


# --- the runs -------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One training."""

    system: System
    seed: int


def _run_of(found: dict[str, Any]) -> Run:
    return Run(system_of(found), found["seed"])


class Session:
    """The runs of one command, and the file that always holds what they have found so far."""

    def __init__(
        self, folder: Path, settings: Settings, sets: list[EvaluationSet], partial: Path, limit_s: float | None
    ) -> None:
        self.settings, self.partial = settings, partial
        self._folder, self._sets = folder, sets
        self._end = time.monotonic() + (float("inf") if limit_s is None else limit_s)
        self._texts: dict[str, Path] = {}  # of each corpus
        self.result: dict[str, Any] = {}

    def prepare(self, corpora: list[Corpus], about: dict[str, Any], goes_on: bool) -> None:
        """Write the texts, resume or begin, and let each system train for a moment to warm up.

        Raises
        ------
        DataError
            A corpus cannot be read; what is there has been measured otherwise.
        RunError
            A system cannot train.
        """
        facts = []
        for number, (path, own) in enumerate(corpora):
            self._texts[path.name] = self._folder / f"corpus{number}.txt"
            facts.append({**prepare(path, self._texts[path.name], self.settings.words), **own._asdict()})
        sets = {one.name: hashlib.sha256(one.path.read_bytes()).hexdigest() for one in self._sets}
        settings = json.loads(json.dumps({**asdict(self.settings), "sets": sets}))
        fresh = {
            **about,
            "quick": self.settings.words is not None,
            "corpora": facts,
            "groups": {one.name: one.group for one in self._sets},
            "settings": settings,
            "workers": cores(),
            "same_vocabulary": True,
            "runs": [],
            "failures": [],
        }
        self.result = self._take_up(fresh) if goes_on else fresh
        if not self._left():
            return
        if self.partial.exists() and not goes_on:
            print(f"{self.partial} is replaced as soon as there is a result; --resume would have gone on with it")
        first = facts[0]["name"]
        prepare(self._texts[first], self._folder / "warm.txt", WARM_WORDS)
        words = ", ".join(f"{about['name']}: {about['words']:,} words" for about in facts)
        print(f"{words}; compiling and trying out every system", flush=True)
        for system in dict.fromkeys(run.system._replace(corpus=first) for run in self._left()):
            self._train(Run(system, seed=1), warm=True)

    def _take_up(self, fresh: dict[str, Any]) -> dict[str, Any]:
        def settings_of(made: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in made["settings"].items() if key not in _WHICH}

        def find_changes(old: dict[str, Any]) -> list[str]:
            before = {about["name"]: about for about in old["corpora"]}
            others = any(before.get(about["name"], about) != about for about in fresh["corpora"])
            changed = {"workers": old["workers"] != fresh["workers"], "corpora or settings of them": others}
            changed["settings"] = settings_of(old) != settings_of(fresh)
            return [what for what, differs in changed.items() if differs]

        old = resume(self.partial, fresh, find_changes)
        wanted = {*self._runs()}
        runs = [run for run in old["runs"] if _run_of(run) in wanted]
        now = {key: fresh[key] for key in ("settings", "corpora", "groups", "quick")}
        return {**old, **now, "runs": runs, "failures": []}

    def _runs(self) -> Iterator[Run]:
        """Yield all runs, seed by seed, so that what is stopped leaves whole seeds."""
        return (
            Run(system, seed)
            for seed in range(1, self.settings.seeds + 1)
            for corpus in self._texts
            for system in self._systems(corpus)
        )

    def _systems(self, corpus: str) -> Iterator[System]:
        settings = self.settings
        for place, dim in enumerate(settings.dims):
            first = 1 if place else None
            for model in settings.models[:first]:
                yield System(corpus, model, GENSIM, "", dim)
                yield from (System(corpus, model, OURS, name, dim) for name in settings.optimizers[:first])

    def _left(self) -> list[Run]:
        done = {_run_of(run) for run in self.result.get("runs", [])}
        return [run for run in self._runs() if run not in done]

    def run_all(self) -> str:
        """Do the remaining runs; return what stopped them, if anything."""
        left, number_of_all, spent = self._left(), len([*self._runs()]), 0.0
        for number, run in enumerate(left):
            start, title = time.monotonic(), self._title(run)
            try:
                found = self._train(run)
                shown = self._describe(found)
            except RunError as error:
                self.result["failures"].append({"title": title, "seed": run.seed, "error": str(error)})
                shown = f"FAILED: {error}"
            except OutOfTimeError as error:
                return str(error)
            except KeyboardInterrupt:
                return "stopped"
            finally:
                write(self.partial, self.result)
            spent += time.monotonic() - start
            minutes = spent / (number + 1) * (len(left) - number - 1) / 60
            place = number_of_all - len(left) + number + 1
            done = f"[{place}/{number_of_all}] {title}, seed {run.seed}"
            print(f"{done}: {shown}; about {minutes:.0f} min to go", flush=True)
        return ""

    def _title(self, run: Run) -> str:
        where = f"{run.system.corpus}, " if len(self._texts) > 1 else ""
        return f"{where}{label(run.system)}"

    def _train(self, run: Run, warm: bool = False) -> dict[str, Any]:
        """Train, evaluate and record a run; `warm`: train a little, to compile and warm up."""
        system, settings = run.system, self.settings
        own = corpus_of(self.result, system.corpus)
        job = {
            **{name: getattr(settings, name) for name in ("window", "negative", "restrict")},
            **{name: own[name] for name in ("epochs", "min_count", "sample")},
            **key_of(system),
            "task": system.name,
            "seed": run.seed,
            "corpus": str(self._texts[system.corpus]),
            "folder": str(self._folder),
            "sets": [
                (one.name, one.kind, str(one.path.resolve()))
                for one in self._sets
                if one.kind != ANALOGIES or own["analogies"]
            ],
        }
        if warm:
            job |= {"epochs": 1, "corpus": str(self._folder / "warm.txt"), "folder": None}
        try:
            found = run_job(_SCRIPT, job, self._end)
        except RunError as error:
            raise RunError(f"{label(system)} cannot train: {error}" if warm else str(error)) from error
        if warm:
            return found
        answers = run_job(_SCRIPT, {**job, "task": EVALUATE}, self._end)
        found = {**key_of(system), "seed": run.seed, **found, **answers, "peak_bytes": found["peak_bytes"]}
        self.result["runs"].append(found)
        vocabularies = {(other["corpus"], other["vocabulary"]["sha256"]) for other in self.result["runs"]}
        self.result["same_vocabulary"] = len(vocabularies) == len({name for name, _ in vocabularies})
        return found

    def _describe(self, found: dict[str, Any]) -> str:
        wall, training, vocabulary = (f"{speed:,.0f}" for speed in speeds(self.result, found))
        shown = [f"{name} {score:.3f}" for name, score in found["scores"].items() if score is not None]
        memory = format_bytes(found["peak_bytes"])
        same = "" if self.result["same_vocabulary"] else ", ANOTHER VOCABULARY"
        return f"{wall} words/s (training {training}, vocabulary {vocabulary}), {', '.join([*shown, memory])}{same}"


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
