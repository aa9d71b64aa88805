"""File formats of word vectors, by suffix, and the names of the files of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors

from speedtransfer.errors import InvalidValueError, StorageError, describe_ending
from speedtransfer.lazy import import_extra
from speedtransfer.system import replace_file
from speedtransfer.tables import files, tensor_of
from speedtransfer.untrusted import check_file, only_storage_errors
from speedtransfer.word2vec import formats_text
from speedtransfer.word2vec.formats_text import Stored, encode

VECTORS = "vectors"  # the file of a run without its suffix
NGRAMS = "ngrams.safetensors"  # the file beside it
VOCABULARY = "vocab.txt"
SETTINGS = "settings.json"
PICTURE = "words.png"


class Format(NamedTuple):
    """How to write and read one kind of file: by a path, and how many words to stop after, if any."""

    write: Callable[[Path, Stored], None]
    read: Callable[[Path, int | None], Stored]


def import_gensim() -> Any:
    """Return gensim's module of `KeyedVectors`. Raises MissingPackageError where gensim is not installed."""
    return import_extra("gensim.models.keyedvectors", "KeyedVectors and .kv files", "gensim")


def to_keyed_vectors(stored: Stored) -> Any:
    """Return `KeyedVectors` over the same memory (float32); counts are its attribute "count"."""
    words, matrix, counts = stored
    keyed = import_gensim().KeyedVectors(matrix.shape[1])
    # Set at once: `add_vectors` copies the matrix and goes through the words one by one.
    keyed.index_to_key = list(words)
    keyed.key_to_index = {word: row for row, word in enumerate(words)}
    keyed.vectors = matrix[:]  # all, where it is that of several processes
    keyed.next_index = len(words)
    if counts is not None:
        keyed.expandos["count"] = counts.copy()
    return keyed


def write_safetensors(path: Path, stored: Stored) -> None:
    """Write the tensors `vectors`, `word_ends`, `words` and, where there are counts, `counts`."""
    encoded = [encode(word) for word in stored.words]
    arrays = {"vectors": stored.matrix[:], "word_ends": np.cumsum([len(word) for word in encoded], dtype=np.int64)}
    if stored.counts is not None:
        arrays["counts"] = stored.counts
    arrays["words"] = np.frombuffer(b"".join(encoded), np.uint8)
    tensors = [files.in_chunks(name, tensor_of(array)) for name, array in arrays.items()]
    files.write(path, tensors, {"format": "speedtransfer word vectors 1"})


def read_safetensors(path: Path, max_words: int | None = None) -> Stored:
    """Read what `write` wrote; the matrix is mapped, not read. Raises StorageError where it is damaged."""
    matrix, _ = files.open_mapped(path, writable=False, key="vectors")
    with only_storage_errors(path, "a file of word vectors"):
        with safetensors.safe_open(path, framework="np") as file:
            ends = file.get_tensor("word_ends")
            data = file.get_tensor("words").tobytes()
            counts = file.get_tensor("counts") if "counts" in file.keys() else None  # noqa: SIM118 (no mapping)
        if ends.ndim != 1 or ends.dtype != np.int64 or (np.diff(ends, prepend=0) < 0).any():
            raise ValueError("word_ends are no rising positions")
        if len(data) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"the words take {len(data)} bytes but end elsewhere")
        words = [data[start:end].decode() for start, end in itertools.pairwise([0, *ends.tolist()])]
    if len(words) != len(matrix):
        raise StorageError(f"{str(path)!r} holds {len(words)} words but {len(matrix)} vectors; get the file again")
    return Stored(words, matrix.numpy(), counts).first(max_words)


def write_gensim(path: Path, stored: Stored) -> None:
    """Write one file, without the .npy files that gensim puts beside large ones when it is given a name."""
    keyed = to_keyed_vectors(stored)
    with replace_file(path) as file:
        keyed.save(file)


def read_gensim(path: Path, max_words: int | None = None) -> Stored:
    """Read what gensim saved: `KeyedVectors`, or a model that has them as `wv`. Raises StorageError where it cannot."""
    gensim = import_gensim()
    with only_storage_errors(path, "a file of gensim's KeyedVectors"):
        check_file(path)
        keyed = gensim.utils.SaveLoad.load(str(path))
        keyed = getattr(keyed, "wv", keyed)
        words, counts = list(keyed.index_to_key), keyed.expandos.get("count")
        if not all(isinstance(word, str) for word in words):
            raise ValueError("its keys are no words")
        return Stored(words, keyed.vectors, None if counts is None else np.asarray(counts)).first(max_words)


_PICKLED = ".kv"
_PACKED = ".txt", ".vec", ".bin", ".glove"  # also read from a .gz file
FORMATS = {
    ".txt": Format(formats_text.write_text, formats_text.read_text),
    ".vec": Format(formats_text.write_text, formats_text.read_text),
    ".bin": Format(formats_text.write_binary, formats_text.read_binary),
    ".safetensors": Format(write_safetensors, read_safetensors),
    ".glove": Format(partial(formats_text.write_text, header=False), formats_text.read_text),
    _PICKLED: Format(write_gensim, read_gensim),
}
OWN_FILES = frozenset({VOCABULARY, SETTINGS, PICTURE, NGRAMS, *(VECTORS + suffix for suffix in FORMATS)})
# Folders within that of a run: its state, the files of memory "mmap", TensorBoard's.
CHECKPOINT, TABLES, BOARD = "checkpoint", "tables", "tensorboard"
OWN_FOLDERS = frozenset({CHECKPOINT, TABLES, BOARD})


def find_format(path: Path, reading: bool = False) -> Format:
    """Return the format of the suffix of `path`; raise where there is none, or a package for it is missing."""
    packed = path.suffix == ".gz"
    suffix = Path(path.stem).suffix if packed else path.suffix
    if suffix not in FORMATS:
        raise InvalidValueError(f"{str(path)!r} {describe_ending(path)} but vectors are {', '.join(FORMATS)}; use one")
    if packed and not (reading and suffix in _PACKED):
        raise InvalidValueError(
            f"{str(path)!r} ends in '.gz', which is only read, and only of {', '.join(_PACKED)}; drop .gz"
        )
    if suffix == _PICKLED:
        import_gensim()
    return FORMATS[suffix]


def find_vectors(path: str | os.PathLike[str]) -> Path:
    """Return the vector file that `path` means, itself or the one in the folder of a run; raise where there is none.

    A pickle is opened only where it is named itself: whoever names a folder need not know what it holds.
    """
    path = Path(path)
    if not path.exists() and path.suffix not in (*FORMATS, ".gz"):
        raise StorageError(f"{str(path)!r} does not exist; pass a file of vectors, or the folder of a run")
    if not path.is_dir():
        return path
    suffixes = [suffix for suffix in FORMATS if suffix != _PICKLED]
    for file in (path / (VECTORS + suffix) for suffix in suffixes):
        if file.exists():
            return file
    raise StorageError(
        f"folder {str(path)!r} holds no {VECTORS} file ({', '.join(suffixes)}); pass the file itself, which for {_PICKLED}, a "
        "pickle that can run any code, must be one that you trust"
    )
