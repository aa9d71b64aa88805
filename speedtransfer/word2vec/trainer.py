"""The training loop, and `train`, which runs it from a corpus to vectors."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch

from speedtransfer.device import resolve_device
from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.interrupt import StopOnInterrupt
from speedtransfer.word2vec.model import Word2Vec
from speedtransfer.word2vec.optimizers import make_optimizer, set_lr
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.sampler import Sampler
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.text import Source
from speedtransfer.word2vec.vectors import Vectors

LOSS_EVERY = 16  # steps: the loss costs two more passes over all scores
LOSS_MEMORY = 0.95  # of the running mean, from one measurement to the next


class Trainer:
    """A model in training. What it has done so far is `step`, the generator's state, the model's and the optimizer's.

    Parameters
    ----------
    corpus : Corpus
    settings : Settings

    Attributes
    ----------
    step : int
        Steps done, of `num_steps`.
    model : Word2Vec
    optimizer : torch.optim.Optimizer
    sampler : Sampler
    loss : float
        Running mean a pair, its negatives included; nan before the first step.
    elapsed_s : float
        Seconds spent in `run`.
    interrupted : bool
        Whether Ctrl-C ended `run`.

    Raises
    ------
    SpeedtransferError
        The settings do not fit the machine or the optimizer.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self.corpus, self.settings = corpus, settings
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.sampler = Sampler(
            corpus.ids,
            corpus.vocabulary,
            seed=settings.seed,
            device=resolve_device(settings.device),
            window=settings.window,
            sample=settings.sample,
            block_words=settings.block_words,
            shared_negatives=settings.shared_negatives,
        )
        self.model = Word2Vec(
            corpus.vocabulary,
            settings.dim,
            negative=settings.negative,
            memory=settings.memory,
            path=settings.path,
            device=settings.device,
            seed=settings.seed,
        )
        self.optimizer = make_optimizer(
            settings.optimizer, self.model.parameters(), settings.first_lr, settings.options
        )
        self.step = 0
        self._blocks = iter(())
        self.num_steps = settings.epochs * len(self.sampler)
        self.elapsed_s, self.interrupted = 0.0, False
        self._corpus_words, self._has_learned = 0, False
        self._loss_sum = self._pair_sum = 0.0

    @property
    def loss(self) -> float:  # noqa: D102 (told above)
        return self._loss_sum / self._pair_sum if self._pair_sum else math.nan

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, counted from 1."""
        return min(self.step // len(self.sampler) + 1, self.settings.epochs)

    @property
    def words_per_s(self) -> float:
        """Words of the text a second of training, those included that the vocabulary or subsampling left out."""
        raw_share = self.corpus.num_raw_words / len(self.corpus)
        return self._corpus_words * raw_share / max(self.elapsed_s, 1e-9)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of rows that came to the compute device so far, and that went back; weights and optimizer state."""
        stats = [table.stats() for table in (self.model.input.table, self.model.output.table)]
        return sum(s.gathered_bytes for s in stats), sum(s.scattered_bytes for s in stats)

    def train_step(self) -> None:
        """Train on the next block.

        Raises
        ------
        InvalidValueError
            The loss is no longer finite: the learning rate is too large.
        OptimizerError
            The optimizer cannot train rows on their own.
        """
        set_lr(self.optimizer, self.settings.first_lr, self.step / self.num_steps)
        block = self._next()
        if len(block.words) > 1:  # fewer make no pair
            result = self.model.deposit_gradients(block, with_loss=self.step % LOSS_EVERY == 0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._has_learned = True
            if result.loss is not None:
                self._note_loss(float(result.loss), int(result.num_pairs))
        self._corpus_words += block.num_corpus_words
        self.step += 1

    def _next(self):
        block = next(self._blocks, None)
        if block is None:
            self._blocks = self.sampler.blocks(self.step, self.num_steps)
            block = next(self._blocks)
        return block

    def _note_loss(self, loss: float, num_pairs: int) -> None:
        if not math.isfinite(loss):
            raise InvalidValueError(
                f"lr={self.settings.first_lr:g} is too large for {self.settings.optimizer}: the loss is {loss} at step "
                f"{self.step} of {self.num_steps}; pass a smaller lr or block_words"
            )
        self._loss_sum = LOSS_MEMORY * self._loss_sum + loss
        self._pair_sum = LOSS_MEMORY * self._pair_sum + num_pairs

    def run(self, progress: TrainingProgress) -> None:
        """Train to the end, or to the first Ctrl-C; then `interrupted` is True and the model whole.

        Parameters
        ----------
        progress : TrainingProgress

        Raises
        ------
        InvalidValueError, OptimizerError
            As `train_step`; also where subsampling has left no pair of words at all.
        """
        with StopOnInterrupt() as interrupt:
            while self.step < self.num_steps and not interrupt.requested:
                started = time.perf_counter()
                self.train_step()
                self.elapsed_s += time.perf_counter() - started
                if self.step % LOSS_EVERY == 1 or self.step == self.num_steps:
                    left_s = self.elapsed_s / self.step * (self.num_steps - self.step)
                    epoch = f"epoch {self.epoch}/{self.settings.epochs}"
                    progress.training(epoch, self.step / self.num_steps, self.words_per_s, self.loss, left_s)
            self.interrupted = interrupt.requested
        if self.interrupted:
            progress.say(
                f"stopped at {self.step / self.num_steps:.0%} (epoch {self.epoch} of {self.settings.epochs}): "
                "the vectors so far are kept; Ctrl-C again aborts"
            )
        elif not self._has_learned:
            raise InvalidValueError(
                f"sample={self.settings.sample:g} leaves no two words in any of {self.num_steps} blocks of this small corpus; "
                "pass a larger sample, or 0 to keep every word"
            )

    def vectors(self) -> Vectors:
        """Return the vectors as they are now: the input table itself, without a copy, where it is in host memory."""
        return Vectors(self.corpus.vocabulary.words, self.model.word_vectors())


def train(
    corpus: Source | Corpus,
    dim: int = Settings.dim,
    optimizer: str = Settings.optimizer,
    lr: float | None = Settings.lr,
    *,
    options: dict[str, Any] | None = None,
    epochs: int = Settings.epochs,
    window: int = Settings.window,
    negative: int = Settings.negative,
    min_count: int = Settings.min_count,
    max_words: int | None = Settings.max_words,
    sample: float = Settings.sample,
    block_words: int = Settings.block_words,
    shared_negatives: int = Settings.shared_negatives,
    seed: int = Settings.seed,
    memory: str = Settings.memory,
    path: str | os.PathLike[str] | None = Settings.path,
    device: torch.device | str | int | None = Settings.device,
    progress: bool = True,
) -> Vectors:
    """Train word vectors by skip-gram with negative sampling.

    Ctrl-C ends training early and returns the vectors so far; a second one raises KeyboardInterrupt.

    Parameters
    ----------
    corpus : path-like, "-", binary file, or Corpus
        Text; see :class:`Corpus`, which has its vocabulary already: `min_count` and `max_words` do nothing then.
    dim, optimizer, lr, options, epochs, window, negative, min_count, max_words, sample
        See :class:`Settings`.
    block_words, shared_negatives, seed, memory, path, device
        See :class:`Settings`.
    progress : bool
        Show on standard error how far training is.

    Returns
    -------
    Vectors
        Words from the most frequent on.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        A setting breaks its rule, or the corpus is no text or has too few words.
    StorageError
        The corpus cannot be read.
    OptimizerError
        The optimizer cannot train rows on their own.
    """
    settings = Settings(
        dim=dim,
        optimizer=optimizer,
        lr=lr,
        options=dict(options or {}),
        epochs=epochs,
        window=window,
        negative=negative,
        min_count=min_count,
        max_words=max_words,
        sample=sample,
        block_words=block_words,
        shared_negatives=shared_negatives,
        seed=seed,
        memory=memory,
        path=path,
        device=device,
    )
    with TrainingProgress(progress) as shown:
        if not isinstance(corpus, Corpus):
            corpus = Corpus(corpus, settings.min_count, settings.max_words, report=shown.reading)
        trainer = Trainer(corpus, settings)
        trainer.run(shown)
    return trainer.vectors()
