"""Training steps beside those of other libraries: torch, FBGEMM, TorchRec, DeepSpeed, bitsandbytes and TFRA, on the host.

Each trains the same tables on the same batches with the same gradient of what is looked up. Before any is timed, its rows are
compared with those of ``torch.nn.Embedding`` after some steps; where an optimizer leaves idle rows as they are, or rounds its
state, only that they moved. ``make peers`` installs the libraries into an environment of their own; one that does not install
or run is named.
"""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from speedtransfer import Embedding, EmbeddingBag, MultiEmbedding, MultiEmbeddingBag, drawing
from speedtransfer.benchmark.environment import host_room
from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.errors import SpeedtransferError
from speedtransfer.units import format_seconds

NOTE = (
    "Ids follow Zipf's law. Embedding and EmbeddingBag are a module for each table; MultiEmbedding has all in one. FBGEMM and "
    "TorchRec make the step in backward, and on a host have SGD and Adagrad only; tables of "
    "FBGEMM are given bags of one id where rows are not pooled. Idle rows stay as they are in FBGEMM, TorchRec, TFRA and "
    'SparseAdam, and in ours with idle="lazy". DeepSpeed and bitsandbytes train nn.Embedding by dense gradients, as they '
    "take no others for these optimizers. TFRA runs in a process of its own, whose table holds the ids of the batches "
    "only; the times include a message through a pipe."
)

_SEEN, _CHECKED = 8, 4  # batches, and steps that are compared
_TOLERANCE = 1e-4  # of the farthest that any weight moved
_PLANES, _SHARE = {"SGD": 1.5, "Adagrad": 2.5, "AdamW": 4}, 0.75  # of a contender, and of the memory
RATE = 0.01
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=RATE),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=RATE),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=RATE, fused=True),
}


class NotHereError(SpeedtransferError):
    """A library is not installed, or cannot do what is compared."""


class Shape(NamedTuple):
    """Tables of one size, and how many `ids` a batch looks up in each: in `bags`, whose rows are summed, or (0) one by one."""

    tables: int
    rows: int
    dim: int
    ids: int
    bags: int = 0

    @property
    def title(self) -> str:
        """What is looked up in what."""
        tables = f"{self.tables} tables of " if self.tables > 1 else ""
        looked_up = f"{self.ids:,} ids" + (f" in {self.bags:,} bags" if self.bags else "")
        return f"{tables}{self.rows:,} x {self.dim}, {looked_up}{' each' if self.tables > 1 else ''}"


SHAPES = (
    Shape(1, 1_000_000, 128, 98_304),
    Shape(26, 100_000, 16, 256),
    Shape(26, 1_000_000, 64, 4_096),
    Shape(26, 100_000, 16, 2_560, 256),
)
QUICK = (Shape(1, 2_000, 16, 512), Shape(3, 1_000, 8, 64), Shape(3, 1_000, 8, 128, 16))


