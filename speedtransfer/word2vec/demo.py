"""The demo: word vectors of the World Factbook (CIA, public domain, CC0), trained with AdamW in a minute or two."""

from __future__ import annotations

import shlex
from importlib import resources
from pathlib import Path
from typing import Any

from speedtransfer.errors import printable
from speedtransfer.lazy import MissingPackageError
from speedtransfer.system import program
from speedtransfer.word2vec.formats import PICTURE
from speedtransfer.word2vec.plot import plot
from speedtransfer.word2vec.run_folder import train_into
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.vectors import Vectors

CORPUS = "world_factbook.words.txt.gz"
WORDS = ("france", "coffee", "copper", "river", "march", "navy")
NEXT = "analogy {} china chinese france"
# A small corpus: many passes, and a subsampling threshold that leaves it words to learn from.
SETTINGS: dict[str, Any] = {"dim": 64, "optimizer": "adamw", "epochs": 25, "sample": 1e-3, "memory": "auto"}


def run_demo(output: Path, overwrite: bool = False, settings: Settings | None = None, show: Any = print) -> int | None:
    """Train on the shipped corpus, write vectors and a picture; return the signal that stopped it early, if one did.

    `show` is called with each line of the report.
    """
    settings = settings or Settings(**SETTINGS)
    with resources.as_file(resources.files(__package__).joinpath("corpora", CORPUS)) as corpus:
        stop_signal = train_into(output, str(corpus), settings, overwrite=overwrite, show=show)
    show(f"World Factbook: dim {settings.dim}, {settings.optimizer}, {settings.epochs} epochs")
    vectors, picture = Vectors.load(output), str(output / PICTURE)
    for word in WORDS:
        if word in vectors:
            show(f"  {word:8} -> {', '.join(near for near, _ in vectors.most_similar(word, 6))}")
    try:
        plot(vectors, picture, title="World Factbook: words that occur alike stand together")
    except MissingPackageError as error:
        picture = f"none ({error})"
    show(printable(f"picture: {picture}"))
    show(printable(f"next: {program()} word2vec {NEXT.format(shlex.quote(str(output)))}"))
    return stop_signal
