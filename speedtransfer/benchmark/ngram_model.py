"""A GPT of torch's own layers with n-gram tables between two of them, and batches of tokens for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.workload import zipf_ids
from speedtransfer.ngrams import NgramEmbedding, NgramHash

ORDERS, HEADS = (2, 3), 16


class Sizes(NamedTuple):
    """Sizes of a model, its batches and its tables.

    Attributes
    ----------
    vocabulary, width, layers, heads : int
        Tokens that there are, values of a hidden state, layers, attention heads.
    batch, context : int
        Windows of a step, and tokens of a window.
    rows, dim : int
        Rows of a head, at least, and their values.
    parts : int
        That a batch is computed in, one after the other: the logits of all tokens need not fit at once.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    batch: int
    context: int
    rows: int
    dim: int
    parts: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.context

    def hash(self) -> NgramHash:
        """Return the hash of the tables."""
        return NgramHash(ORDERS, HEADS // len(ORDERS), self.rows, vocab_size=self.vocabulary)

    def about(self) -> str:
        """Return the model in words."""
        return f"GPT of {self.layers} layers of {self.width}, {self.tokens:,} tokens"


class Gpt(nn.Module):
    """Predict the next token: the mean loss of ``(batch, context + 1)`` tokens."""

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
    """Return batches ``(batch, context + 1)``: frequencies of tokens fall as 1 / rank, and none depends on the one before."""
    draw = torch.Generator().manual_seed(seed)
    shape = sizes.batch, sizes.context + 1
    return [zipf_ids(sizes.vocabulary, shape[0] * shape[1], draw).view(shape).to(device) for _ in range(count)]
