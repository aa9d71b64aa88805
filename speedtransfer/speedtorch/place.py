"""Where the rows of a SpeedTorch class live: the one thing in which its many classes differ."""

from __future__ import annotations

import contextlib
import sys
import uuid
import warnings
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from speedtransfer.cuda import cuda_status, resolve_device
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.tables import PathLike, Table

_warned = False

Memory: TypeAlias = Literal["device", "pinned", "pageable", "mmap"]


class Place(NamedTuple):
    """A memory and the compute device that rows are gathered to.

    Attributes
    ----------
    memory : {"device", "pinned", "pageable", "mmap"}
    device : torch.device
    folder : Path
        Of the nameless file of a "mmap" table; that of the working directory by default, as ever.
    path : Path or None
        The file of a "mmap" table that is to stay.
    """

    memory: Memory
    device: torch.device
    folder: Path = Path()
    path: Path | None = None

    def table(self, num_rows: int, dim: int, dtype: torch.dtype) -> Table:
        """Return a new table of zeros."""
        if self.memory != "mmap":
            return Table(num_rows, dim, dtype, self.memory, device=self.device)
        path = self.path or self.folder / f".speedtorch-{uuid.uuid4().hex}.safetensors"
        table = Table(num_rows, dim, dtype, "mmap", path, self.device)
        if self.path is None:
            with contextlib.suppress(OSError):  # the map keeps the file, without a name, until the table dies
                path.unlink()
        return table


def on_cuda(memory: Memory) -> Place:
    """Return `memory` of the current CUDA device; without CUDA that of the CPU, with a warning once a process."""
    return on_device("cuda", memory)


def on_device(device: torch.device | str, memory: Memory) -> Place:
    """Return `memory` as the compute device `device` has it; where that is CUDA and there is none, as the CPU has it."""
    cuda = cuda_status()
    if cuda.available or (torch.device(device).type != "cuda" and memory != "pinned"):
        return Place(memory, resolve_device(device))
    _warn_once(cuda.reason)
    return Place("mmap" if memory == "mmap" else "pageable", torch.device("cpu"))


def in_file(path: PathLike | None = None, folder: PathLike = "") -> Place:
    """Return the memory that is a file: one at `path`, or in `folder` one without a name, which goes with the table."""
    place = on_cuda("mmap")
    return place._replace(folder=Path(folder), path=None if path is None else Path(path))


def cpu_or_cuda(device_type: object, pinned: object, variable: torch.Tensor | None = None) -> Place:
    """Return the place that PytorchModelFactory's `deviceType` and `pinType` name.

    With "cpu" rows come to where `variable` is, which is what holds them during a step.
    """
    device = _device_of(device_type)
    if device.type == "cuda":
        if pinned:
            raise InvalidValueError(
                "pinType is True but deviceType is 'cuda', whose memory is not the host's; pass deviceType='cpu'"
            )
        return on_device(device, "device")
    target = device if variable is None else variable.device
    return on_device(target, "pinned" if pinned else "pageable")


def _device_of(device_type: object) -> torch.device:
    if not isinstance(device_type, (str, torch.device)):
        raise InvalidTypeError(f"deviceType is {device_type!r} but must be a name; pass 'cuda' or 'cpu'")
    try:
        device = torch.device(device_type)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidValueError(f"deviceType is {str(device_type)!r} but must be 'cuda' or 'cpu'; pass one of them")
    return device


def _warn_once(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        level, frame = 2, sys._getframe().f_back
        while frame is not None and frame.f_globals.get("__name__", "").startswith("speedtransfer."):
            level, frame = level + 1, frame.f_back  # to the line that asks
        warnings.warn(
            f"SpeedTorch's classes ask for CUDA, but {reason}. Rows live in ordinary memory and are computed with on the CPU",
            RuntimeWarning,
            stacklevel=level,
        )
