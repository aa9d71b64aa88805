"""What bench/word2vec.py trains on and asks: the corpus in lines of words, and the sets of word pairs and of analogies."""

from __future__ import annotations

import gzip
import hashlib
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

CORPUS = "schools_wiki_2007"
_ENDINGS = (".text8.xz", ".text8", ".text8.gz", ".txt", ".txt.xz", ".txt.gz")
SETS = {
    "WS-353": "EN-WS-353-ALL.txt",
    "RG-65": "EN-RG-65.txt",
    "MTurk-287": "EN-MTurk-287.txt",
    "analogies": "questions-words.txt",
}
PAIRS, ANALOGIES = "pairs", "analogies"  # kinds of sets
PARTS = ("semantic", "syntactic")  # of analogies
LINE_WORDS = 1000  # gensim's workers share out a corpus by lines, and cut one of more than 10,000 words
WARM_WORDS = 20_000
_READ = 1 << 20


class DataError(ValueError):
    """The data are not there, or not as they must be."""


@dataclass(frozen=True)
class Settings:
    """What is trained, by whom and how; the same for all, but for the optimizers, which gensim has no choice of.

    Attributes
    ----------
    dims : tuple of int
    optimizers : tuple of str
        Ours: all of them in the first of `dims`, only the first in the others.
    seeds : int
        Runs of each: seeds 1, 2, ...
    epochs, window, negative, min_count : int
    sample : float
        Threshold of subsampling.
    words : int, optional
        Only the first of the corpus.
    restrict : int
        Analogies are asked of so many of the most frequent words.
    """

    dims: tuple[int, ...] = (100, 300)
    optimizers: tuple[str, ...] = ("adamw", "adamax", "adagrad", "sgd")
    seeds: int = 3
    epochs: int = 5
    window: int = 5
    negative: int = 5
    min_count: int = 5
    sample: float = 1e-4
    words: int | None = None
    restrict: int = 30_000


class EvaluationSet(NamedTuple):
    """A file of questions."""

    name: str
    kind: str
    path: Path


def find_corpus(folder: Path | None, named: Path | None) -> Path:
    """Return the corpus: `named`, or that of `folder`.

    Raises
    ------
    DataError
        It is not there.
    """
    if named is not None:
        if not named.is_file():
            raise DataError(f"there is no corpus {str(named)!r}; pass a text file, packed (.xz, .gz) or not")
        return named
    places = [base / (CORPUS + ending) for base in _bases(folder, "corpora") for ending in _ENDINGS]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise DataError(
            f"there is no corpora/{CORPUS}.text8.xz (or .txt) in {str(folder or '')!r}; name the folder that has it "
            "with --data, or another text with --corpus"
        )
    return found


def find_sets(folder: Path | None, named: Iterable[Path] | None) -> list[EvaluationSet]:
    """Return the sets: `named` ones, or the four of `folder`.

    Raises
    ------
    DataError
        One is not there or has another format.
    """
    if named is None:
        named = []
        for file in SETS.values():
            found = next((path for base in _bases(folder, "wordsim") if (path := base / file).is_file()), None)
            if found is None:
                raise DataError(
                    f"there is no wordsim/{file} in {str(folder or '')!r}; name the folder that has it with --data, or "
                    "other sets with --sets"
                )
            named.append(found)
    names = {file: name for name, file in SETS.items()}
    sets = [EvaluationSet(names.get(path.name, path.stem), _check(path), path) for path in named]
    twice = next((s.name for i, s in enumerate(sets) if s.name in [other.name for other in sets[:i]]), None)
    if twice is not None:
        raise DataError(f"two sets are called {twice!r}; name each once, or rename a file")
    return sets


def _bases(folder: Path | None, below: str) -> list[Path]:
    return [] if folder is None else [folder / below, folder]


def _check(path: Path) -> str:
    """Return the kind of the set at `path`, every line of which has been looked at: gensim would skip what it cannot read."""
    number, kind, questions = 0, "", 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007
                if not line.strip() or line.startswith("#"):
                    continue
                kind = kind or (ANALOGIES if line.startswith(":") else PAIRS)
                if kind == PAIRS:
                    _, _, score = line.split("\t")
                    float(score)
                elif line.startswith(":"):
                    continue
                elif len(line.split()) != 4:
                    raise ValueError(f"{len(line.split())} words, not 4")
                questions += 1
    except FileNotFoundError:
        raise DataError(f"there is no set {str(path)!r}; check --sets") from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read line {max(number, 1)} of {str(path)!r} ({error}); it must have lines of word, word and score "
            'between tabs, or ": section" and then lines of four words'
        ) from error
    if not questions:
        raise DataError(f"{str(path)!r} asks nothing; it must have pairs of words with scores, or analogies")
    return kind


def prepare(corpus: Path, target: Path, words: int | None = None) -> dict[str, Any]:
    """Write the first `words` of `corpus` to `target` in lines of `LINE_WORDS`; return facts about them.

    Raises
    ------
    DataError
        The corpus cannot be read, or has no word.
    """
    count, content = 0, hashlib.sha256()
    try:
        with target.open("wb") as out:
            for line in _lines(corpus, words):
                count += len(line)
                data = " ".join(line).encode() + b"\n"
                content.update(data)
                out.write(data)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {str(corpus)!r} ({error}); it must be text in UTF-8") from error
    if not count:
        raise DataError(f"{str(corpus)!r} holds no words; pass a corpus with text in it")
    return {"name": corpus.name, "words": count, "sha256": content.hexdigest()}


def _lines(corpus: Path, words: int | None) -> Iterator[list[str]]:
    waiting: list[str] = []
    left = words
    with _open(corpus) as file:
        for some in _words(file):
            waiting += some if left is None else some[:left]
            left = None if left is None else left - min(left, len(some))
            whole = len(waiting) - len(waiting) % LINE_WORDS
            yield from (waiting[first : first + LINE_WORDS] for first in range(0, whole, LINE_WORDS))
            del waiting[:whole]
            if left == 0:
                break
    if waiting:
        yield waiting


def _words(file: IO[str]) -> Iterator[list[str]]:
    rest = ""
    while text := file.read(_READ):
        text = rest + text
        words = text.split()
        rest = words.pop() if words and not text[-1].isspace() else ""
        yield words
    if rest:
        yield [rest]


def _open(path: Path) -> IO[str]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    file: IO[str] = opener(path, "rt", encoding="utf-8")
    return file
