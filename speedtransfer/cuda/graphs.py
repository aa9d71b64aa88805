"""CUDA graphs: whether one is being captured, and what cannot be. A replay repeats what the device did, and not the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from speedtransfer.errors import DeviceError
from speedtransfer.once import once

WARM_UP = "do a few steps like it before the capture, on another stream, as torch asks for every graph"

# Calls of methods of CUDAGraph so far; a capture that could not begin has ended.
_calls = {"capture_begin": 0, "capture_end": 0, "replay": 0}


@once
def count_graphs() -> None:
    """Have every capture and replay from now on counted: torch tells neither one capture from another, nor of a replay."""
    for name in _calls:
        setattr(torch.cuda.CUDAGraph, name, _counting(name, getattr(torch.cuda.CUDAGraph, name)))


def _counting(name: str, method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def called(*args: Any, **kwargs: Any) -> None:
        if name == "capture_end":
            try:
                return method(*args, **kwargs)
            finally:
                _calls[name] += 1
        _calls[name] += 1
        try:
            return method(*args, **kwargs)
        except BaseException:
            _calls["capture_end"] += name == "capture_begin"
            raise

    return called


def is_capturing() -> bool:
    """Tell whether the current stream is being captured in a CUDA graph."""
    # Only what uses CUDA captures. Elsewhere torch raises instead of answering: without CUDA, a driver or a device.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def some_thread_captures() -> bool:
    """Tell whether any thread may capture a CUDA graph, which waits, queries and frees of others would end (mode "global")."""
    return _calls["capture_begin"] > _calls["capture_end"] or is_capturing()


def capture_number() -> int | None:
    """Return a number of the capture that the current stream is in; None outside of one."""
    return _calls["capture_begin"] if is_capturing() else None


def num_replays() -> int:
    """Return how many replays of graphs there were."""
    return _calls["replay"]


def check_not_capturing(
    what: str,
    remedy: str = "do it before the capture, or outside of the graph",
    why: str = "as the host takes part in it and a replay would leave that out",
) -> None:
    """Raise :class:`~speedtransfer.errors.DeviceError` if the current stream is being captured in a CUDA graph."""
    if is_capturing():
        raise DeviceError(f"{what} cannot be captured in a CUDA graph, {why}; {remedy}")
