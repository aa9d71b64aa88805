"""The graph of bench/node2vec.py, the groups of its nodes, and the walks that both packages are trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from needs import DataError
from store import ROOT

sys.path.insert(0, str(ROOT))  # also where the package is not installed

from speedtransfer.word2vec.counting import LINE_END
from speedtransfer.word2vec.graph import Graph, read_graph
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.walks import write_walks

GRAPH, LABELS = "bc_adjlist.txt", "bc_labels.txt"
_FORMAT = f"{GRAPH} (or .txt.xz), a node and its neighbours a line, and {LABELS}, a node and its groups a line"


class Data(NamedTuple):
    """A graph whose nodes have groups.

    Attributes
    ----------
    graph : Graph
    nodes : list of str
        The nodes that have groups.
    groups : ndarray of bool, shape (num_nodes, num_groups)
        Which groups each of `nodes` is in.
    """

    graph: Graph
    nodes: list[str]
    groups: np.ndarray


def read_data(folder: Path) -> Data:
    """Read the graph and the groups of its nodes in `folder`.

    Raises
    ------
    DataError
        A file is missing or has another format.
    SpeedtransferError
        The graph cannot be read.
    """
    path = next((path for path in (folder / GRAPH, folder / f"{GRAPH}.xz") if path.is_file()), None)
    if path is None or not (folder / LABELS).is_file():
        raise DataError(f"there is no {GRAPH} or no {LABELS} in {str(folder)!r}; name the folder that has {_FORMAT}")
    graph = read_graph(path, adjacency=True)
    nodes, numbers = read_groups(folder / LABELS)
    unknown = set(nodes).difference(names_of(graph))
    if unknown:
        raise DataError(
            f"{LABELS} has node {min(unknown)!r}, which {path.name} has not; name a folder that has {_FORMAT}"
        )
    groups = np.zeros((len(nodes), 1 + max(map(max, numbers))), bool)
    for row, of_node in enumerate(numbers):
        groups[row, of_node] = True
    return Data(graph, nodes, groups[:, groups.any(axis=0)])


def read_groups(path: Path) -> tuple[list[str], list[list[int]]]:
    """Return the nodes of a file and the numbers of the groups of each."""
    nodes, numbers = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            node, *groups = line.split()
            numbers.append([int(group) for group in groups])
        except ValueError:
            numbers.append([])
        if not numbers[-1] or min(numbers[-1]) < 0:
            raise DataError(f"line {number} of {str(path)!r} is {line[:40]!r}, not a node and its groups; fix it")
        nodes.append(node)
    if not nodes:
        raise DataError(f"{str(path)!r} is empty; it must have a node and its groups a line")
    return nodes, numbers


def names_of(graph: Graph) -> list[str]:
    """Return the names of the nodes by number."""
    return graph.nodes.take(np.arange(len(graph)))


def save_walks(graph: Graph, settings: Settings, path: Path) -> int:
    """Write walks over `graph` to a text file, one a line; return how many nodes they have in all."""
    names = np.array([*names_of(graph), "\n"])  # LINE_END, -1, is the last
    num_nodes = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:

        def write(numbers: np.ndarray) -> None:
            nonlocal num_nodes
            # A walk that ends early is filled up with line ends, of which one is enough.
            ends = numbers == LINE_END
            kept = numbers[~ends | ~np.roll(ends, 1)]
            num_nodes += int(np.count_nonzero(kept != LINE_END))
            file.write(" ".join(names[kept]).replace(" \n ", "\n").replace(" \n", "\n"))

        write_walks(graph, settings, write)
    return num_nodes
