"""The graph of bench/node2vec.py with the groups of its nodes, the walks that both packages are trained on, and the scores.

Scores are by the protocol of DeepWalk (Perozzi, Al-Rfou and Skiena 2014, section 5) and node2vec (Grover and Leskovec 2016,
section 4.3): logistic regression, one group against the rest, trained on a share of the nodes. How many groups each other
node is in is known, and that number of groups with the highest scores is predicted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from experiment import DataError
from word2vec_child import cores

from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.tokenise import LINE_END
from speedtransfer.word2vec.walks import Graph, read_graph, write_walks

GRAPH, LABELS = "bc_adjlist.txt", "bc_labels.txt"
MICRO, MACRO = MEASURES = ("micro-F1", "macro-F1")
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


# --- how well vectors predict the groups ----------------------------------------------------------------------------------


def predict(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Predict for each node as many groups as it is in, those with the highest scores.

    Parameters
    ----------
    scores : ndarray of float, shape (num_nodes, num_groups)
    truth : ndarray of bool, same shape

    Returns
    -------
    ndarray of bool, same shape
    """
    ranks = np.empty(scores.shape, np.int64)
    np.put_along_axis(ranks, np.argsort(-scores, axis=1, kind="stable"), np.arange(scores.shape[1])[None], axis=1)
    predicted: np.ndarray = ranks < truth.sum(axis=1, keepdims=True)
    return predicted


def f1(predicted: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Return micro- and macro-F1, the latter over all groups; 0 for a group that neither occurs nor is predicted."""
    hits = (predicted & truth).sum(axis=0)
    named = predicted.sum(axis=0) + truth.sum(axis=0)  # true positives count twice
    each = np.divide(2 * hits, named, out=np.zeros(len(hits)), where=named > 0)
    return {MICRO: float(2 * hits.sum() / named.sum()), MACRO: float(each.mean())}


def score(vectors: np.ndarray, groups: np.ndarray, share: float, seed: int) -> dict[str, float]:
    """Train on a random `share` of the nodes, drawn by `seed`, and return micro- and macro-F1 on the others.

    Vectors are scaled to the same mean length first: how strong the regularization of the regression is depends on it, and
    optimizers end with vectors of different length.

    Parameters
    ----------
    vectors : ndarray of float32, shape (num_nodes, dim)
    groups : ndarray of bool, shape (num_nodes, num_groups)
    share : float
    seed : int
    """
    from sklearn.linear_model import LogisticRegression

    order = np.random.default_rng(seed).permutation(len(vectors))
    train, test = np.split(order, [round(share * len(vectors))])
    features = vectors.astype(np.float64) * (math.sqrt(vectors.shape[1]) / np.linalg.norm(vectors, axis=1).mean())

    def scores_of(group: int) -> np.ndarray:
        known = groups[train, group]
        if known.all() or not known.any():
            return np.full(len(test), np.inf if known.all() else -np.inf)
        model = LogisticRegression(solver="liblinear", random_state=0).fit(features[train], known)
        found: np.ndarray = model.decision_function(features[test])
        return found

    with ThreadPoolExecutor(cores()) as threads:
        scores = np.stack([*threads.map(scores_of, range(groups.shape[1]))], axis=1)
    return f1(predict(scores, groups[test]), groups[test])


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of `values` and half of its 95% interval by Student's t, None for a single value."""
    from scipy.stats import t

    if len(values) < 2:
        return {"mean": statistics.fmean(values), "half": None}
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "half": float(half)}
