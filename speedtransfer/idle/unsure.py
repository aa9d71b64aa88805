"""A step of which only the device knows whether it was made: GradScaler lets fused optimizers skip one there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speedtransfer.cuda import keep_until_done


class Unsure:
    """A step of which only the device knows, so far, whether it was made.

    Parameters
    ----------
    step : IdleStep or Numbers
        What it does to idle rows if it was made.
    found_inf : Tensor
        Not zero on the device: it was skipped.
    """

    def __init__(self, step: Any, found_inf: Tensor) -> None:
        self.step = step
        # Of this object, and as kernels read it: that of GradScaler may be used again.
        self.skipped = found_inf.ne(0).to(torch.int32).view(1)
        self._arrived = torch.empty(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._arrived.copy_(self.skipped, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(found_inf.device))

    def is_known(self) -> bool:
        """Tell whether `was_made` need not wait."""
        return self._event.query()

    def was_made(self) -> bool:
        """Return whether the step was made, once the device is there: after the backward pass before it."""
        if not self._event.query():
            self._event.synchronize()
        return not self._arrived[0]

    def begin_use(self) -> None:
        """Let the current stream use `skipped` from now on."""
        stream = torch.cuda.current_stream(self.skipped.device)
        self._event.wait(stream)
        keep_until_done([self.skipped], stream)
