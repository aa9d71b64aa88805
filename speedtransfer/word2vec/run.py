"""A whole run, from a corpus to vectors: `train`, and what is done beside training: evaluation, and curves for TensorBoard."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError, check_number, check_path
from speedtransfer.lazy import import_extra
from speedtransfer.tables import PathLike
from speedtransfer.untrusted import storage_error
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.evaluation import Similarity, load_set
from speedtransfer.word2vec.evaluation import evaluate as measure
from speedtransfer.word2vec.model import check_no_tables
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.settings import SETTINGS, Settings, check_writable, settings_of
from speedtransfer.word2vec.text import Source
from speedtransfer.word2vec.trainer import Callback, Trainer
from speedtransfer.word2vec.vectors import Vectors

EVALUATED_WORDS = 300_000  # the most frequent ones, the default of `evaluate`
LOG_EVERY_S = 2.0  # five figures take a third of a millisecond
PROJECTOR_WORDS = 5000


class Evaluations(Callback):
    """Evaluate the vectors of a trainer on similarity or analogy sets, `every` so many epochs and at the end.

    The sets are read at once; `board` draws the figures.
    """

    def __init__(self, paths: Sequence[PathLike], every: float, board: TensorBoard | None = None) -> None:
        self._sets = [load_set(path) for path in paths]
        self._every = every
        self._last_step, self._board = -1, board

    def begin(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Raise `InvalidValueError` where a set has too few words of the vocabulary."""
        self._progress = progress
        vectors = trainer.vectors(EVALUATED_WORDS)
        for words in self._sets:
            measure(vectors, words)

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
        line = [f"epoch {round(trainer.step / trainer.steps_an_epoch, 3):g}"]
        for words in self._sets:
            try:
                result = measure(vectors, words)
            except InvalidValueError as error:  # such as equal cosines: no reason to lose a run
                line.append(str(error))
                continue
            names = ("spearman", "pearson") if isinstance(result, Similarity) else ("accuracy", "semantic", "syntactic")
            parts = {name: getattr(result, name) for name in names}
            figures = {name: getattr(part, "accuracy", part) for name, part in parts.items()}
            figures = {name: value for name, value in figures.items() if value is not None}
            line.append(f"{result.name}: " + " ".join(f"{name} {value:.3f}" for name, value in figures.items()))
            if self._board is not None:
                self._board.draw(f"evaluation/{result.name}", figures, trainer.step)
        self._progress.log("  ".join(line))


class TensorBoard(Callback):
    """Write curves of a run to a folder that ``tensorboard --logdir`` shows; nothing is written before `begin`.

    Runs in folders beside each other are shown together.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        import_extra("tensorboard", "curves", '"speedtransfer[tensorboard]"')
        self._writer: Any = None
        self._last_log = float("-inf")
        check_writable(self.path, "TensorBoard's files")

    def begin(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Open the files; what a run that is resumed had logged beyond `trainer.step` is hidden.

        Where they can no longer be written, as on a full disk, training goes on without them.
        """
        from torch.utils.tensorboard import SummaryWriter

        self._progress = progress
        with storage_error(f"cannot write TensorBoard's files to {str(self.path)!r}", "choose another folder"):
            self._writer = SummaryWriter(str(self.path), purge_step=trainer.step + 1 if trainer.step else None)

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
        figures = {"loss": trainer.loss, "lr": trainer.lr, "words_per_s": trainer.words_per_s}
        self.draw("train", figures, trainer.step)
        self.draw("rows", dict(zip(("bytes_in", "bytes_out"), trainer.moved_bytes, strict=True)), trainer.step)

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


