"""Graphs out of text: edge lists and adjacency lists, as the neighbours of each node in one array."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec.text import Source, iter_lines, name_of
from speedtransfer.word2vec.tokenise import WordDict

COMMENTS = ("#", "%")


@dataclass(frozen=True)
class Graph:
    """An undirected graph; node v has the neighbours ``neighbours[begins[v] : begins[v + 1]]``, in rising order.

    Attributes
    ----------
    nodes : WordDict
        The names of the nodes.
    begins : ndarray of int64, shape (num_nodes + 1,)
    neighbours : ndarray of int32, shape (num_entries,)
        Two entries an edge, one for an edge from a node to itself.
    weights : ndarray of float64, shape (num_entries,), or None
        None where all are equal.
    """

    nodes: WordDict
    begins: np.ndarray
    neighbours: np.ndarray
    weights: np.ndarray | None

    def __len__(self) -> int:
        return len(self.begins) - 1


def read_graph(source: Source, adjacency: bool = False) -> Graph:
    """Read a graph from text; blank lines and lines that begin with # or % say nothing.

    Parameters
    ----------
    source : path-like, "-" or binary file
        As of :class:`Corpus`.
    adjacency : bool
        Whether a line is a node and its neighbours: then an edge is there once, however often it is named, and a line of one
        node adds it without an edge. Else a line is an edge: two nodes, and a weight where it is not 1; the weights of an
        edge that is named several times, in either direction, add up.

    Raises
    ------
    StorageError, InvalidValueError, InvalidTypeError
        As `iter_lines`; also a line that is no edge, a weight that is not above 0 and finite, or no edge at all.
    """
    nodes = WordDict()
    heads, tails, weights = [], [], []
    for edges in _iter_adjacent(source) if adjacency else _iter_edges(source):
        heads.append(nodes.number_words(edges.heads))
        tails.append(nodes.number_words(edges.tails))
        weights.append(np.array(edges.weights, dtype=np.float64))
        nodes.number_words(edges.lone)
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


@dataclass
class _Edges:
    """What a block of lines says."""

    heads: list[str] = field(default_factory=list)
    tails: list[str] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    lone: list[str] = field(default_factory=list)


def _iter_fields(source: Source) -> Iterator[list[tuple[str, list[str]]]]:
    """Yield lists of lines that are neither blank nor comment: where the line is, and its fields."""
    file, before = "", 0
    for name, lines in iter_lines(source):
        if name != file:
            file, before = name, 0
        split = ((before + number, line.split()) for number, line in enumerate(lines, start=1))
        yield [(f"line {number} of {name}", it) for number, it in split if it and it[0][0] not in COMMENTS]
        before += len(lines)


def _iter_edges(source: Source) -> Iterator[_Edges]:
    for lines in _iter_fields(source):
        edges = _Edges()
        for place, fields in lines:
            if not 2 <= len(fields) <= 3:
                remedy = "for lines of a node and its neighbours pass kind='adjacency'" if len(fields) > 3 else "fix it"
                raise InvalidValueError(
                    f"{place} has {len(fields)} fields, {' '.join(fields)[:40]!r}, but an edge is 'node node' or "
                    f"'node node weight'; {remedy}"
                )
            edges.heads.append(fields[0])
            edges.tails.append(fields[1])
            edges.weights.append(1.0 if len(fields) == 2 else _weight(fields[2], place))
        yield edges


def _weight(text: str, place: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        raise InvalidValueError(
            f"{place} has the weight {text[:40]!r}, not a number; an edge is 'node node' or 'node node weight'"
        ) from None
    if not 0 < weight < math.inf:
        raise InvalidValueError(f"{place} has the weight {text[:40]} but a weight is above 0 and finite; leave it out")
    return weight


def _iter_adjacent(source: Source) -> Iterator[_Edges]:
    for lines in _iter_fields(source):
        edges = _Edges()
        for _, (node, *neighbours) in lines:
            edges.heads += [node] * len(neighbours)
            edges.tails += neighbours
            if not neighbours:
                edges.lone.append(node)
        yield edges
