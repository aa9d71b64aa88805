"""Place words on the plane, close where their vectors are (t-SNE), and move labels apart.

In NumPy: at this size a step is a few dozen small operations, which cost less than waking torch's threads for each.
"""

from __future__ import annotations

import numpy as np

from speedtransfer.progress import LateBar

_BISECTIONS = 40
_TINY = 1e-12


def neighbour_map(matrix: np.ndarray, perplexity: float = 12.0, steps: int = 600) -> np.ndarray:
    """Place vectors on the plane by t-SNE (van der Maaten and Hinton 2008), from their two main axes, by cosine distance.

    The same vectors always give the same map: nothing is drawn at random. Made for some hundred words; memory and time
    grow with the square of their number. A bar on a terminal shows how far it is.

    Parameters
    ----------
    matrix : ndarray of float32, shape (n, dim)
    perplexity : float
        About how many neighbours of a word count; lowered for few words.
    steps : int

    Returns
    -------
    ndarray of float64, shape (n, 2)
    """
    rows = matrix.astype(np.float64)
    num_rows = len(rows)
    if num_rows < 3:
        return np.stack([np.arange(num_rows, dtype=np.float64), np.zeros(num_rows)], axis=1)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), _TINY)
    wanted = _affinities(2 - 2 * rows @ rows.T, min(perplexity, (num_rows - 1) / 3))
    place = _main_axes(rows)
    place *= 1e-2 / max(place.std(), _TINY)
    speed, gain = np.zeros_like(place), np.ones_like(place)
    early = steps // 4  # at first clusters pull four times as hard, so that they find one another
    closeness, pull = np.empty((num_rows, num_rows)), np.empty((num_rows, num_rows))
    with LateBar("placing words", steps) as bar:
        for step in range(steps):
            _squared_distances(place, closeness, pull)
            closeness += 1
            np.reciprocal(closeness, out=closeness)
            np.fill_diagonal(closeness, 0)
            np.divide(closeness, closeness.sum(), out=pull)
            np.subtract(wanted * 4.0 if step < early else wanted, pull, out=pull)
            pull *= closeness
            slope = 4 * (pull.sum(axis=1, keepdims=True) * place - pull @ place)
            gain = np.maximum(np.where(np.sign(slope) == np.sign(speed), gain * 0.8, gain + 0.2), 0.01)
            speed = (0.5 if step < early else 0.8) * speed - max(num_rows / 12, 10.0) * gain * slope
            place += speed
            bar.show(step + 1)
    centered: np.ndarray = place - place.mean(axis=0)
    return centered


def _main_axes(rows: np.ndarray) -> np.ndarray:
    centered = rows - rows.mean(axis=0)
    axes = np.linalg.eigh(centered.T @ centered).eigenvectors[:, :-3:-1]
    if axes.shape[1] < 2:  # vectors of one number
        axes = np.concatenate([axes, np.zeros_like(axes)], axis=1)
    # An eigenvector's sign is arbitrary and differs between machines: let its largest entry be positive.
    largest: np.ndarray = np.take_along_axis(axes, np.abs(axes).argmax(axis=0, keepdims=True), axis=0)
    return centered @ (axes * np.sign(largest))


def _squared_distances(place: np.ndarray, out: np.ndarray, spare: np.ndarray) -> None:
    """Write the squared distances of points to `out`; both arrays are (n, n)."""
    np.subtract(place[:, None, 0], place[None, :, 0], out=out)
    out *= out
    np.subtract(place[:, None, 1], place[None, :, 1], out=spare)
    spare *= spare
    out += spare


def _affinities(distance: np.ndarray, perplexity: float) -> np.ndarray:
    """Return the symmetric affinities, sum 1: Gaussians, the width of each found by bisection for its perplexity."""
    num_rows = len(distance)
    off_diagonal = ~np.eye(num_rows, dtype=bool)
    distance = np.maximum(distance, 0)[off_diagonal].reshape(num_rows, num_rows - 1)
    distance = distance - distance.min(axis=1, keepdims=True)  # the nearest one must not underflow
    low, high = np.full((num_rows, 1), 1e-6), np.full((num_rows, 1), 1e6)
    for _ in range(_BISECTIONS):
        precision = np.sqrt(low * high)
        share = np.exp(-distance * precision)
        share /= share.sum(axis=1, keepdims=True)
        entropy = -(share * np.log(np.maximum(share, _TINY))).sum(axis=1, keepdims=True)
        too_wide = entropy > np.log(perplexity)
        low, high = np.where(too_wide, precision, low), np.where(too_wide, high, precision)
    full = np.zeros((num_rows, num_rows))
    full[off_diagonal] = share.ravel()
    symmetric: np.ndarray = (full + full.T) / (2 * num_rows)
    return symmetric


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
