"""What a process does once, whichever of its threads come first."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def once(function: F) -> F:
    """Call `function` once for the same arguments, as ``functools.cache``, but have other threads wait for the first call."""
    found: dict[Any, Any] = {}
    lock = threading.RLock()

    @functools.cache
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with lock:
            if args not in found:
                found[args] = function(*args)
            return found[args]

    clear = call.cache_clear

    def forget() -> None:
        clear()
        found.clear()

    def renew() -> None:
        nonlocal lock
        # In the parent another thread may have had it.
        lock = threading.RLock()

    call.cache_clear, call.__wrapped__ = forget, function  # type: ignore[method-assign]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
    return call  # type: ignore[return-value]
