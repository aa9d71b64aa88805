"""Signs that a run has trained nothing, or went wrong: what a user should hear although no rule is broken."""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer

from speedtransfer.word2vec.gradients import RATES
from speedtransfer.word2vec.optimizers import DEFAULT_OPTIONS, STEPS_AS_GIVEN
from speedtransfer.word2vec.settings import Settings

FEW_STEPS = 100
_FAR = 8.0  # times word2vec's rate, or a part of it: as far as some corpora and models want
_AT_CHANCE = 0.99  # of the loss of vectors that know nothing
MOST_WORDS = 10_000  # whose vectors are looked at
_ONE_DIMENSION = 0.25  # of the squared length of vectors, where some 0.02 is usual
_RISEN = 1.01  # times it: more than one batch differs from another


class Losses:
    """A running mean of the last few losses."""

    def __init__(self) -> None:
        self.count, self.recent = 0, math.nan

    def note(self, loss: float) -> None:
        """Take note of a loss per pair."""
        self.count += 1
        if self.count == 1:
            self.recent = loss
        self.recent += (loss - self.recent) / min(self.count, 8)

    def state(self) -> list[float]:
        """Return what a checkpoint keeps."""
        return [self.count, self.recent]

    def load_state(self, state: list[float]) -> None:
        """Go on from `state`."""
        self.count, self.recent = int(state[0]), state[1]


def warning_of_few_steps(num_steps: int, epochs: int, block_words: int) -> str:
    """Return what to say of a run of so few steps that vectors hardly move; "" where there are enough."""
    if num_steps >= FEW_STEPS:
        return ""
    words = num_steps * block_words // (4 * FEW_STEPS)  # a block, for some hundred steps
    fitting = 1 << max(words, 16).bit_length() - 1
    smaller = f"a smaller block_words, such as {fitting}, or " if fitting < block_words else ""
    return (
        f"this run has {num_steps} steps, too few to train much (fewer than {FEW_STEPS}); pass {smaller}more epochs than "
        f"{epochs}"
    )


def warning_of_rate(settings: Settings, optimizer: Optimizer) -> str:
    """Return what to say of a learning rate far from word2vec's; "" where it is near, or where eps does not tell."""
    name, lr, usual = settings.optimizer.lower(), settings.first_lr, RATES[settings.model]
    scaled = "eps" in DEFAULT_OPTIONS.get(name, {})
    eps = float(optimizer.defaults["eps"]) if scaled else 1.0
    if settings.lr is None or eps == 0 or (not scaled and name not in STEPS_AS_GIVEN):
        return ""
    rate = lr / eps
    if usual / _FAR <= rate <= usual * _FAR:
        return ""
    divided = f" with eps={eps:g}" if scaled else ""
    less = "less than an eighth of" if rate < usual else "more than eight times"
    return (
        f"lr={lr:g}{divided} moves rows at {rate:.2g}, {less} word2vec's rate, {usual:g}; for that pass "
        f"lr={usual * eps:.3g}, or drop lr"
    )


def warning_of_loss(losses: Losses, settings: Settings, epochs: int) -> str:
    """Return what to say of a loss that did not fall; "" where it did.

    Every run begins at chance, since the rows of the output table are zeros: the loss that it began with need not be measured,
    and what the first block learns while it is measured does not count against the end.
    """
    if losses.count < 2:
        return ""
    chance = (1 + settings.negative) * math.log(2)
    if losses.recent > _RISEN * chance:
        return (
            f"the loss ended at {losses.recent:.4g}, above the {chance:.4g} that it began with; pass a smaller lr than "
            f"{settings.first_lr:g}"
        )
    if losses.recent > _AT_CHANCE * chance:
        return (
            f"the loss ended at {losses.recent:.4g} and that of vectors which know nothing is {chance:.4g}: little "
            f"was learnt; pass more epochs than {epochs}, a smaller block_words, or a larger lr than "
            f"{settings.first_lr:g}"
        )
    return ""


def warning_of_vectors(vectors: Tensor, settings: Settings) -> str:
    """Return what to say of vectors (words, dim) that share most of their length in one dimension; "" where they do not."""
    shares = vectors.mean(0).square() / vectors.square().sum(1).mean()
    share = float(shares.max())
    if not share > max(_ONE_DIMENSION, 10 / settings.dim):  # nan: all are zero
        return ""
    return (
        f"the vectors have {share:.0%} of their squared length in common, in dimension {int(shares.argmax())}, which leaves "
        f"little to tell words apart by; pass more shared_negatives than {settings.pool}, a smaller lr than "
        f"{settings.first_lr:g}, or optimizer='sgd'"
    )
