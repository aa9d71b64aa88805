"""The folder that a run leaves behind: checked before any work, filled in one go at the end, never half."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from speedtransfer.errors import InvalidValueError, StorageError, suggest
from speedtransfer.version import __version__
from speedtransfer.word2vec.formats import FORMATS
from speedtransfer.word2vec.trainer import Trainer

VECTORS = "vectors"
VOCABULARY = "vocab.txt"
SETTINGS = "settings.json"
PICTURE = "words.png"
NGRAMS = "ngrams.safetensors"
OWN_FILES = frozenset({VOCABULARY, SETTINGS, PICTURE, NGRAMS, *(VECTORS + suffix for suffix in FORMATS)})
# Folders within that of a run: its state, the files of memory "mmap", TensorBoard's.
CHECKPOINT, TABLES, BOARD = "checkpoint", "tables", "tensorboard"
OWN_FOLDERS = frozenset({CHECKPOINT, TABLES, BOARD})


class OutputFolder:
    """A new folder, or one of an earlier run that is replaced. Entering makes sure that it can be written.

    Files are written to `staging`, a folder beside it; `commit` moves them into place. Without `commit`, whatever the reason,
    nothing is changed.

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
    within : sequence of path-like
        Other folders of this run; those in `path` are no strangers there.

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
        within: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self.path, self._overwrite = Path(path), overwrite
        self._staging: Path | None = None
        if self.path.exists() and not self.path.is_dir():
            raise InvalidValueError(f"output folder {str(path)!r} exists and is a file; choose another folder")
        if self.path.exists() and not overwrite:
            raise InvalidValueError(f"output folder {str(path)!r} exists; choose another folder{remedy}")
        if only_own and self.path.exists():
            own = (OWN_FILES | OWN_FOLDERS).union(*(_below(self.path, folder).parts[:1] for folder in within))
            others = sorted(set(os.listdir(self.path)) - own)
            if others:
                raise InvalidValueError(
                    f"output folder {str(path)!r} holds {others[0]!r}, not created by speedtransfer; choose another folder"
                )

    @property
    def holds_a_run(self) -> bool:
        """Whether files of a run are in `path` already."""
        return any((self.path / name).exists() for name in OWN_FILES)

    def __enter__(self) -> OutputFolder:
        try:
            if self.path.exists() and not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")
            self._make_staging().rmdir()  # a run that is killed meanwhile leaves nothing behind
        except OSError as error:
            raise self._cannot_make(error) from error
        return self

    @property
    def staging(self) -> Path:
        """The folder to write files to, made when it is asked for."""
        if self._staging is None:
            try:
                self._staging = self._make_staging()
            except OSError as error:
                raise self._cannot_make(error) from error
        return self._staging

    def _make_staging(self) -> Path:
        above = self.path.absolute().parent
        while not above.exists():
            above = above.parent
        return Path(tempfile.mkdtemp(dir=above, prefix=f".{self.path.name}."))

    def _cannot_make(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot make output folder {str(self.path)!r} ({error.strerror}); choose a place you may write to"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def discard(self) -> None:
        """Remove `staging` with what has been written to it."""
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None

    def commit(self) -> None:
        """Move the files into place and remove what an earlier run left of other formats.

        Where another run has filled the folder meanwhile, and may not be overwritten, `path` becomes a new one beside it.
        """
        wanted, number = self.path, 1
        while not self._overwrite and self.holds_a_run:
            number += 1
            self.path = wanted.with_name(f"{wanted.name}-{number}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            written = os.listdir(self.staging)
            for name in written:
                os.replace(self.staging / name, self.path / name)
            for name in OWN_FILES.difference(written):
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot write to {str(self.path)!r} ({error.strerror}); choose a place you may write to"
            ) from error


def check_apart(name: str, path: str | os.PathLike[str] | None, checkpoint: str | os.PathLike[str]) -> None:
    """Raise `InvalidValueError` where the folder `path`, the argument `name`, is that of the checkpoint or in it."""
    if path is not None and Path(os.path.abspath(path)).is_relative_to(os.path.abspath(checkpoint)):
        raise InvalidValueError(
            f"{name} {os.fspath(path)!r} is in the folder of the checkpoint, {os.fspath(checkpoint)!r}, which takes nothing "
            "else; choose another folder"
        )


def _below(folder: Path, path: str | os.PathLike[str]) -> Path:
    """Return `path` as seen from `folder`, or no path where it is not in there."""
    try:
        return Path(os.path.abspath(path)).relative_to(os.path.abspath(folder))
    except ValueError:
        return Path()


def check_writable(path: Path, what: str) -> None:
    """Raise `StorageError` unless the folder `path` can be written, or made; nothing is."""
    above = path.absolute()
    while not above.exists():
        above = above.parent
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise StorageError(f"cannot write {what} to {str(path)!r}; choose a folder you may write to")


def check_format(name: str) -> str:
    """Return the suffix of the vector format called `name`: "txt", "bin" or another of `formats.FORMATS`.

    Raises
    ------
    InvalidValueError
        There is none of that name.
    MissingPackageError
        It needs a package that is not installed.
    """
    suffix = f".{name.lower().lstrip('.')}"
    if suffix not in FORMATS:
        raise InvalidValueError(f"format {name!r} is unknown{suggest(name, [s[1:] for s in FORMATS])}")
    FORMATS[suffix].check()
    return suffix


def save_run(folder: Path, trainer: Trainer, corpus: str, suffix: str = ".txt", run_folder: Path | None = None) -> None:
    """Write vectors, those of n-grams if any, vocabulary and settings of a run into `folder`.

    Parameters
    ----------
    folder : Path
    trainer : Trainer
    corpus : str
        What the settings call the corpus.
    suffix : str
        Of the vector file.
    run_folder : Path, optional
        The folder of the run: settings do not name table files in there, since those of another run with them are elsewhere.
    """
    settings = trainer.settings.as_dict()
    if run_folder is not None and trainer.settings.path == run_folder / TABLES:
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
    versions: dict[str, str | None] = {
        "speedtransfer": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    try:
        versions["numba"] = metadata.version("numba")
    except metadata.PackageNotFoundError:
        versions["numba"] = None
    return versions


def find_vectors(path: str | os.PathLike[str]) -> Path:
    """Return the vector file that `path` means: itself, or the one in the output folder of a run.

    Raises
    ------
    StorageError
        There is nothing at `path`, or a folder without vectors.
    """
    path = Path(path)
    if not path.exists() and path.suffix not in (*FORMATS, ".gz"):
        raise StorageError(f"{str(path)!r} does not exist; pass a file of vectors, or the folder of a run")
    if path.is_dir():
        for suffix in FORMATS:
            if (path / (VECTORS + suffix)).exists():
                return path / (VECTORS + suffix)
        raise StorageError(f"folder {str(path)!r} holds no {VECTORS} file ({', '.join(FORMATS)}); pass the file itself")
    return path


def find_ngrams(path: str | os.PathLike[str]) -> Path | None:
    """Return the file of n-gram vectors beside the vectors at `path`, a file or the folder of a run; None without one."""
    found = find_vectors(path).with_name(NGRAMS)
    return found if found.exists() else None
