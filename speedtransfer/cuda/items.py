"""Launch a kernel whose threads share any number of items."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from speedtransfer.cuda.launch import launch_kernel, load_kernel
from speedtransfer.cuda.streams import current_stream
from speedtransfer.once import once

_THREADS = 256
# More items than these have threads are taken several by a thread.
_MAX_BLOCKS = 1 << 16


def launch_over(num_items: int, source_name: str, function_name: str, device: torch.device, packed: np.ndarray) -> None:
    """Queue a kernel on the current stream of `device`, with the argument that a `KernelArgument` has packed."""
    if num_items:
        blocks = min(-(-num_items // _THREADS), _MAX_BLOCKS)
        launch_kernel(kernel_on(source_name, function_name, device), blocks, _THREADS, packed, current_stream(device))


@once
def kernel_on(source_name: str, function_name: str, device: torch.device) -> Any:
    """Return what `load_kernel` does, which makes the device current each time."""
    return load_kernel(source_name, function_name, device)
