"""What a vocabulary has done so far."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class VocabularyStats:
    """Counters of a vocabulary.

    Attributes
    ----------
    size, capacity, max_capacity : int
        Known ids; those that there are rows for; those that there may be rows for (None: as the memory allows).
    admitted, evicted : int
        Ids that got a row and that lost it, since the vocabulary was made or `reset_stats`.
    lookups, unseen : int
        Ids looked up, and those of them that had no row.
    clock : int
        Optimizer steps so far.
    num_bytes : int
        Of the index and of the planes of ids and their use.
    """

    size: int
    capacity: int
    max_capacity: int | None
    admitted: int
    evicted: int
    lookups: int
    unseen: int
    clock: int
    num_bytes: int

    @property
    def load(self) -> float:
        """The share of the rows that have an id."""
        return self.size / self.capacity if self.capacity else 0.0

    @property
    def unseen_rate(self) -> float:
        """The share of the ids looked up that had no row."""
        return self.unseen / self.lookups if self.lookups else 0.0

    def scalars(self, prefix: str = "vocabulary") -> dict[str, float]:
        """Return what is worth a curve, by name: for ``SummaryWriter.add_scalar``."""
        values = {
            "size": self.size,
            "load": self.load,
            "admitted": self.admitted,
            "evicted": self.evicted,
            "unseen_rate": self.unseen_rate,
        }
        return {f"{prefix}/{name}": float(value) for name, value in values.items()}
