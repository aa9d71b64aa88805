"""A corpus of several processes, each of which reads a part: whose files are whose, and how often words occur in all parts."""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from speedtransfer.errors import InvalidValueError
from speedtransfer.ranks import Exchange, Segment
from speedtransfer.word2vec.text import Source, find_files, name_of
from speedtransfer.word2vec.tokenise import WordTable, read_words
from speedtransfer.word2vec.vocabulary import Vocabulary, most_frequent

T = TypeVar("T")
POINT = "reads a corpus"
_WORDS_AT_ONCE = 1 << 18


def in_all(exchange: Exchange | None, do: Callable[[], T], about: Callable[[T], str] = lambda _: "") -> T:
    """Return what `do` returns; raise in all processes where it raises in one, or what it is `about` differs."""
    result: Any = None
    error: Exception | None = None
    try:
        result = do()
    except Exception as raised:
        error = raised
    if exchange is None:
        if error is not None:
            raise error
    else:
        exchange.agree_on_error(POINT, error, "" if error is not None else about(result))
    return result


def own_part(source: Source, exchange: Exchange) -> Source:
    """Return the files that this process reads of those of all, about as many bytes as others; an open file is its own.

    From the largest on each file goes to the process that has the fewest bytes.
    """
    if hasattr(source, "read"):
        return source
    if source == "-":
        raise InvalidValueError("divide is for files but the corpus is '-'; pass a folder or a pattern of files")

    def listed() -> list[tuple[int, str]]:
        return [(-os.stat(file).st_size, str(file)) for file in find_files(source)]

    def digest(files: list[tuple[int, str]]) -> str:
        told = repr([(size, os.path.basename(name)) for size, name in files])
        return f"{len(files)} files to divide, {hashlib.sha256(told.encode()).hexdigest()[:12]}"

    files = in_all(exchange, listed, digest)
    if len(files) < exchange.ranks:
        raise InvalidValueError(
            f"{name_of(source)} has {len(files)} files but {exchange.ranks} processes are to divide them; split them into as "
            "many, or drop divide: then each reads all"
        )
    taken, own = [0] * exchange.ranks, []
    for place in sorted(range(len(files)), key=files.__getitem__):
        rank = taken.index(min(taken))
        taken[rank] -= files[place][0]
        if rank == exchange.rank:
            own.append(place)
    return [files[place][1] for place in sorted(own)]


def count_together(
    words: WordTable, counts: np.ndarray, min_count: int, max_words: int | None, exchange: Exchange
) -> Vocabulary:
    """Choose the words of a model by how often they occur in the parts of all processes; `counts` (len(words),) are of this.

    Each word has an owner, by its hash, who adds its counts up; all get the words that any owner may keep. So a process holds
    the distinct words of its part, its share of those of all, and the vocabulary.
    """
    owners = np.empty(len(words), np.int64)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        some = np.arange(start, min(start + _WORDS_AT_ONCE, len(words)))
        owners[some] = [zlib.crc32(word.encode()) % exchange.ranks for word in words.take(some)]
    order = np.argsort(owners, kind="stable")
    parts = np.split(order, np.searchsorted(owners[order], np.arange(1, exchange.ranks)))
    texts = [_text(words, part) for part in parts]
    sizes = torch.tensor([[len(text), len(part)] for text, part in zip(texts, parts, strict=True)])
    received = exchange.agree(POINT, sizes)
    values = np.frombuffer(b"".join(texts), np.uint8), counts[order]
    segments = [
        Segment(torch.from_numpy(value.copy())[:, None], sizes[:, i].tolist(), received[:, i].tolist())
        for i, value in enumerate(values)
    ]
    mine, sums = _add_up(*exchange.move("control", segments))
    kept = most_frequent(sums, min_count, max_words)
    if len(kept) < 2:
        kept = np.argsort(-sums, kind="stable")[:2]  # for the message of an error
    text = torch.frombuffer(bytearray(_text(mine, kept) or b" "), dtype=torch.uint8)[:, None]
    told = exchange.agree(POINT, [len(text), len(kept), len(mine)])
    texts_of_all = exchange.gather("control", text, told[:, 0].tolist())
    counts_of_all = exchange.gather("control", torch.from_numpy(sums[kept])[:, None], told[:, 1].tolist())
    union, totals = _add_up(texts_of_all, counts_of_all)
    return Vocabulary.choose(totals, union.take, min_count, max_words, int(told[:, 2].sum()))


def _text(words: WordTable, numbers: np.ndarray) -> bytes:
    """Return the words with these numbers, a space after each."""
    parts = np.split(numbers, range(_WORDS_AT_ONCE, len(numbers), _WORDS_AT_ONCE))
    return b"".join("".join(f"{word} " for word in words.take(part)).encode() for part in parts)


def _add_up(text: torch.Tensor, counts: torch.Tensor) -> tuple[WordTable, np.ndarray]:
    """Return the distinct words of a text (bytes, 1), and the sums of the counts (words, 1) that stand for its words."""
    numbers = [np.empty(0, np.int32)]
    words = read_words(io.BytesIO(text.numpy().tobytes()), numbers.append)
    sums = np.zeros(len(words), np.int64)
    np.add.at(sums, np.concatenate(numbers), counts[:, 0].numpy())
    return words, sums
