"""The demo: word vectors of the World Factbook (CIA, public domain, CC0), trained with AdamW in a minute or two."""

from __future__ import annotations

import gzip
import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidValueError, format_bytes, printable
from speedtransfer.lazy import MissingPackageError
from speedtransfer.system import program
from speedtransfer.untrusted import MAX_JSON_BYTES, open_file, parse_json
from speedtransfer.word2vec.formats import VECTORS
from speedtransfer.word2vec.output import PICTURE, OutputFolder
from speedtransfer.word2vec.output import SETTINGS as SETTINGS_FILE
from speedtransfer.word2vec.plot import plot
from speedtransfer.word2vec.progress import StopOnSignal, TrainingProgress
from speedtransfer.word2vec.run import Run
from speedtransfer.word2vec.run_folder import save_run
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.trainer import Trainer

CORPUS = "world_factbook.words.txt.gz"
WORDS = ("france", "coffee", "copper", "river", "march", "navy")
NEXT = "analogy {} china chinese france"
# A small corpus: many passes, and a subsampling threshold that leaves it words to learn from. Checked where they are used.
SETTINGS: dict[str, Any] = {"dim": 64, "optimizer": "adamw", "epochs": 25, "sample": 1e-3, "memory": "auto"}


def run_demo(
    output: str | os.PathLike[str], settings: Settings | None = None, show: Callable[[str], None] = print
) -> Trainer:
    """Train on the shipped corpus, write vectors and a picture, and return the trainer.

    Parameters
    ----------
    output : path-like
        Folder; the files of an earlier demo in it are replaced.
    settings : Settings, optional
    show : callable
        Called with each line of the report.

    Raises
    ------
    InvalidValueError
        `output` is a folder with other files in it, such as those of a training run.
    StorageError
        `output` cannot be written.
    """
    settings = settings or Settings(**SETTINGS)
    folder = OutputFolder(output, overwrite=True, only_own=True)
    if folder.path.exists() and os.listdir(folder.path) and not _is_of_demo(folder.path):
        raise InvalidValueError(
            f"output folder {str(folder.path)!r} holds files that are not of a demo; choose another folder"
        )
    corpus = resources.files(__package__).joinpath("corpora", CORPUS)
    with ExitStack() as saving, corpus.open("rb") as packed:
        stop = StopOnSignal()

        def begin(trainer: Trainer) -> None:
            saving.enter_context(stop)
            show(_intention(trainer))

        with TrainingProgress() as progress, gzip.open(packed) as text:
            trainer = Run(settings).train(text, progress, begin)
        vectors, picture = trainer.vectors(), ""

        def save(staging: Path) -> None:
            nonlocal picture
            save_run(staging, trainer, CORPUS)
            try:
                plot(vectors, staging / PICTURE, title="World Factbook: words that occur alike stand together")
                picture = str(folder.path / PICTURE)
            except MissingPackageError as error:
                picture = f"none ({error})"

        folder.fill(save)
        trainer.stop_signal = stop.requested
    show(f"{trainer.words_per_s:,.0f} words/s, {trainer.elapsed_s:.0f} s of training, loss {trainer.loss:.3f} a pair")
    for word in WORDS:
        if word in vectors:
            show(f"  {word:8} -> {', '.join(near for near, _ in vectors.most_similar(word, 6))}")
    to_device, back = trainer.moved_bytes
    show(f"rows moved: {format_bytes(to_device)} to the compute device, {format_bytes(back)} back")
    show(printable(f"vectors: {folder.path / (VECTORS + '.txt')} (gensim: KeyedVectors.load_word2vec_format)"))
    show(printable(f"picture: {picture}"))
    show(printable(f"next: {program()} word2vec {NEXT.format(shlex.quote(str(folder.path)))}"))
    return trainer


def _is_of_demo(folder: Path) -> bool:
    """Return whether the settings in `folder` name the shipped corpus."""
    try:
        with open_file(folder / SETTINGS_FILE) as file:
            facts = parse_json(file.read(MAX_JSON_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and facts.get("corpus") == CORPUS


def _intention(trainer: Trainer) -> str:
    table, settings = trainer.model.input.table, trainer.settings
    return (
        f"World Factbook: {trainer.corpus.num_raw_words:,} words, {len(trainer.corpus.vocabulary):,} in the vocabulary; dim "
        f"{settings.dim}, {trainer.optimizer.__class__.__name__}, {settings.epochs} epochs; two tables and their optimizer "
        f"state in {table.memory} memory, compute on {table.device}"
    )
