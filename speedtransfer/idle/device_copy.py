"""Keep a copy of `Sums` on a device, by sending the lines that have changed."""

from __future__ import annotations

import torch
from torch import Tensor

from speedtransfer.idle.quadrature import BLOCK, Floats


class DeviceCopy:
    """A copy of lines and blocks on a device other than the CPU, for one stream of it: others may still read theirs."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._count = self._final = 0  # of the lines when they were sent

    def tensors(
        self, device: torch.device, lines: Floats, blocks: Floats, count: int, final: int
    ) -> tuple[Tensor, Tensor]:
        """Return `lines` and `blocks` on `device`, with the first `count` + 1 lines as they are now.

        A step changes the lines of its block, those from `final` on, and the blocks before.
        """
        if self._kept is None or len(self._kept[0]) != len(lines):
            self._kept = _pinned(lines).to(device, non_blocking=True), _pinned(blocks).to(device, non_blocking=True)
        elif count != self._count:
            first = min(self._count - self._count % BLOCK, self._final)
            kept_lines, kept_blocks = self._kept
            kept_lines[first : count + 1].copy_(_pinned(lines[first : count + 1]), non_blocking=True)
            if count >= BLOCK:
                end = count // BLOCK + 1
                kept_blocks[:end].copy_(_pinned(blocks[:end]), non_blocking=True)
        self._count, self._final = count, final
        return self._kept


def _pinned(values: Floats) -> Tensor:
    """Return a page-locked copy, from torch's pool, which uses memory again only once the device has read it."""
    return torch.from_numpy(values).pin_memory()
