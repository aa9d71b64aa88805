"""Sets to evaluate vectors with: pairs of words that people scored for similarity, and analogy questions."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from speedtransfer.errors import StorageError

Question = tuple[str, str, str, str]


@dataclass(frozen=True)
class SimilaritySet:
    """Pairs of words and how similar people found them.

    Attributes
    ----------
    name : str
    pairs : tuple of (str, str)
    scores : tuple of float
        One a pair, on any scale.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class AnalogySet:
    """Questions "a is to b as c is to d", by section.

    Attributes
    ----------
    name : str
    sections : tuple of (str, tuple of (str, str, str, str))
        Name and questions of each, in the order of the file.
    """

    name: str
    sections: tuple[tuple[str, tuple[Question, ...]], ...]


def load_set(path: str | os.PathLike[str]) -> SimilaritySet | AnalogySet:
    """Read a set of either kind; its first line tells which.

    Similarity: ``word word score`` a line, separated by tabs or, in lines without one, by white space. Analogies, as in
    Google's questions-words.txt (Mikolov et al. 2013): ``: section`` lines, each followed by lines of four words. Blank lines
    and lines that begin with ``#`` are passed over.

    Raises
    ------
    StorageError
        The file is missing, is no text, or a line of it is neither; the message names the line and what it should be.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(f"{str(path)!r} is no UTF-8 text ({error}); pass a text file") from None
    except OSError as error:
        raise StorageError(f"cannot read {str(path)!r} ({error.strerror}); check the path") from error
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1)]
    lines = [(number, line) for number, line in lines if line.strip() and not line.startswith("#")]
    if not lines:
        raise StorageError(f"{str(path)!r} holds no lines to evaluate with; pass a set of word pairs or of analogies")
    if lines[0][1].startswith(":") or (len(lines[0][1].split()) == 4 and "\t" not in lines[0][1]):
        return _parse_analogies(path, lines)
    return _parse_pairs(path, lines)


def _malformed(path: Path, number: int, line: str, expected: str) -> StorageError:
    shown = line if len(line) <= 60 else line[:57] + "..."
    return StorageError(
        f"line {number} of {str(path)!r} is {shown!r} but must be {expected}; fix it, or put # before it"
    )


def _parse_pairs(path: Path, lines: list[tuple[int, str]]) -> SimilaritySet:
    expected = "'word word score', as lines of a similarity set are (an analogy set begins with ': section')"
    pairs, scores = [], []
    for number, line in lines:
        fields = [field.strip() for field in (line.split("\t") if "\t" in line else line.split())]
        try:
            first, second, score = fields
            scores.append(float(score))
        except ValueError:
            raise _malformed(path, number, line, expected) from None
        if not (first and second and math.isfinite(scores[-1])):
            raise _malformed(path, number, line, expected)
        pairs.append((first, second))
    return SimilaritySet(path.stem, tuple(pairs), tuple(scores))


def _parse_analogies(path: Path, lines: list[tuple[int, str]]) -> AnalogySet:
    sections: list[tuple[str, list[Question]]] = []
    for number, line in lines:
        fields = line.split()
        if fields[0] == ":" and len(fields) > 1:
            sections.append((" ".join(fields[1:]), []))
        elif not sections:
            raise _malformed(path, number, line, "': section', as the first line of an analogy set is")
        elif len(fields) != 4:
            raise _malformed(path, number, line, "four words or ': section', as lines of an analogy set are")
        else:
            sections[-1][1].append((fields[0], fields[1], fields[2], fields[3]))
    return AnalogySet(path.stem, tuple((name, tuple(questions)) for name, questions in sections))
