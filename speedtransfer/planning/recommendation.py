"""Choose a configuration: the least lossy that fits, and of these the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speedtransfer.planning.configurations import Option
from speedtransfer.planning.footprint import DENSE, DEVICE, PAGEABLE, PINNED, SPARSE

# Where no time is known: nothing to look up in other memory first.
_ORDER = (DENSE, SPARSE, DEVICE, PINNED, PAGEABLE)


def best_option(options: Sequence[Option]) -> Option | None:
    """Return the configuration to use: of those that fit and lose least, the fastest; None where none fits.

    Levels are float32 rows and state; fewer bits of rows or state; rows in 8 bits; files. One that trains with another
    optimizer than was asked for is left out. Of equally fast ones the first takes precedence, which is torch's own module.
    """
    fitting = [option for option in options if option.fits and option.same]
    if not fitting:
        return None
    level = min(option.level for option in fitting)
    return min((option for option in fitting if option.level == level), key=_slowness)


def smallest_option(options: Sequence[Option]) -> Option | None:
    """Return the one that takes the fewest bytes of memory, of those that fit; files only where nothing else does."""
    fitting = [option for option in options if option.fits and option.same]
    return min(fitting, key=lambda o: (o.level == 3, o.total_bytes), default=None)


def _slowness(option: Option) -> tuple[float, float, int]:
    seconds = option.ahead_s or option.step_s
    place = _ORDER.index(option.memory) if option.memory in _ORDER else len(_ORDER)
    return (math.inf if seconds is None else seconds, float(option.form.level), place)
