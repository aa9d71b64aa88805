"""word2vec's models on two tables: what is predicted from what (skip-gram, CBOW), and what a word's vector is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from speedtransfer.cuda import resolve_device
from speedtransfer.errors import InvalidValueError, StorageError, check_size
from speedtransfer.nn import Embedding
from speedtransfer.ranks import Exchange, exchange_of
from speedtransfer.tables import PathLike, row_chunks
from speedtransfer.untrusted import storage_error
from speedtransfer.word2vec.gradients import BlockGradients, block_gradients, draws_of
from speedtransfer.word2vec.places import Block, Places
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.subwords import NgramVectors, Subwords
from speedtransfer.word2vec.vocabulary import Vocabulary

_WORDS_AT_ONCE = 1 << 12  # whose vectors are put together


class Word2Vec(nn.Module):
    """Two tables and the loss over a block of words. A step touches only the rows of the block's words.

    Parameters
    ----------
    vocabulary : Vocabulary or sequence of str
    settings : Settings
        The input rows begin even in ±0.5 / dim as in word2vec.c, with n-grams ±1 / dim as in fastText; the others as zeros.
    process_group : ProcessGroup, optional
        Of processes that share the rows out; as for :class:`~speedtransfer.Embedding`.

    Attributes
    ----------
    input : Embedding
        A row for each word, then the buckets.
    output : Embedding
        A row for each word: as the context of skip-gram, as what CBOW predicts, and as a negative.
    subwords : Subwords or None
        Which rows of `input` each word is made of.
    """

    def __init__(
        self, vocabulary: Vocabulary | Sequence[str], settings: Settings | None = None, process_group: Any = None
    ) -> None:
        super().__init__()
        settings = settings or Settings()
        self.model, self.dim, self.negative, self.clip = settings.model, settings.dim, settings.negative, settings.clip
        words, buckets = vocabulary.words if isinstance(vocabulary, Vocabulary) else vocabulary, settings.buckets
        self.num_words = check_size(len(words), "vocabulary", 1)
        self.subwords = Subwords(words, buckets, settings.min_n, settings.max_n) if buckets else None
        generator = torch.Generator().manual_seed(settings.seed)
        self._path, self._group = settings.path, process_group
        check_no_tables(settings.path)
        try:
            if settings.path is not None:
                with storage_error(f"cannot make folder {str(settings.path)!r}", "choose another path"):
                    os.makedirs(settings.path, exist_ok=True)
            self.input = self._make_table("input", self.num_words + buckets, settings)
            self.output = self._make_table("output", self.num_words, settings)
            reach = (1.0 if buckets else 0.5) / self.dim
            self.input.table.uniform_(-reach, reach, generator=generator)
        except BaseException:
            self.discard()
            raise

    def _make_table(self, name: str, num_rows: int, settings: Settings) -> Embedding:
        path, device = table_files(settings.path).get(name), resolve_device(settings.device)
        table = _ZeroEmbedding(
            num_rows, self.dim, device=device, dtype=torch.float32, memory=settings.memory, path=path, idle="lazy",
            **({} if self._group is None else {"process_group": self._group}),
        )  # fmt: skip
        # How far several processes would move a row, each having trained it on a block of its own, is no gradient to average.
        table._handle.owners.is_adaptive = True
        return table

    def discard(self) -> None:
        """Remove the table files that this model made, if any. The model itself keeps working, on files without a name."""
        remove_tables(self._path)

    @torch.no_grad()
    def deposit_gradients(self, block: Block, with_loss: bool = True, rate: float | None = None) -> BlockGradients:
        """Train copies of the rows of `block`, and deposit how far they moved as gradients for ``optimizer.step()``.

        The host does not wait for a CUDA device, unless tensors of `block`, better prepared by `prepare`, are there. `rate` is
        the learning rate of that training: that of SGD where this is the optimizer. The gradients returned are of rows of
        `input` (`center`) and of `output` (`context`).
        """
        block = self.prepare(block)
        places: Any = block.places
        places = places.to(self.input.table.device)
        # With several processes the ids alone tell, which may have been sent ahead.
        rows: Any = (self.output, places.outputs), (self.input, places.bags.rows)
        output, active = (module.activate(some) for module, some in (self.ids_of(block) if self._group else rows))
        options: dict[str, Any] = {"model": self.model, "negative": self.negative, "rate": rate, "with_loss": with_loss}
        result = block_gradients(active.rows, output.rows, places, **options)
        if self.clip is not None:
            for grad in (result.center, result.context):
                grad.mul_((self.clip / grad.norm(dim=1, keepdim=True)).clamp_(max=1))
        active.add_grad(result.center)
        output.add_grad(result.context)
        return result

    def ids_of(self, block: Block) -> list[tuple[Embedding, Tensor]]:
        """Return which rows of which table `deposit_gradients` looks up for a prepared block, on the host."""
        places: Any = block.places
        return [(self.output, places.outputs.ids), (self.input, places.bags.rows.ids)]

    def prepare(self, block: Block) -> Block:
        """Return `block` with what `deposit_gradients` needs on the host; may be called in any thread.

        A word outside the vocabulary raises `RowIndexError`.
        """
        if block.places is not None:
            return block
        reach = int(torch.maximum(block.before, block.after).max()) if len(block.words) else 0
        places = Places.find(block, self.num_words, draws_of(self.model, self.negative, reach), self.subwords)
        return dataclasses.replace(block, places=places)

    @torch.no_grad()
    def word_vectors(self, num_words: int | None = None) -> Tensor:
        """Return the vectors of the first `num_words` words, by default of all, on the host: float32, shape (words, dim).

        The table itself, without a copy, where it is in host memory and each word has one row.
        """
        count = self.num_words if num_words is None else min(num_words, self.num_words)
        if self._group is None and self.subwords is None:
            return self.input.table.torch()[:count].cpu()
        vectors = torch.empty(count, self.dim, dtype=torch.float32, device="cpu")
        for start in range(0, count, _WORDS_AT_ONCE):
            stop = min(start + _WORDS_AT_ONCE, count)
            vectors[start:stop] = self.some_vectors(start, stop)
        return vectors

    @torch.no_grad()
    def some_vectors(self, start: int, stop: int) -> Tensor:
        """Return the vectors of the words `start` to `stop` on the host; of several processes by one lookup, of all."""
        words, table = torch.arange(start, stop, device="cpu"), self.input.table
        if self.subwords is None:
            return table.gather(words).cpu()
        bags = self.subwords.find(words)
        rows = table.gather(bags.rows.ids)
        inverse, starts = bags.rows.inverse.to(rows.device), bags.starts[:-1].to(rows.device)
        return nn.functional.embedding_bag(inverse, rows, starts, mode="mean").cpu()

    @torch.no_grad()
    def is_finite(self) -> bool:
        """Return whether all rows that vectors are made of are finite."""
        table: Any = self.input.table
        weight = table.torch() if self._group is None else table.local.torch()
        chunks = row_chunks(len(weight), weight.element_size() * self.dim)
        found = all(bool(torch.isfinite(weight[rows]).all()) for rows in chunks)
        return found if self._group is None else bool(exchange_of(self._group).agree("reads all rows", [found]).all())

    def ngram_vectors(self) -> NgramVectors:
        """Return the rows of the n-grams, for words outside the vocabulary: without a copy where they are in host memory."""
        if self.subwords is None:
            raise InvalidValueError("buckets is 0, so this model has no n-grams; pass buckets=2_000_000")
        table: Any = self.input.table
        if self._group is None:
            rows = table.torch()[self.num_words :].cpu()
        else:
            rows = torch.empty(table.num_rows - self.num_words, self.dim, dtype=torch.float32, device="cpu")
            for part in row_chunks(len(rows), 4 * self.dim):
                rows[part] = table.gather(torch.arange(part.start, part.stop, device="cpu") + self.num_words).cpu()
        return NgramVectors(rows.numpy(), self.subwords.min_n, self.subwords.max_n)


class SharedVectors:
    """The vectors of a model of several processes as an array; the first reads a part at a time, while the others `serve`."""

    def __init__(self, model: Word2Vec, exchange: Exchange) -> None:
        self._model, self._exchange = model, exchange
        self.shape, self.dtype = (model.num_words, model.dim), np.dtype(np.float32)

    def __getitem__(self, words: slice) -> np.ndarray:
        start, stop, _ = words.indices(self.shape[0])
        self._exchange.agree("reads all rows", [stop])
        return self._model.some_vectors(start, stop).numpy()

    def end(self) -> None:
        """Let the others go."""
        self._exchange.agree("reads all rows", [0])

    def serve(self) -> None:
        """Send the first process what it reads, until its `end`."""
        while int(self._exchange.agree("reads all rows", [0])[0, 0]):
            self._model.some_vectors(0, 0)


def table_files(folder: PathLike | None) -> dict[str, Path]:
    """Return where the files of a model's two tables with memory "mmap" are, or would be; None: there are none."""
    return {} if folder is None else {name: Path(folder, f"{name}.safetensors") for name in ("input", "output")}


def check_no_tables(folder: PathLike | None) -> None:
    """Raise `StorageError` where one exists: before a long corpus is read, not after it."""
    for file in filter(Path.exists, table_files(folder).values()):
        raise StorageError(
            f"table {str(file)!r} of another run exists and would be overwritten; delete it, or choose another path"
        )


def remove_tables(folder: PathLike | None) -> None:
    """Remove the files, and their folder where nothing else is in it."""
    for file in filter(Path.exists, table_files(folder).values()):
        with storage_error(f"cannot replace table {str(file)!r}", "check the permissions of its folder"):
            file.unlink()
    if folder is not None:
        with contextlib.suppress(OSError):
            os.rmdir(folder)


class _ZeroEmbedding(Embedding):
    """Rows that begin as zeros, as the table gives them: those that nothing writes to take neither time nor disk."""

    def reset_parameters(self) -> None:
        pass
