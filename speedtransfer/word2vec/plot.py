"""A picture of the frequent words: a map on which words of a kind stand together."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from speedtransfer.errors import InvalidValueError, SpeedtransferError, check_size
from speedtransfer.tables.files import atomic
from speedtransfer.word2vec.layout import neighbour_map, spread_labels
from speedtransfer.word2vec.vectors import Vectors

_WIDTH_INCH, _HEIGHT_INCH, _DPI = 16.0, 10.0, 120
_INK, _PAPER = "#1f2430", "#ffffff"


class MissingPackageError(SpeedtransferError, ImportError):
    """A package of an optional extra is not installed."""


def _import_figure() -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            'plots need matplotlib, which is not installed; run: pip install "speedtransfer[plot]"'
        ) from error
    # Not pyplot: it would pick a backend and keep the figure in the state of the whole process.
    figure = Figure(figsize=(_WIDTH_INCH, _HEIGHT_INCH), dpi=_DPI, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    return figure


def plot(vectors: Vectors, path: str | os.PathLike[str], num_words: int = 200, title: str | None = None) -> None:
    """Draw the first `num_words` words, the most frequent where `train` made the vectors, as a map of neighbours.

    The font is matplotlib's own: letters it lacks (Chinese, for instance) show as boxes.

    Parameters
    ----------
    vectors : Vectors
    path : path-like
        The PNG file; an old one stays whole until the new one is.
    num_words : int
    title : str, optional

    Raises
    ------
    InvalidValueError
        `path` does not end in .png, or there are no words.
    MissingPackageError
        matplotlib is not installed.
    StorageError
        The file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".png":
        raise InvalidValueError(f"{str(path)!r} ends in {path.suffix!r} but the picture is a PNG; use the ending .png")
    num_words = min(check_size(num_words, "num_words", 1), len(vectors))
    if num_words == 0:
        raise InvalidValueError("there are no words to draw; pass vectors that hold some")
    figure = _import_figure()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # one for every letter the font lacks
        _draw(figure, vectors.words[:num_words], neighbour_map(vectors.matrix[:num_words]), title)
        with atomic(path) as file:
            figure.savefig(file, format="png")


def _draw(figure: Any, words: list[str], place: np.ndarray, title: str | None) -> None:
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(0, _WIDTH_INCH * _DPI)
    axes.set_ylim(0, _HEIGHT_INCH * _DPI)
    size = float(np.clip(190 / np.sqrt(len(words)), 7, 13))
    # Frequent words stand out by size and weight: a map without them reads as a cloud.
    rank = np.arange(len(words)) / max(len(words) - 1, 1)
    colours = _colours(place)
    labels = [
        axes.text(
            0, 0, word, color=colours[i], fontsize=size * (1.35 - 0.5 * rank[i]), ha="center", va="center",
            fontweight="bold" if rank[i] < 0.1 else "normal", parse_math=False,
        )
        for i, word in enumerate(words)
    ]  # fmt: skip
    renderer = figure.canvas.get_renderer()
    boxes = np.array(
        [[box.width + 10, box.height + 5] for box in (label.get_window_extent(renderer) for label in labels)]
    )
    frame = (_WIDTH_INCH * _DPI, _HEIGHT_INCH * _DPI)
    for label, (x, y) in zip(labels, spread_labels(_into_frame(place, boxes), boxes, frame), strict=True):
        label.set_position((x, y))
    if title:
        axes.text(24, _HEIGHT_INCH * _DPI - 24, title, color=_INK, fontsize=13, ha="left", va="top", parse_math=False)


def _into_frame(place: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Stretch the map over the picture, with room for half a label at the rim."""
    rim = boxes.max(axis=0) / 2 + 40
    room = np.array([_WIDTH_INCH, _HEIGHT_INCH]) * _DPI - 2 * rim
    low, high = place.min(axis=0), place.max(axis=0)
    share = np.where(high > low, (place - low) / np.where(high > low, high - low, 1), 0.5)
    return rim + share * room


def _colours(place: np.ndarray) -> list[tuple[float, float, float]]:
    """Return a colour a word that turns with the direction from the middle: regions of the map get a hue of their own."""
    from matplotlib.colors import hsv_to_rgb

    offset = place - place.mean(axis=0)
    hue = (np.arctan2(offset[:, 1], offset[:, 0]) / (2 * np.pi)) % 1.0
    rgb = hsv_to_rgb(np.stack([hue, np.full_like(hue, 0.85), np.full_like(hue, 0.62)], axis=1))
    return [tuple(map(float, colour)) for colour in rgb]  # type: ignore[misc]
