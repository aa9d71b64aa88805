"""The demo: word vectors of the World Factbook (CIA, public domain, CC0), trained with AdamW in a minute or two."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from speedtransfer.errors import InvalidValueError, printable
from speedtransfer.lazy import MissingPackageError
from speedtransfer.system import program
from speedtransfer.untrusted import MAX_JSON_BYTES, open_file, parse_json
from speedtransfer.word2vec.formats import PICTURE
from speedtransfer.word2vec.formats import SETTINGS as SETTINGS_FILE
from speedtransfer.word2vec.plot import plot
from speedtransfer.word2vec.run_folder import OutputFolder, train_into
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.vectors import Vectors

CORPUS = "world_factbook.words.txt.gz"
WORDS = ("france", "coffee", "copper", "river", "march", "navy")
NEXT = "analogy {} china chinese france"
# A small corpus: many passes, and a subsampling threshold that leaves it words to learn from. Checked where they are used.
SETTINGS: dict[str, Any] = {"dim": 64, "optimizer": "adamw", "epochs": 25, "sample": 1e-3, "memory": "auto"}


def run_demo(
    output: str | os.PathLike[str], settings: Settings | None = None, show: Callable[[str], None] = print
) -> int | None:
    """Train on the shipped corpus, write vectors and a picture; return the signal that stopped it early, if one did.

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
    settings, folder = settings or Settings(**SETTINGS), OutputFolder(output, overwrite=True, only_own=True).path
    if folder.exists() and os.listdir(folder) and not _is_of_demo(folder):
        raise InvalidValueError(
            f"output folder {str(folder)!r} holds files that are not of a demo; choose another folder"
        )
    show(f"World Factbook: dim {settings.dim}, {settings.optimizer}, {settings.epochs} epochs")
    with resources.as_file(resources.files(__package__).joinpath("corpora", CORPUS)) as corpus:
        stop_signal = train_into(folder, str(corpus), settings, overwrite=True, show=show)
    vectors, picture = Vectors.load(folder), str(folder / PICTURE)
    for word in WORDS:
        if word in vectors:
            show(f"  {word:8} -> {', '.join(near for near, _ in vectors.most_similar(word, 6))}")
    try:
        plot(vectors, picture, title="World Factbook: words that occur alike stand together")
    except MissingPackageError as error:
        picture = f"none ({error})"
    show(printable(f"picture: {picture}"))
    show(printable(f"next: {program()} word2vec {NEXT.format(shlex.quote(str(folder)))}"))
    return stop_signal


def _is_of_demo(folder: Path) -> bool:
    """Return whether the settings in `folder` name the shipped corpus."""
    try:
        with open_file(folder / SETTINGS_FILE) as file:
            facts = parse_json(file.read(MAX_JSON_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and os.path.basename(str(facts.get("corpus"))) == CORPUS
