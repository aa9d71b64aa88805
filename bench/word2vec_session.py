"""The runs of one bench/word2vec.py: in which order, which are left, and the file that holds what they have found."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from needs import DataError
from store import read, write
from word2vec_child import EVALUATE, GENSIM, OURS, cores
from word2vec_data import ANALOGIES, WARM_WORDS, Corpus, Settings, prepare
from word2vec_process import OutOfTimeError, ProcessError, run_job
from word2vec_sets import EvaluationSet
from word2vec_statistics import System, corpus_of, key_of, speeds, system_of
from word2vec_text import label

from speedtransfer.errors import format_bytes

_SCRIPT = "word2vec_child.py"
_WHICH = ("dims", "optimizers", "models", "seeds")  # runs: one may ask for more or fewer another time


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

    def prepare(self, corpora: list[Corpus], about: dict[str, Any], resume: bool) -> None:
        """Write the texts for all, take up what is there or begin anew, and have each system train for a moment.

        Raises
        ------
        DataError
            A corpus cannot be read; what is there has been measured otherwise.
        ProcessError
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
        self.result = self._take_up(fresh) if resume else fresh
        if not self._left():
            return
        if self.partial.exists() and not resume:
            print(
                f"{self.partial} is replaced as soon as there is a result; --resume would have gone on with it",
                flush=True,
            )
        first = facts[0]["name"]
        prepare(self._texts[first], self._folder / "warm.txt", WARM_WORDS)
        words = ", ".join(f"{about['name']}: {about['words']:,} words" for about in facts)
        print(f"{words}; compiling and trying out every system", flush=True)
        for system in dict.fromkeys(run.system._replace(corpus=first) for run in self._left()):
            self._train(Run(system, seed=1), warm=True)

    def _take_up(self, fresh: dict[str, Any]) -> dict[str, Any]:
        try:
            old = read(self.partial)
            changed = [key for key in ("digest", "workers") if old[key] != fresh[key]]
            before = {about["name"]: about for about in old["corpora"]}
            if any(before.get(about["name"], about) != about for about in fresh["corpora"]):
                changed.append("corpora or settings of them")
            same = [
                {key: value for key, value in made["settings"].items() if key not in _WHICH} for made in (old, fresh)
            ]
            changed += ["settings"] if same[0] != same[1] else []
            changed += ["versions"] if old["environment"]["versions"] != fresh["environment"]["versions"] else []
        except FileNotFoundError:
            raise DataError(f"there is no {str(self.partial)!r} to go on with; drop --resume") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"cannot read {str(self.partial)!r} ({error!r}); drop --resume to begin anew") from error
        if changed:
            what = " and ".join("sources" if key == "digest" else key for key in changed)
            raise DataError(f"{str(self.partial)!r} was measured with other {what}; drop --resume to begin anew")
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
        """Do what is left; return what stopped it, if anything."""
        left, number_of_all, spent = self._left(), len([*self._runs()]), 0.0
        for number, run in enumerate(left):
            start, title = time.monotonic(), self._title(run)
            try:
                found = self._train(run)
                said = self._told(found)
            except ProcessError as error:
                self.result["failures"].append({"title": title, "seed": run.seed, "error": str(error)})
                said = f"FAILED: {error}"
            except OutOfTimeError as error:
                return str(error)
            except KeyboardInterrupt:
                return "stopped"
            finally:
                write(self.partial, self.result)
            spent += time.monotonic() - start
            minutes = spent / (number + 1) * (len(left) - number - 1) / 60
            place = number_of_all - len(left) + number + 1
            print(
                f"[{place}/{number_of_all}] {title}, seed {run.seed}: {said}; about {minutes:.0f} min to go", flush=True
            )
        return ""

    def _title(self, run: Run) -> str:
        where = f"{run.system.corpus}, " if len(self._texts) > 1 else ""
        return f"{where}{label(run.system)}"

    def _train(self, run: Run, warm: bool = False) -> dict[str, Any]:
        """Train and evaluate, and put it among the runs; only train a little where it is to get warm."""
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
        except ProcessError as error:
            raise ProcessError(f"{label(system)} cannot train: {error}" if warm else str(error)) from error
        if warm:
            return found
        answers = run_job(_SCRIPT, {**job, "task": EVALUATE}, self._end)
        found = {**key_of(system), "seed": run.seed, **found, **answers, "peak_bytes": found["peak_bytes"]}
        self.result["runs"].append(found)
        vocabularies = {(other["corpus"], other["vocabulary"]["sha256"]) for other in self.result["runs"]}
        self.result["same_vocabulary"] = len(vocabularies) == len({name for name, _ in vocabularies})
        return found

    def _told(self, found: dict[str, Any]) -> str:
        wall, training, vocabulary = (f"{speed:,.0f}" for speed in speeds(self.result, found))
        shown = [f"{name} {score:.3f}" for name, score in found["scores"].items() if score is not None]
        memory = format_bytes(found["peak_bytes"])
        same = "" if self.result["same_vocabulary"] else ", ANOTHER VOCABULARY"
        return f"{wall} words/s (training {training}, vocabulary {vocabulary}), {', '.join([*shown, memory])}{same}"
