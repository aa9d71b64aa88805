"""A warm training step in every form that tables are used in: launches.py counts what each does, tests/gpu/test_waits.py holds
them to not waiting.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.word2vec import Block, Word2Vec

BATCHES = 4  # taken in turn
BAG, TABLES = 16, 26
WINDOW, NEGATIVES = 5, 512

Step = Callable[[], Any]


class Sizes(NamedTuple):
    """Rows of the table, lookups of a step, columns."""

    rows: int
    lookups: int
    dim: int


@dataclass(frozen=True)
class Form:
    """One way to use tables.

    Attributes
    ----------
    memory : str
        Where the rows live; "dense": in ``torch.nn`` modules on the device.
    idle : {"lazy", "exact"}
    how : {"fused", "foreach"}
        Which AdamW.
    tables, lookups : int
        How many tables there are, and how often each is looked up before backward.
    bag, scaled, trained : bool
        Whether the module is an EmbeddingBag, a GradScaler is used, and the step has a backward pass and an update; without
        it follows two that have.
    options : dict
        Further arguments of the module.
    """

    memory: str = "pinned"
    idle: str = "lazy"
    how: str = "fused"
    tables: int = 1
    lookups: int = 1
    bag: bool = False
    scaled: bool = False
    trained: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, sizes: Sizes, device: torch.device, folder: Path) -> Step:
        """Return the step; files of tables go to `folder`."""
        share = Sizes(sizes.rows // self.tables, sizes.lookups // self.tables // self.lookups, sizes.dim)
        modules = [self._module(share, device, folder / f"table{number}.safetensors") for number in range(self.tables)]
        generator = torch.Generator().manual_seed(0)
        batches = [
            [self._ids(share, generator).to(device) for _ in range(self.tables * self.lookups)] for _ in range(BATCHES)
        ]
        grad = torch.full((share.lookups // (BAG if self.bag else 1), share.dim), 0.5, device=device)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **{self.how: True})
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
        module = (_Bag if self.bag else _Embedding)(sizes.rows, sizes.dim, **options)
        return module

    def _ids(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        ids = zipf_ids(sizes.rows, sizes.lookups, generator)
        return ids.view(-1, BAG) if self.bag else ids

    def _look_up(self, modules: list[nn.Module], ids: list[Tensor]) -> list[Tensor]:
        return [module(next_ids) for module, next_ids in zip(modules * self.lookups, ids, strict=True)]


class _Embedding(st.Embedding):
    def reset_parameters(self) -> None:
        """Stay zero: the rows need not be filled for the few that are used."""


class _Bag(st.EmbeddingBag):
    def reset_parameters(self) -> None:
        """Stay zero."""


def _skipgram(sizes: Sizes, device: torch.device, folder: Path, memory: str = "pinned") -> Step:
    """Return a step of word2vec on blocks of `sizes.lookups` // 16 words."""
    words = max(2 * WINDOW, sizes.lookups // 16)
    path = {"path": folder / "word2vec"} if memory == "mmap" else {}
    model = Word2Vec(sizes.rows // 2, sizes.dim, memory=memory, device=device, **path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    generator = torch.Generator().manual_seed(0)
    position = torch.arange(words)
    blocks = []
    for _ in range(BATCHES):
        windows = torch.randint(0, WINDOW + 1, (words,), generator=generator)
        negatives = torch.randint(sizes.rows // 2, (words // 512 + 1, NEGATIVES), generator=generator)
        drawn = zipf_ids(sizes.rows // 2, words, generator), negatives
        before, after = torch.minimum(windows, position), torch.minimum(windows, position.flip(0))
        blocks.append(Block(*(tensor.to(device) for tensor in (drawn[0], before, after, drawn[1])), words))
    turn = itertools.cycle(blocks)

    def step() -> None:
        model.deposit_gradients(next(turn), with_loss=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


_SMALL = {"storage_dtype": torch.int8, "state_dtype": torch.uint8}
_EXACT = Form(idle="exact")
_DENSE = Form(memory="dense")

# By name; each takes sizes, the device and a folder, and returns its step.
FORMS: dict[str, Callable[[Sizes, torch.device, Path], Step]] = {
    "dense nn.Embedding, fused": _DENSE.build,
    "lazy": Form().build,
    "lazy, foreach": Form(how="foreach").build,
    "exact, foreach": replace(_EXACT, how="foreach").build,
    "exact, fused": _EXACT.build,
    "lazy, int8 and uint8 state": Form(options=_SMALL).build,
    "exact, int8 and uint8 state, foreach": replace(_EXACT, how="foreach", options=_SMALL).build,
    "lazy, bfloat16 and bfloat16 state": Form(
        options={"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    ).build,
    "lazy, looked up twice": Form(lookups=2).build,
    "lazy, pageable": Form("pageable").build,
    "lazy, mmap": Form("mmap").build,
    "lazy, device": Form("device").build,
    "lazy, EmbeddingBag": Form(bag=True).build,
    "dense, max_norm": replace(_DENSE, options={"max_norm": 1.0}).build,
    "lazy, max_norm": Form(options={"max_norm": 1.0}).build,
    "lazy, padding_idx": Form(options={"padding_idx": 3}).build,
    "dense, GradScaler": replace(_DENSE, scaled=True).build,
    "lazy, GradScaler": Form(scaled=True).build,
    "exact, GradScaler": replace(_EXACT, scaled=True).build,
    "word2vec skip-gram": _skipgram,
    "word2vec skip-gram, pageable": functools.partial(_skipgram, memory="pageable"),
    f"dense, {TABLES} tables": replace(_DENSE, tables=TABLES).build,
    f"lazy, {TABLES} tables": Form(tables=TABLES).build,
    f"exact, {TABLES} tables": replace(_EXACT, tables=TABLES).build,
    "dense, evaluation": replace(_DENSE, trained=False).build,
    "evaluation": Form(trained=False).build,
    "evaluation, exact": replace(_EXACT, trained=False).build,
    "evaluation, pageable": Form("pageable", trained=False).build,
}
