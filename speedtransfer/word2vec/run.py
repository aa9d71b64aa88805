"""A whole run, from a corpus to vectors: `train`, and what the command line shares with it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import Unpack

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables import PathLike
from speedtransfer.word2vec.callbacks import Evaluations, TensorBoard, remove_curves
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.config import settings_of, shows_settings
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.formats import BOARD, CHECKPOINT, OWN_FOLDERS, TABLES
from speedtransfer.word2vec.model import TableFiles
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.settings import SETTINGS, Keywords, Settings, check_path
from speedtransfer.word2vec.text import Source
from speedtransfer.word2vec.trainer import Callback, Trainer
from speedtransfer.word2vec.vectors import Vectors


class Run:
    """A run that is ready to begin: everything that can be checked before the corpus is read has been checked.

    Parameters
    ----------
    settings : Settings
    checkpoint, checkpoint_every, resume, tensorboard, evaluate, evaluate_every
        As in `train`; none of them changes a bit of the vectors.
    folder : Path, optional
        The folder of the run. Its checkpoint is in there, and saved at a signal to stop alone where neither `resume` nor
        `checkpoint_every` is given; what an earlier run left of checkpoint, tables and curves is removed.
    overwrite : bool
        Replace the checkpoint of another run.

    Attributes
    ----------
    callbacks : list of Callback
        Called in this order.

    Raises
    ------
    SpeedtransferError
        See `train`. Nothing has been written.
    """

    def __init__(
        self,
        settings: Settings,
        checkpoint: PathLike | None = None,
        checkpoint_every: int | None = None,
        resume: bool = False,
        tensorboard: PathLike | None = None,
        evaluate: Sequence[PathLike] = (),
        evaluate_every: float = 1.0,
        folder: Path | None = None,
        overwrite: bool = False,
    ) -> None:
        resolve_device(settings.device)
        self.settings, self._folder = settings, folder
        if folder is not None:
            checkpoint = folder / CHECKPOINT
        for name, path in (("checkpoint", checkpoint), ("tensorboard", tensorboard)):
            if path is not None:
                check_path(path, name)
        self._has_tables = folder is not None and settings.path is not None and Path(settings.path) == folder / TABLES
        board = None if tensorboard is None else TensorBoard(tensorboard)
        evaluations = [Evaluations(evaluate, evaluate_every, board)] if evaluate else []
        self.checkpoints = None
        if checkpoint is not None:
            when_stopped = folder is not None and not (resume or checkpoint_every)
            self.checkpoints = Checkpoints(checkpoint, checkpoint_every, resume, overwrite, when_stopped)
            if self.checkpoints.resumes:
                self.checkpoints.check_settings(settings)
        elif resume or checkpoint_every is not None:
            given = "resume" if resume else "checkpoint_every"
            raise InvalidValueError(f"{given} was given but no checkpoint, the folder; pass checkpoint")
        # The checkpoints come after the evaluation, whose figures they save.
        self.callbacks: list[Callback] = [one for one in (*evaluations, self.checkpoints, board) if one is not None]
        if not self.resumes and not self._has_tables:
            TableFiles(settings.path).check_none()

    def _clear(self, folder: Path) -> None:
        """Remove from the folder of the run what an earlier one left there that this one does not go on from."""
        TableFiles(folder / TABLES).remove()
        remove_curves(folder / BOARD)
        if self.checkpoints is not None:
            self.checkpoints.remove()
        for name in OWN_FOLDERS:
            with contextlib.suppress(OSError):  # it does not exist, or has something else in it
                (folder / name).rmdir()

    @property
    def resumes(self) -> bool:
        """Whether there is a checkpoint that training goes on from."""
        return self.checkpoints is not None and self.checkpoints.resumes

    def train(
        self, corpus: Source | Corpus, progress: TrainingProgress, begun: Callable[[Trainer], object] | None = None
    ) -> Trainer:
        """Read the corpus, unless that is done, and train to the end or to a signal to stop.

        Table files of memory "mmap" are removed where this fails: they would stop the next run.

        Parameters
        ----------
        corpus : path-like, "-", binary file, or Corpus
        progress : TrainingProgress
        begun : callable, optional
            Called with the trainer before its first step.

        Returns
        -------
        Trainer
            As it is after training.
        """
        settings = self.settings
        if not isinstance(corpus, Corpus):
            corpus = Corpus(corpus, report=progress.reading, settings=settings)
        if self.checkpoints is not None and self.checkpoints.resumes:
            trainer = self.checkpoints.restore(corpus, settings, progress, self._has_tables)
        else:
            if self._folder is not None:
                self._clear(self._folder)
            trainer = Trainer(corpus, settings)
        try:
            if begun is not None:
                begun(trainer)
            trainer.run(progress, self.callbacks)
        except BaseException:
            trainer.discard()
            raise
        return trainer


@shows_settings()
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
    **settings: Unpack[Keywords],
) -> Vectors:
    """Train word vectors: skip-gram or CBOW with negative sampling, by any optimizer that works row by row.

    Where torch.distributed has several processes all of them must call it: they share the vocabulary out and train together.
    Ctrl-C ends training early and returns the vectors so far; a second one raises KeyboardInterrupt. SIGTERM ends it early
    too: `checkpoint` is saved, then SystemExit with code 143 raised.

    Parameters
    ----------
    corpus : path-like, "-", binary file, or Corpus
        Text; see :class:`Corpus`, which has its vocabulary already: the settings that make one do nothing then.
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

    Raises
    ------
    InvalidValueError, InvalidTypeError
        A setting breaks its rule, the corpus is no text or has too few words, or the checkpoint is of another run.
    StorageError
        The corpus or a set cannot be read; the checkpoint cannot be read or written.
    OptimizerError
        The optimizer cannot train rows on their own.
    MissingPackageError
        `tensorboard` is given but the package is not installed.
    """
    named = {"dim": dim, "optimizer": optimizer, "lr": lr, "min_count": min_count, "max_words": max_words}
    chosen = settings_of(SETTINGS, settings, **named)
    sets = [evaluate] if isinstance(evaluate, str | os.PathLike) else evaluate
    if not isinstance(sets, Sequence):
        raise InvalidTypeError(f"evaluate is {sets!r} but must be a path or a list of them; pass the path of a set")
    for one in sets:
        check_path(one, "evaluate")
    run = Run(chosen, checkpoint, checkpoint_every, resume, tensorboard, sets, evaluate_every)
    with TrainingProgress(progress) as shown:
        trainer = run.train(corpus, shown)
    if trainer.stop_signal == signal.SIGTERM:
        raise SystemExit(128 + signal.SIGTERM)
    return trainer.vectors()
