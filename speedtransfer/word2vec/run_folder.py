"""A run from the command line: all that it writes is in one folder.

``vectors.*``, ``vocab.txt``, ``settings.json`` and, of n-grams, ``ngrams.safetensors`` are written at the end, together;
``checkpoint/``, ``tables/`` (memory "mmap") and ``tensorboard/`` while training goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
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
)  # fmt: skip
from speedtransfer.word2vec.model import TableFiles
from speedtransfer.word2vec.progress import StopOnSignal, TrainingProgress, format_loss
from speedtransfer.word2vec.run import Run
from speedtransfer.word2vec.settings import Settings, existing_folder
from speedtransfer.word2vec.text import find_files
from speedtransfer.word2vec.trainer import Trainer


class OutputFolder:
    """A new folder, or one of an earlier run that is replaced. Making it checks that it can be written, and changes nothing.

    Parameters
    ----------
    path : path-like
        Folders above it are made as needed.
    overwrite : bool
        Replace the files of an earlier run if `path` exists.
    remedy : str
        What to do where `path` exists and `overwrite` is False, for the message.
    only_own : bool
        Refuse a folder that holds anything but the files of an earlier run. False: leave the rest as it is.
    within : iterable of path-like
        Other files of this run; those in `path` are no strangers there.

    Raises
    ------
    InvalidValueError
        `path` exists and may not be overwritten.
    StorageError
        The folder cannot be made.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        overwrite: bool = False,
        remedy: str = "",
        only_own: bool = False,
        within: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        check_no_url(path, "output")
        self.path, self._overwrite = Path(path), overwrite
        exists = self.path.exists()
        if exists and not self.path.is_dir():
            raise InvalidValueError(f"output folder {str(path)!r} exists and is a file; choose another folder")
        if exists and not overwrite:
            raise InvalidValueError(f"output folder {str(path)!r} exists; choose another folder{remedy}")
        if only_own and exists:
            below = [Path(os.path.relpath(folder, self.path)).parts[:1] for folder in within]
            own = (OWN_FILES | OWN_FOLDERS).union(*below)
            others = sorted(set(os.listdir(self.path)) - own)
            if others:
                raise InvalidValueError(
                    f"output folder {str(path)!r} holds {others[0]!r}, not created by speedtransfer; choose another folder"
                )
        if exists and not os.access(self.path, os.W_OK | os.X_OK):
            raise self._cannot_make("Permission denied")
        self._make_staging().rmdir()  # a run that is killed meanwhile leaves nothing behind

    @property
    def holds_a_run(self) -> bool:
        """Whether files of a run are in `path` already."""
        return any((self.path / name).exists() for name in OWN_FILES)

    def _make_staging(self) -> Path:
        try:
            return Path(tempfile.mkdtemp(dir=existing_folder(self.path.parent), prefix=f".{self.path.name}."))
        except OSError as error:
            raise self._cannot_make(error.strerror) from error

    def _cannot_make(self, why: str | None) -> StorageError:
        return StorageError(f"cannot make output folder {str(self.path)!r} ({why}); choose a place you may write to")

    def fill(self, save: Callable[[Path], None]) -> None:
        """Have `save` write files to a folder beside it, and move them into place, where those of an earlier run go.

        Where `save` fails nothing is changed. Where another run has filled the folder meanwhile, and may not be overwritten,
        `path` becomes a new one beside it.
        """
        staging = self._make_staging()
        try:
            save(staging)
            self._move(staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _move(self, staging: Path) -> None:
        wanted, number = self.path, 1
        while not self._overwrite and self.holds_a_run:
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            written = os.listdir(staging)
            for name in written:
                keep_mode(staging / name, self.path / name)
                os.replace(staging / name, self.path / name)
            for name in OWN_FILES.difference(written):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot write to {str(self.path)!r} ({error.strerror}); choose a place you may write to"
            ) from error


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
    **options: Any,
) -> int | None:
    """Train on `corpus` and fill the folder `output`; return the signal that stopped it early, if one did.

    The arguments are those of the command ``train``; `corpus` is a path, or "-", and `show` is called with each line of the
    report. `options` are further arguments of `Run`.

    Raises
    ------
    SpeedtransferError
        As `speedtransfer.word2vec.train`; and where `output` exists and is neither to be resumed nor overwritten, or cannot be
        written: then the message names the place where the vectors are.
    """
    suffix = check_format(format)
    checkpoint, board = output / CHECKPOINT, output / BOARD if curves else None
    stopped = os.path.lexists(checkpoint / manifest.NAME)
    folder = OutputFolder(
        output,
        overwrite or resume,
        remedy=", or pass --resume to go on or --overwrite" if stopped else " or pass --overwrite",
        only_own=resume and not overwrite,  # the run that is resumed has left its files there when it was interrupted
        within=TableFiles(settings.path).paths.values(),
    )
    run = Run(settings, resume=resume, tensorboard=board, folder=output, overwrite=overwrite, **options)
    if resume and not run.resumes and not overwrite and folder.holds_a_run:
        raise InvalidValueError(
            f"output folder {str(output)!r} holds a run but there is no checkpoint in {str(checkpoint)!r} to resume; "
            "pass --overwrite to begin anew"
        )
    if corpus != "-":
        find_files(corpus)
    with ExitStack() as saving:
        others = saving.enter_context(joined(resolve_device(settings.device)))
        if others is not None and (curves or settings.path is not None):
            raise InvalidValueError("tensorboard and path are for one process; leave them out with torchrun")
        stop = StopOnSignal()
        with TrainingProgress(not quiet and is_first()) as progress:
            # From the first step until everything is saved a signal only ends training.
            trainer = run.train(corpus, progress, lambda trainer: saving.enter_context(stop))
        trainer.keep_vectors()  # all processes take part, one writes them
        if is_first():
            save_or_rescue(folder, trainer, corpus, suffix)
            _report(trainer, folder.path, suffix, show)
    return stop.requested


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


