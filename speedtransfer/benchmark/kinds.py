"""The kinds of table that suites `step` and `memory` compare: ours in every memory, and torch's dense and sparse ones."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from speedtransfer.benchmark.results import Role
from speedtransfer.nn import Embedding

DIM = 128
ROW_BYTES = DIM * 4  # of float32
PLANES = {
    "AdamW": 3,
    "SGD": 1,
    "SGD with momentum": 2,
    "RMSprop": 2,
    "Adamax": 3,
}  # that a table trained with it has: the weights and the optimizer's state
OURS = "speedtransfer, {}"  # and the memory


@dataclass(frozen=True)
class Kind:
    """A kind of table with its optimizer.

    Attributes
    ----------
    name : str
    role : {"ours", "other"}
    place : {"host", "device"}
        Whose memory it takes.
    planes : int
        What it holds there in a step, each as large as the weights; a dense gradient is one.
    make : callable
        Takes the number of rows and returns an embedding of zeros on the compute device.
    optimizer : callable
        Takes the parameters.
    idle : {"lazy", "exact"}
        Of ours.
    memory : str
        Of ours.
    """

    name: str
    role: Role
    place: str
    planes: int
    make: Callable[[int], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    idle: str = "lazy"
    memory: str = ""


class _Ours(Embedding):
    def reset_parameters(self) -> None:
        """Stay zero: many gigabytes need not be filled for the few rows that are used."""


class _Torch(nn.Embedding):
    def reset_parameters(self) -> None:
        """Start from zeros as well."""
        nn.init.zeros_(self.weight)


def kinds(device: torch.device, optimizer: str = "AdamW", idle: str = "lazy") -> list[Kind]:
    """Return every kind of table whose compute device is `device`, trained with `optimizer` (a key of `PLANES`).

    The first is the one that this library chooses. On the CPU "device" would be "pageable" once more.
    """
    names = ("pinned", "device", "pageable", "mmap") if device.type == "cuda" else ("pageable", "mmap")
    first, *rest = (_ours(memory, device, optimizer, idle) for memory in names)
    return [first, _torch(device, optimizer, sparse=True), _torch(device, optimizer, sparse=False), *rest]


def _ours(memory: str, device: torch.device, optimizer: str, idle: str) -> Kind:
    def make(rows: int) -> nn.Module:
        if memory != "mmap":
            return _Ours(rows, DIM, device=device, memory=memory, idle=idle)
        folder = tempfile.mkdtemp(prefix="speedtransfer-bench-")
        emb = _Ours(rows, DIM, device=device, memory=memory, path=Path(folder, "table.safetensors"), idle=idle)
        weakref.finalize(emb, shutil.rmtree, folder, ignore_errors=True)
        return emb

    place = "device" if memory == "device" else "host"
    name = OURS.format(memory) + (f", idle={idle}" if idle != "lazy" else "")
    return Kind(name, "ours", place, PLANES[optimizer], make, _OPTIMIZERS[optimizer], idle, memory)


def _torch(device: torch.device, optimizer: str, sparse: bool) -> Kind:
    def make(rows: int) -> nn.Module:
        return _Torch(rows, DIM, sparse=sparse, device=device)

    name = "SparseAdam" if sparse and optimizer == "AdamW" else optimizer
    planes = PLANES[optimizer] + (not sparse)
    title = f"nn.Embedding({'sparse=True' if sparse else ''}) + {name}".replace("()", "")
    return Kind(title, "other", "device" if device.type == "cuda" else "host", planes, make, _OPTIMIZERS[name])


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SparseAdam": torch.optim.SparseAdam,
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, foreach=True),
}
