"""A warm training step in every form that tables are used in: launches.py counts what each does, tests/gpu/test_waits.py holds
them to not waiting.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.benchmark.contenders import unfilled
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.word2vec import Block, Settings, Word2Vec

BATCHES = 4  # taken in turn
BAG, TABLES = 16, 26
WINDOW, NEGATIVES, SAMPLE = 5, 512, 1e-4

Step = Callable[[], Any]

_FUSED, _FOREACH = (functools.partial(torch.optim.AdamW, lr=0.1, **{how: True}) for how in ("fused", "foreach"))
_MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True)


class Sizes(NamedTuple):
    """Rows of the table, lookups of a step, columns."""

    rows: int
    lookups: int
    dim: int


_Embedding, _Multi, _Bag = map(unfilled, (st.Embedding, st.MultiEmbedding, st.EmbeddingBag))


@dataclass(frozen=True)
class Form:
    """One way to use tables: where the rows live ("dense": in ``torch.nn`` modules on the device), and how they are trained.

    Ids are given on the device `ids`, "" being the compute device. There are so many `tables`, each looked up so often before
    backward, as one `MultiEmbedding` if `together`. The module is an EmbeddingBag (`bag`), a GradScaler is used (`scaled`),
    the step has a backward pass and an update (`trained`; without it follows two that have). `options` are those of the
    module.
    """

    memory: str = "pinned"
    idle: str = "lazy"
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = _FUSED
    ids: str = ""
    tables: int = 1
    lookups: int = 1
    together: bool = False
    bag: bool = False
    cached: bool = False
    scaled: bool = False
    trained: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, sizes: Sizes, device: torch.device, folder: Path) -> Step:
        """Return the step; files of tables go to `folder`."""
        share = Sizes(sizes.rows // self.tables, sizes.lookups // self.tables // self.lookups, sizes.dim)
        number = 1 if self.together else self.tables
        modules = [self._module(share, device, folder / f"table{i}.safetensors") for i in range(number)]
        generator = torch.Generator().manual_seed(0)
        batches = [
            [self._ids(share, generator).to(self.ids or device) for _ in range(self.tables * self.lookups)]
            for _ in range(BATCHES)
        ]
        grad = torch.full((share.lookups // (BAG if self.bag else 1), share.dim), 0.5, device=device)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = self.optimizer(parameters)
        scaler = torch.amp.GradScaler("cuda", enabled=self.scaled)
        turn = itertools.cycle(batches)

        def evaluate() -> None:
            with torch.no_grad():
                self._look_up(modules, next(turn))

        def train() -> None:
            outs = self._look_up(modules, next(turn))
            if self.scaled:
                scaler.scale(torch.stack([(out * grad).sum() for out in outs]).sum()).backward()
            else:
                torch.autograd.backward(outs, [grad] * len(outs))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        if not self.trained:
            train()
            train()
        return train if self.trained else evaluate

    def _module(self, sizes: Sizes, device: torch.device, path: Path) -> nn.Module:
        options = {"device": device, **self.options, **({"mode": "sum"} if self.bag else {})}
        if self.memory == "dense":
            module: Any = (nn.EmbeddingBag if self.bag else nn.Embedding)(sizes.rows, sizes.dim, **options)
            return module
        options |= {"memory": self.memory, "idle": self.idle, **({"path": path} if self.memory == "mmap" else {})}
        options |= {"cache_rows": sizes.rows, "cache_counts": torch.ones(sizes.rows)} if self.cached else {}
        if self.together:
            return _Multi([sizes.rows] * self.tables, sizes.dim, **options)
        module = (_Bag if self.bag else _Embedding)(sizes.rows, sizes.dim, **options)
        return module

    def _ids(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        ids = zipf_ids(sizes.rows, sizes.lookups, generator)
        return ids.view(-1, BAG) if self.bag else ids

    def _look_up(self, modules: list[nn.Module], ids: list[Tensor]) -> list[Tensor]:
        if self.together:
            outs: list[Tensor] = modules[0](ids)
            return outs
        return [module(next_ids) for module, next_ids in zip(modules * self.lookups, ids, strict=True)]


@dataclass(frozen=True)
class Words:
    """word2vec on blocks of words, a sixteenth of the lookups; its negatives are as many again and more.

    `buckets` are the rows of n-grams; 0: words have a row each.
    """

    memory: str = "pinned"
    model: str = "skipgram"
    buckets: int = 0

    def build(self, sizes: Sizes, device: torch.device, folder: Path) -> Step:
        path = {"path": folder / "word2vec"} if self.memory == "mmap" else {}
        words = [f"word {number}" for number in range(sizes.rows // 2)]
        given = {"model": self.model, "buckets": self.buckets, "memory": self.memory, "device": device, **path}
        model = Word2Vec(words, Settings(dim=sizes.dim, **given))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        generator = torch.Generator().manual_seed(0)
        # In training a thread draws and prepares them.
        turn = itertools.cycle([model.prepare(self._block(sizes, generator)) for _ in range(BATCHES)])

        def step() -> None:
            model.deposit_gradients(next(turn), with_loss=False)
            optimizer.step()
            optimizer.zero_grad()

        return step

    def _block(self, sizes: Sizes, generator: torch.Generator) -> Block:
        num_words, vocabulary = max(2 * WINDOW, sizes.lookups // 16), sizes.rows // 2
        share = 1 / torch.arange(1, vocabulary + 1).double()
        share /= share.sum()
        # As subsampling leaves them: a word is kept with probability sqrt(sample / share).
        kept = torch.minimum(share, (SAMPLE * share).sqrt())
        words, position = torch.multinomial(kept, num_words, True, generator=generator), torch.arange(num_words)
        windows = torch.randint(0, WINDOW + 1, (num_words,), generator=generator)
        before, after = torch.minimum(windows, position), torch.minimum(windows, position.flip(0))
        negatives = torch.randint(vocabulary, ((num_words // 512 + 1) * NEGATIVES,), generator=generator)
        return Block(words, before, after, negatives)


_INT8 = {"storage_dtype": torch.int8, "state_dtype": torch.uint8}
_BFLOAT16 = {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}

# By name. AdamW is fused and tables are pinned unless it says otherwise; "dense": torch's own.
FORMS: dict[str, Form | Words] = {
    "dense": Form("dense"),
    "lazy": Form(),
    "lazy, foreach": Form(optimizer=_FOREACH),
    "lazy, SGD with momentum": Form(optimizer=_MOMENTUM),
    "lazy, ids on the host": Form(ids="cpu"),
    "lazy, pageable": Form("pageable"),
    "lazy, mmap": Form("mmap"),
    "lazy, device": Form("device"),
    "lazy, cache": Form(cached=True),
    "lazy, foreach, cache": Form(optimizer=_FOREACH, cached=True),
    "lazy, int8 and uint8 state": Form(options=_INT8),
    "lazy, bfloat16": Form(options=_BFLOAT16),
    "lazy, looked up twice": Form(lookups=2),
    "lazy, padding_idx": Form(options={"padding_idx": 3}),
    "dense, max_norm": Form("dense", options={"max_norm": 1.0}),
    "lazy, max_norm": Form(options={"max_norm": 1.0}),
    "dense, EmbeddingBag": Form("dense", bag=True),
    "lazy, EmbeddingBag": Form(bag=True),
    "dense, GradScaler": Form("dense", scaled=True),
    "lazy, GradScaler": Form(scaled=True),
    "exact": Form(idle="exact"),
    "exact, foreach": Form(idle="exact", optimizer=_FOREACH),
    "exact, SGD with momentum": Form(idle="exact", optimizer=_MOMENTUM),
    "exact, int8 and uint8 state, foreach": Form(idle="exact", optimizer=_FOREACH, options=_INT8),
    "exact, looked up twice": Form(idle="exact", lookups=2),
    "exact, GradScaler": Form(idle="exact", scaled=True),
    "word2vec skip-gram": Words(),
    "word2vec CBOW": Words(model="cbow"),
    "word2vec skip-gram, n-grams": Words(buckets=10_000),
    f"dense, {TABLES} tables": Form("dense", tables=TABLES),
    f"lazy, {TABLES} tables": Form(tables=TABLES),
    f"exact, {TABLES} tables": Form(idle="exact", tables=TABLES),
    f"lazy, {TABLES} in one": Form(tables=TABLES, together=True),
    f"exact, {TABLES} in one": Form(idle="exact", tables=TABLES, together=True),
    "dense, evaluation": Form("dense", trained=False),
    "evaluation": Form(trained=False),
    "evaluation, exact": Form(idle="exact", trained=False),
    "evaluation, pageable": Form("pageable", trained=False),
}
