"""Ways to train tables on batches of ids, with a given gradient: ours, those of torch, and those of other libraries."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speedtransfer import MultiEmbedding, MultiEmbeddingBag
from speedtransfer.benchmark.workload import zipf_ids

SEEN, CHECKED = 8, 4  # batches, and steps that are compared
RATE = 0.01
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=RATE),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=RATE),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=RATE, fused=True),
}


class Shape(NamedTuple):
    """Tables of one size, and how many `ids` a batch looks up in each: in `bags`, whose rows are summed, or (0) one by one."""

    tables: int
    rows: int
    dim: int
    ids: int
    bags: int = 0

    @property
    def title(self) -> str:
        tables = f"{self.tables} tables of " if self.tables > 1 else ""
        looked_up = f"{self.ids:,} ids" + (f" in {self.bags:,} bags" if self.bags else "")
        return f"{tables}{self.rows:,} x {self.dim}, {looked_up}{' each' if self.tables > 1 else ''}"


class Data:
    """Batches of ids, table by table, each with the begin of every bag; first weights; the gradient of what is looked up."""

    def __init__(self, shape: Shape, optimizer: str) -> None:
        self.shape, self.optimizer = shape, optimizer
        self.batches, self.offsets = list[list[Tensor]](), list[list[Tensor]]()
        draw, count = torch.Generator().manual_seed(0), shape.bags or shape.ids
        for _ in range(SEEN):
            # Parts of one tensor, as a loader makes them.
            ids = torch.stack([zipf_ids(shape.rows, shape.ids, draw) for _ in range(shape.tables)])
            self.batches.append(list(ids.unbind()))
            every = (torch.randint(shape.ids + 1, (count - 1,), generator=draw) for _ in range(shape.tables))
            cuts = [each.sort().values for each in every]
            begins = [torch.cat([cut.new_zeros(1), cut]) if shape.bags else torch.arange(count) for cut in cuts]
            self.offsets.append(begins)
        self.weights = [torch.randn(shape.rows, shape.dim, generator=draw) for _ in range(shape.tables)]
        self.gradient = torch.randn(count, shape.dim, generator=draw)
        # Those of all tables in one: ids side by side, and where their bags begin and the last ends.
        self.flat = [torch.cat(ids) for ids in self.batches]
        ends = torch.tensor([shape.ids * shape.tables])
        self.begins = [
            torch.cat([*(part + shape.ids * number for number, part in enumerate(offsets)), ends])
            for offsets in self.offsets
        ]

    def make(self, params: Any) -> Any:
        return OPTIMIZERS[self.optimizer](params)

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        peer = modules(self, nn.EmbeddingBag if self.shape.bags else nn.Embedding)
        for number in range(CHECKED):
            peer.step(number)
        return peer.tables()


class Peer(NamedTuple):
    """A way to train: a step on the batch of a number, and the tables as they are now."""

    step: Callable[[int], object]
    tables: Callable[[], list[Tensor]]


def _stepping(
    modules: Sequence[Any], look_up: Callable[[int], list[Tensor]], optimizer: Any, gradients: list[Tensor]
) -> Peer:
    def step(number: int) -> None:
        torch.autograd.backward(look_up(number), gradients)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(step, lambda: [module.weight.detach() for module in modules])


def modules(data: Data, kind: Any, make: Any = None, **options: Any) -> Peer:
    shape = data.shape
    if shape.bags:
        options["mode"] = "sum"
    found = nn.ModuleList(kind(shape.rows, shape.dim, _weight=weight.clone(), **options) for weight in data.weights)

    def look_up(number: int) -> list[Tensor]:
        ids, offsets = data.batches[number % SEEN], data.offsets[number % SEEN]
        if shape.bags:
            return [module(*part) for module, *part in zip(found, ids, offsets, strict=True)]
        return [module(part) for module, part in zip(found, ids, strict=True)]

    return _stepping(found, look_up, (make or data.make)(found.parameters()), [data.gradient] * shape.tables)


def keyed(names: list[str], ids: Tensor, begins: Tensor) -> Any:
    """Return ids in bags, feature by feature, in the form of a KeyedJaggedTensor of TorchRec."""
    return SimpleNamespace(keys=lambda: names, values=lambda: ids, offsets=lambda: begins)


def together(data: Data, one_by_one: bool = False, **options: Any) -> Peer:
    """Tables of ours that share one: looked up at once, in tensors as FBGEMM and TorchRec are given them, or `one_by_one`."""
    shape, gradients = data.shape, [data.gradient] * data.shape.tables
    sizes, given = [shape.rows] * shape.tables, list[Any]()
    if shape.bags:
        multi: Any = MultiEmbeddingBag(sizes, shape.dim, mode="sum", concatenate=True, **options)
    else:
        multi = MultiEmbedding(sizes, shape.dim, **options)
    with torch.no_grad():
        for module, weight in zip(multi, data.weights, strict=True):
            module.weight.copy_(weight)
    if shape.bags:
        names = [str(number) for number in range(shape.tables)]
        given = [keyed(names, ids, begins) for ids, begins in zip(data.flat, data.begins, strict=True)]
        gradients = [data.gradient.repeat(1, shape.tables)]
    elif not one_by_one:
        given = [torch.stack(ids, dim=1) for ids in data.batches]
        gradients = [torch.stack(gradients, dim=1)]

    def look_up(number: int) -> list[Tensor]:
        if one_by_one:
            return [module(part) for module, part in zip(multi, data.batches[number % SEEN], strict=True)]
        return [multi(given[number % SEEN])]

    return _stepping(list(multi), look_up, data.make(multi.parameters()), gradients)


# --- others -------------------------------------------------------------------------------------------------------------


def fbgemm(data: Data) -> Peer:
    specs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    tables = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    places = importlib.import_module("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    kinds = {"SGD": "EXACT_SGD", "Adagrad": "EXACT_ADAGRAD", "AdamW": "ADAM"}
    shape = data.shape
    spec = (shape.rows, shape.dim, places.EmbeddingLocation.HOST, tables.ComputeDevice.CPU)
    kind = getattr(specs.EmbOptimType, kinds[data.optimizer])
    found = tables.SplitTableBatchedEmbeddingBagsCodegen(
        [spec] * shape.tables, optimizer=kind, learning_rate=RATE, eps=1e-10
    )
    for weight, first in zip(found.split_embedding_weights(), data.weights, strict=True):
        weight.copy_(first)
    gradient = data.gradient.repeat(1, shape.tables)

    def step(number: int) -> None:
        found(data.flat[number % SEEN], data.begins[number % SEEN]).backward(gradient)

    return Peer(step, found.split_embedding_weights)


def torchrec(data: Data) -> Peer:
    library = importlib.import_module("torchrec")
    fused = importlib.import_module("torchrec.modules.fused_embedding_modules")
    shape = data.shape
    names = [f"t{number}" for number in range(shape.tables)]
    size = {"num_embeddings": shape.rows, "embedding_dim": shape.dim}
    configs = [library.EmbeddingBagConfig(**size, name=name, feature_names=[name]) for name in names]
    kind = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "AdamW": torch.optim.Adam}[data.optimizer]
    found = fused.FusedEmbeddingBagCollection(
        tables=configs, optimizer_type=kind, optimizer_kwargs={"lr": RATE, "eps": 1e-10}, device=torch.device("cpu")
    )
    weights = [found.state_dict()[f"embedding_bags.{name}.weight"] for name in names]
    for weight, first in zip(weights, data.weights, strict=True):
        weight.copy_(first)
    jagged = [
        library.KeyedJaggedTensor(keys=names, values=ids, lengths=begins.diff().int())
        for ids, begins in zip(data.flat, data.begins, strict=True)
    ]
    gradient = data.gradient.repeat(1, shape.tables)

    def step(number: int) -> None:
        found(jagged[number % SEEN]).values().backward(gradient)

    return Peer(step, lambda: weights)


def dense(data: Data, module: str, name: str, **options: Any) -> Peer:
    make = getattr(importlib.import_module(module), name)
    kind = nn.EmbeddingBag if data.shape.bags else nn.Embedding
    return modules(data, kind, lambda params: make(params, lr=RATE, **options))


def tfra(data: Data) -> Peer:
    """TensorFlow Recommenders Addons, in its own process: see bench/peers_tfra.py."""
    python = Path(sys.prefix, "tensorflow", "bin", "python")
    if not python.exists():
        raise ImportError(f"there is no {python.name} in {python.parent}; `make peers` installs it")
    if data.shape.bags:
        raise NotImplementedError("its lookups are not pooled here")
    shape = data.shape
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        ids = torch.stack([torch.stack(batch) for batch in data.batches])
        np.savez(file, ids=ids.numpy(), gradient=data.gradient.numpy())
        file.flush()
        script, threads = Path(__file__).with_name("peers_tfra.py"), torch.get_num_threads()
        command = [python, script, file.name, data.optimizer, str(RATE), str(threads)]
        pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        child = subprocess.Popen(command, text=True, **pipes)
        if not _answer(child).startswith("ready"):
            raise ImportError("it did not start")

    def step(number: int) -> None:
        _answer(child, str(number % SEEN))

    def tables() -> list[Tensor]:
        # Its rows begin at zero, and what a step adds does not depend on where they are.
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "tables.npz")
            _answer(child, str(path))
            found = np.load(path)
        moved = [torch.zeros(shape.rows, shape.dim) for _ in data.weights]
        for number, part in enumerate(moved):
            part[torch.from_numpy(found[f"ids{number}"])] = torch.from_numpy(found[f"rows{number}"])
        return [first + part for first, part in zip(data.weights, moved, strict=True)]

    return Peer(step, tables)


def _answer(child: Any, message: str = "") -> str:
    if message:
        child.stdin.write(f"{message}\n")
        child.stdin.flush()
    line: str = child.stdout.readline()
    if not line:
        raise ImportError(" ".join(child.stderr.read().split())[-300:])
    return line
