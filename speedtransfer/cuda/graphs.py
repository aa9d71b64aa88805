"""CUDA graphs: whether one is being captured, and what cannot be. A replay repeats what the device did, and not the host."""

from __future__ import annotations

import functools

import torch

from speedtransfer.errors import DeviceError

WARM_UP = "do a few steps like it before the capture, on another stream, as torch asks for every graph"

# A torch that was built without CUDA raises instead of answering.
_WITHOUT_CUDA = None if torch.backends.cuda.is_built() else torch.cuda.is_current_stream_capturing
_captures = 0
_counted = False


def count_captures() -> None:
    """Have every capture from now on counted, so that :func:`capture_number` can tell one from another."""
    global _counted
    if _counted:
        return
    begin = torch.cuda.CUDAGraph.capture_begin

    @functools.wraps(begin)
    def capture_begin(*args: object, **kwargs: object) -> None:
        global _captures
        _captures += 1
        begin(*args, **kwargs)  # type: ignore[arg-type]

    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign]
    _counted = True


def is_capturing() -> bool:
    """Tell whether the current stream is being captured in a CUDA graph."""
    asks = torch.cuda.is_current_stream_capturing
    return asks is not _WITHOUT_CUDA and asks()


def capture_number() -> int | None:
    """Return a number of the capture that the current stream is in; None outside of one."""
    return _captures if is_capturing() else None


def check_not_capturing(
    what: str,
    remedy: str = "do it before the capture, or outside of the graph",
    why: str = "as the host takes part in it and a replay would leave that out",
) -> None:
    """Raise :class:`~speedtransfer.errors.DeviceError` if the current stream is being captured in a CUDA graph."""
    if is_capturing():
        raise DeviceError(f"{what} cannot be captured in a CUDA graph, {why}; {remedy}")
