"""Choose the passes over a corpus and the words of a step where the settings leave them open."""

from __future__ import annotations

import math

from speedtransfer.word2vec.corpus import Corpus
from speedtransfer.word2vec.settings import Settings

CHOSEN = ("epochs", "block_words")  # settings
STEPS = 1_000  # a run should have
EPOCHS, MOST_EPOCHS = 5, 50
BLOCK_WORDS, FEWEST_BLOCK_WORDS = 16_384, 32


def choose_schedule(num_kept_words: float, epochs: int | None, block_words: int | None) -> tuple[int, int]:
    """Return epochs and words a step for a corpus of which subsampling keeps `num_kept_words` an epoch.

    A run needs some 1,000 steps: with fewer, optimizers with steps of fixed length, such as AdamW, end before the vectors have
    left chance. Large blocks are faster, so blocks shrink only as far as 1,000 steps take, and the corpus is passed over more
    often than usual only where even the smallest blocks are too few. Loss on held-out text confirms it: with 4,000, 30,000 and
    200,000 words of the World Factbook AdamW was best at about 500, 1,500 and 1,500 steps, and worse again beyond. Blocks of
    fewer than 32 words would lose too many pairs at their edges, and more than 50 epochs only learn a small text by heart.

    Parameters
    ----------
    num_kept_words : float
    epochs, block_words : int or None
        What the user has asked for, which is obeyed; None: choose.
    """
    if epochs is None:
        needed = math.ceil(STEPS * FEWEST_BLOCK_WORDS / max(num_kept_words, 1))
        epochs = min(max(needed, EPOCHS), MOST_EPOCHS)
    if block_words is None:
        fitting = max(int(epochs * num_kept_words / STEPS), FEWEST_BLOCK_WORDS)
        block_words = min(1 << fitting.bit_length() - 1, BLOCK_WORDS)
    return epochs, block_words


def schedule_for(settings: Settings, corpus: Corpus) -> tuple[int, int]:
    """Return the epochs and words a step of `settings`, chosen for `corpus` where they are None."""
    if settings.epochs is not None and settings.block_words is not None:
        return settings.epochs, settings.block_words
    vocabulary = corpus.vocabulary
    kept = float((vocabulary.counts * vocabulary.keep_probability(settings.sample)).sum())
    share = kept / max(vocabulary.num_words, 1)
    return choose_schedule(share * len(corpus), settings.epochs, settings.block_words)
