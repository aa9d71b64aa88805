"""Graphs out of text, and random walks over them as node2vec takes them: sentences of nodes.

A walk that has come from t to v goes on to the neighbour x of v with a probability proportional to ``w(v, x)`` times 1/p
where x is t, 1 where x is a neighbour of t, 1/q else (Grover and Leskovec 2016, "node2vec", section 3.2). The walkers step
together: x is proposed by its weight alone and accepted by the share of its factor in the largest, so that nothing is kept
for each pair of nodes. Of 1/p only what the other factors reach is rejected that way; the rest is a chance of going back at
once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.text import Source, iter_lines, name_of
from speedtransfer.word2vec.tokenise import LINE_END, WordTable

_BLOCK_STEPS = 1 << 22  # of walkers that step together: what bounds the memory


@dataclass(frozen=True)
class Graph:
    """An undirected graph; node v has the neighbours ``neighbours[begins[v] : begins[v + 1]]``, in rising order.

    It has two entries an edge, one for an edge from a node to itself.
    """

    nodes: WordTable  # their names
    begins: np.ndarray  # int64, shape (num_nodes + 1,)
    neighbours: np.ndarray  # int32, shape (num_entries,)
    weights: np.ndarray | None  # float64, shape (num_entries,); None where all are equal

    def __len__(self) -> int:
        return len(self.begins) - 1


def read_graph(source: Source, adjacency: bool = False) -> Graph:
    """Read a graph from text; blank lines and lines that begin with # or % are skipped.

    A line is an edge: two nodes, and a weight where it is not 1; those of an edge that is named several times add up. With
    `adjacency` it is a node and its neighbours, and an edge is there once; a line of one node adds it without an edge.
    """
    nodes = WordTable()
    heads, tails, weights = [], [], []
    for lines in _iter_fields(source):
        if adjacency:
            pairs = [(node, neighbour) for _, (node, *neighbours) in lines for neighbour in neighbours]
        else:
            weights.append(np.array([_weight(fields, place) for place, fields in lines]))
            pairs = [(fields[0], fields[1]) for _, fields in lines]
        heads.append(nodes.number(" ".join(head for head, _ in pairs).encode()))
        tails.append(nodes.number(" ".join(tail for _, tail in pairs).encode()))
        nodes.number(" ".join(fields[0] for _, fields in lines if len(fields) == 1).encode())
    if not sum(map(len, heads)):
        raise InvalidValueError(f"{name_of(source)} holds no edges; pass a graph of at least one line 'node node'")
    head, tail = np.concatenate(heads).astype(np.int64), np.concatenate(tails).astype(np.int64)
    both = head != tail  # an edge from a node to itself is entered once, any other at both its ends
    ends = np.concatenate([head * len(nodes) + tail, (tail * len(nodes) + head)[both]])
    ends, where = np.unique(ends, return_inverse=True)
    summed = None
    if not adjacency:
        weight = np.concatenate(weights)
        summed = np.bincount(where, np.concatenate([weight, weight[both]]))
        if (summed == summed[0]).all():
            summed = None
    begins = np.zeros(len(nodes) + 1, np.int64)
    np.cumsum(np.bincount(ends // len(nodes), minlength=len(nodes)), out=begins[1:])
    return Graph(nodes, begins, (ends % len(nodes)).astype(np.int32), summed)


def _iter_fields(source: Source) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield lists of lines that are neither blank nor comment: where the line is, and its fields."""
    file, before = "", 0
    for name, lines in iter_lines(source):
        if name != file:
            file, before = name, 0
        split = ((before + number, line.split()) for number, line in enumerate(lines, start=1))
        yield [(f"line {number} of {name}", it) for number, it in split if it and it[0][0] not in "#%"]
        before += len(lines)


def _weight(fields: list[str], place: str) -> float:
    """Return the weight of the edge in a line."""
    if not 2 <= len(fields) <= 3:
        remedy = "for lines of a node and its neighbours pass kind='adjacency'" if len(fields) > 3 else "fix it"
        raise InvalidValueError(
            f"{place} has {len(fields)} fields, {' '.join(fields)[:40]!r}, but an edge is 'node node' or "
            f"'node node weight'; {remedy}"
        )
    try:
        weight = float(fields[2]) if len(fields) == 3 else 1.0
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise InvalidValueError(
            f"{place} has the weight {fields[2][:40]!r} but a weight is a finite number above 0; drop it"
        )
    return weight


def write_walks(
    graph: Graph, settings: Settings, write: Callable[[np.ndarray], None], report: Callable[[int], None] | None = None
) -> None:
    """Walk from every node, `settings.walks` times, and hand the walks to `write`: int32, `LINE_END` after each.

    Nodes come in random order. The walk of one without edges is that node. `report` is called with the number of nodes so far.
    """
    stepper, rng = _Stepper(graph, settings.p, settings.q), np.random.default_rng(settings.seed)
    together, written = max(1, _BLOCK_STEPS // settings.walk_length), 0
    rounds = max(1, together // len(graph))
    for first in range(0, settings.walks, rounds):
        order = np.concatenate([rng.permutation(len(graph)) for _ in range(min(rounds, settings.walks - first))])
        for begin in range(0, len(order), together):
            walks = stepper.walk(order[begin : begin + together], settings.walk_length, rng)
            write(walks.ravel())
            written += int(np.count_nonzero(walks != LINE_END))
            if report is not None:
                report(written)


class _Stepper:
    """Draw the steps of many walkers at once; the position of a walker is the entry of `graph.neighbours` it came over."""

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
        moving = np.flatnonzero(self._degrees[starts])  # to the end, since the edge that a walker came over leads back
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
        chosen = self._graph.begins[here]  # the only choice at the end of a path
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
