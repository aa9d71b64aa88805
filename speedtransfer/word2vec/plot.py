"""Draw words as a map on which similar words are close together."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any

import numpy as np

from speedtransfer.drawing import require_matplotlib
from speedtransfer.errors import InvalidValueError, check_png, check_size
from speedtransfer.lazy import import_extra
from speedtransfer.system import replace_file
from speedtransfer.tables import PathLike
from speedtransfer.word2vec.lookup import TINY, find_rows
from speedtransfer.word2vec.vectors import Vectors

_WIDTH_INCH, _HEIGHT_INCH, _DPI = 16.0, 10.0, 120
_ROUNDS = 400  # of moving labels apart
_PERPLEXITY = 12.0  # about how many neighbours of a word count; fewer of few words


def plot(vectors: Vectors, path: PathLike, num_words: int = 200, words: Sequence[str] | None = None) -> None:
    """Draw the first `num_words` words, the most frequent where `train` made the vectors, or those near `words`, as a map.

    The font is matplotlib's own: letters it lacks (Chinese, for instance) show as boxes. `path` is a PNG file; an old one
    stays whole until the new one is. With `words` these are drawn, in bold, and the words nearest to them, as many for each.
    Needs matplotlib and scikit-learn.
    """
    path = check_png(path)
    num_words = min(check_size(num_words, "num_words", 1), len(vectors))
    if num_words == 0:
        raise InvalidValueError("there are no words to draw; pass vectors that hold some")
    rows = np.arange(num_words) if words is None else _around(vectors, words, num_words)
    num_bold = max(num_words // 10, 1) if words is None else len(set(words))
    figure = require_matplotlib()(_WIDTH_INCH, _HEIGHT_INCH)
    figure.set_layout_engine("none")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # one for every letter the font lacks
        _draw(figure, [vectors.words[row] for row in rows], neighbour_map(vectors.matrix[rows]), num_bold)
        with replace_file(path) as file:
            figure.savefig(file, format="png")


def _around(vectors: Vectors, words: Sequence[str], num_words: int) -> np.ndarray:
    """Return the rows of `words`, then those of their neighbours, the nearest of each first."""
    words = list(dict.fromkeys(words))
    if not 0 < len(words) <= num_words:
        raise InvalidValueError(
            f"there are {len(words)} words to draw with their neighbours but must be 1 to num_words, {num_words}; "
            "pass some, or a larger num_words"
        )
    vectors[words]  # one message for all that are unknown
    found = [[near for near, _ in vectors.most_similar(word, num_words)] for word in words]
    in_turn = (near for same_rank in zip_longest(*found) for near in same_rank if near is not None)
    return np.array(find_rows(list(islice(dict.fromkeys([*words, *in_turn]), num_words)), vectors._row_of))


def _draw(figure: Any, words: list[str], place: np.ndarray, num_bold: int) -> None:
    from matplotlib.colors import hsv_to_rgb

    axes, frame = figure.add_axes((0.0, 0.0, 1.0, 1.0)), (_WIDTH_INCH * _DPI, _HEIGHT_INCH * _DPI)
    axes.set_axis_off()
    axes.set_xlim(0, frame[0])
    axes.set_ylim(0, frame[1])
    size = float(np.clip(190 / np.sqrt(len(words)), 7, 13))
    # Frequent words stand out by size and weight: a map without them reads as a cloud.
    rank = np.arange(len(words)) / max(len(words) - 1, 1)
    # Regions of the map get a hue of their own: it turns with the direction from the middle.
    x, y = (place - place.mean(axis=0)).T
    hues = np.arctan2(y, x) / (2 * np.pi) % 1
    colours = hsv_to_rgb(np.stack([hues, np.full_like(hues, 0.85), np.full_like(hues, 0.62)], axis=1))
    labels = [
        axes.text(
            0, 0, word, color=colours[i], fontsize=size * (1.35 - 0.5 * rank[i]), ha="center", va="center",
            fontweight="bold" if i < num_bold else "normal", parse_math=False,
        )
        for i, word in enumerate(words)
    ]  # fmt: skip
    renderer = figure.canvas.get_renderer()
    found = [label.get_window_extent(renderer) for label in labels]
    boxes = np.array([[box.width + 10, box.height + 5] for box in found])
    # The map is stretched over the picture, with room for half a label at the rim.
    rim = boxes.max(axis=0) / 2 + 40
    low, high = place.min(axis=0), place.max(axis=0)
    share = np.where(high > low, (place - low) / np.where(high > low, high - low, 1), 0.5)
    centers = rim + share * (np.array(frame) - 2 * rim)
    for label, place in zip(labels, spread_labels(centers, boxes, frame), strict=True):
        label.set_position(place)


# --- where words stand ---------------------------------------------------------------------------------------------------


def neighbour_map(matrix: np.ndarray) -> np.ndarray:
    """Place vectors (n, dim) on the plane, (n, 2): by t-SNE (van der Maaten and Hinton 2008), of cosine distances.

    It begins at their two main axes. The same vectors always give the same map.
    """
    tsne = import_extra("sklearn.manifold", "plots", '"speedtransfer[plot]"').TSNE
    rows = matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), TINY)
    if np.ptp(rows, axis=0).max() < 1e-6:  # nothing to tell them apart by
        return np.stack([np.arange(len(rows), dtype=np.float64), np.zeros(len(rows))], axis=1)
    begin = "pca" if rows.shape[1] > 1 else "random"
    found = tsne(perplexity=min(_PERPLEXITY, (len(rows) - 1) / 3), init=begin, random_state=0).fit_transform(rows)
    return np.asarray(found, dtype=np.float64)


def spread_labels(centers: np.ndarray, sizes: np.ndarray, frame: tuple[float, float]) -> np.ndarray:
    """Move boxes (n, 2) from `centers` apart, as little as it takes, until none covers another; give up after some rounds.

    They do not leave a picture of the size `frame`; a box that is larger sticks to its lower left corner.
    """
    place = centers.astype(np.float64)
    low = sizes / 2
    high = np.maximum(np.array(frame) - sizes / 2, low)
    first, second = np.triu_indices(len(place), 1)
    for _ in range(_ROUNDS):
        place = np.clip(place, low, high)
        apart = place[first] - place[second]
        overlap = (sizes[first] + sizes[second]) / 2 - np.abs(apart)
        covered = (overlap > 0).all(axis=1)
        if not covered.any():
            break
        # Push along the axis that needs less; a later word goes up or right where two share one spot.
        axis = overlap.argmin(axis=1)
        ahead = np.sign(apart[np.arange(len(axis)), axis])
        push = np.where(ahead == 0, np.sign(first - second), ahead) * overlap.min(axis=1) * 0.3
        for way in (0, 1):
            along = np.where(covered & (axis == way), push, 0.0)
            place[:, way] += np.bincount(first, along, len(place)) - np.bincount(second, along, len(place))
    return np.clip(place, low, high)
