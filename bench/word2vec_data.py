"""What bench/word2vec.py trains on and evaluates with: corpora with the settings of each, word pairs and analogies."""

from __future__ import annotations

import gzip
import hashlib
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from experiment import DataError
from store import ROOT

CORPUS = "schools_wiki_2007"
SHIPPED = ROOT / "speedtransfer" / "word2vec" / "corpora" / "world_factbook.words.txt.gz"
_ENDINGS = (".text8.xz", ".text8", ".text8.gz", ".txt", ".txt.xz", ".txt.gz")
PAIRS, ANALOGIES = "pairs", "analogies"  # kinds of sets
PARTS = ("semantic", "syntactic")  # of analogies
MODELS = ("skipgram", "cbow")
LINE_WORDS = 1000  # gensim's workers share out a corpus by lines, and cut one of more than 10,000 words
WARM_WORDS = 20_000
_READ = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What is trained, by whom and how: the same for gensim, except for the optimizers, and on every corpus.

    Attributes
    ----------
    dims : tuple of int
    optimizers : tuple of str
        Ours.
    models : tuple of str
        Of `MODELS`. All models and optimizers are trained in the first of `dims`, only the first of each in the others.
    seeds : int
        Runs of each: seeds 1, 2, ...
    window, negative : int
    words : int, optional
        Only the first of each corpus.
    restrict : int
        Analogies are evaluated among so many of the most frequent words.
    """

    dims: tuple[int, ...] = (100, 300)
    optimizers: tuple[str, ...] = ("adamw", "adamax", "adagrad", "sgd")
    models: tuple[str, ...] = MODELS
    seeds: int = 3
    window: int = 5
    negative: int = 5
    words: int | None = None
    restrict: int = 30_000


class CorpusSettings(NamedTuple):
    """Settings for a corpus of some size, the same for gensim.

    Attributes
    ----------
    epochs, min_count : int
    sample : float
        Threshold of subsampling.
    analogies : bool
        Whether the corpus is large enough for analogies to be meaningful.
    """

    epochs: int = 5
    min_count: int = 5
    sample: float = 1e-4
    analogies: bool = True


# All other corpora have the defaults above.
OWN_SETTINGS = {SHIPPED.name: CorpusSettings(epochs=25, min_count=5, sample=1e-3, analogies=False)}


class Corpus(NamedTuple):
    """A text and the settings it is trained with."""

    path: Path
    settings: CorpusSettings


def find_corpora(folder: Path | None, named: Iterable[Path] | None, epochs: int | None = None) -> list[Corpus]:
    """Return the corpora: `named` ones, or that of `folder` and the one that is shipped with the package.

    Raises
    ------
    DataError
        One is not there.
    """
    if named is None:
        places = [base / (CORPUS + ending) for base in bases(folder, "corpora") for ending in _ENDINGS]
        found = next((path for path in places if path.is_file()), None)
        if found is None:
            raise DataError(
                f"there is no corpora/{CORPUS}.text8.xz (or .txt) in {str(folder or '')!r}; name the folder that has it "
                "with --data, or other texts with --corpus"
            )
        named = [found, SHIPPED]
    corpora: list[Corpus] = []
    for path in named:
        if not path.is_file():
            raise DataError(f"there is no corpus {str(path)!r}; pass a text file, packed (.xz, .gz) or not")
        if path.name in (corpus.path.name for corpus in corpora):
            raise DataError(f"two corpora are called {path.name!r}; name each once, or rename a file")
        settings = OWN_SETTINGS.get(path.name, CorpusSettings())
        corpora.append(Corpus(path, settings if epochs is None else settings._replace(epochs=epochs)))
    return corpora


def bases(folder: Path | None, below: str) -> list[Path]:
    """Return where the files of `folder` may lie."""
    return [] if folder is None else [folder / below, folder]


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


# --- evaluation sets ------------------------------------------------------------------------------------------------------


# Sets on which settings of the package were chosen are weak evidence for other data. A set that moves from RESERVED to TUNED
# is no longer evidence: never do that silently.
TUNED, RESERVED = "tuned", "reserved"
SETS = {
    TUNED: {
        "WS-353": "EN-WS-353-ALL.txt",
        "RG-65": "EN-RG-65.txt",
        "MTurk-287": "EN-MTurk-287.txt",
        "analogies": "questions-words.txt",
    },
    RESERVED: {"SimLex-999": "EN-SIMLEX-999.txt", "RW": "EN-RW-STANFORD.txt"},
}


class EvaluationSet(NamedTuple):
    """A file of questions, and whether settings were chosen on it."""

    name: str
    kind: str
    group: str
    path: Path


def find_sets(folder: Path | None, named: Iterable[Path] | None) -> list[EvaluationSet]:
    """Return the sets, tuned ones first: `named` ones, or all of `folder`; one with another name than ours is reserved.

    Raises
    ------
    DataError
        One is not there or has another format.
    """
    known = {file: (name, group) for group, files in SETS.items() for name, file in files.items()}
    if named is None:
        named = []
        for file in known:
            found = next((path for base in bases(folder, "wordsim") if (path := base / file).is_file()), None)
            if found is None:
                raise DataError(
                    f"there is no wordsim/{file} in {str(folder or '')!r}; name the folder that has it with --data, or "
                    "other sets with --sets"
                )
            named.append(found)
    sets: list[EvaluationSet] = []
    for path in named:
        name, group = known.get(path.name, (path.stem, RESERVED))
        if name in (other.name for other in sets):
            raise DataError(f"two sets are called {name!r}; name each once, or rename a file")
        sets.append(EvaluationSet(name, _check(path), group, path))
    return sorted(sets, key=lambda found: [*SETS].index(found.group))


def _check(path: Path) -> str:
    """Return the kind of the set at `path`, after checking every line: gensim would skip what it cannot read."""
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
