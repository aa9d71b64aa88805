"""Evaluation while training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.word2vec.evaluation import Analogies, Similarity, evaluate, load_set
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.settings import is_finite
from speedtransfer.word2vec.trainer import Trainer

WORDS = 300_000  # the most frequent, as `evaluate` has it
Note = Callable[[str, dict[str, float], int], None]  # (name of the set, its figures, step)


class Evaluations:
    """Evaluates the vectors of a trainer on sets, every so many epochs and at the end. Training does not notice.

    Parameters
    ----------
    paths : sequence of path-like
        Similarity or analogy sets, read at once.
    every : float
        Epochs from one evaluation to the next.
    progress : TrainingProgress
        Gets a line for each evaluation.
    note : callable, optional
        Gets the figures, too.

    Raises
    ------
    StorageError
        A set is missing or malformed.
    InvalidTypeError, InvalidValueError
        `every` is no number above 0, or there is nothing to evaluate with.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], every: float) -> None:
        if not isinstance(every, int | float) or isinstance(every, bool):
            raise InvalidTypeError(f"evaluate_every is {every!r} but must be a number of epochs; pass for instance 0.5")
        if not (is_finite(every) and every > 0):
            raise InvalidValueError(f"evaluate_every is {every} but must be above 0, in epochs; pass for instance 0.5")
        self._sets = [(os.fspath(path), load_set(path)) for path in paths]
        self._every, self._last_step = float(every), -1
        self._progress: TrainingProgress | None = None
        self._note: Note | None = None

    def begin(self, trainer: Trainer, progress: TrainingProgress, note: Note | None = None) -> None:
        """Begin to report to `progress` and `note`; raise `InvalidValueError` where a set knows too few of the words."""
        self._progress, self._note = progress, note
        vectors = trainer.vectors(WORDS)
        for _, words in self._sets:
            evaluate(vectors, words)

    def after_step(self, trainer: Trainer) -> None:  # noqa: D102 (Watcher)
        steps = self._every * trainer.steps_an_epoch
        if int(trainer.step / steps) > int((trainer.step - 1) / steps):
            self._evaluate(trainer)

    def finish(self, trainer: Trainer) -> None:  # noqa: D102 (Watcher)
        if not trainer.interrupted and self._last_step != trainer.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        assert self._progress is not None
        self._progress.busy("evaluating")
        self._last_step = trainer.step
        vectors = trainer.vectors(WORDS)  # anew: it keeps lengths
        epochs = round(trainer.step / trainer.steps_an_epoch, 3)
        found, told = [], [f"epoch {epochs:g}"]
        for path, words in self._sets:
            try:
                result = evaluate(vectors, words)
            except InvalidValueError as error:  # such as equal cosines: no reason to lose a run
                told.append(str(error))
                continue
            figures = figures_of(result)
            told.append(f"{result.name}: " + " ".join(f"{name} {value:.3f}" for name, value in figures.items()))
            if self._note is not None:
                self._note(result.name, figures, trainer.step)
            found.append({"set": path, "epochs": epochs, "step": trainer.step, **figures, **_counts(result)})
        self._progress.say("  ".join(told))
        trainer.evaluation = found


def figures_of(result: Similarity | Analogies) -> dict[str, float]:
    """Return the figures that tell how good vectors are, by name."""
    if isinstance(result, Similarity):
        return {"spearman": result.spearman, "pearson": result.pearson}
    parts = {"accuracy": result.accuracy, "semantic": result.semantic.accuracy, "syntactic": result.syntactic.accuracy}
    return {name: value for name, value in parts.items() if value is not None}


def _counts(result: Similarity | Analogies) -> dict[str, Any]:
    used = result.num_pairs if isinstance(result, Similarity) else result.total.num_questions
    return {"used": used, "unknown": result.num_unknown}
