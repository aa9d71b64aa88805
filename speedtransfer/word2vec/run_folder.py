"""A run from the command line: all that it writes is in one folder.

``vectors.*``, ``vocab.txt``, ``settings.json`` and, of n-grams, ``ngrams.safetensors`` are written at the end, together;
``checkpoint/``, ``tables/`` (memory "mmap") and ``tensorboard/`` while training goes on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedtransfer.checkpoint import manifest
from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, StorageError, check_no_url, format_bytes, printable
from speedtransfer.ranks import is_first, joined
from speedtransfer.system import keep_mode
from speedtransfer.version import __version__, version_of
from speedtransfer.word2vec.callbacks import remove_curves
from speedtransfer.word2vec.checkpoints import Checkpoints
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.formats import (
    BOARD,
    CHECKPOINT,
    NGRAMS,
    OWN_FILES,
    OWN_FOLDERS,
    SETTINGS,
    TABLES,
    VECTORS,
    VOCABULARY,
    check_format,
)
from speedtransfer.word2vec.model import TableFiles
from speedtransfer.word2vec.progress import StopOnSignal, TrainingProgress, format_loss
from speedtransfer.word2vec.run import make_callbacks, make_trainer
from speedtransfer.word2vec.settings import Settings, check_writable, existing_folder
from speedtransfer.word2vec.text import find_files
from speedtransfer.word2vec.trainer import Trainer


def train_into(
    output: Path,
    corpus: str,
    settings: Settings,
    format: str = "txt",
    *,
    resume: bool = False,
    overwrite: bool = False,
    curves: bool = False,
    quiet: bool = False,
    show: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    evaluate: Sequence[Path] = (),
    evaluate_every: float = 1.0,
) -> int | None:
    """Train on `corpus` and fill the folder `output`; return the signal that stopped it early, if one did.

    The arguments are those of the command ``train``; `corpus` is a path, or "-", and `show` is called with each line of the
    report.

    Raises
    ------
    SpeedtransferError
        As `speedtransfer.word2vec.train`; and where `output` exists and is neither to be resumed nor overwritten, or cannot be
        written: then the message names the place where the vectors are.
    """
    suffix = check_format(format)
    _check_output(output, overwrite or resume)
    tables_within = settings.path is not None and Path(settings.path) == output / TABLES
    checkpoints = Checkpoints(
        output / CHECKPOINT,
        settings,
        checkpoint_every,
        resume,
        overwrite,
        when_stopped=not (resume or checkpoint_every),
        own_tables=tables_within,
    )
    callbacks = make_callbacks(settings, checkpoints, output / BOARD if curves else None, evaluate, evaluate_every)
    if resume and not checkpoints.resumes and not overwrite and _holds_a_run(output):
        raise InvalidValueError(
            f"output folder {str(output)!r} holds a run but there is no checkpoint in {str(checkpoints.path)!r} to resume; "
            "pass --overwrite to begin anew"
        )
    if corpus != "-":
        find_files(corpus)
    with joined(resolve_device(settings.device)) as others, contextlib.ExitStack() as saving:
        if others is not None and (curves or settings.path is not None):
            raise InvalidValueError("tensorboard and path are for one process; leave them out with torchrun")
        with TrainingProgress(not quiet and is_first()) as progress:
            words = Corpus(corpus, report=progress.reading, settings=settings)
            if not checkpoints.resumes:
                _clear(output, checkpoints)
            trainer = make_trainer(words, settings, checkpoints, progress)
            # From the first step until everything is saved a signal only ends training.
            stop = saving.enter_context(StopOnSignal())
            trainer.run(progress, callbacks, stop)
        save = _saver(trainer, corpus, suffix, output)  # by all processes, which have the rows together
        if is_first():
            save_or_rescue(output, overwrite or resume, save)
            _report(trainer, output, suffix, show)
    return stop.requested


def _check_output(path: Path, overwrite: bool) -> None:
    """Raise where the folder `path` cannot be written, or exists and may not be overwritten."""
    check_no_url(path, "output")
    if path.exists() and not path.is_dir():
        raise InvalidValueError(f"output folder {str(path)!r} exists and is a file; choose another folder")
    if path.exists() and not overwrite:
        stopped = os.path.lexists(path / CHECKPOINT / manifest.NAME)
        remedy = ", or pass --resume to go on or --overwrite" if stopped else " or pass --overwrite"
        raise InvalidValueError(f"output folder {str(path)!r} exists; choose another folder{remedy}")
    check_writable(path, "vectors")


def _holds_a_run(path: Path) -> bool:
    return any((path / name).exists() for name in OWN_FILES)


def _clear(folder: Path, checkpoints: Checkpoints) -> None:
    """Remove what an earlier run left in the folder that this one does not go on from."""
    TableFiles(folder / TABLES).remove()
    remove_curves(folder / BOARD)
    checkpoints.remove()
    for name in OWN_FOLDERS:
        with contextlib.suppress(OSError):  # it does not exist, or has something else in it
            (folder / name).rmdir()


def _saver(trainer: Trainer, corpus: str, suffix: str, run_folder: Path) -> Callable[[Path], None]:
    """Return what writes vectors, those of n-grams if any, vocabulary and settings of a run into a folder.

    The settings do not name table files within `run_folder`, since another run with these settings has them in a folder of
    its own.
    """
    vectors, ngrams = trainer.vectors(), trainer.ngram_vectors()
    settings = trainer.settings.as_dict()
    if trainer.settings.path == run_folder / TABLES:
        settings["path"] = None
    facts: dict[str, Any] = {
        # What the bits of the vectors depend on.
        "versions": {
            "speedtransfer": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "numba": version_of("numba"),
        },
        "device": str(trainer.model.input.table.device),
        "threads": torch.get_num_threads(),
        "corpus": corpus,
        "settings": settings,
        "corpus_words": trainer.corpus.num_raw_words,
        "vocabulary_words": len(trainer.corpus.vocabulary),
        "steps": trainer.step,
        "of_steps": trainer.num_steps,
        "loss": trainer.loss if math.isfinite(trainer.loss) else None,  # JSON has no nan
        "evaluation": trainer.evaluation,
        "training_s": round(trainer.elapsed_s, 3),
        "words_per_s": round(trainer.words_per_s),
    }

    def save(folder: Path) -> None:
        vectors.save(folder / (VECTORS + suffix))
        trainer.corpus.vocabulary.save(folder / VOCABULARY)
        if ngrams is not None:
            ngrams.save(folder / NGRAMS)
        (folder / SETTINGS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    return save


def save_or_rescue(folder: Path, overwrite: bool, save: Callable[[Path], None]) -> None:
    """Have `save` write into `folder`; where that fails, into a new folder for temporary files.

    Raises `StorageError` where `folder` cannot be written; the message names the place where the vectors are instead.
    """
    try:
        _fill(folder, overwrite, save)
    except OSError as error:
        problem = f"cannot write the vectors to {str(folder)!r} ({error.strerror or error})"
        problem = str(error) if isinstance(error, StorageError) else problem
        kept = None
        try:
            kept = tempfile.mkdtemp(prefix="speedtransfer-vectors-")
            save(Path(kept))
        except OSError:
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
            raise StorageError(
                f"{problem}, nor to {tempfile.gettempdir()!r}; make room, and --resume the checkpoint if there is one"
            ) from error
        raise StorageError(f"{problem}; the vectors are in {kept!r} instead") from error


def _fill(folder: Path, overwrite: bool, save: Callable[[Path], None]) -> None:
    """Have `save` write files beside `folder`, and move them into place, where those of an earlier run go.

    Where `save` fails nothing is changed.
    """
    staging = Path(tempfile.mkdtemp(dir=existing_folder(folder.parent), prefix=f".{folder.name}."))
    try:
        save(staging)
        if not overwrite and _holds_a_run(folder):
            raise StorageError(f"another run has filled the folder {str(folder)!r} meanwhile")
        folder.mkdir(parents=True, exist_ok=True)
        written = os.listdir(staging)
        for name in written:
            keep_mode(staging / name, folder / name)
            os.replace(staging / name, folder / name)
        for name in OWN_FILES.difference(written):
            (folder / name).unlink(missing_ok=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _report(trainer: Trainer, folder: Path, suffix: str, show: Callable[[str], None]) -> None:
    to_device, back = trainer.moved_bytes
    show(
        f"{len(trainer.corpus.vocabulary):,} words, {trainer.num_steps:,} steps of {trainer.block_words:,} words (epochs: "
        f"{trainer.epochs}), {trainer.elapsed_s:.1f} s of training, "
        f"{trainer.words_per_s:,.0f} words/s, loss {format_loss(trainer.loss)}; rows moved: {format_bytes(to_device)} in, "
        f"{format_bytes(back)} out"
    )
    show(printable(f"vectors: {folder / (VECTORS + suffix)}"))
    if trainer.settings.buckets:
        show(printable(f"n-grams: {folder / NGRAMS}, for words outside the vocabulary"))
