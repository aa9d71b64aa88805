"""Runs that train nothing are distinguished from those that learn, and small corpora get a schedule that they learn with."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch

from speedtransfer.word2vec import Corpus, Settings, Trainer, train
from speedtransfer.word2vec.optimizers import make_optimizer
from speedtransfer.word2vec.outcome import (
    FEW_STEPS,
    Losses,
    warning_of_few_steps,
    warning_of_loss,
    warning_of_rate,
    warning_of_vectors,
)
from speedtransfer.word2vec.progress import TrainingProgress
from speedtransfer.word2vec.sampler import choose_schedule, schedule_for

CHANCE = 6 * math.log(2)
BASE_RATE = math.log(6) + 5 * math.log(6 / 5)  # the loss of who knows only that one in six pairs is real


@pytest.mark.parametrize(
    ("num_kept_words", "chosen"),
    [
        (0, (50, 32)),
        (1, (50, 32)),
        (640, (50, 32)),
        (641, (50, 32)),
        (1000, (32, 32)),
        (5_600, (6, 32)),
        (6_400, (5, 32)),
        (12_800, (5, 64)),
        (12_799, (5, 32)),
        (100_000, (5, 256)),
        (204_800, (5, 1024)),
        (409_600, (5, 2048)),
        (1e12, (5, 16_384)),
    ],
)
def test_schedule(num_kept_words, chosen):
    assert choose_schedule(num_kept_words, None, None) == chosen


def test_a_schedule_has_about_a_thousand_steps_or_more():
    for num_kept_words in (*range(1, 2000, 7), *range(2000, 600_000, 997)):
        epochs, block_words = choose_schedule(num_kept_words, None, None)
        steps = epochs * num_kept_words / block_words
        assert steps >= 1000 or (epochs, block_words) == (50, 32)
        assert steps < 2001 or block_words == 16_384


@pytest.mark.parametrize("num_kept_words", [10, 10_000, 10_000_000])
def test_what_is_given_is_obeyed(num_kept_words):
    assert choose_schedule(num_kept_words, 3, 77) == (3, 77)
    assert choose_schedule(num_kept_words, 1, None)[0] == 1
    assert choose_schedule(num_kept_words, None, 5000)[1] == 5000
    assert choose_schedule(10_000, 100, None) == (100, 512)  # more epochs, larger blocks


def test_words_count_that_subsampling_keeps():
    text = " ".join(f"w{n}" for n in np.random.default_rng(0).integers(0, 50, 20_000))
    corpus = Corpus(io.BytesIO(text.encode()))
    assert schedule_for(Settings(sample=0), corpus) == (5, 64)
    # Of words that are 1 in 50 a threshold of 1e-3 keeps 0.05 + sqrt(0.05) = 27%.
    assert schedule_for(Settings(sample=1e-3), corpus) == (6, 32)
    trainer = Trainer(corpus, Settings(dim=2, sample=0, device="cpu"))
    assert trainer.settings == Settings(dim=2, sample=0, device="cpu", epochs=5, block_words=64)
    assert trainer.num_steps == 5 * math.ceil(20_000 / 64) == 5 * len(trainer.sampler)


@pytest.mark.parametrize(
    "optimizer", ["adamw", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adagrad", "adamax"))]
)
def test_a_small_text_is_learnt_by_default(optimizer, caplog):
    """4,000 words in sentences of ten, each of one topic."""
    rng = np.random.default_rng(0)
    topics, numbers = np.repeat(rng.integers(0, 5, 400), 10), rng.integers(0, 8, 4000)
    text = " ".join(f"t{topic}_{number}" for topic, number in zip(topics, numbers, strict=True))
    trainer = Trainer(Corpus(io.BytesIO(text.encode())), Settings(dim=16, optimizer=optimizer, device="cpu"))
    trainer.run(TrainingProgress(enabled=False))
    assert caplog.messages == []
    assert trainer.loss < BASE_RATE - 0.1
    vectors = trainer.vectors()
    near = [other[:2] == word[:2] for word in vectors.words for other, _ in vectors.most_similar(word, 7)]
    assert np.mean(near) > 0.9


# --- warnings ---------------------------------------------------------------------------------------------------------


def losses_of(*values):
    losses = Losses()
    for value in values:
        losses.add(value, 1)
    return losses


def test_few_steps():
    assert warning_of_few_steps(FEW_STEPS, 5, 2048) == ""
    expected = "this run has 10 steps, too few to train much (fewer than 100); pass "
    assert warning_of_few_steps(10, 5, 2048) == f"{expected}a smaller block_words, such as 32, or more epochs than 5"
    assert warning_of_few_steps(10, 50, 16) == f"{expected}more epochs than 50"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([CHANCE], ""),
        ([CHANCE, 2.6, 2.6], ""),
        ([2.6] * 20, ""),  # learnt within the first block, while it was measured
        ([2.6] + [2.7] * 20, ""),
        ([3.9, 2.4] + [2.6, 2.5] * 20, ""),
        ([2.7] * 10 + [CHANCE] * 40, "little was learnt"),
        ([CHANCE] * 40, "little was learnt"),
        ([3.0] + [4.4] * 40, "above the 4.159 that it began with; pass a smaller lr than 0.03"),
        ([900.0] + [4.4] * 60, "above the 4.159 that it began with; pass a smaller lr than 0.03"),
    ],
)
def test_loss(values, expected):
    found = warning_of_loss(losses_of(*values), Settings(lr=0.03), 5)
    assert (expected in found) if expected else found == ""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ""),
        ({"optimizer": "sgd"}, ""),
        ({"lr": 0.3}, ""),
        ({"lr": 0.05, "optimizer": "sgd"}, ""),
        ({"lr": 0.06, "options": {"eps": 1.0}}, ""),
        ({"lr": 0.02, "optimizer": "rprop"}, ""),  # its steps are not a part of the gradient
        ({"lr": 0.02}, "lr=0.02 with eps=10 moves rows at 0.002, less than an eighth of the usual rate, 0.03; for that pass "
                       "lr=0.3, or drop lr"),
        ({"lr": 0.02, "model": "cbow"}, "the usual rate, 0.05; for that pass lr=0.5"),
        ({"lr": 0.02, "options": {"eps": 1e-8}}, "lr=0.02 with eps=1e-08 moves rows at 2e+06, more than eight times"),
        ({"lr": 0.5, "optimizer": "SGD"}, "lr=0.5 moves rows at 0.5, more than eight times the usual rate, 0.03"),
    ],
)  # fmt: skip
def test_rates_far_from_those_of_word2vec(settings, expected):
    chosen = Settings(**settings)
    optimizer = make_optimizer(
        chosen.optimizer, [torch.nn.Parameter(torch.zeros(1, 1))], chosen.first_lr, chosen.options
    )
    warning = warning_of_rate(chosen, optimizer)
    assert expected in warning
    assert bool(expected) == bool(warning)


def test_too_little_text_is_reported_by_default(caplog):
    train(io.BytesIO(b"one two three four five six\n" * 4), 4, min_count=1, sample=0, device="cpu", progress=False)
    assert caplog.messages == [
        "this run has 50 steps, too few to train much (fewer than 100); pass a smaller block_words, such as 16, or more "
        "epochs than 50"
    ]


def test_vectors_that_have_one_dimension_in_common_are_reported():
    """As AdamW made them with 64 shared negatives: a loss lower than that of good vectors, and words like any other."""
    vectors, settings = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0)), Settings(dim=100)
    assert warning_of_vectors(vectors, settings) == ""
    vectors[:, 7] = 8
    warning = warning_of_vectors(vectors, settings)
    assert "39% of their squared length in common, in dimension 7" in warning
    assert "more shared_negatives than 512" in warning
    assert "more shared_negatives than 256" in warning_of_vectors(vectors, Settings(dim=100, model="cbow"))
    assert warning_of_vectors(torch.ones(5, 4), Settings(dim=4)) == ""  # so few that they say nothing
    assert warning_of_vectors(torch.zeros(5, 100), settings) == ""
