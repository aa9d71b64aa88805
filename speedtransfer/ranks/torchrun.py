"""Join the processes that torchrun has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def world() -> Any:
    """Return the process group of all processes, or None where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Any]:
    """Make the process group of the processes that torchrun has started, until the end of the block; yield `world`.

    One that there is already stays. With a CUDA device each process takes that of its number on its host.
    """
    start = "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not start or dist.is_initialized():
        yield world()
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield world()
    finally:
        dist.destroy_process_group()
