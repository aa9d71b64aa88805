"""A small GPT with hashed n-gram tables: what the last words were, looked up and added between two of its layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import speedtransfer as st


class Block(nn.Module):
    """Causal attention and a network, each on the normalised hidden states and added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # Without a bias: attention does not depend on that of the keys, and Adam would follow the rounding of its gradient.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden states of ``(batch, time, width)``."""
        batch, time, width = hidden.shape
        parts = self.qkv(self.norm1(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(found.transpose(1, 2).reshape(batch, time, width))
        return hidden + self.mlp(self.norm2(hidden))


class GPT(nn.Module):
    """Predict each next token.

    Parameters
    ----------
    vocabulary, width, layers, heads, context : int
        Number of tokens there are, of values a hidden state, of blocks, of attention heads, and the longest input.
    ngrams : NgramEmbedding, optional
        Takes tokens ``(batch, time)`` and returns ``(batch, time, width)``, which is added before the last half of the blocks.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        ngrams: st.NgramEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        self.head.weight = self.tokens.weight
        # Last: with tables or without them, the rest of the model starts from the same numbers.
        self.ngrams = ngrams

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``(batch, time, vocabulary)`` for the token after each of ``(batch, time)``."""
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for number, block in enumerate(self.blocks):
            if self.ngrams is not None and number == len(self.blocks) // 2:
                hidden = hidden + self.ngrams(tokens)
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean cross entropy of ``(batch, time + 1)`` tokens, each predicted from those before it."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
