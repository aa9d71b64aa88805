"""How well vectors tell the groups of nodes: the protocol of DeepWalk and node2vec.

Perozzi, Al-Rfou and Skiena 2014, "DeepWalk", section 5; Grover and Leskovec 2016, "node2vec", section 4.3: logistic
regression, one group against the rest, trained on a share of the nodes. How many groups each other node is in is known, and
that number of groups with the highest scores is predicted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from word2vec_child import cores

MICRO, MACRO = "micro-F1", "macro-F1"
MEASURES = (MICRO, MACRO)


def predict(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return for each node as many groups as it is in, those with the highest scores.

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
    """Return micro- and macro-F1, the latter over all groups; 0 for a group that is neither there nor predicted."""
    hits = (predicted & truth).sum(axis=0)
    named = predicted.sum(axis=0) + truth.sum(axis=0)  # twice the hits, and what was predicted or true alone
    each = np.divide(2 * hits, named, out=np.zeros(len(hits)), where=named > 0)
    return {MICRO: float(2 * hits.sum() / named.sum()), MACRO: float(each.mean())}


def score(vectors: np.ndarray, groups: np.ndarray, share: float, seed: int) -> dict[str, float]:
    """Train on a random `share` of the nodes, which `seed` decides, and return micro- and macro-F1 on the others.

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
    """Return the mean of `values` and half of its 95% interval by Student's t; None where there is one value."""
    from scipy.stats import t

    if len(values) < 2:
        return {"mean": statistics.fmean(values), "half": None}
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "half": float(half)}
