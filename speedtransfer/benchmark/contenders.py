"""Embedding tables compared by suites `step` and `memory`: this library's, torch's, and rows by hand."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.results import Role
from speedtransfer.errors import HostMemoryError, format_bytes
from speedtransfer.nn import Embedding

DIM = 128
ROW_BYTES = DIM * 4  # float32
# Planes of a table with weights and optimizer state.
PLANES = {"AdamW": 3, "SGD": 1}
BY_HAND = "rows by hand, unchecked"

Embed = Callable[[int, int], nn.Module]
MakeOptimizer = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Contender:
    """A kind of table with its optimizer.

    `embed` returns the module of so many rows and columns, all zeros, and `optimizer` what trains a model of such modules;
    `dense` trains a model of ``nn.Embedding`` in the same way. `exact`: a step also trains rows that it does not touch.
    `place` is the memory that a table takes ("host" or "device"), `planes` how many arrays as large as the weights it holds in
    a step, a dense gradient included. `memory` is that of our tables.
    """

    name: str
    role: Role
    embed: Embed
    optimizer: MakeOptimizer
    dense: MakeOptimizer
    exact: bool
    place: str
    planes: int
    memory: str = ""


def unfilled(kind: type[nn.Module]) -> Any:
    """Return a class of such modules that leave rows as they are: filling gigabytes takes long, and few rows are used."""
    return type(kind.__name__, (kind,), {"reset_parameters": lambda self: None})


UnfilledEmbedding = unfilled(Embedding)


class ZeroEmbedding(nn.Embedding):
    """Embedding whose rows are zero at first."""

    def reset_parameters(self) -> None:
        """Fill with zeros."""
        nn.init.zeros_(self.weight)


def _training(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: optimizer(model.parameters(), **options)


_OPTIMIZERS = {
    "AdamW": _training(torch.optim.AdamW, fused=True),
    "SparseAdam": _training(torch.optim.SparseAdam),
    "SGD": _training(torch.optim.SGD),
}


def contenders(device: torch.device, optimizer: str = "AdamW", idle: str = "lazy") -> list[Contender]:
    """Return all contenders on `device`, trained with `optimizer` (a key of `PLANES`); our default memory comes first."""
    # On the CPU memory="device" would be "pageable" again.
    names = ("pinned", "device", "pageable", "mmap") if device.type == "cuda" else ("pageable", "mmap")
    first, *rest = (_ours(memory, device, optimizer, idle) for memory in names)
    return [first, _torch(device, optimizer, sparse=True), _torch(device, optimizer, sparse=False), *rest]


def _ours(memory: Any, device: torch.device, optimizer: str, idle: Any) -> Contender:
    def embed(rows: int, dim: int) -> nn.Module:
        if memory != "mmap":
            return UnfilledEmbedding(rows, dim, device=device, memory=memory, idle=idle)
        folder = tempfile.mkdtemp(prefix="speedtransfer-bench-")
        emb = UnfilledEmbedding(
            rows, dim, device=device, memory=memory, path=Path(folder, "table.safetensors"), idle=idle
        )
        weakref.finalize(emb, shutil.rmtree, folder, ignore_errors=True)
        return emb

    # Lazy idle rows are the default.
    name = f"speedtransfer, {memory}" + (f", idle={idle}" if idle != "lazy" else "")
    make, place = _OPTIMIZERS[optimizer], "device" if memory == "device" else "host"
    return Contender(name, "ours", embed, make, make, idle == "exact", place, PLANES[optimizer], memory)


def _torch(device: torch.device, optimizer: str, sparse: bool) -> Contender:
    name = "SparseAdam" if sparse and optimizer == "AdamW" else optimizer
    return Contender(
        f"nn.Embedding{'(sparse=True)' * sparse} + {name}",
        "other",
        functools.partial(ZeroEmbedding, sparse=sparse, device=device),
        _OPTIMIZERS[name],
        _training(torch.optim.AdamW, weight_decay=0) if name == "SparseAdam" else _OPTIMIZERS[name],
        not sparse,
        "device" if device.type == "cuda" else "host",
        PLANES[optimizer] + (not sparse),
    )


def by_hand(device: torch.device) -> Contender:
    """Return the idea of this library in plain torch, without checks, trained with AdamW."""
    embed = functools.partial(TableByHand, device=device)
    return Contender(BY_HAND, "other", embed, AdamWByHand, _OPTIMIZERS["AdamW"], False, device.type, PLANES["AdamW"])


def fitting(
    chosen: Iterable[Contender], rows: int, room: dict[str, float]
) -> Iterator[tuple[Contender, HostMemoryError | None]]:
    """Yield each contender with the error of a table that does not fit beside the earlier ones, or None.

    `room` has the bytes that tables may take, by place.
    """
    left = dict(room)
    for contender in chosen:
        size, place = contender.planes * rows * ROW_BYTES, contender.place
        error = HostMemoryError(
            f"takes {format_bytes(size)} but the tables of a comparison may take {format_bytes(room[place])} of the "
            f"{place}'s memory together, of which those beside it leave {format_bytes(left[place])}"
        )
        fits = size <= left[place]
        left[place] -= size * fits
        yield contender, None if fits else error


class TableByHand(ZeroEmbedding):
    """Plain torch: an embedding whose unique rows of a batch are a leaf of autograd."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        super().__init__(rows, width, device=device)
        self.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:  # noqa: D102 (nn.Embedding)
        self.ids, inverse = ids.unique(return_inverse=True)
        self.rows = self.weight.index_select(0, self.ids).requires_grad_()
        return F.embedding(inverse, self.rows)


class AdamWByHand:
    """AdamW on the rows that each `TableByHand` has looked up: gathers the state, steps, and scatters everything."""

    def __init__(self, model: nn.Module) -> None:
        tables = [table for table in model.modules() if isinstance(table, TableByHand)]
        self._params = [nn.Parameter(table.weight[:0]) for table in tables]
        self._adamw = torch.optim.AdamW(self._params, fused=True)
        planes = [{name: torch.zeros_like(table.weight) for name in ("exp_avg", "exp_avg_sq")} for table in tables]
        self._parts = list(zip(tables, self._params, planes, strict=True))

    def step(self) -> None:
        """Step the rows of the last batch."""
        for table, param, planes in self._parts:
            param.data, param.grad = table.rows.detach(), table.rows.grad
            if state := self._adamw.state[param]:
                state.update({name: plane.index_select(0, table.ids) for name, plane in planes.items()})
        self._adamw.step()
        for table, param, planes in self._parts:
            table.weight.index_copy_(0, table.ids, param.data)
            for name, plane in planes.items():
                plane.index_copy_(0, table.ids, self._adamw.state[param][name])

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for param in self._params:
            param.grad = None
