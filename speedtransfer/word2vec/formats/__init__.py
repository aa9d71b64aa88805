"""The files that hold word vectors: word2vec text and binary, GloVe text, safetensors, gensim's own.

Each format is a module with `write` and `read`; the suffix of a path chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec.formats import binary, native, safe, text
from speedtransfer.word2vec.formats.common import Stored

__all__ = ["FORMATS", "Format", "Stored", "find_format"]


class Writer(Protocol):
    """Writes words, float32 vectors of shape (num_words, dim) and, where the format has a place for them, counts."""

    def __call__(self, path: Path, words: Sequence[str], matrix: np.ndarray, counts: np.ndarray | None) -> None: ...


class Format(NamedTuple):
    """How to write and read one kind of file; `read` takes the path and, if not None, how many words to stop after."""

    write: Writer
    read: Callable[[Path, int | None], Stored]
    check: Callable[[], object] = lambda: None  # raises where a package is missing
    packed: bool = True  # may be read from a .gz file


_TEXT = Format(text.write, text.read)
FORMATS = {
    ".txt": _TEXT,
    ".vec": _TEXT,
    ".bin": Format(binary.write, binary.read),
    ".safetensors": Format(safe.write, safe.read, packed=False),
    ".glove": Format(text.write_glove, text.read),
    ".kv": Format(native.write, native.read, native.check, packed=False),
}


def find_format(path: Path, reading: bool = False) -> Format:
    """Return the format that the suffix of `path` names.

    Raises
    ------
    InvalidValueError
        The suffix names none; or it ends in .gz and is not one to read, or of no format that may be packed.
    MissingPackageError
        The format needs a package that is not installed.
    """
    packed = path.suffix == ".gz"
    suffix = Path(path.stem).suffix if packed else path.suffix
    if suffix not in FORMATS:
        raise InvalidValueError(
            f"{str(path)!r} ends in {path.suffix!r} but vectors are {', '.join(FORMATS)}; use one of these endings"
        )
    found = FORMATS[suffix]
    if packed and not (reading and found.packed):
        packable = ", ".join(name for name, format in FORMATS.items() if format.packed)
        raise InvalidValueError(
            f"{str(path)!r} ends in '.gz', which is only read, and only of {packable}; use a path without .gz"
        )
    found.check()
    return found