def save_or_rescue(folder: OutputFolder, trainer: Trainer, corpus: str, suffix: str) -> None:
    """Write a run into `folder`; where that fails, into a new folder beside the corpus or for temporary files.

    Raises
    ------
    StorageError
        `folder` cannot be written; the message names the place where the vectors are instead.
    """
    try:
        folder.fill(lambda staging: save_run(staging, trainer, corpus, suffix, folder.path))
        return
    except OSError as error:
        failure = error
    problem = str(failure)
    if not isinstance(failure, StorageError):
        problem = f"cannot write the vectors to {str(folder.path)!r} ({failure.strerror or failure})"
    beside = [Path(corpus).absolute().parent] if os.path.exists(corpus) else []
    for place in (*beside, Path(tempfile.gettempdir()), Path.cwd()):
        kept: Path | None = None
        try:
            kept = Path(tempfile.mkdtemp(dir=place, prefix="speedtransfer-vectors-"))
            save_run(kept, trainer, corpus, suffix, folder.path)
        except OSError:
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
            continue
        raise StorageError(f"{problem}; the vectors are in {str(kept)!r} instead") from failure
    raise StorageError(
        f"{problem}; nor could they be written beside the corpus or to {tempfile.gettempdir()!r}; make room, and --resume the "
        "checkpoint if there is one"
    ) from failure


def save_run(folder: Path, trainer: Trainer, corpus: str, suffix: str, run_folder: Path) -> None:
    """Write vectors, those of n-grams if any, vocabulary and settings of a run into `folder`.

    The settings name the corpus `corpus`. They do not name table files within `run_folder`, since another run with these
    settings has them in a folder of its own.
    """
    settings = trainer.settings.as_dict()
    if trainer.settings.path == run_folder / TABLES:
        settings["path"] = None
    trainer.vectors().save(folder / (VECTORS + suffix))
    trainer.corpus.vocabulary.save(folder / VOCABULARY)
    ngrams = trainer.ngram_vectors()
    if ngrams is not None:
        ngrams.save(folder / NGRAMS)
    facts: dict[str, Any] = {
        "versions": _versions(),
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
    (folder / SETTINGS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _versions() -> dict[str, str | None]:
    """Return the versions of what the bits of the vectors depend on."""
    others = {"torch": torch.__version__, "numpy": np.__version__, "numba": version_of("numba")}
    return {"speedtransfer": __version__, **others}
