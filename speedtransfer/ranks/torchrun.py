"""Join the processes that a launcher has started: torchrun, srun, the operators of Kubernetes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from speedtransfer.errors import ProcessGroupError


def num_launched() -> int:
    """Return how many processes the launcher of this one has started, by the variables that PyTorch reads; 1: no launcher."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if "RANK" in os.environ and size.isdigit() else 1


def group_of(given: Any) -> Any:
    """Return the process group that the argument `process_group` means; None: there is this process alone.

    ProcessGroupError: it is None, or "world", before there are process groups, in one of several processes.
    """
    if given is not None and not (isinstance(given, str) and given == "world"):
        return given
    if num_launched() > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ProcessGroupError(
            f"process_group is {given!r}, as torch.distributed.group.WORLD is before init_process_group(), so that each of "
            f"the {num_launched()} processes would have a whole table; make the module after init_process_group() (with "
            "Lightning in configure_model), or leave the argument out for a table in each"
        )
    return None if given is None else world()


def world() -> Any:
    """Return the process group of all processes, or None where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.group.WORLD
    return None


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Any]:
    """Make the process group of the processes that a launcher has started, until the end of the block; yield `world`.

    One that there is already stays. With a CUDA device each process takes that of its number on its host.
    """
    if num_launched() == 1 or "MASTER_ADDR" not in os.environ or dist.is_initialized():
        yield world()
        return
    if device.type == "cuda":
        number = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        torch.cuda.set_device(number % torch.cuda.device_count())
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield world()
    finally:
        dist.destroy_process_group()
