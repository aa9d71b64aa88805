"""What a training run shows: how far it is, and warnings where it trains little; signals that end it."""

from __future__ import annotations

import math
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from rich.console import Console
from rich.status import Status
from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.errors import printable
from speedtransfer.word2vec.gradients import RATES
from speedtransfer.word2vec.optimizers import DEFAULT_OPTIONS, STEPS_AS_GIVEN
from speedtransfer.word2vec.settings import Settings

LINE_EVERY_S = 10.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FEW_STEPS = 100
MOST_WORDS = 10_000  # whose vectors are checked
_MAX_RATE_RATIO = 8.0  # to the usual rate, either way: some corpora and models are best that far from it
_MIN_LOSS_RATIO = 0.99  # to the loss of untrained vectors: above it little has been learned
_MAX_LOSS_RATIO = 1.01  # to the same: batches differ by less
_MAX_SHARE_OF_DIMENSION = 0.25  # of the squared length of vectors, where some 0.02 is usual


class TrainingProgress:
    """Progress of reading and training, on standard error; without `enabled` only `log` writes."""

    def __init__(self, enabled: bool = True, console: Console | None = None) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False) if console is None else console
        self._enabled, self._last_line = enabled, time.monotonic()
        self._status: Status | None = None

    def __enter__(self) -> TrainingProgress:
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._status = self._console.status("reading")
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def log(self, text: str) -> None:
        """Write a line that stays."""
        self._console.print(printable(text), markup=False)

    def reading(self, num_words: int) -> None:
        """Show that `num_words` words of the corpus have been read."""
        self._show(f"reading: {num_words:,} words")

    def training(self, trainer: Any) -> None:
        """Show how far a :class:`~speedtransfer.word2vec.Trainer` is, and how long it goes on."""
        share, epoch = trainer.step / trainer.num_steps, f"epoch {trainer.epoch}/{trainer.epochs}"
        left = timedelta(seconds=round(trainer.elapsed_s * (1 / share - 1)))
        self._show(f"{epoch}  {share:.0%}  {trainer.words_per_s:,.0f} words/s  loss {trainer.loss:.4g}  {left} left")

    def _show(self, text: str) -> None:
        now = time.monotonic()
        if self._status is not None:
            self._status.update(text)
        elif self._enabled and now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self.log(text)


class StopOnSignal:
    """Within this context the first SIGINT (Ctrl-C) or SIGTERM sets `requested`, its number, and does nothing else.

    An exception between two writes would leave weights and optimizer state of different steps. Ctrl-C after that raises
    KeyboardInterrupt; another SIGTERM does nothing, since ``timeout`` and job schedulers send several. Nothing is changed in a
    thread other than the main one, and of signals that the program ignores or handles itself.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    self._previous[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous.clear()


@dataclass
class Losses:
    """The running mean of the loss per pair, over eight measurements or so; nan before the first."""

    count: int = 0
    mean: float = math.nan

    def add(self, loss: float, num_pairs: float) -> None:
        """Add a measurement: the loss summed over `num_pairs` pairs."""
        if num_pairs:
            before = self.mean if self.count else loss / num_pairs
            self.count += 1
            self.mean = before + (loss / num_pairs - before) / min(self.count, 8)


def warning_of_few_steps(num_steps: int, epochs: int, block_words: int) -> str:
    """Return a warning of a run with so few steps that vectors hardly move; "" where there are enough."""
    if num_steps >= FEW_STEPS:
        return ""
    return (
        f"this run has {num_steps} steps, too few to train much (fewer than {FEW_STEPS}); pass more epochs than {epochs}, or "
        f"a smaller block_words than {block_words}"
    )


def warning_of_rate(settings: Settings, optimizer: Optimizer) -> str:
    """Return a warning of a learning rate far from word2vec's; "" where it is near, or cannot be compared."""
    name, lr, usual = settings.optimizer.lower(), settings.first_lr, RATES[settings.model]
    scaled = "eps" in DEFAULT_OPTIONS.get(name, {})
    # With several processes both are larger by the same factor (`options_apart`).
    eps = float(optimizer.defaults["eps"]) * (lr / optimizer.defaults["lr"]) if scaled else 1.0
    if settings.lr is None or eps == 0 or (not scaled and name not in STEPS_AS_GIVEN):
        return ""
    rate = lr / eps
    if usual / _MAX_RATE_RATIO <= rate <= usual * _MAX_RATE_RATIO:
        return ""
    divided = f" with eps={eps:g}" if scaled else ""
    less = "less than an eighth of" if rate < usual else "more than eight times"
    return (
        f"lr={lr:g}{divided} moves rows at {rate:.2g}, {less} the usual rate, {usual:g}; for that pass "
        f"lr={usual * eps:.3g}, or drop lr"
    )


def warning_of_loss(losses: Losses, settings: Settings, epochs: int) -> str:
    """Return a warning of a loss that did not fall; "" where it did.

    Every run begins at chance, since the rows of the output table are zeros: the loss that it began with need not be measured.
    """
    chance, lr = (1 + settings.negative) * math.log(2), f"{settings.first_lr:g}"
    if losses.count < 2 or losses.mean <= _MIN_LOSS_RATIO * chance:
        return ""
    remedy = f"more epochs than {epochs}, a smaller block_words, or a larger lr than {lr}"
    if losses.mean > _MAX_LOSS_RATIO * chance:
        remedy = f"a smaller lr than {lr}"
    return (
        f"the loss ended at {losses.mean:.4g} and that of vectors which know nothing is {chance:.4g}: little was learnt; pass "
        f"{remedy}"
    )


def warning_of_vectors(vectors: Tensor, settings: Settings) -> str:
    """Return a warning of vectors (words, dim) that share much of their length in one dimension; "" where they do not."""
    shares = vectors.mean(0).square() / vectors.square().sum(1).mean()
    share = float(shares.max())
    if not share > max(_MAX_SHARE_OF_DIMENSION, 10 / settings.dim):  # nan: all are zero
        return ""
    return (
        f"the vectors have {share:.0%} of their squared length in common, in dimension {int(shares.argmax())}, which leaves "
        f"little to tell words apart by; pass more shared_negatives than {settings.pool}, a smaller lr than "
        f"{settings.first_lr:g}, or optimizer='sgd'"
    )
