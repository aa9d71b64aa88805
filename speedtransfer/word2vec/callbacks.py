"""Callbacks of a training run: evaluation, and curves for TensorBoard. (Checkpoints are in `checkpoints`.)"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidValueError, check_number
from speedtransfer.lazy import import_extra
from speedtransfer.untrusted import storage_error
from speedtransfer.word2vec.evaluation import Analogies, Similarity, evaluate, load_set
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.settings import check_writable
from speedtransfer.word2vec.trainer import Callback, Trainer

EVALUATED_WORDS = 300_000  # the most frequent ones, the default of `evaluate`
LOG_EVERY_S = 2.0  # five figures take a third of a millisecond
PROJECTOR_WORDS = 5000


class Evaluations(Callback):
    """Evaluate the vectors of a trainer on similarity or analogy sets, `every` so many epochs and at the end.

    The sets are read at once; `board` draws the figures.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], every: float, board: TensorBoard | None = None) -> None:
        self._sets = [(os.fspath(path), load_set(path)) for path in paths]
        self._every = check_number(every, "evaluate_every", above=True)
        self._last_step, self._board = -1, board

    def begin(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Raise `InvalidValueError` where a set has too few words of the vocabulary."""
        self._progress = progress
        vectors = trainer.vectors(EVALUATED_WORDS)
        for _, words in self._sets:
            evaluate(vectors, words)

    def after_step(self, trainer: Trainer) -> None:  # noqa: D102
        steps = self._every * trainer.steps_an_epoch
        if int(trainer.step / steps) > int((trainer.step - 1) / steps):
            self._evaluate(trainer)

    def finish(self, trainer: Trainer) -> None:  # noqa: D102
        if not trainer.interrupted and self._last_step != trainer.step:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        self._last_step = trainer.step
        vectors = trainer.vectors(EVALUATED_WORDS)  # a new object each time, as it caches lengths
        epochs = round(trainer.step / trainer.steps_an_epoch, 3)
        found, line = [], [f"epoch {epochs:g}"]
        for path, words in self._sets:
            try:
                result = evaluate(vectors, words)
            except InvalidValueError as error:  # such as equal cosines: no reason to lose a run
                line.append(str(error))
                continue
            figures = figures_of(result)
            line.append(f"{result.name}: " + " ".join(f"{name} {value:.3f}" for name, value in figures.items()))
            if self._board is not None:
                self._board.draw(f"evaluation/{result.name}", figures, trainer.step)
            used = result.num_pairs if isinstance(result, Similarity) else result.total.num_questions
            counts = {"used": used, "unknown": result.num_unknown}
            found.append({"set": path, "epochs": epochs, "step": trainer.step, **figures, **counts})
        self._progress.log("  ".join(line))
        trainer.evaluation = found


def figures_of(result: Similarity | Analogies) -> dict[str, float]:
    """Return the figures of a set by name, without intervals and counts."""
    if isinstance(result, Similarity):
        return {"spearman": result.spearman, "pearson": result.pearson}
    parts = {"accuracy": result.accuracy, "semantic": result.semantic.accuracy, "syntactic": result.syntactic.accuracy}
    return {name: value for name, value in parts.items() if value is not None}


class TensorBoard(Callback):
    """Write curves of a run to a folder that ``tensorboard --logdir`` shows; nothing is written before `begin`.

    Runs in folders beside each other are shown together.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        import_extra("tensorboard", "curves", '"speedtransfer[tensorboard]"')
        self._writer: Any = None
        self._last_log, self._words_before, self._seconds_before = float("-inf"), 0.0, 0.0
        check_writable(self.path, "TensorBoard's files")

    def begin(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Open the files; what a run that is resumed had logged beyond `trainer.step` is hidden.

        Where they can no longer be written, as on a full disk, training goes on without them.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._progress = progress
        with storage_error(f"cannot write TensorBoard's files to {str(self.path)!r}", "choose another folder"):
            self._writer = SummaryWriter(str(self.path), purge_step=trainer.step + 1 if trainer.step else None)
        self._words_before, self._seconds_before = trainer.words_done, trainer.elapsed_s

    def close(self) -> None:
        """Close the files."""
        self._write("close")
        self._writer = None

    def _write(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the writer, unless an earlier call has failed."""
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*arguments, **options)
        except OSError as error:
            self._writer = None
            self._progress.log(
                f"TensorBoard's files in {str(self.path)!r} end here ({error.strerror or error}); training goes on"
            )

    def after_step(self, trainer: Trainer) -> None:  # noqa: D102
        now = time.monotonic()
        if now - self._last_log < LOG_EVERY_S and trainer.step < trainer.num_steps:
            return
        self._last_log = now
        words, seconds = trainer.words_done - self._words_before, trainer.elapsed_s - self._seconds_before
        self._words_before, self._seconds_before = trainer.words_done, trainer.elapsed_s
        bytes_in, bytes_out = trainer.moved_bytes
        figures = {"loss": trainer.loss, "lr": trainer.lr, "words_per_s": words / max(seconds, 1e-9)}
        self.draw("train", figures, trainer.step)
        self.draw("rows", {"bytes_in": bytes_in, "bytes_out": bytes_out}, trainer.step)

    def draw(self, group: str, figures: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each figure."""
        for name, value in figures.items():
            self._write("add_scalar", f"{group}/{name}", value, step)

    def finish(self, trainer: Trainer) -> None:
        """Give the most frequent words to the projector."""
        vectors = trainer.vectors(PROJECTOR_WORDS)
        folder = self.path / f"{trainer.step:05}"  # where the writer puts them; it warns of what a resumed run repeats
        if not folder.exists():
            named = {"metadata": vectors.words, "global_step": trainer.step, "tag": "words"}
            self._write("add_embedding", vectors.matrix, **named)
        self._write("flush")


def remove_curves(path: Path) -> None:
    """Remove what a run has written to the folder `path`, and nothing else in it."""
    for file in [*path.glob("events.out.tfevents.*"), *path.glob("projector_config.pbtxt")]:
        file.unlink(missing_ok=True)
    for projected in path.glob("[0-9]*/words/tensors.tsv"):  # `finish`
        shutil.rmtree(projected.parents[1], ignore_errors=True)
