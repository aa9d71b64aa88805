"""Keep copies on a device of arrays of the host, by sending the lines that have changed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from speedtransfer.idle.quadrature import BLOCK, Floats


class DeviceCopy:
    """A copy of lines and blocks on a device other than the CPU, for one stream of it: others may still read theirs."""

    def __init__(self) -> None:
        self._lines: Tensor | None = None
        self._blocks: Tensor | None = None
        self._count = self._final = 0  # of the lines when they were sent

    def tensors(
        self, device: torch.device, lines: Floats, blocks: Floats, count: int, final: int
    ) -> tuple[Tensor, Tensor]:
        """Return `lines` and `blocks` on `device`, with the first `count` + 1 lines as they are now.

        A step changes the lines of its block, those from `final` on, and the blocks before.
        """
        if self._lines is None or count != self._count:
            first = min(self._count - self._count % BLOCK, self._final)
            self._lines = send(self._lines, device, lines, first, count + 1)
            self._blocks = send(self._blocks, device, blocks, 0, count // BLOCK + 1 if count >= BLOCK else 0)
        assert self._blocks is not None
        self._count, self._final = count, final
        return self._lines, self._blocks


def send(kept: Tensor | None, device: torch.device, array: np.ndarray, first: int, stop: int) -> Tensor:
    """Return a copy of `array` on `device`: `kept` with the lines `first` to `stop` as they are now, or a new one.

    The host does not wait, and may change its own at once.
    """
    # One that is made for an evaluation must be of use in training.
    with torch.inference_mode(False):
        if kept is None or len(kept) != len(array):
            return _pinned(array).to(device, non_blocking=True)
        if first < stop:
            kept[first:stop].copy_(_pinned(array[first:stop]), non_blocking=True)
        return kept


def current_stream(device: torch.device) -> int:
    """Return the address of the current stream of a device; 0 for one without streams."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _pinned(values: np.ndarray) -> Tensor:
    """Return a page-locked copy, from torch's pool, which uses memory again only once the device has read it."""
    return torch.from_numpy(values).pin_memory()