@dataclass
class Data:
    """Batches of ids, table by table, each with the begin of every bag; first weights; the gradient of what is looked up."""

    shape: Shape
    optimizer: str
    batches: list[list[Tensor]] = field(default_factory=list)
    offsets: list[list[Tensor]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradient: Tensor = field(default_factory=Tensor)

    def __post_init__(self) -> None:
        draw, shape = torch.Generator().manual_seed(0), self.shape
        count = shape.bags or shape.ids
        for _ in range(_SEEN):
            self.batches.append([zipf_ids(shape.rows, shape.ids, draw) for _ in range(shape.tables)])
            cuts = [
                torch.randint(shape.ids + 1, (count - 1,), generator=draw).sort().values for _ in range(shape.tables)
            ]
            begins = [torch.cat([cut.new_zeros(1), cut]) if shape.bags else torch.arange(count) for cut in cuts]
            self.offsets.append(begins)
        self.weights = [torch.randn(shape.rows, shape.dim, generator=draw) for _ in range(shape.tables)]
        self.gradient = torch.randn(count, shape.dim, generator=draw)

    def make(self, params: Any) -> Any:
        """Return the optimizer, of torch."""
        return OPTIMIZERS[self.optimizer](params)

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """The tables after the checked steps of nn.Embedding."""
        peer = modules(self, nn.EmbeddingBag if self.shape.bags else nn.Embedding)
        for number in range(_CHECKED):
            peer.step(number)
        return peer.tables()


class Peer(NamedTuple):
    """A way to train: a step on the batch of a number, and the tables as they are now."""

    step: Callable[[int], object]
    tables: Callable[[], list[Tensor]]


def _stepping(data: Data, modules: Sequence[Any], look_up: Callable[[int], list[Tensor]], optimizer: Any) -> Peer:
    gradients = [data.gradient] * data.shape.tables

    def step(number: int) -> None:
        torch.autograd.backward(look_up(number), gradients)
        optimizer.step()
        optimizer.zero_grad()

    return Peer(step, lambda: [module.weight.detach() for module in modules])


def modules(data: Data, kind: Any, make: Any = None, **options: Any) -> Peer:
    """A module for each table."""
    shape = data.shape
    if shape.bags:
        options["mode"] = "sum"
    found = nn.ModuleList(kind(shape.rows, shape.dim, _weight=weight.clone(), **options) for weight in data.weights)

    def look_up(number: int) -> list[Tensor]:
        ids, offsets = data.batches[number % _SEEN], data.offsets[number % _SEEN]
        if shape.bags:
            return [module(*part) for module, *part in zip(found, ids, offsets, strict=True)]
        return [module(part) for module, part in zip(found, ids, strict=True)]

    return _stepping(data, found, look_up, (make or data.make)(found.parameters()))


def together(data: Data, **options: Any) -> Peer:
    """Tables of ours that share one."""
    shape = data.shape
    if shape.bags:
        multi: Any = MultiEmbeddingBag([shape.rows] * shape.tables, shape.dim, mode="sum", **options)
    else:
        multi = MultiEmbedding([shape.rows] * shape.tables, shape.dim, **options)
    with torch.no_grad():
        for module, weight in zip(multi, data.weights, strict=True):
            module.weight.copy_(weight)

    def look_up(number: int) -> list[Tensor]:
        ids, offsets = data.batches[number % _SEEN], data.offsets[number % _SEEN]
        return list(multi(list(zip(ids, offsets, strict=True)) if shape.bags else ids))

    return _stepping(data, list(multi), look_up, data.make(multi.parameters()))


# --- others -------------------------------------------------------------------------------------------------------------


def fbgemm(data: Data) -> Peer:
    """Tables of FBGEMM in host memory, which make the step in backward."""
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
    flat = [torch.cat(ids) for ids in data.batches]
    begins = [_ends(offsets, shape.ids) for offsets in data.offsets]
    gradient = data.gradient.repeat(1, shape.tables)

    def step(number: int) -> None:
        found(flat[number % _SEEN], begins[number % _SEEN]).backward(gradient)

    return Peer(step, found.split_embedding_weights)


def _ends(offsets: list[Tensor], ids: int) -> Tensor:
    """Return where the bags of all tables begin, side by side, and where the last ends."""
    begins = [part + ids * number for number, part in enumerate(offsets)]
    return torch.cat([*begins, torch.tensor([ids * len(offsets)])])


def torchrec(data: Data) -> Peer:
    """The collection of TorchRec whose optimizer is fused, on FBGEMM's tables."""
    library = importlib.import_module("torchrec")
    fused = importlib.import_module("torchrec.modules.fused_embedding_modules")
    shape = data.shape
    names = [f"t{number}" for number in range(shape.tables)]
    configs = [
        library.EmbeddingBagConfig(num_embeddings=shape.rows, embedding_dim=shape.dim, name=name, feature_names=[name])
        for name in names
    ]
    kind = {"SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad, "AdamW": torch.optim.Adam}[data.optimizer]
    found = fused.FusedEmbeddingBagCollection(
        tables=configs, optimizer_type=kind, optimizer_kwargs={"lr": RATE, "eps": 1e-10}, device=torch.device("cpu")
    )
    weights = [found.state_dict()[f"embedding_bags.{name}.weight"] for name in names]
    for weight, first in zip(weights, data.weights, strict=True):
        weight.copy_(first)
    keyed = [
        library.KeyedJaggedTensor(keys=names, values=torch.cat(ids), lengths=_ends(offsets, shape.ids).diff().int())
        for ids, offsets in zip(data.batches, data.offsets, strict=True)
    ]
    gradient = data.gradient.repeat(1, shape.tables)

    def step(number: int) -> None:
        found(keyed[number % _SEEN]).values().backward(gradient)

    return Peer(step, lambda: weights)


def dense(data: Data, module: str, name: str, **options: Any) -> Peer:
    """nn.Embedding with an optimizer of another library."""
    make = getattr(importlib.import_module(module), name)
    kind = nn.EmbeddingBag if data.shape.bags else nn.Embedding
    return modules(data, kind, lambda params: make(params, lr=RATE, **options))


def tfra(data: Data) -> Peer:
    """TensorFlow Recommenders Addons, in its own process: see bench/peers_tfra.py."""
    python = Path(sys.prefix, "tensorflow", "bin", "python")
    if not python.exists():
        raise NotHereError(f"there is no {python.name} in {python.parent}; `make peers` installs it")
    if data.shape.bags:
        raise NotHereError("its lookups are not pooled here")
    shape = data.shape
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(
            file, ids=torch.stack([torch.stack(ids) for ids in data.batches]).numpy(), gradient=data.gradient.numpy()
        )
        file.flush()
        script, threads = Path(__file__).parents[1] / "peers_tfra.py", torch.get_num_threads()
        command = [python, script, file.name, data.optimizer, str(RATE), str(threads)]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not _answer(child).startswith("ready"):
            raise NotHereError("it did not start")

    def step(number: int) -> None:
        _answer(child, str(number % _SEEN))

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


def _answer(child: subprocess.Popen[str], message: str = "") -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    if message:
        child.stdin.write(f"{message}\n")
        child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise NotHereError(" ".join(child.stderr.read().split())[-300:])
    return line


# --- what is compared ---------------------------------------------------------------------------------------------------


class Contender(NamedTuple):
    """A way to train; `same` says whether its tables are those of nn.Embedding."""

    name: str
    make: Callable[[Data], Peer]
    same: bool = True
    ours: bool = False


def contenders(shape: Shape, optimizer: str) -> Iterator[Contender]:
    """Yield all that train `shape` by `optimizer`, ours first."""
    kind, theirs = (EmbeddingBag, nn.EmbeddingBag) if shape.bags else (Embedding, nn.Embedding)
    several = shape.tables > 1
    name = "MultiEmbeddingBag" if shape.bags else "MultiEmbedding"
    for idle in ("exact", "lazy") if optimizer == "AdamW" else ("exact",):
        told, same = f', idle="{idle}"' if optimizer == "AdamW" else "", idle == "exact"
        if several:
            yield Contender(f"{name}{told}", functools.partial(together, idle=idle), same, True)
        yield Contender(f"{kind.__name__}{told}", functools.partial(modules, kind=kind, idle=idle), same, True)
    yield Contender(f"torch.nn.{theirs.__name__}", functools.partial(modules, kind=theirs))
    sparse = functools.partial(modules, kind=theirs, sparse=True)
    if optimizer == "AdamW":
        yield Contender("torch SparseAdam", functools.partial(sparse, make=_sparse_adam), False)
        yield Contender(
            "DeepSpeed CPUAdam",
            functools.partial(dense, module="deepspeed.ops.adam", name="DeepSpeedCPUAdam", weight_decay=0.01),
        )
        yield Contender(
            "bitsandbytes AdamW8bit", functools.partial(dense, module="bitsandbytes.optim", name="AdamW8bit"), False
        )
    else:
        yield Contender(f"torch.nn.{theirs.__name__}(sparse=True)", sparse)
    yield Contender("FBGEMM", fbgemm)
    yield Contender("TorchRec, fused", torchrec)
    yield Contender("TFRA", tfra, optimizer != "AdamW")


def _sparse_adam(params: Any) -> Any:
    return torch.optim.SparseAdam(list(params), lr=RATE)


class Training:
    """A contender that trains, and the check of its tables."""

    def __init__(self, contender: Contender, data: Data) -> None:
        self.contender, self.data, self.number = contender, data, 0
        self._peer: Peer | None = None

    def run(self) -> None:
        """Make a step; the first makes those that are compared."""
        if self._peer is None:
            self._peer = self._made()
            for number in range(_CHECKED - 1):
                self._peer.step(number)
            self.number = _CHECKED - 1
        self._peer.step(self.number)
        self.number += 1

    def _made(self) -> Peer:
        try:
            return self.contender.make(self.data)
        except ImportError as error:
            raise NotHereError(f"not installed ({error})") from error

    def check(self) -> None:
        """Raise AssertionError unless the rows are those of nn.Embedding, or at least have moved."""
        assert self._peer is not None
        moved = max(float((a - b).abs().max()) for a, b in zip(self.data.expected, self.data.weights, strict=True))
        off = 0.0
        for found, expected, first in zip(self._peer.tables(), self.data.expected, self.data.weights, strict=True):
            off = max(off, float((found - (expected if self.contender.same else first)).abs().max()))
        if self.contender.same:
            assert off <= _TOLERANCE * moved, f"a weight is {off:.1e} off, where the farthest has moved by {moved:.1e}"
        else:
            assert moved / 4 < off < 4 * moved, f"the farthest weight has moved by {off:.1e}, not by about {moved:.1e}"


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each shape and optimizer; tables have fewer rows where those of all would not fit."""
    found = []
    for shape in QUICK if quick else SHAPES:
        for optimizer in OPTIMIZERS:
            # All are in memory at once, with the first weights and the expected ones; those of dense gradients have most.
            planes = _PLANES[optimizer] * sum(1 for _ in contenders(shape, optimizer)) + 2
            most = int(host_room(_SHARE) / (4 * shape.dim * shape.tables * planes))
            fits = shape._replace(rows=min(shape.rows, max(1, most // 1_000) * 1_000))
            params = {"optimizer": optimizer, **fits._asdict()}
            found.append(Group(f"{fits.title}, {optimizer}", functools.partial(_cases, fits, optimizer), params))
    return found


def _cases(shape: Shape, optimizer: str) -> list[Case]:
    data = Data(shape, optimizer)
    return [
        Case.of(one.name, Training(one, data), "ours" if one.ours else "other") for one in contenders(shape, optimizer)
    ]


# --- how it is shown ----------------------------------------------------------------------------------------------------


def describe(group: GroupResult, case: CaseResult) -> str:
    """Return nothing more than the time."""
    return ""


def picture(make_figure: Callable[[float, float], Any], groups: Sequence[GroupResult]) -> Any:
    """Draw a row for each shape and a column for each optimizer, the fastest first; times are on a logarithmic scale."""
    shapes: dict[tuple[Any, ...], list[GroupResult]] = {}
    for group in groups:
        key = tuple(group.params[name] for name in ("tables", "dim", "ids", "bags"))
        shapes.setdefault(key, []).append(group)
    figure = make_figure(19, 0.5 + 3.1 * len(shapes))
    rows = figure.subplots(len(shapes), len(OPTIMIZERS), squeeze=False)
    for row, some in zip(rows, shapes.values(), strict=True):
        for axes, group in zip(row, some, strict=False):
            cases = sorted(group.ran, key=lambda case: case.median_s)
            times = [1e3 * case.median_s for case in cases]
            colours = [drawing.COLOURS[0] if case.role == "ours" else drawing.PALE for case in cases]
            drawing.bars(
                axes, [case.name for case in cases], times, [format_seconds(case.median_s) for case in cases], colours
            )
            axes.set_xscale("log")
            axes.set_xlim(times[0] / 3, times[-1] * 5)
            axes.minorticks_off()
            axes.set_xticks([])
            axes.set_title(group.title, fontsize=9.5, color=drawing.INK, loc="left", parse_math=False)
    figure.supxlabel("time of a step on a logarithmic scale, less is better", fontsize=9, color=drawing.QUIET)
    return figure
