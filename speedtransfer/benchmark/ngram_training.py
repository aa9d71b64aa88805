"""A GPT of torch's layers with n-gram tables of several kinds: sizes, batches of tokens, and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.ngrams import NgramEmbedding, NgramHash
from speedtransfer.nn.sizing import table_size

ORDERS, HEADS = (2, 3), 16


class Sizes(NamedTuple):
    """Sizes of a model, its batches and its tables."""

    vocabulary: int
    width: int  # of a hidden state
    layers: int
    heads: int  # of attention
    batch: int  # windows of a step
    context: int  # tokens of a window
    rows: int  # at least, of a head of the hash
    dim: int  # columns of the table
    parts: int  # micro-batches of a step, since the logits of all tokens may not fit at once

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    def hash(self) -> NgramHash:
        """Make the hash of the tables."""
        return NgramHash(ORDERS, HEADS // len(ORDERS), self.rows, vocab_size=self.vocabulary)

    def about(self) -> str:
        """Describe the model."""
        return f"GPT of {self.layers} layers of {self.width}, {self.tokens:,} tokens"


class Gpt(nn.Module):
    """A language model that returns the mean loss of ``(batch, context + 1)`` tokens."""

    def __init__(self, sizes: Sizes, ngrams: NgramEmbedding | None, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        place: Any = {"device": device}
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width, **place)
        self.places = nn.Embedding(sizes.context, sizes.width, **place)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                sizes.width,
                sizes.heads,
                4 * sizes.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
                **place,
            )
            for _ in range(sizes.layers)
        )
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False, **place)
        self.ngrams = ngrams
        mask = nn.Transformer.generate_square_subsequent_mask(sizes.context, device=device)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the loss; on CUDA computed in bfloat16."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            hidden = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for number, layer in enumerate(self.layers):
                if self.ngrams is not None and number == len(self.layers) // 2:
                    hidden = hidden + self.ngrams(tokens)
                hidden = layer(hidden, src_mask=self.mask, is_causal=True)
            logits = self.head(hidden)
            loss: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss


def token_batches(sizes: Sizes, count: int, seed: int, device: torch.device) -> list[Tensor]:
    """Draw batches ``(batch, context + 1)`` of independent tokens with frequency 1 / rank."""
    draw = torch.Generator().manual_seed(seed)
    shape = sizes.batch, sizes.context + 1
    return [zipf_ids(sizes.vocabulary, shape[0] * shape[1], draw).view(shape).to(device) for _ in range(count)]


NO_TABLES = "no tables"
DENSE, SPARSE = "nn.Embedding + AdamW", "nn.Embedding(sparse=True) + SparseAdam"
AT_BEGIN, AHEAD = ", prefetch", ", prefetch a batch ahead"
LR = 1e-2
_PLANES = {DENSE: 4, SPARSE: 3}  # weights, a dense gradient, and state


class Training:
    """A model and its optimizers, made in the first step, so that running out of memory fails its cases alone.

    `name` is `NO_TABLES`, `DENSE` or `SPARSE`, or any other for tables of this library with `options`.
    """

    def __init__(self, sizes: Sizes, name: str, options: dict[str, Any] | None, device: torch.device) -> None:
        self.sizes, self.name, self.options, self.device = sizes, name, options, device
        # The batch of the first step, and the number of cases that share the model.
        self.first: Tensor | None = None
        self.cases = 0
        self._model: Gpt | None = None
        self._optimizers: list[torch.optim.Optimizer] = []

    @property
    def table_bytes(self) -> int:
        """Bytes of the table and its state."""
        rows = self.sizes.hash().num_rows
        if self.options is not None:
            return table_size(rows, self.sizes.dim, **self.options).total_bytes
        return _PLANES.get(self.name, 0) * rows * self.sizes.dim * 4

    @property
    def model(self) -> Gpt:
        """The model, with rows of zeros and otherwise the same initial weights for all tables."""
        if self._model is None:
            if self.options is not None:
                torch.manual_seed(1)
                place: Any = {"device": self.device, **self.options}
                ngrams = NgramEmbedding(self.sizes.hash(), self.sizes.dim, self.sizes.width, **place)
                self._model = Gpt(self.sizes, ngrams, self.device)
                self._optimizers = [_adamw(self._model.parameters())]
            elif self.name == NO_TABLES:
                self._model = Gpt(self.sizes, None, self.device)
                self._optimizers = [_adamw(self._model.parameters())]
            else:
                hashes = self.sizes.hash()
                self._model, self._optimizers = _with_plain(self.sizes, self.name, hashes, hashes.num_rows, self.device)
        return self._model

    @property
    def ngrams(self) -> NgramEmbedding:
        """The tables."""
        ngrams = self.model.ngrams
        assert ngrams is not None
        return ngrams

    def step(self, windows: Tensor, ahead: str, following: Tensor) -> None:
        """Train on a batch ``(batch, context + 1)``, reading ahead its rows or those of the `following` one."""
        model = self.model
        if self.first is None:
            self.first = windows
        if ahead == AT_BEGIN:
            self._prefetch(windows)
        then = (lambda: self._prefetch(following)) if ahead == AHEAD else (lambda: None)
        _step(model, self._optimizers, self.sizes, windows, then)

    def _prefetch(self, windows: Tensor) -> None:
        for part in windows.chunk(self.sizes.parts):
            self.ngrams.prefetch(part[:, :-1])


def _step(
    model: Gpt, optimizers: list[torch.optim.Optimizer], sizes: Sizes, windows: Tensor, forwarded: Callable[[], None]
) -> None:
    """Take a step, and call `forwarded` after the forward pass of the last part."""
    parts = windows.chunk(sizes.parts)
    for number, part in enumerate(parts, start=1):
        loss = model(part) / len(parts)
        if number == len(parts):
            forwarded()
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _with_plain(
    sizes: Sizes, name: str, hashes: nn.Module, rows: int, device: torch.device
) -> tuple[Gpt, list[torch.optim.Optimizer]]:
    """Make a model with a table of torch.nn, and its optimizers."""
    torch.manual_seed(1)
    # A minimal table, which is replaced.
    ngrams: Any = NgramEmbedding(sizes._replace(rows=2).hash(), sizes.dim, sizes.width, device=device)
    ngrams.ngrams = hashes
    ngrams.embedding = nn.Embedding(rows, sizes.dim, sparse=name == SPARSE, device=device)
    tables = [ngrams.embedding.weight]
    nn.init.zeros_(tables[0])
    model = Gpt(sizes, ngrams, device)
    if name != SPARSE:
        return model, [_adamw(model.parameters())]
    others = [one for one in model.parameters() if one is not tables[0]]
    return model, [_adamw(others), torch.optim.SparseAdam(tables, lr=LR)]


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, fused=True)


def plain_rows(sizes: Sizes, name: str, windows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the ids of a batch (n,) and their rows (n, dim) after a step of a torch.nn table with these rows only."""
    ids, places = sizes.hash()(windows[:, :-1]).unique(return_inverse=True)
    model, optimizers = _with_plain(sizes, name, _Places(places.chunk(sizes.parts)), len(ids), device)
    _step(model, optimizers, sizes, windows, lambda: None)
    assert model.ngrams is not None
    return ids, model.ngrams.embedding.weight.detach()


class _Places(nn.Module):
    """Known row numbers in place of a hash."""

    def __init__(self, places: Iterable[Tensor]) -> None:
        super().__init__()
        self._turn = iter(places)

    def forward(self, tokens: Tensor, context: Tensor | None = None) -> Tensor:
        return next(self._turn)
