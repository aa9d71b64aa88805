"""Signs that a run has trained nothing, or went wrong: what a user should hear although no rule is broken."""

from __future__ import annotations

import math

from speedtransfer.word2vec.settings import Settings

FEW_STEPS = 100
_AT_CHANCE = 0.99  # of the loss of vectors that know nothing
_RISEN = 1.01  # times the first loss: more than one batch differs from another


class Losses:
    """The first loss and a running mean of the last few."""

    def __init__(self) -> None:
        self.count, self.first, self.recent = 0, math.nan, math.nan

    def note(self, loss: float) -> None:
        """Take note of a loss per pair."""
        self.count += 1
        if self.count == 1:
            self.first = self.recent = loss
        self.recent += (loss - self.recent) / min(self.count, 8)

    def state(self) -> list[float]:
        """Return what a checkpoint keeps."""
        return [self.count, self.first, self.recent]

    def load_state(self, state: list[float]) -> None:
        """Go on from `state`."""
        self.count, self.first, self.recent = int(state[0]), state[1], state[2]


def warning_of_few_steps(num_steps: int, settings: Settings) -> str:
    """Return what to say of a run of so few steps that vectors hardly move; "" where there are enough."""
    if num_steps >= FEW_STEPS:
        return ""
    words = num_steps * settings.block_words // (4 * FEW_STEPS)  # a block, for some hundred steps
    fitting = 1 << max(words, 16).bit_length() - 1
    smaller = f"a smaller block_words, such as {fitting}, or " if fitting < settings.block_words else ""
    return (
        f"this run has {num_steps} steps, too few to train much (fewer than {FEW_STEPS}); pass {smaller}more epochs than "
        f"{settings.epochs}"
    )


def warning_of_loss(losses: Losses, settings: Settings) -> str:
    """Return what to say of a loss that did not fall; "" where it did."""
    if losses.count < 2:
        return ""
    if losses.recent > _RISEN * losses.first:
        return (
            f"the loss ended at {losses.recent:.4g}, above the {losses.first:.4g} that it began with; pass a smaller lr than "
            f"{settings.first_lr:g}"
        )
    chance = (1 + settings.negative) * math.log(2)
    if losses.recent > _AT_CHANCE * chance:
        return (
            f"the loss ended at {losses.recent:.4g} and that of vectors which know nothing is {chance:.4g}: little "
            f"was learnt; pass more epochs than {settings.epochs}, a smaller block_words, or a larger lr than "
            f"{settings.first_lr:g}"
        )
    return ""
