"""Random walks over a graph as node2vec takes them (Grover and Leskovec 2016, "node2vec", section 3.2): sentences of nodes.

A walk that has come from t to v goes on to the neighbour x of v with a probability proportional to ``w(v, x)`` times 1/p where
x is t, 1 where x is a neighbour of t, 1/q else. The walkers step together, drawn by rejection: x is proposed by its weight
alone and accepted by the share of its factor in the largest, so that nothing has to be kept for each pair of nodes. Of 1/p
only what the other factors reach is rejected that way; the rest is a chance of going back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from speedtransfer.word2vec.graph import Graph
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.tokenise import LINE_END

_BLOCK_STEPS = 1 << 22  # of walkers that step together: what bounds the memory


def write_walks(
    graph: Graph,
    settings: Settings,
    write: Callable[[np.ndarray], None],
    report: Callable[[int], None] | None = None,
) -> None:
    """Walk from every node, `settings.walks` times in turn, and hand the walks to `write` in blocks.

    Parameters
    ----------
    graph : Graph
    settings : Settings
        Of which `walks`, `walk_length`, `p`, `q` and `seed` count.
    write : callable
        Called with int32 arrays, shape (n,): node numbers, and `LINE_END` after each walk. The walk of a node without edges
        is that node.
    report : callable, optional
        Called with the number of nodes written so far.
    """
    stepper = _Stepper(graph, settings.p, settings.q)
    rng = np.random.default_rng(settings.seed)
    num_nodes = 0
    for starts in _starts(len(graph), settings, rng):
        walks = stepper.walk(starts, settings.walk_length, rng)
        write(walks.ravel())
        num_nodes += int(np.count_nonzero(walks != LINE_END))
        if report is not None:
            report(num_nodes)


def _starts(num_nodes: int, settings: Settings, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield nodes for walks to start from together: all nodes in random order, as often as there are walks."""
    together = max(1, _BLOCK_STEPS // settings.walk_length)
    rounds = max(1, together // num_nodes)
    for first in range(0, settings.walks, rounds):
        order = np.concatenate([rng.permutation(num_nodes) for _ in range(min(rounds, settings.walks - first))])
        for begin in range(0, len(order), together):
            yield order[begin : begin + together]


class _Stepper:
    """Draws the steps of many walkers at once; where a walker is, is told by the entry of `graph.neighbours` it came over."""

    def __init__(self, graph: Graph, p: float, q: float) -> None:
        self._graph = graph
        self._back, self._near, self._far = 1 / p, 1.0, 1 / q
        self._degrees = np.diff(graph.begins)
        heads = np.repeat(np.arange(len(graph)), self._degrees)
        self._edges = heads * len(graph) + graph.neighbours  # sorted, to look up whether there is an edge
        if graph.weights is None:
            self._shares, self._bounds = None, None
            return
        totals = np.bincount(heads, graph.weights, minlength=len(graph))
        self._shares = graph.weights / totals[graph.neighbours]  # of the way back, among those of the node it leads to
        bounds = np.cumsum(graph.weights / totals[heads])
        filled = graph.begins[:-1][self._degrees > 0]
        before = np.zeros(len(graph))
        before[self._degrees > 0] = np.concatenate([[0.0], bounds[filled[1:] - 1]])
        # Within node v from v to v + 1, so that one search serves all nodes.
        self._bounds = np.minimum(bounds - before[heads], 1.0) + heads

    def walk(self, starts: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
        """Return walks from `starts` (n,) as int32, shape (n, length + 1), filled up with `LINE_END`."""
        walks = np.full((len(starts), length + 1), LINE_END, np.int32)
        walks[:, 0] = starts
        moving = np.flatnonzero(self._degrees[starts])  # all the way: the edge that one came over leads back
        if len(moving) == 0:
            return walks
        before = starts[moving]
        entries = self._propose(before, rng)
        here = self._graph.neighbours[entries].astype(np.int64)
        walks[moving, 1] = here
        first_order = self._back == self._near == self._far
        for step in range(2, length):
            entries = self._propose(here, rng) if first_order else self._step(before, here, entries, rng)
            before, here = here, self._graph.neighbours[entries].astype(np.int64)
            walks[moving, step] = here
        return walks

    def _propose(self, nodes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return for each of `nodes` one of its entries, drawn by weight."""
        begins = self._graph.begins[nodes]
        uniform = rng.random(len(nodes))
        if self._bounds is None:
            return begins + (uniform * self._degrees[nodes]).astype(np.int64)
        entries = np.searchsorted(self._bounds, nodes + uniform, side="right")
        return np.clip(entries, begins, self._graph.begins[nodes + 1] - 1)  # a sum may round to either side

    def _step(self, before: np.ndarray, here: np.ndarray, came: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the entries over which walkers go on from `here`, having come from `before` over the entries `came`."""
        cap, least = max(self._near, self._far), min(self._near, self._far, self._back)
        # What going back weighs beyond the cap, in units of all the weight at the node.
        share = 1 / self._degrees[here] if self._shares is None else self._shares[came]
        surplus = max(self._back - cap, 0.0) * share
        chosen = self._graph.begins[here]  # all there is to choose at the end of a path
        todo = np.flatnonzero(self._degrees[here] > 1)
        while len(todo):
            uniform = rng.random(len(todo)) * (cap + surplus[todo])
            returning = uniform >= cap
            back = todo[returning]
            chosen[back] = np.searchsorted(self._edges, here[back] * len(self._graph) + before[back])
            todo, uniform = todo[~returning], uniform[~returning]
            entries = self._propose(here[todo], rng)
            accepted = uniform < least
            unsure = np.flatnonzero(~accepted)
            factors = self._factors(before[todo[unsure]], self._graph.neighbours[entries[unsure]])
            accepted[unsure] = uniform[unsure] < factors
            chosen[todo[accepted]] = entries[accepted]
            todo = todo[~accepted]
        return chosen

    def _factors(self, before: np.ndarray, to: np.ndarray) -> np.ndarray:
        factors = np.full(len(to), self._far)
        if self._far != self._near:
            edges = before * len(self._graph) + to
            at = np.minimum(np.searchsorted(self._edges, edges), len(self._edges) - 1)
            factors[self._edges[at] == edges] = self._near
        factors[before == to] = self._back
        return factors
