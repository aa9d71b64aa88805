"""Results of evaluations, with 95% intervals: how precise a set of that size is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Question = tuple[str, str, str, str]
_Z = 1.959963984540054  # 97.5% of a normal distribution lie below: intervals of 95%
_SYNTACTIC = "gram"  # prefix of Google's syntactic sections


@dataclass(frozen=True)
class Similarity:
    """The result of a similarity set.

    Attributes
    ----------
    spearman, pearson : float
        Correlation of the cosines with people's scores, by rank and by value.
    num_pairs, num_unknown : int
        Pairs whose words both have a vector, which count, and the others.
    unknown_words : tuple of str
        Words of the set without a vector, each once.
    """

    name: str
    spearman: float
    pearson: float
    num_pairs: int
    num_unknown: int
    unknown_words: tuple[str, ...]

    @property
    def oov_ratio(self) -> float:
        """Pairs left out, in per cent of all (out of vocabulary), as gensim gives it."""
        return 100 * self.num_unknown / (self.num_pairs + self.num_unknown)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `spearman`, from Fisher's z with variance 1.06 / (n - 3) (Fieller, Hartley and Pearson 1957).

        (-1, 1) for three pairs or fewer. It takes pairs for independent; sets that repeat words are a little less certain.
        """
        if self.num_pairs <= 3:
            return -1.0, 1.0
        if abs(self.spearman) >= 1:
            return self.spearman, self.spearman
        z, reach = math.atanh(self.spearman), _Z * math.sqrt(1.06 / (self.num_pairs - 3))
        return math.tanh(z - reach), math.tanh(z + reach)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        more = {"interval": list(self.interval), "oov_ratio": self.oov_ratio, "unknown_words": list(self.unknown_words)}
        return {"kind": "similarity", **asdict(self), **more}


@dataclass(frozen=True)
class Section:
    """The questions of a section whose words all have vectors, as the file writes them."""

    name: str
    correct: tuple[Question, ...]
    incorrect: tuple[Question, ...]

    @property
    def num_questions(self) -> int:
        """How many there are."""
        return len(self.correct) + len(self.incorrect)

    @property
    def accuracy(self) -> float | None:
        """Share answered as expected; None where there are no questions."""
        return len(self.correct) / self.num_questions if self.num_questions else None

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of `accuracy` (Wilson 1927); (0, 1) where there are no questions. Takes questions for independent."""
        n = self.num_questions
        if not n:
            return 0.0, 1.0
        share, z2 = len(self.correct) / n, _Z * _Z
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        reach = _Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
        return max(middle - reach, 0.0), min(middle + reach, 1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, without the questions."""
        return {
            "name": self.name, "accuracy": self.accuracy, "interval": list(self.interval),
            "num_correct": len(self.correct), "num_questions": self.num_questions,
        }  # fmt: skip


@dataclass(frozen=True)
class Analogies:
    """The result of an analogy set.

    Attributes
    ----------
    sections : tuple of Section
    num_unknown : int
        Questions left out because a word of them has no vector.
    unknown_words : tuple of str
        Words of the set without a vector, each once.
    """

    name: str
    sections: tuple[Section, ...]
    num_unknown: int
    unknown_words: tuple[str, ...]

    def _sum(self, name: str, sections: Sequence[Section]) -> Section:
        correct, incorrect = (tuple(q for s in sections for q in getattr(s, part)) for part in ("correct", "incorrect"))
        return Section(name, correct, incorrect)

    @property
    def total(self) -> Section:
        """All questions together."""
        return self._sum("total", self.sections)

    @property
    def semantic(self) -> Section:
        """The questions of the sections that are not syntactic."""
        return self._sum("semantic", [s for s in self.sections if not s.name.startswith(_SYNTACTIC)])

    @property
    def syntactic(self) -> Section:
        """The questions of the sections whose names begin with "gram"."""
        return self._sum("syntactic", [s for s in self.sections if s.name.startswith(_SYNTACTIC)])

    @property
    def accuracy(self) -> float:
        """Share of all questions answered as expected."""
        return self.total.accuracy or 0.0

    @property
    def oov_ratio(self) -> float:
        """Questions left out, in per cent of all."""
        return 100 * self.num_unknown / (self.total.num_questions + self.num_unknown)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        parts = {part.name: part.as_dict() for part in (self.total, self.semantic, self.syntactic)}
        return {
            "kind": "analogies", "name": self.name, **parts, "num_unknown": self.num_unknown, "oov_ratio": self.oov_ratio,
            "unknown_words": list(self.unknown_words), "sections": [section.as_dict() for section in self.sections],
        }  # fmt: skip
