"""What bench/word2vec.py asks vectors: sets of word pairs and of analogies, those that settings were chosen on and others."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from needs import DataError
from word2vec_data import ANALOGIES, PAIRS, bases

# What the settings of the package were chosen on says little about them elsewhere. A set must never move from RESERVED to
# TUNED without a word: from then on it is no longer evidence.
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