def make_callbacks(
    settings: Settings, checkpoints: Checkpoints | None, tensorboard: PathLike | None, evaluate: Sequence[PathLike],
    evaluate_every: float
) -> list[Callback]:  # fmt: skip
    """Return the callbacks of a run, in order; raise for whatever is wrong with it before its corpus is read."""
    resolve_device(settings.device)
    if checkpoints is None or not (checkpoints.resumes or checkpoints.own_tables):
        check_no_tables(settings.path)
    board = None if tensorboard is None else TensorBoard(check_path(tensorboard, "tensorboard", "a folder"))
    check_number(evaluate_every, "evaluate_every", above=True)
    evaluations = Evaluations(evaluate, evaluate_every, board) if evaluate else None
    # The checkpoints come after the evaluation, whose figures they save.
    return [one for one in (evaluations, checkpoints, board) if one is not None]


def train(
    corpus: Source | Corpus,
    dim: int = Settings.dim,
    optimizer: str = Settings.optimizer,
    lr: float | None = Settings.lr,
    *,
    checkpoint: PathLike | None = None,
    checkpoint_every: int | None = None,
    resume: bool = False,
    tensorboard: PathLike | None = None,
    evaluate: PathLike | Sequence[PathLike] = (),
    evaluate_every: float = 1.0,
    progress: bool = True,
    **settings: Any,
) -> Vectors:
    """Train word vectors: skip-gram or CBOW with negative sampling, by any optimizer that works row by row.

    Where torch.distributed has several processes all of them must call it: they share the vocabulary out and train together.
    Ctrl-C ends training early and returns the vectors so far; a second one raises KeyboardInterrupt. SIGTERM ends it early
    too: `checkpoint` is saved, then SystemExit with code 143 raised.

    Parameters
    ----------
    corpus : path-like, "-", binary file, or Corpus
        Text; of a :class:`Corpus` the settings that make one do nothing.
    dim, optimizer, lr, **settings
        Every attribute of :class:`Settings`, with its default.
    checkpoint : path-like, optional
        A folder for the state of training, saved at Ctrl-C, SIGTERM and the end, too.
    checkpoint_every : int, optional
        Steps from one save to the next; None: an epoch.
    resume : bool
        Go on from `checkpoint`, which the same settings (but `memory` and `path`) and the same corpus have made. The vectors
        are those of a run without a break, bit for bit, on the same device with the same number of threads. Where there is no
        checkpoint yet, begin.
    tensorboard : path-like, optional
        A folder for TensorBoard: loss, learning rate, words a second, bytes of rows moved, figures of `evaluate`, and the
        frequent words in the projector.
    evaluate : path-like or sequence of path-like
        Similarity or analogy sets to evaluate the vectors on during training; each evaluation is a line on standard error.
    evaluate_every : float
        Epochs from one evaluation to the next; there is one at the end as well.
    progress : bool
        Show on standard error how far training is.

    Returns
    -------
    Vectors
        Words from the most frequent on.
    """
    chosen = settings_of(SETTINGS, settings, dim=dim, optimizer=optimizer, lr=lr)
    sets = [evaluate] if isinstance(evaluate, str | os.PathLike) else evaluate
    if not isinstance(sets, Sequence):
        raise InvalidTypeError(f"evaluate is {sets!r} but must be a path or a list of them; pass the path of a set")
    checkpoints = None
    if checkpoint is not None:
        folder = check_path(checkpoint, "checkpoint", "a folder")
        checkpoints = Checkpoints(folder, chosen, checkpoint_every, resume)
    elif resume or checkpoint_every is not None:
        raise InvalidValueError("resume and checkpoint_every need a checkpoint, the folder; pass checkpoint")
    callbacks = make_callbacks(chosen, checkpoints, tensorboard, sets, evaluate_every)
    with TrainingProgress(progress) as shown:
        if not isinstance(corpus, Corpus):
            corpus = Corpus(corpus, report=shown.reading, settings=chosen)
        trainer = checkpoints.restore(corpus, shown) if checkpoints and checkpoints.resumes else Trainer(corpus, chosen)
        trainer.run(shown, callbacks)
    if trainer.stop_signal == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    return trainer.vectors()
