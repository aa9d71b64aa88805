"""Do something in another thread, and in the middle of a step: where an optimizer has got its rows and has changed none."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch


def elsewhere(use: Callable[[], Any]) -> Any:
    """Return what `use` does in another thread, while this one waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use).result(60)


def midway(optimizer: torch.optim.Adam, use: Callable[[], Any]) -> Any:
    """Make a step of an Adam, call `use` in the middle of it, and return what that returned; steps that it makes are whole."""
    seen, begin = [], torch.optim.Adam._init_group

    def begun(self: Any, *args: Any) -> Any:
        found = begin(self, *args)
        if self is optimizer and not seen:
            seen.append(None)
            seen.append(use())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "_init_group", begun)
        optimizer.step()
    return seen[1]
