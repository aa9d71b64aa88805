"""Trains word2vec beside gensim, on the same texts with the same settings, and compares speed, quality and memory.

``python bench/word2vec.py --data FOLDER``, where FOLDER has ``corpora/schools_wiki_2007.text8.xz`` (or ``.txt``) and
``wordsim/`` with the sets that word2vec_data.py names; these data are not part of this repository, and --corpus and --sets
take others. The second corpus, the World Factbook, comes with the package. Some of the sets are those that settings of the
package were chosen on, the others are reserved: they are reported apart. Each run is a process of its own, gensim's and ours
in turn, seed by seed, so that whatever else the machine does hits all alike. The result goes to
``bench/results/<device>/word2vec.json``, with a picture beside it; bench/readme.py puts both into docs/results.md. Needs
gensim (extra ``dev``).
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiment import (
    DataError,
    OutOfTimeError,
    RunError,
    exit_code,
    make_parser,
    positive_int,
    require,
    run_job,
    stop_on_signals,
    write_result,
)
from store import FULL, PARTIAL, QUICK, ROOT, WORD2VEC, header, path_of, read, write
from word2vec_child import EVALUATE, GENSIM, OURS, cores
from word2vec_data import (
    ANALOGIES,
    OWN_SETTINGS,
    WARM_WORDS,
    CorpusSettings,
    EvaluationSet,
    Settings,
    find_corpora,
    find_sets,
    prepare,
)
from word2vec_report import draw, label, markdown
from word2vec_statistics import System, corpus_of, speeds, system_of, with_differences

from speedtransfer.errors import format_bytes

SETTINGS = Settings()
_SCRIPT = "word2vec_child.py"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = make_parser("word2vec", __doc__)
    parser.add_argument("--data", type=Path, help="the folder of corpora/ and wordsim/")
    files = {"type": Path, "nargs": "+", "action": "extend", "metavar": "FILE"}
    parser.add_argument("--corpus", help="other texts", **files)
    parser.add_argument("--sets", help="other word pairs with scores, or analogies", **files)
    text = "systems with that in their name, as printed; gensim's beside them is another"
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--seeds", type=positive_int, default=SETTINGS.seeds, help=f"by default {SETTINGS.seeds}")
    parser.add_argument("--words", type=positive_int, metavar="N", help="only the first N words of each text")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="stop after that; --resume goes on another time")
    parser.add_argument("--resume", action="store_true", help="go on with what an earlier run has left")
    args = parser.parse_args(arguments)
    if args.data is None and (args.corpus is None or args.sets is None):
        parser.error("the following arguments are required: --data, or --corpus and --sets")
    return exit_code(lambda: _measure(args))


def _measure(args: argparse.Namespace) -> int:
    require("gensim")
    settings = replace(SETTINGS, seeds=args.seeds, words=args.words)
    corpora, sets = find_corpora(args.data, args.corpus), find_sets(args.data, args.sets)
    about = header(ROOT, WORD2VEC)  # before: the sources as they are when it starts
    about["environment"]["versions"]["gensim"] = importlib.metadata.version("gensim")
    out = args.out or path_of(ROOT, about["environment"]["device"], WORD2VEC, QUICK if args.words else FULL)
    partial = out.with_name(f"{out.stem}{PARTIAL}.json")
    with tempfile.TemporaryDirectory(prefix="speedtransfer-") as folder:
        session = Session(Path(folder), settings, sets, partial, args.limit, args.only)
        session.prepare(corpora, about, args.resume)
        stopped = session.run_all()
    result = with_differences(session.result, sets)
    if stopped or result["failures"]:
        print("", markdown(result, ""), sep="\n")
        raise RunError(f"{stopped or 'a run failed'}; what was measured is in {partial}: --resume goes on")
    write_result({**result, "complete": True}, out, draw, [markdown(result, "")])
    partial.unlink()
    return 0


class Session:
    """The runs of one command, and the file that always holds what they have found so far."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        sets: list[EvaluationSet],
        partial: Path,
        limit_s: float | None = None,
        only: list[str] | None = None,
    ) -> None:
        self.settings, self.partial = settings, partial
        self._folder, self._sets, self._only = folder, sets, only
        self._end = time.monotonic() + (float("inf") if limit_s is None else limit_s)
        self._texts: dict[str, Path] = {}  # of each corpus
        self.result: dict[str, Any] = {}

    def prepare(self, corpora: list[Path], about: dict[str, Any], goes_on: bool) -> None:
        """Write the texts, resume or begin, and let each system train for a moment to warm up."""
        facts = []
        for number, path in enumerate(corpora):
            self._texts[path.name] = self._folder / f"corpus{number}.txt"
            own = OWN_SETTINGS.get(path.name, CorpusSettings())
            facts.append({**prepare(path, self._texts[path.name], self.settings.words), **own._asdict()})
        sets = {one.name: hashlib.sha256(one.path.read_bytes()).hexdigest() for one in self._sets}
        fresh = {
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
        self.result = self._take_up(fresh) if goes_on else fresh
        left = self._left()
        if left and self.partial.exists() and not goes_on:
            print(f"{self.partial} is replaced as soon as there is a result; --resume would have gone on with it")
        words = ", ".join(f"{about['name']}: {about['words']:,} words" for about in facts)
        print(f"{words}; compiling and trying out every system", flush=True)
        prepare(self._texts[facts[0]["name"]], self._folder / "warm.txt", WARM_WORDS)
        for system in dict.fromkeys(system._replace(corpus=facts[0]["name"]) for system, _ in left):
            self._train(system, 1, warm=True)

    def _take_up(self, fresh: dict[str, Any]) -> dict[str, Any]:
        try:
            old = read(self.partial)
            before, now = ({**one["environment"], **one, **one["settings"], "seeds": 0} for one in (old, fresh))
            same = ("commit", "dirty", "versions", "corpora", "workers", *fresh["settings"])
            changed = [name for name in same if before[name] != now[name]]
            runs = old["runs"]
        except FileNotFoundError:
            raise DataError(f"there is no {str(self.partial)!r} to go on with; drop --resume") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read {str(self.partial)!r} ({error!r}); drop --resume to start over") from error
        if changed:
            what = " and ".join(changed)
            raise DataError(f"{str(self.partial)!r} was measured with other {what}; drop --resume to start over")
        wanted = {*self._runs()}
        return {**fresh, "runs": [run for run in runs if (system_of(run), run["seed"]) in wanted]}

    def _runs(self) -> Iterator[tuple[System, int]]:
        """Yield all runs, seed by seed, so that what is stopped leaves whole seeds."""
        for seed in range(1, self.settings.seeds + 1):
            for system in (system for corpus in self._texts for system in self._systems(corpus)):
                if not self._only or any(text in label(system) for text in self._only):
                    yield system, seed

    def _systems(self, corpus: str) -> Iterator[System]:
        for place, dim in enumerate(self.settings.dims):
            first = 1 if place else None
            for model in self.settings.models[:first]:
                yield System(corpus, model, GENSIM, "", dim)
                yield from (System(corpus, model, OURS, name, dim) for name in self.settings.optimizers[:first])

    def _left(self) -> list[tuple[System, int]]:
        done = {(system_of(run), run["seed"]) for run in self.result.get("runs", [])}
        return [run for run in self._runs() if run not in done]

    def run_all(self) -> str:
        """Do the remaining runs; return what stopped them, if anything."""
        left, number_of_all, spent = self._left(), len([*self._runs()]), 0.0
        for number, (system, seed) in enumerate(left):
            start, title = time.monotonic(), f"{system.corpus}, {label(system)}"
            try:
                shown = self._describe(self._train(system, seed))
            except RunError as error:
                self.result["failures"].append({"title": title, "seed": seed, "error": str(error)})
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
            print(f"[{place}/{number_of_all}] {title}, seed {seed}: {shown}; about {minutes:.0f} min to go", flush=True)
        return ""

    def _train(self, system: System, seed: int, warm: bool = False) -> dict[str, Any]:
        """Train, evaluate and record a run; `warm`: train a little, to compile and warm up."""
        own = corpus_of(self.result, system.corpus)
        sets = [one for one in self._sets if one.kind != ANALOGIES or own["analogies"]]
        job = {
            **{name: getattr(self.settings, name) for name in ("window", "negative", "restrict")},
            **{name: own[name] for name in ("epochs", "min_count", "sample")},
            **system._asdict(),
            "task": system.system,
            "seed": seed,
            "corpus": str(self._texts[system.corpus]),
            "folder": str(self._folder),
            "sets": [(one.name, one.kind, str(one.path.resolve())) for one in sets],
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
    stop_on_signals()
    sys.exit(main())
