"""Place words on the plane, close where their vectors are, and move labels apart."""

from __future__ import annotations

import numpy as np

_TINY = 1e-12


def neighbour_map(matrix: np.ndarray, perplexity: float = 12.0) -> np.ndarray:
    """Place vectors on the plane by t-SNE (van der Maaten and Hinton 2008), from their two main axes, by cosine distance.

    Without scikit-learn by their main axes alone. The same vectors always give the same map.

    Parameters
    ----------
    matrix : ndarray of float32, shape (n, dim)
    perplexity : float
        About how many neighbours of a word count; lowered for few words.

    Returns
    -------
    ndarray of float64, shape (n, 2)
    """
    rows = matrix.astype(np.float64)
    if len(rows) < 3:
        return np.stack([np.arange(len(rows), dtype=np.float64), np.zeros(len(rows))], axis=1)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
    place = _main_axes(rows)
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return place
    if place.std() < 1e-6:
        # All are the same.
        return place
    begin = (1e-4 / place[:, 0].std() * place).astype(np.float32) if place[:, 0].std() else "random"
    found = TSNE(perplexity=min(perplexity, (len(rows) - 1) / 3), init=begin, random_state=0).fit_transform(rows)
    return np.asarray(found - found.mean(axis=0), dtype=np.float64)


def _main_axes(rows: np.ndarray) -> np.ndarray:
    centered = rows - rows.mean(axis=0)
    axes = np.linalg.eigh(centered.T @ centered).eigenvectors[:, :-3:-1]
    if axes.shape[1] < 2:  # vectors of one number
        axes = np.concatenate([axes, np.zeros_like(axes)], axis=1)
    # An eigenvector's sign is arbitrary and differs between machines: let its largest entry be positive.
    largest: np.ndarray = np.take_along_axis(axes, np.abs(axes).argmax(axis=0, keepdims=True), axis=0)
    return centered @ (axes * np.sign(largest))


def spread_labels(
    centers: np.ndarray, sizes: np.ndarray, frame: tuple[float, float] | None = None, rounds: int = 400
) -> np.ndarray:
    """Move boxes apart, as little as it takes, until none covers another or `rounds` are over.

    Parameters
    ----------
    centers : ndarray of float64, shape (n, 2)
        Where the boxes want to be.
    sizes : ndarray of float64, shape (n, 2)
        Width and height of each, in the same unit.
    frame : (float, float), optional
        Width and height of the picture, which boxes do not leave; a box that is larger sticks to its lower left corner.
    rounds : int

    Returns
    -------
    ndarray of float64, shape (n, 2)
        Where they are now.
    """
    place = centers.astype(np.float64)
    low = np.full_like(place, -np.inf) if frame is None else sizes / 2
    high = np.full_like(place, np.inf) if frame is None else np.maximum(np.array(frame) - sizes / 2, low)
    for _ in range(rounds):
        place = np.clip(place, low, high)
        first, second, apart, overlap = _covered(place, sizes)
        if not len(first):
            break
        # Push along the axis that needs less; a later word goes up or right where two share one spot.
        axis = overlap.argmin(axis=1)
        ahead = np.sign(apart[np.arange(len(axis)), axis])
        push = np.where(ahead == 0, np.sign(first - second), ahead) * overlap.min(axis=1) * 0.3
        for way in (0, 1):
            along = np.where(axis == way, push, 0.0)
            place[:, way] += np.bincount(first, along, len(place)) - np.bincount(second, along, len(place))
    return np.clip(place, low, high)


def _covered(place: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs of boxes that cover one another: both boxes, how far apart they are and by how much they overlap.

    Only boxes whose heights can meet are compared, which are next to each other by their place upwards: few of all pairs.
    """
    order = np.argsort(place[:, 1], kind="stable")
    height = place[order, 1]
    upper = np.searchsorted(height, height + sizes[:, 1].max(initial=0.0))
    counts = np.maximum(upper - np.arange(len(place)) - 1, 0)
    lower = np.repeat(np.arange(len(place)), counts)
    later = np.arange(len(lower)) - np.repeat(np.cumsum(counts) - counts, counts)
    first, second = order[lower], order[lower + 1 + later]
    apart = place[first] - place[second]
    overlap = (sizes[first] + sizes[second]) / 2 - np.abs(apart)
    covered = (overlap > 0).all(axis=1)
    return first[covered], second[covered], apart[covered], overlap[covered]
