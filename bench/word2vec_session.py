"""The runs of one bench/word2vec.py: in which order, which are left, and the file that holds what they have found."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from store import read, write
from word2vec_child import EVALUATE, GENSIM, OURS, cores
from word2vec_data import WARM_WORDS, DataError, EvaluationSet, Settings, prepare
from word2vec_figure import label
from word2vec_process import OutOfTimeError, ProcessError, run_job
from word2vec_statistics import System, speeds

from speedtransfer.errors import format_bytes

_SCRIPT = "word2vec_child.py"
_WHICH = ("dims", "optimizers", "seeds")  # runs: one may ask for more or fewer another time


class Run(NamedTuple):
    """One training."""

    system: System
    seed: int


def _run_of(found: dict[str, Any]) -> Run:
    return Run(System(found["system"], found["optimizer"], found["dim"]), found["seed"])


class Session:
    """The runs of one command, and the file that always holds what they have found so far."""

    def __init__(
        self, folder: Path, settings: Settings, sets: list[EvaluationSet], partial: Path, limit_s: float | None
    ) -> None:
        self.settings, self.partial = settings, partial
        self._folder, self._sets = folder, sets
        self._end = time.monotonic() + (float("inf") if limit_s is None else limit_s)
        self.result: dict[str, Any] = {}

    def prepare(self, corpus: Path, about: dict[str, Any], resume: bool) -> None:
        """Write the text for all, take up what is there or begin anew, and have each system train for a moment.

        Raises
        ------
        DataError
            The corpus cannot be read; what is there has been measured otherwise.
        ProcessError
            A system cannot train.
        """
        facts = prepare(corpus, self._folder / "corpus.txt", self.settings.words)
        sets = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, _, path in self._sets}
        settings = json.loads(json.dumps({**asdict(self.settings), "sets": sets}))
        fresh = {
            **about,
            "quick": self.settings.words is not None,
            "corpus": facts,
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
        prepare(self._folder / "corpus.txt", self._folder / "warm.txt", WARM_WORDS)
        print(f"{facts['words']:,} words; compiling and trying out every system", flush=True)
        for system in dict.fromkeys(run.system for run in self._left()):
            self._train(Run(system, seed=1), warm=True)

    def _take_up(self, fresh: dict[str, Any]) -> dict[str, Any]:
        try:
            old = read(self.partial)
            changed = [key for key in ("digest", "corpus", "workers") if old[key] != fresh[key]]
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
        return {**old, "settings": fresh["settings"], "runs": runs, "failures": []}

    def _runs(self) -> Iterator[Run]:
        for place, dim in enumerate(self.settings.dims):
            optimizers = self.settings.optimizers[: 1 if place else None]
            systems = [System(GENSIM, "", dim), *(System(OURS, name, dim) for name in optimizers)]
            yield from (Run(system, seed) for seed in range(1, self.settings.seeds + 1) for system in systems)

    def _left(self) -> list[Run]:
        done = {_run_of(run) for run in self.result.get("runs", [])}
        return [run for run in self._runs() if run not in done]

    def run_all(self) -> str:
        """Do what is left; return what stopped it, if anything."""
        left, number_of_all, spent = self._left(), len([*self._runs()]), 0.0
        for number, run in enumerate(left):
            start, title = time.monotonic(), f"{label(run.system)}, seed {run.seed}"
            try:
                found = self._train(run)
                said = self._told(found)
            except ProcessError as error:
                self.result["failures"].append({"title": label(run.system), "seed": run.seed, "error": str(error)})
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
            print(f"[{place}/{number_of_all}] {title}: {said}; about {minutes:.0f} min to go", flush=True)
        return ""

    def _train(self, run: Run, warm: bool = False) -> dict[str, Any]:
        """Train and evaluate, and put it among the runs; only train a little where it is to get warm."""
        system, settings = run.system, self.settings
        job = {
            **{name: getattr(settings, name) for name in ("window", "negative", "min_count", "sample", "restrict")},
            "task": system.name,
            "optimizer": system.optimizer,
            "dim": system.dim,
            "seed": run.seed,
            "epochs": 1 if warm else settings.epochs,
            "corpus": str(self._folder / ("warm.txt" if warm else "corpus.txt")),
            "folder": None if warm else str(self._folder),
            "sets": [(name, kind, str(path.resolve())) for name, kind, path in self._sets],
        }
        try:
            found = run_job(_SCRIPT, job, self._end)
        except ProcessError as error:
            raise ProcessError(f"{label(system)} cannot train: {error}" if warm else str(error)) from error
        if warm:
            return found
        answers = run_job(_SCRIPT, {**job, "task": EVALUATE}, self._end)
        found = {
            "system": system.name,
            "optimizer": system.optimizer,
            "dim": system.dim,
            "seed": run.seed,
            **found,
            "scores": answers["scores"],
            "asked": answers["asked"],
        }
        self.result["runs"].append(found)
        self.result["same_vocabulary"] = len({other["vocabulary"]["sha256"] for other in self.result["runs"]}) == 1
        return found

    def _told(self, found: dict[str, Any]) -> str:
        wall, training, vocabulary = (f"{speed:,.0f}" for speed in speeds(self.result, found))
        shown = [f"{name} {score:.3f}" for name, score in found["scores"].items() if score is not None]
        memory = format_bytes(found["peak_bytes"])
        same = "" if self.result["same_vocabulary"] else ", ANOTHER VOCABULARY"
        return f"{wall} words/s (training {training}, vocabulary {vocabulary}), {', '.join([*shown, memory])}{same}"
