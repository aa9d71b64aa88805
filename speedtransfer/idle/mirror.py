"""The lines of a `History` on a device: a copy that is kept up to date by sending what has changed."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtransfer.idle.quadrature import BLOCK, Floats


class Mirror:
    """A copy of lines and blocks on a device other than the CPU."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._length = self._final = 0  # of the history when it was sent

    def reset(self) -> None:
        """Forget the copy: the lines have been made anew."""
        self._kept = None

    def tensors(
        self, device: torch.device, lines: Floats, blocks: Floats, length: int, final: int
    ) -> tuple[Tensor, Tensor]:
        """Return `lines` and `blocks` on `device`, the first `length` + 1 lines up to date.

        A step changes the lines of its block, those from `final` on, and the blocks before.
        """
        if self._kept is None or self._kept[0].device != device:
            self._kept = _send(lines, device), _send(blocks, device)
        elif length != self._length:
            first = min(self._length - self._length % BLOCK, self._final)
            kept_lines, kept_blocks = self._kept
            kept_lines[first : length + 1].copy_(_pinned(lines[first : length + 1]), non_blocking=True)
            if length >= BLOCK:
                end = length // BLOCK + 1
                kept_blocks[:end].copy_(_pinned(blocks[:end]), non_blocking=True)
        self._length, self._final = length, final
        return self._kept


def _pinned(values: Floats) -> Tensor:
    """Return a page-locked copy, from torch's pool, which uses memory again only once the device has read it."""
    return torch.from_numpy(values).pin_memory()


def _send(values: Floats, device: torch.device) -> Tensor:
    return _pinned(values).to(device, non_blocking=True)
