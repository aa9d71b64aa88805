"""The results as pictures: loss curves, and bars of speed and memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ngram_lm.contenders import CONTENDERS
from speedtransfer.drawing import COLOURS, INK, QUIET, legend_below, require_matplotlib, tidy
from speedtransfer.errors import SpeedtransferError

_PLAIN = "#b8bec8"
_LINE = {"dense": {"color": _PLAIN, "lw": 7}, "exact": {"color": COLOURS[0], "lw": 2, "ls": (0, (4, 2))}}
_COLOUR = {"none": QUIET, "sparse": COLOURS[2], "lazy": COLOURS[1]}


def save_pictures(result: dict[str, Any], folder: Path) -> Iterator[str]:
    """Write curves.png and bars.png; yield what is wrong where one cannot be drawn."""
    for name, draw in (("curves", curves), ("bars", bars)):
        try:
            figure = draw(result)
            if figure is not None:
                figure.savefig(folder / f"{name}.png", format="png")
        except (SpeedtransferError, OSError) as error:
            yield f"no {name}.png: {' '.join(str(error).split())}"


def curves(result: dict[str, Any]) -> Any:
    """Return a figure of the losses; None where there are none."""
    if not _with_losses(result):
        return None
    figure = require_matplotlib()(11, 4.4)
    legend_below(figure, draw_curves(figure, result))
    return figure


def bars(result: dict[str, Any]) -> Any:
    """Return a figure of speed and memory; None where no contender has come to its end."""
    if not _at_end(result):
        return None
    figure = require_matplotlib()(11, 1.2 + 0.36 * len(_at_end(result)))
    draw_bars(figure, result)
    return figure


def _with_losses(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    # Those that read ahead have the curves of those that do not.
    return {name: one for name, one in result["contenders"].items() if one["losses"] and not CONTENDERS[name].prefetch}


def _at_end(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in result["contenders"].items() if one["complete"]}


def draw_curves(area: Any, result: dict[str, Any]) -> Any:
    """Draw loss and validation loss by the step into a figure or a part of one; return axes that have the legend."""
    training, validation = area.subplots(1, 2)
    for order, (name, one) in enumerate(_with_losses(result).items()):
        style = {"zorder": 3 + order, **_LINE.get(name, {"color": _COLOUR.get(name, INK), "lw": 2})}
        window = max(1, len(one["losses"]) // 40)
        smooth = np.convolve(one["losses"], np.full(window, 1 / window), mode="valid")
        training.plot(np.arange(len(smooth)) + window, smooth, label=CONTENDERS[name].title, **style)
        if one["validation"]:
            validation.plot(*zip(*one["validation"], strict=True), **style)
    training.set_title("training loss, a running mean", fontsize=11, color=INK)
    validation.set_title("loss of text that was not trained on", fontsize=11, color=INK)
    for axes in (training, validation):
        axes.set_xlabel("step")
        tidy(axes)
    return training


def draw_bars(area: Any, result: dict[str, Any]) -> None:
    """Draw tokens a second, and the memory of table and state, into a figure or a part of one."""
    found = _at_end(result)
    tokens = result["settings"]["batch"] * result["settings"]["context"]
    speed, memory = area.subplots(1, 2, sharey=True)
    for place, (name, one) in enumerate(found.items()):
        colour = COLOURS[0] if CONTENDERS[name].kind == "ours" else _PLAIN
        for axes, value in ((speed, tokens / one["step_s"]), (memory, one["table_bytes"] / 1e6)):
            axes.barh(place, value, 0.72, color=colour)
            style = {"va": "center", "fontsize": 8.5, "color": INK}
            axes.annotate(f"{value:,.0f}", (value, place), (4, 0), textcoords="offset points", **style)
    for axes, title in ((speed, "tokens a second"), (memory, "MB of table and state")):
        axes.set_title(title, fontsize=11, color=INK)
        axes.margins(x=0.15)
        tidy(axes)
        axes.grid(visible=False, axis="y")
    speed.set_yticks(range(len(found)), [CONTENDERS[name].title for name in found], parse_math=False)
    speed.invert_yaxis()
