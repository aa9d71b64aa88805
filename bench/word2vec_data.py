"""What bench/word2vec.py trains on and evaluates with: corpora with the settings of each, word pairs and analogies."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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

    All `models` and our `optimizers` are trained in the first of `dims`, only the first of each in the others; `seeds` are
    runs of each: 1, 2, ... Of each corpus only the first `words`, if given. Analogies are evaluated among the `restrict` most
    frequent words.
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
    """Settings for a corpus of some size, the same for gensim; `analogies`: whether it is large enough for them."""

    epochs: int = 5
    min_count: int = 5
    sample: float = 1e-4
    analogies: bool = True


# All other corpora have the defaults above.
OWN_SETTINGS = {SHIPPED.name: CorpusSettings(epochs=25, min_count=5, sample=1e-3, analogies=False)}


def _find(folder: Path | None, below: str, names: Sequence[str], option: str) -> Path:
    """Return the first of `names` that is a file in `folder`, or in its folder `below`."""
    for base in (folder / below, folder) if folder is not None else ():
        if found := next((base / name for name in names if (base / name).is_file()), None):
            return found
    where = f"there is no {below}/{names[0]} in {str(folder or '')!r}"
    raise DataError(f"{where}; name the folder that has it with --data, or others with {option}")


def _check_names(paths: list[Path], what: str) -> None:
    for number, path in enumerate(paths):
        if not path.is_file():
            raise DataError(f"there is no {what} {str(path)!r}; check the path")
        if path.name in (other.name for other in paths[:number]):
            raise DataError(f"two files are called {path.name!r}; name each {what} once, or rename a file")


def find_corpora(folder: Path | None, named: Iterable[Path] | None) -> list[Path]:
    """Return the corpora: `named` ones, or that of `folder` and the one that is shipped with the package."""
    if named is None:
        named = [_find(folder, "corpora", [CORPUS + ending for ending in _ENDINGS], "--corpus"), SHIPPED]
    paths = list(named)
    _check_names(paths, "corpus")
    return paths


def prepare(corpus: Path, target: Path, words: int | None = None) -> dict[str, Any]:
    """Write the first `words` of `corpus` to `target` in lines of `LINE_WORDS`; return facts about them."""
    count, content = 0, hashlib.sha256()
    try:
        with target.open("wb") as out:
            left = itertools.islice(_words(corpus), words)
            while line := list(itertools.islice(left, LINE_WORDS)):
                count += len(line)
                data = " ".join(line).encode() + b"\n"
                content.update(data)
                out.write(data)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise DataError(f"cannot read {str(corpus)!r} ({error}); it must be text in UTF-8") from error
    if not count:
        raise DataError(f"{str(corpus)!r} holds no words; pass a corpus with text in it")
    return {"name": corpus.name, "words": count, "sha256": content.hexdigest()}


def _words(corpus: Path) -> Iterator[str]:
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(corpus.suffix, open)
    rest = ""
    with opener(corpus, "rt", encoding="utf-8") as file:
        while text := file.read(_READ):
            text = rest + text
            some = text.split()
            # A word may go on in what is read next.
            rest = some.pop() if some and not text[-1].isspace() else ""
            yield from some
    if rest:
        yield rest


# --- evaluation sets ------------------------------------------------------------------------------------------------------


# Sets on which settings of the package were chosen are weak evidence for other data. A set that moves from RESERVED to TUNED
# is no longer evidence: never do that silently.
TUNED, RESERVED = "tuned", "reserved"
SETS = {
    "EN-WS-353-ALL.txt": ("WS-353", TUNED),
    "EN-RG-65.txt": ("RG-65", TUNED),
    "EN-MTurk-287.txt": ("MTurk-287", TUNED),
    "questions-words.txt": ("analogies", TUNED),
    "EN-SIMLEX-999.txt": ("SimLex-999", RESERVED),
    "EN-RW-STANFORD.txt": ("RW", RESERVED),
}


class EvaluationSet(NamedTuple):
    """A file of questions, and whether settings were chosen on it."""

    name: str
    kind: str
    group: str
    path: Path


def find_sets(folder: Path | None, named: Iterable[Path] | None) -> list[EvaluationSet]:
    """Return the sets, tuned ones first: `named` ones, or all of `folder`; one with another name than ours is reserved.

    A line that is no pair with its score, and no analogy, is an error: gensim would skip it.
    """
    from speedtransfer.word2vec.evaluation import SimilaritySet, load_set

    if named is None:
        named = [_find(folder, "wordsim", [file], "--sets") for file in SETS]
    paths = list(named)
    _check_names(paths, "set")
    sets = []
    for path in paths:
        name, group = SETS.get(path.name, (path.stem, RESERVED))
        kind = PAIRS if isinstance(load_set(path), SimilaritySet) else ANALOGIES
        sets.append(EvaluationSet(name, kind, group, path))
    return sorted(sets, key=lambda found: found.group != TUNED)
