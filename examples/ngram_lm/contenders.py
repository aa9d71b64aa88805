"""The ways to hold and train the n-gram tables. All start from the same numbers and see the same batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import AdamW, Optimizer, SparseAdam

import speedtransfer as st
from ngram_lm.data import END
from ngram_lm.model import GPT
from ngram_lm.settings import Settings


class Contender(NamedTuple):
    """How tables are held and trained.

    Attributes
    ----------
    title : str
    kind : {"none", "dense", "sparse", "ours"}
    idle : {"lazy", "exact"}
        Of ours.
    prefetch : bool
        Whether the rows of the next batch are read while this one is computed.
    """

    title: str
    kind: str
    idle: str = "lazy"
    prefetch: bool = False


CONTENDERS = {
    "none": Contender("no tables", "none"),
    "dense": Contender("nn.Embedding + AdamW", "dense"),
    "sparse": Contender("nn.Embedding(sparse=True) + SparseAdam", "sparse"),
    "lazy": Contender('speedtransfer, idle="lazy"', "ours", "lazy"),
    "lazy-prefetch": Contender('speedtransfer, idle="lazy", prefetch', "ours", "lazy", prefetch=True),
    "exact": Contender('speedtransfer, idle="exact"', "ours", "exact"),
    "exact-prefetch": Contender('speedtransfer, idle="exact", prefetch', "ours", "exact", prefetch=True),
}


def make_model(contender: Contender, settings: Settings, vocabulary: int) -> GPT:
    """Return the model, whose first numbers depend on the settings alone."""
    torch.manual_seed(settings.seed)
    model = GPT(vocabulary, settings.width, settings.layers, settings.attention_heads, settings.context)
    if contender.kind == "none":
        return model
    # To give a model tables these lines are enough, and the one in `GPT.forward` that adds what they return.
    heads = settings.heads // len(settings.orders)
    ngrams = st.NgramHash(settings.orders, heads, settings.rows, vocab_size=vocabulary, seed=settings.seed, eos=END)
    model.ngrams = st.NgramEmbedding(ngrams, settings.dim, out_dim=settings.width, idle=contender.idle)
    if contender.kind != "ours":
        model.ngrams.embedding = nn.Embedding(ngrams.num_rows, settings.dim, sparse=contender.kind == "sparse")
        # As a table begins.
        nn.init.zeros_(model.ngrams.embedding.weight)
    return model


def make_optimizers(contender: Contender, model: GPT, settings: Settings) -> list[Optimizer]:
    """Return what trains the model: AdamW, and of sparse gradients SparseAdam beside it."""
    tables = [] if model.ngrams is None else list(model.ngrams.embedding.parameters())
    others = _without(model.parameters(), tables)
    options = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if contender.kind == "sparse":
        return [AdamW(others, **options), SparseAdam(tables, lr=settings.table_lr)]
    of_tables = [{"params": tables, "lr": settings.table_lr}] if tables else []
    return [AdamW([{"params": others}, *of_tables], **options)]


def _without(parameters: Iterable[nn.Parameter], tables: list[nn.Parameter]) -> list[nn.Parameter]:
    return [one for one in parameters if all(one is not other for other in tables)]


def table_bytes(model: GPT, optimizers: list[Optimizer]) -> int:
    """Return the bytes of the n-gram tables and their state; a dense gradient comes on top of them."""
    if model.ngrams is None:
        return 0
    embedding = model.ngrams.embedding
    if isinstance(embedding, st.Embedding):
        return embedding.table.nbytes
    weight = embedding.weight
    state = [value for one in optimizers for value in one.state.get(weight, {}).values() if torch.is_tensor(value)]
    return sum(value.nbytes for value in (weight, *state))
