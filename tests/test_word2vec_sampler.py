"""The draws follow their distributions and their seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from speedtransfer.errors import InvalidValueError
from speedtransfer.word2vec import Sampler, Vocabulary

COUNTS = [400, 200, 100, 50, 25, 10, 5, 1]


@pytest.fixture
def vocabulary():
    return Vocabulary([f"w{i}" for i in range(len(COUNTS))], COUNTS)


def corpus_ids(repeat=1, seed=0):
    ids = np.repeat(np.arange(len(COUNTS), dtype=np.int32), np.array(COUNTS) * repeat)
    np.random.default_rng(seed).shuffle(ids)
    return ids


def sampler_of(vocabulary, ids, seed=3, **kwargs):
    return Sampler(ids, vocabulary, torch.Generator().manual_seed(seed), **kwargs)


def assert_drawn_from(observed, probability):
    """Chi-square at 1e-4 (normal approximation of Wilson and Hilferty), seeds fixed: it fails for a wrong distribution."""
    expected = np.asarray(probability) * np.sum(observed)
    assert expected.min() > 5
    chi_square = float((((observed - expected) ** 2) / expected).sum())
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < bound


def test_without_subsampling_the_blocks_are_the_corpus(vocabulary):
    ids = corpus_ids()
    sampler = sampler_of(vocabulary, ids, sample=0, block_words=100)
    blocks = list(sampler)
    assert len(blocks) == len(sampler) == 8
    assert [len(block.words) for block in blocks] == [100] * 7 + [91]
    assert torch.cat([block.words for block in blocks]).tolist() == ids.tolist()
    assert blocks[0].words.dtype == torch.int64
    assert sum(block.num_corpus_words for block in blocks) == len(ids)


def test_windows_are_even(vocabulary):
    drawn = torch.cat([block.windows for block in sampler_of(vocabulary, corpus_ids(40), sample=0, window=7)])
    assert (drawn.min(), drawn.max()) == (1, 7)
    assert_drawn_from(np.bincount(drawn.numpy(), minlength=8)[1:], np.full(7, 1 / 7))


def test_negatives_follow_the_noise(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(), sample=0, block_words=100, shared_negatives=4000)
    drawn = torch.cat([block.negatives for block in sampler])
    assert_drawn_from(np.bincount(drawn.numpy(), minlength=len(COUNTS)), vocabulary.noise())


def test_assertion_finds_a_wrong_distribution(vocabulary):
    drawn = np.random.default_rng(0).choice(len(COUNTS), 32_000, p=vocabulary.noise(power=1.0))
    with pytest.raises(AssertionError):
        assert_drawn_from(np.bincount(drawn, minlength=len(COUNTS)), vocabulary.noise())


def test_subsampling_keeps_the_share_of_the_formula(vocabulary):
    repeat, sample = 300, 0.02
    sampler = sampler_of(vocabulary, corpus_ids(repeat), sample=sample)
    kept = np.bincount(torch.cat([block.words for block in sampler]).numpy(), minlength=len(COUNTS))
    share = vocabulary.counts / vocabulary.num_words
    probability = np.minimum((np.sqrt(share / sample) + 1) * sample / share, 1)
    trials = np.array(COUNTS) * repeat
    deviation = np.sqrt(trials * probability * (1 - probability))
    assert (np.abs(kept - trials * probability) <= 4 * deviation).all()
    assert kept[-1] == trials[-1]  # rare words are never dropped
    assert probability[0] < 0.25


def test_blocks_have_about_the_size_asked_for(vocabulary):
    blocks = list(sampler_of(vocabulary, corpus_ids(100), sample=0.02, block_words=500))
    sizes = [len(block.words) for block in blocks[:-1]]
    assert np.mean(sizes) == pytest.approx(500, rel=0.03)
    assert len(set(sizes)) > 1
    assert len({block.num_corpus_words for block in blocks[:-1]}) == 1


def blocks_equal(first, second):
    names = ("words", "windows", "negatives")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for a, b in zip(first, second, strict=True) for n in names)


def test_seed_decides_every_draw(vocabulary):
    ids = corpus_ids(10)
    first, second, other = (list(sampler_of(vocabulary, ids, seed, sample=0.02, block_words=200)) for seed in (5, 5, 6))
    assert blocks_equal(first, second)
    assert not torch.equal(first[0].negatives, other[0].negatives)


def test_any_block_again_from_the_state_of_the_generator(vocabulary):
    sampler = sampler_of(vocabulary, corpus_ids(10), sample=0.02, block_words=200)
    for number in range(3):
        sampler.block(number)
    state = sampler.generator.get_state()
    expected = sampler.block(3)
    again = sampler_of(vocabulary, corpus_ids(10), seed=99, sample=0.02, block_words=200)
    again.generator.set_state(state)
    assert blocks_equal([expected], [again.block(3)])


def test_small_corpora(vocabulary):
    blocks = list(sampler_of(vocabulary, np.array([3], dtype=np.int32), sample=0))
    assert [block.words.tolist() for block in blocks] == [[3]]
    two = Vocabulary(["a", "b"], [10**9, 1])
    assert len(list(sampler_of(two, np.zeros(50, dtype=np.int32), sample=1e-6))) == 1


def test_bad_arguments(vocabulary):
    for name in ("window", "shared_negatives"):
        with pytest.raises(InvalidValueError, match=f"{name} is 0 but must be at least 1"):
            sampler_of(vocabulary, corpus_ids(), **{name: 0})
    with pytest.raises(InvalidValueError, match="block_words is 1 but must be at least 2"):
        sampler_of(vocabulary, corpus_ids(), block_words=1)
    with pytest.raises(InvalidValueError, match="the corpus has no word of the vocabulary"):
        sampler_of(vocabulary, np.empty(0, dtype=np.int32))
