"""A run in TensorBoard: curves as it goes on, and the frequent words for the projector at its end."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speedtransfer.errors import StorageError
from speedtransfer.word2vec.extras import MissingPackageError
from speedtransfer.word2vec.output import check_writable
from speedtransfer.word2vec.trainer import Trainer

LOG_EVERY_S = 2.0  # five figures take a third of a millisecond
PROJECTOR_WORDS = 5000


class TensorBoard:
    """Writes what a trainer does to a folder that ``tensorboard --logdir`` shows.

    Making it writes nothing; entering begins.

    Parameters
    ----------
    path : path-like
        The folder, made if missing. Runs in folders beside each other are shown together.

    Raises
    ------
    MissingPackageError
        tensorboard is not installed.
    StorageError
        `path` is a file, or a folder that cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._writer_class = _import_writer()
        self._writer: Any = None
        self._say: Callable[[str], None] = print
        self._last_log, self._words_before, self._seconds_before = float("-inf"), 0.0, 0.0
        check_writable(self.path, "TensorBoard's files")

    def begin(self, trainer: Trainer, say: Callable[[str], None]) -> None:
        """Open the files; what a run that is resumed had logged beyond `trainer.step` is hidden.

        Where they can no longer be written, as on a full disk, `say` gets a line and training goes on without them.
        """
        self._say = say
        try:
            self._writer = self._writer_class(str(self.path), purge_step=trainer.step + 1 if trainer.step else None)
        except OSError as error:
            raise StorageError(
                f"cannot write TensorBoard's files to {str(self.path)!r} ({error.strerror}); choose another folder"
            ) from error
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
            self._say(
                f"TensorBoard's files in {str(self.path)!r} end here ({error.strerror or error}); training goes on"
            )

    def after_step(self, trainer: Trainer) -> None:  # noqa: D102 (Watcher)
        now = time.monotonic()
        if now - self._last_log >= LOG_EVERY_S or trainer.step == trainer.num_steps:
            self._last_log = now
            self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        words, seconds = trainer.words_done - self._words_before, trainer.elapsed_s - self._seconds_before
        self._words_before, self._seconds_before = trainer.words_done, trainer.elapsed_s
        bytes_in, bytes_out = trainer.moved_bytes
        figures = {
            "train/loss": trainer.loss,
            "train/lr": trainer.lr,
            "train/words_per_s": words / max(seconds, 1e-9),
            "rows/bytes_in": bytes_in,
            "rows/bytes_out": bytes_out,
        }
        for tag, value in figures.items():
            self._write("add_scalar", tag, value, trainer.step)

    def note_evaluation(self, name: str, figures: dict[str, float], step: int) -> None:
        """Log figures of the set called `name`."""
        for what, value in figures.items():
            self._write("add_scalar", f"evaluation/{name}/{what}", value, step)

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


def _import_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingPackageError(
            'curves need tensorboard, which is not installed; run: pip install "speedtransfer[tensorboard]"'
        ) from error
    return SummaryWriter
