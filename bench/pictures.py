"""Writes the picture of a result, in as few colours as it needs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

from speedtransfer.errors import SpeedtransferError


def save_picture(draw: Callable[[], bytes], path: Path) -> str:
    """Write the PNG that `draw` returns to `path`; return why there is none."""
    try:
        from PIL import Image  # matplotlib brings it

        picture = draw()
    except (ImportError, SpeedtransferError) as error:
        return f"no picture {path}: {error}"
    with Image.open(io.BytesIO(picture)) as image:  # few colours are enough for bars and lines
        image.convert("RGB").quantize(64).save(path, optimize=True)
    return ""
