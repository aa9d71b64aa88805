"""A run from the command line: all that it writes is in one folder.

``vectors.*``, ``vocab.txt``, ``settings.json`` and, of n-grams, ``ngrams.safetensors`` are written at the end, together;
``checkpoint/``, ``tables/`` (memory "mmap") and ``tensorboard/`` while training goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from speedtransfer.checkpoint import manifest
from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, format_bytes
from speedtransfer.ranks import is_first, joined
from speedtransfer.word2vec.output import NGRAMS, VECTORS, OutputFolder, check_apart, check_format
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.rescue import save_or_rescue, warn_of_little_room
from speedtransfer.word2vec.run import Run, Watching
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.stopping import StopOnSignal
from speedtransfer.word2vec.tablefiles import table_files
from speedtransfer.word2vec.text import find_files
from speedtransfer.word2vec.trainer import Trainer


def train_into(
    output: Path,
    corpus: str,
    settings: Settings,
    watching: Watching,
    format: str = "txt",
    quiet: bool = False,
    show: Callable[[str], None] = print,
) -> int | None:
    """Train on `corpus` and fill the folder `output`; return the signal that stopped it early, if one did.

    Parameters
    ----------
    output : Path
    corpus : str
        A path, or "-".
    settings : Settings
    watching : Watching
        With the checkpoint and TensorBoard's folder where they are wanted: in `output`, or elsewhere.
    format : str
        Of the vectors.
    quiet : bool
        Show no progress.
    show : callable
        Takes each line of the report.

    Raises
    ------
    SpeedtransferError
        As `speedtransfer.word2vec.train`; and where `output` exists and is neither to be resumed nor overwritten, or cannot be
        written: then the message tells where the vectors are.
    """
    suffix = check_format(format)
    resume, overwrite, checkpoint = watching.resume, watching.overwrite, watching.checkpoint
    if checkpoint is not None:
        check_apart("output", output, checkpoint)
    stopped = checkpoint is not None and os.path.lexists(Path(checkpoint) / manifest.NAME)
    folder = OutputFolder(
        output,
        overwrite or resume,
        remedy=", or pass --resume to go on or --overwrite" if stopped else " or pass --overwrite",
        only_own=resume and not overwrite,  # the run that is resumed has left its files there when it was interrupted
        within=[
            *(path for path in (checkpoint, watching.tensorboard) if path is not None),
            *table_files(settings.path),
        ],
    )
    with folder, ExitStack() as saving:
        run = Run(settings, watching)
        if resume and not run.resumes and not overwrite and folder.holds_a_run:
            raise InvalidValueError(
                f"output folder {str(output)!r} holds a run but there is no checkpoint in {str(checkpoint)!r} to resume; "
                "pass --overwrite to begin anew"
            )
        if corpus != "-":
            find_files(corpus)
        others = saving.enter_context(joined(resolve_device(settings.device)))
        if others is not None and (watching.tensorboard is not None or settings.path is not None):
            raise InvalidValueError("tensorboard and path are for one process; leave them out with torchrun")
        stop = StopOnSignal()

        def begin(trainer: Trainer) -> None:
            # From the first step until all is saved a signal ends nothing but training.
            saving.enter_context(stop)
            if is_first():
                warn_of_little_room(folder, trainer, suffix, progress.say)

        with TrainingProgress(not quiet and is_first()) as progress:
            trainer = run.train(corpus, progress, begin)
        # All processes have some of the vectors, one writes them.
        trainer.keep_vectors()
        if is_first():
            save_or_rescue(folder, trainer, corpus, suffix)
            _report(trainer, folder.path, suffix, show)
    return stop.requested


def _report(trainer: Trainer, folder: Path, suffix: str, show: Callable[[str], None]) -> None:
    to_device, back = trainer.moved_bytes
    show(
        f"{len(trainer.corpus.vocabulary):,} words, {trainer.num_steps:,} steps of {trainer.block_words:,} words (epochs: "
        f"{trainer.epochs}), {trainer.elapsed_s:.1f} s of training, "
        f"{trainer.words_per_s:,.0f} words/s, loss {trainer.loss:.3f}; rows moved: {format_bytes(to_device)} in, "
        f"{format_bytes(back)} out"
    )
    show(f"vectors: {folder / (VECTORS + suffix)}")
    if trainer.settings.buckets:
        show(f"n-grams: {folder / NGRAMS}, for words outside the vocabulary")
