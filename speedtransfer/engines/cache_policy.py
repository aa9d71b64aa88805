"""Which rows a cache has: the hottest by given counts, or those that were gathered most often of late."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from speedtransfer.cuda import current_stream, keep_until_done
from speedtransfer.system import available_bytes

NO_ROW = 2**63 - 1  # fills the places of a cache that has room for more rows than there are
_MOST_SEEN = 1 << 22  # ids that wait to be counted
_CANDIDATES = 4  # rows counted for each that is cached
_PLANES = 3  # that a cache is sized for: the weights, and the two planes of state that Adam adds at the first step


class CachePolicy(Protocol):
    """Chooses the rows of a cache."""

    def saw(self, ids: Tensor) -> bool:
        """Note that the rows `ids` (n,), a tensor to keep, were gathered (NO_ROW is none); tell whether to choose anew."""
        ...

    def choose(self, capacity: int) -> Tensor:
        """Return the rows to cache, ``(capacity,)`` int64, sorted; NO_ROW, at the end, where there are fewer."""
        ...


class StaticPolicy:
    """The same rows for good.

    Parameters
    ----------
    hottest : Tensor
        ``(k,)`` int64 on the compute device, each row once and the hottest first.
    """

    def __init__(self, hottest: Tensor) -> None:
        self._hottest = hottest

    def saw(self, ids: Tensor) -> bool:
        """Return False: nothing changes."""
        return False

    def choose(self, capacity: int) -> Tensor:
        """Return the hottest rows; see `CachePolicy`."""
        return _filled_up(self._hottest[:capacity].sort().values, capacity)


class LfuPolicy:
    """The rows gathered most often, where what is long ago counts less.

    Every so many gathers the rows seen meanwhile are counted, the counts so far are multiplied by `decay`, and the cache gets
    the rows with the largest. Rows that are cached already count `bonus` times, so that rows used equally often do not take
    turns. At first it chooses after 1, 2, 4 ... gathers. It depends on the order of gathers and on nothing else.

    Parameters
    ----------
    device : torch.device
        The compute device. On a CUDA device the host waits when rows are chosen.
    every : int
        Gathers from one choice to the next.
    decay, bonus : float
    """

    def __init__(self, device: torch.device, every: int = 64, decay: float = 0.9, bonus: float = 1.25) -> None:
        self.every, self.decay, self.bonus = every, decay, bonus
        self._seen: list[Tensor] = []
        self._num_seen, self._patience = 0, 1
        # Rows that may be cached, sorted, with their counts; and those that are.
        self._ids = self._chosen = torch.empty(0, dtype=torch.int64, device=device)
        self._counts = torch.empty(0, dtype=torch.float64, device=device)

    def saw(self, ids: Tensor) -> bool:
        """Note that the rows `ids` (n,) were gathered; see `CachePolicy`."""
        self._seen.append(ids)
        self._num_seen += len(ids)
        return len(self._seen) >= self._patience or self._num_seen >= _MOST_SEEN

    def choose(self, capacity: int) -> Tensor:
        """Count what was seen and return the rows with the largest counts; see `CachePolicy`."""
        if self._seen:
            self._count()
            self._patience = min(2 * self._patience, self.every)
        cached = _is_among(self._ids, self._chosen)
        score = torch.where(cached, self._counts * self.bonus, self._counts)
        order = score.sort(descending=True, stable=True).indices[: _CANDIDATES * capacity]
        self._chosen = self._ids[order[:capacity]].sort().values
        kept = order.sort().values
        self._ids, self._counts = self._ids[kept], self._counts[kept]
        return _filled_up(self._chosen, capacity)

    def _count(self) -> None:
        if self._ids.is_cuda:
            # Of calls on other streams, perhaps.
            keep_until_done((*self._seen, self._ids, self._chosen, self._counts), current_stream(self._ids.device))
        seen, times = torch.cat(self._seen).unique(return_counts=True)
        self._seen, self._num_seen = [], 0
        rows = seen != NO_ROW
        ids, places = torch.cat([self._ids, seen[rows]]).unique(return_inverse=True)
        counts = torch.cat([self._counts * self.decay, times[rows].to(torch.float64)])
        # At most two for each: their sum does not depend on the order.
        self._counts = torch.zeros(len(ids), dtype=torch.float64, device=ids.device).index_add_(0, places, counts)
        self._ids = ids


def hottest_rows(counts: Tensor, capacity: int, device: torch.device) -> Tensor:
    """Return the rows with the largest of `counts` (num_rows,), ``(capacity,)`` on `device`, the hottest first."""
    return counts.sort(descending=True, stable=True).indices[:capacity].to(device)


def auto_capacity(row_bytes: int, device: torch.device) -> int:
    """Return how many rows, of `row_bytes` of weights, a cache gets by itself.

    A tenth of the free memory of a CUDA device, or a sixteenth of that of the host, with as much again for each of two planes
    of optimizer state.
    """
    share = torch.cuda.mem_get_info(device)[0] // 10 if device.type == "cuda" else available_bytes() // 16
    return share // max(1, _PLANES * row_bytes)


def _filled_up(ids: Tensor, capacity: int) -> Tensor:
    return ids if len(ids) == capacity else torch.cat([ids, ids.new_full((capacity - len(ids),), NO_ROW)])


def _is_among(ids: Tensor, others: Tensor) -> Tensor:
    """Tell which of `ids` (n,) are among `others`, sorted."""
    if not len(others):
        return torch.zeros_like(ids, dtype=torch.bool)
    return others[torch.searchsorted(others, ids).clamp_(max=len(others) - 1)] == ids
