"""A whole run, from a corpus to vectors: `train`, and what the command line shares with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables import PathLike
from speedtransfer.word2vec.callbacks import Evaluations, TensorBoard
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.model import TableFiles
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.settings import SETTINGS, Settings, TrainingSettings, check_path, settings_of
from speedtransfer.word2vec.text import Source
from speedtransfer.word2vec.trainer import Callback, Trainer
from speedtransfer.word2vec.vectors import Vectors

if TYPE_CHECKING:
    from typing_extensions import Unpack


def make_callbacks(
    settings: Settings,
    checkpoints: Checkpoints | None = None,
    tensorboard: PathLike | None = None,
    evaluate: Sequence[PathLike] = (),
    evaluate_every: float = 1.0,
) -> list[Callback]:
    """Return the callbacks of a run, in order; raise for whatever is wrong with it before its corpus is read."""
    resolve_device(settings.device)
    if checkpoints is None or not (checkpoints.resumes or checkpoints.own_tables):
        TableFiles(settings.path).check_none()
    board = None if tensorboard is None else TensorBoard(check_path(tensorboard, "tensorboard"))
    evaluations = Evaluations(evaluate, evaluate_every, board) if evaluate else None
    # The checkpoints come after the evaluation, whose figures they save.
    return [one for one in (evaluations, checkpoints, board) if one is not None]


def make_trainer(
    corpus: Corpus, settings: Settings, checkpoints: Checkpoints | None, progress: TrainingProgress
) -> Trainer:
    """Return a trainer at its first step, or in the state that was saved."""
    if checkpoints is not None and checkpoints.resumes:
        return checkpoints.restore(corpus, progress)
    return Trainer(corpus, settings)


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
    min_count: int = Settings.min_count,
    max_words: int | None = Settings.max_words,
    **settings: Unpack[TrainingSettings],
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
    named = {"dim": dim, "optimizer": optimizer, "lr": lr, "min_count": min_count, "max_words": max_words}
    chosen = settings_of(SETTINGS, settings, **named)
    sets = [evaluate] if isinstance(evaluate, str | os.PathLike) else evaluate
    if not isinstance(sets, Sequence):
        raise InvalidTypeError(f"evaluate is {sets!r} but must be a path or a list of them; pass the path of a set")
    for one in sets:
        check_path(one, "evaluate")
    checkpoints = None
    if checkpoint is not None:
        checkpoints = Checkpoints(Path(check_path(checkpoint, "checkpoint")), chosen, checkpoint_every, resume)
    elif resume or checkpoint_every is not None:
        raise InvalidValueError("resume and checkpoint_every need a checkpoint, the folder; pass checkpoint")
    callbacks = make_callbacks(chosen, checkpoints, tensorboard, sets, evaluate_every)
    with TrainingProgress(progress) as shown:
        if not isinstance(corpus, Corpus):
            corpus = Corpus(corpus, report=shown.reading, settings=chosen)
        trainer = make_trainer(corpus, chosen, checkpoints, shown)
        trainer.run(shown, callbacks)
    if trainer.stop_signal == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    return trainer.vectors()
