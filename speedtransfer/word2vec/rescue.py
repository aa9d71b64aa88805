"""Vectors that their output folder has no room for: saved elsewhere, so that a long run is not lost."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from speedtransfer.errors import StorageError, format_bytes
from speedtransfer.word2vec.output import OutputFolder, save_run
from speedtransfer.word2vec.trainer import Trainer

_BYTES_A_NUMBER = {".txt": 11, ".vec": 11, ".glove": 11}  # in text; 4 in the others


def warn_of_little_room(folder: OutputFolder, trainer: Trainer, suffix: str, say: Callable[[str], None]) -> None:
    """Say so where the vectors will not fit on the disk of `folder` as it is now."""
    above = folder.path.absolute()
    while not above.exists():
        above = above.parent
    free = shutil.disk_usage(above).free
    settings = trainer.settings
    needed = settings.dim * (len(trainer.corpus.vocabulary) * _BYTES_A_NUMBER.get(suffix, 4) + settings.buckets * 4)
    if needed > free:
        say(
            f"output folder {str(folder.path)!r} has {format_bytes(free)} free but the vectors will take about "
            f"{format_bytes(needed)}; make room before training ends"
        )


def save_or_rescue(folder: OutputFolder, trainer: Trainer, corpus: str, suffix: str) -> None:
    """Write a run into `folder`; where that fails, into a new folder beside the corpus or for temporary files.

    Raises
    ------
    StorageError
        `folder` cannot be written; the message names the place where the vectors are instead.
    """
    try:
        save_run(folder.staging, trainer, corpus, suffix, folder.path)
        folder.commit()
        return
    except OSError as error:
        failure = error
    folder.discard()
    problem = str(failure) if isinstance(failure, StorageError) else _describe(folder.path, failure)
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


def _describe(path: Path, error: OSError) -> str:
    return f"cannot write the vectors to {str(path)!r} ({error.strerror or error})"
