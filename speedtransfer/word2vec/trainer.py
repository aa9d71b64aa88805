"""The training loop: steps, the learning rate, the running loss, signals to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import operator
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from speedtransfer.errors import InvalidValueError
from speedtransfer.nn import prefetch
from speedtransfer.ranks import DifferenceError, exchange_of, world
from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.model import Word2Vec
from speedtransfer.word2vec.optimizers import block_rate, make_optimizer, options_apart, set_lr
from speedtransfer.word2vec.places import Block
from speedtransfer.word2vec.progress import (
    MOST_WORDS,
    Losses,
    StopOnSignal,
    TrainingProgress,
    warning_of_few_steps,
    warning_of_loss,
    warning_of_rate,
    warning_of_vectors,
)
from speedtransfer.word2vec.sampler import Sampler, choose_schedule
from speedtransfer.word2vec.settings import Settings
from speedtransfer.word2vec.text import POINT
from speedtransfer.word2vec.vectors import Vectors

_MOST_THREADS = 8  # that draw blocks for a GPU
LOSS_EVERY = 16  # steps: the loss costs two more passes over all scores

log = logging.getLogger(__name__)


class Callback:
    """Called by `Trainer.run`; must not change anything that training depends on. By default it does nothing."""

    def begin(self, trainer: Trainer, progress: TrainingProgress) -> None:
        """Called before the first step of the run."""

    def after_step(self, trainer: Trainer) -> None:
        """Called after each step."""

    def finish(self, trainer: Trainer) -> None:
        """Called after the last step, or after a signal to stop (`trainer.interrupted`)."""

    def close(self) -> None:
        """Called last, also where training has failed."""


class Trainer:
    """Train a model on a corpus. The progress made is `step` and the state of model and optimizer.

    Parameters
    ----------
    corpus : Corpus
    settings : Settings

    Attributes
    ----------
    settings : Settings
        As given, `epochs` and `block_words` chosen for the corpus where they were None.
    step : int
        Steps done, of `num_steps`.
    model, optimizer, sampler
        The `Word2Vec`, what trains it, and the `Sampler` of its blocks.
    processes : int
        How many train together, each on blocks of its own.
    elapsed_s : float
        Seconds spent in `run`.
    interrupted : bool
        Whether a signal ended `run` before the last step.
    stop_signal : int or None
        The signal, SIGINT (Ctrl-C) or SIGTERM, that came while `run` ran.
    """

    def __init__(self, corpus: Corpus, settings: Settings) -> None:
        self._group = world()
        self._exchange = None if self._group is None else exchange_of(self._group)
        rank, self.processes = (0, 1) if self._exchange is None else (self._exchange.rank, self._exchange.ranks)
        num_kept_words = corpus.vocabulary.kept_share(settings.sample) * corpus.num_words
        self.epochs, self.block_words = choose_schedule(
            num_kept_words, settings.epochs, settings.block_words, self.processes
        )
        if self._exchange is not None:
            # Each trains on some blocks of it; of a corpus of its own the others would never be.
            found = corpus.fingerprint()
            digest = hashlib.sha256((found["vocabulary"] + found["text"]).encode()).hexdigest()[:12]
            about = f"a corpus of {found['words']:,} words and {found['vocabulary_words']:,} different ones, {digest}"
            try:
                self._exchange.agree(POINT, [0], about)
            except DifferenceError as error:
                raise DifferenceError(
                    f"{error}, or all files with divide=True (--divide), of which each reads some"
                ) from None
        self.corpus = corpus
        self.settings = settings = dataclasses.replace(settings, epochs=self.epochs, block_words=self.block_words)
        self.sampler = Sampler(corpus.ids, corpus.vocabulary, settings, corpus.starts)
        self.model = Word2Vec(corpus.vocabulary, settings, self._group)
        parameters = self.model.parameters()
        self._first_lr, options = settings.first_lr, settings.options
        if self.processes > 1:
            self._first_lr, options = options_apart(settings.optimizer, self._first_lr, options)
        self.optimizer = make_optimizer(settings.optimizer, parameters, self._first_lr, options)
        self.step = 0
        # The blocks that this process trains on, of all that are drawn from its corpus.
        num_blocks = self.epochs * len(self.sampler)
        self._own = range(num_blocks) if corpus.is_divided else range(rank, num_blocks, self.processes)
        self.num_steps = len(self._own)
        if self._exchange is not None:
            self.num_steps = int(self._exchange.agree("begins to train", [self.num_steps]).max())
        self.elapsed_s, self.interrupted = 0.0, False
        self.stop_signal: int | None = None
        self._blocks: Iterator[Block] | None = None
        self._has_learned = False
        self._losses = Losses()
        self._moved_before = (0, 0)

    @property
    def loss(self) -> float:
        """Running mean per pair, including its negatives; nan before the first step."""
        return self._losses.mean

    @property
    def epoch(self) -> int:
        """The epoch that the next step belongs to, counted from 1."""
        return min(self.step * self.epochs // self.num_steps + 1, self.epochs)

    @property
    def steps_an_epoch(self) -> float:
        """Steps in which all processes together pass over the corpus once."""
        return self.num_steps / self.epochs

    @property
    def words_per_s(self) -> float:
        """Words of the text per second of training, including those that the vocabulary or subsampling left out."""
        return self.step / self.steps_an_epoch * self.corpus.num_raw_words / max(self.elapsed_s, 1e-9)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes of rows moved to the compute device so far, and back; weights and optimizer state."""
        stats = [table.stats() for table in (self.model.input.table, self.model.output.table)]
        gathered, scattered = self._moved_before
        return gathered + sum(s.gathered_bytes for s in stats), scattered + sum(s.scattered_bytes for s in stats)

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def train_step(self) -> None:
        """Train on the next block. Raises `InvalidValueError` where the loss is not finite, or all steps are done."""
        if self.step >= self.num_steps:
            raise InvalidValueError(f"all {self.num_steps} steps are done; make a Trainer with more epochs")
        if self._blocks is None:
            # One thread draws as fast as a core trains.
            is_host = self.model.input.table.device.type == "cpu"
            threads = 1 if is_host else min(torch.get_num_threads(), _MOST_THREADS)
            self._blocks = self.sampler.blocks(self.step, self.num_steps, self.model.prepare, self._block_of, threads)
            if self._group is not None:
                # The ids of the next block are on their way to the owners of their rows while this one is trained on.
                self._blocks = iter(prefetch(self._blocks, self.model.ids_of, depth=1))
        block = next(self._blocks)
        set_lr(self.optimizer, self._first_lr, self.step / self.num_steps)
        # A single word makes no pair, but among processes all must make the lookups.
        if len(block.words) > 1 or self.processes > 1:
            rate = block_rate(self.settings.optimizer, self.settings.model, self.lr, self._first_lr)
            result = self.model.deposit_gradients(block, self.step % LOSS_EVERY == 0, rate)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._has_learned = self._has_learned or float(result.num_pairs) > 0
            if result.loss is not None:
                loss = float(result.loss)  # the host waits for a CUDA device
                if not math.isfinite(loss):
                    raise self._blown_up(f"the loss is {loss}")
                self._losses.add(loss, float(result.num_pairs))
        self.step += 1

    def _block_of(self, step: int) -> int | None:
        """Return the number of the block that this process trains on in a step; None: it has fewer blocks than others.

        Those steps are spread over the run, so that all parts of a corpus are trained on to its end.
        """
        done, after = (-(-each * len(self._own) // self.num_steps) for each in (step, step + 1))
        return self._own[done] if after > done else None

    def _blown_up(self, what: str) -> InvalidValueError:
        return InvalidValueError(
            f"lr={self.settings.first_lr:g} is too large for {self.settings.optimizer}: {what} at step "
            f"{self.step} of {self.num_steps}; pass a smaller lr or block_words"
        )

    def run(
        self, progress: TrainingProgress, callbacks: Sequence[Callback] = (), stop: StopOnSignal | None = None
    ) -> None:
        """Train to the end, or to the first SIGINT (Ctrl-C) or SIGTERM: the model is whole then, and `interrupted` True.

        `stop` has been entered, by default one of its own is. Raises as `train_step`; also where there was no pair of words at
        all, or a vector is not finite at the end. Table files are removed where it fails: they would stop the next run.
        """
        try:
            for callback in callbacks:
                callback.begin(self, progress)
            few_steps = warning_of_few_steps(self.num_steps, self.epochs, self.block_words)
            _warn(few_steps, warning_of_rate(self.settings, self.optimizer))
            entered = StopOnSignal() if stop is None else contextlib.nullcontext(stop)
            with entered as stop, _leave_a_core(self.model.input.table.device):
                self._train(progress, callbacks, stop)
                self._check_result(progress, stop)
                for callback in callbacks:
                    callback.finish(self)
                self.stop_signal = stop.requested
        except BaseException:
            self.model.discard()
            raise
        finally:
            self._blocks = None  # stop drawing ahead
            for callback in callbacks:
                callback.close()

    def _train(self, progress: TrainingProgress, callbacks: Sequence[Callback], stop: StopOnSignal) -> None:
        """Make the steps that are left, until a signal to stop."""
        while self.step < self.num_steps and not self._is_stopped(stop):
            started = time.perf_counter()
            self.train_step()
            self.elapsed_s += time.perf_counter() - started
            if self.step % LOSS_EVERY == 1 or self.step == self.num_steps:
                progress.training(self)
            for callback in callbacks:
                callback.after_step(self)

    def _check_result(self, progress: TrainingProgress, stop: StopOnSignal) -> None:
        """Raise or warn where training went wrong; report a stop."""
        if not self.model.is_finite():  # the loss, measured only now and then, may have missed it
            raise self._blown_up("there are vectors that are not finite")
        self.interrupted = self.step < self.num_steps
        if self.interrupted:
            by = "" if stop.requested == signal.SIGINT else " by SIGTERM"
            done = f"{self.step / self.num_steps:.0%} (epoch {self.epoch} of {self.epochs})"
            progress.log(f"stopped{by} at {done}: the vectors so far are kept; Ctrl-C{'' if by else ' again'} aborts")
        elif not self._has_learned and self.processes == 1:
            raise InvalidValueError(
                f"no word has another of the vocabulary beside it in any of {self.num_steps} blocks; pass a larger corpus, a "
                f"larger sample than {self.settings.sample:g} (0: every word), a smaller min_count, or kind='text' for lines"
            )
        else:
            some = self.model.word_vectors(MOST_WORDS)
            _warn(warning_of_loss(self._losses, self.settings, self.epochs), warning_of_vectors(some, self.settings))

    def _is_stopped(self, stop: StopOnSignal) -> bool:
        """Return whether any process has received a signal to stop."""
        if self._exchange is None:
            return stop.requested is not None
        if self.step % LOSS_EVERY:
            return False  # else a meeting before each step
        signals = self._exchange.agree("makes a step", [stop.requested or 0])
        stop.requested = int(signals.max()) or None
        return stop.requested is not None

    def state(self) -> dict[str, Any]:
        """Return what training has done so far, but for model and optimizer: plain data for a checkpoint."""
        return {
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "losses": [self._losses.count, self._losses.mean],
            "has_learned": self._has_learned,
            "moved_bytes": list(self.moved_bytes),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`; model and optimizer have been loaded already."""
        self.step, self.elapsed_s = operator.index(state["step"]), float(state["elapsed_s"])
        if not 0 <= self.step <= self.num_steps:
            raise ValueError(f"step {self.step} of {self.num_steps}")
        self._losses = Losses(int(state["losses"][0]), float(state["losses"][1]))
        self._has_learned = state["has_learned"]
        for table in (self.model.input.table, self.model.output.table):
            table.reset_stats()  # loading has moved rows, too
        self._moved_before = tuple(state["moved_bytes"])
        self._blocks = None  # the next block is another one

    def vectors(self, num_words: int | None = None) -> Vectors:
        """Return the vectors as they are now, or those of the `num_words` most frequent words.

        They are the input table itself, where it is in host memory. Several processes have them together, so all call this.
        """
        vocabulary, some = self.corpus.vocabulary, slice(num_words)
        return Vectors(vocabulary.words[some], self.model.word_vectors(num_words), vocabulary.counts[some])


@contextlib.contextmanager
def _leave_a_core(device: torch.device) -> Iterator[None]:
    """Let torch use one thread fewer, so that the thread that draws blocks has a core of the host.

    After each of its parallel operations torch's threads go on to spin for a while, on the cores that others have work for.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads - (device.type == "cpu" and threads > 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _warn(*messages: str) -> None:
    for message in filter(None, messages):
        log.warning(message)
