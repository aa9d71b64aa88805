"""The picture of a ranking: bars of performance, and of performance over each price, relative to the best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speedtransfer.drawing import COLOURS, INK, QUIET, require_matplotlib
from speedtransfer.errors import InvalidValueError, StorageError
from speedtransfer.planning.rank import Ranking
from speedtransfer.planning.shown_ranking import relative

# Titles in lines that are short enough for a column of a picture that is shown 390 pixels wide.
_TITLES = {
    "time": "batches\na second",
    "device-price": "per price of\nthe GPUs",
    "machine-price": "per price of\nthe machine",
    "hour": "per price of\nan hour",
}
# Dark enough for white letters.
_COLOURS = {"time": COLOURS[0], "device-price": COLOURS[1], "machine-price": COLOURS[2], "hour": COLOURS[7]}
_WIDTH, _ROW, _FRAME = 6.5, 0.34, 1.15  # inches
_LETTERS, _SMALL = 12.5, 11.5  # points, of 72 an inch: 390 pixels are 60 an inch
_MOST = 40  # machines
_LONGEST = 18  # letters of a name


def draw_ranking(ranking: Ranking, path: str | Path) -> None:
    """Draw the machines of a ranking from the best down, a column for each measure that is known, and write it to `path`.

    Parameters
    ----------
    ranking : Ranking
    path : str or Path
        Its ending says the format, such as .png or .svg.

    Raises
    ------
    MissingPackageError
        matplotlib is not installed.
    InvalidValueError
        The workload fits on none of the machines, so that there is nothing to draw; or matplotlib has no such format.
    StorageError
        The file cannot be written.
    """
    if not ranking.ranked:
        raise InvalidValueError(
            "the workload fits on none of the machines, so that there is nothing to draw; add machines"
        )
    figure = _figure(ranking)
    path = Path(path)
    form = path.suffix[1:].lower() or "png"
    if form not in figure.canvas.get_supported_filetypes():
        raise InvalidValueError(
            f"the picture's name is {path.name!r}, whose ending is no format of pictures; write .png"
        )
    try:
        figure.savefig(path, format=form, dpi=185)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r} ({error.strerror}); choose another path") from error


def _figure(ranking: Ranking) -> Any:
    shown = ranking.ranked[:_MOST]
    measures = [measure for measure in _TITLES if ranking.has(measure)]
    figure = require_matplotlib()(_WIDTH, _FRAME + _ROW * len(shown))
    places = range(len(shown))
    columns = figure.subplots(1, len(measures), sharey=True, squeeze=False)[0]
    for axes, measure in zip(columns, measures, strict=True):
        values = relative(ranking, measure)[: len(shown)]
        axes.barh(places, [value or 0.0 for value in values], color=_COLOURS[measure], height=0.72)
        for place, value in zip(places, values, strict=True):
            _label(axes, place, value)
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        axes.set_title(_TITLES[measure], fontsize=_LETTERS, color=INK, loc="left")
        axes.tick_params(length=0, colors=INK, labelsize=_LETTERS)
        for side in axes.spines.values():
            side.set_visible(False)
    columns[0].set_yticks(places, [_label_of(each.machine.name, each.machine.devices) for each in shown])
    columns[0].set_ylim(len(shown) - 0.5, -0.5)
    more = len(ranking.ranked) - len(shown)
    notes = [
        "1: the best of its column",
        *["(n): GPUs of the machine"] * any(each.machine.devices > 1 for each in shown),
    ]
    notes += [f"{more} more machines are not shown"] * bool(more)
    figure.supxlabel("; ".join(notes), fontsize=_SMALL, color=QUIET)
    return figure


def _label(axes: Any, place: int, value: float | None) -> None:
    """Write a value at the end of its bar: inside a long one, beside a short one."""
    text = (
        "\u2013" if value is None else "1" if value > 0.9995 else f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"
    )
    inside = value is not None and value > 0.55
    at = value or 0.0
    axes.text(
        at - 0.03 if inside else at + 0.03,
        place,
        text,
        ha="right" if inside else "left",
        va="center",
        fontsize=_SMALL,
        color="#ffffff" if inside else QUIET if value is None else INK,
    )


def _label_of(name: str, devices: int) -> str:
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}\u2026"
    return short if devices == 1 else f"{short} ({devices})"
