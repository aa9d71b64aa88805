"""Steps of the models against autograd on the plain loss, and their tables; n-grams and buckets against gensim's fastText."""

import dataclasses
import random

import numpy as np
import pytest
import safetensors.numpy
import torch
from late import fasttext
from test_word2vec_gradients import draw_block as draw_windows
from test_word2vec_gradients import train

from speedtransfer.word2vec import NgramVectors, Settings, Vocabulary, Word2Vec
from speedtransfer.word2vec import model as model_module
from speedtransfer.word2vec.subwords import Subwords

WORDS = [f"{first}{second}ing" for first in "bcdfg" for second in ("a", "ea", "é", "oo")]  # which share n-grams
VOCABULARY = Vocabulary(WORDS, range(len(WORDS), 0, -1))
NUM_WORDS, BUCKETS, NEGATIVE = len(WORDS), 50, 3


def model_of(vocabulary, dim, **settings):
    return Word2Vec(vocabulary, Settings(dim=dim, device="cpu", **settings))


def draw_block(num_words, vocabulary=NUM_WORDS, window=4):
    return draw_windows(num_words, window, k=6, num_rows=vocabulary)


def rows_of(buckets, words=WORDS, min_n=3, max_n=6):
    """Return which rows each word is the mean of, by gensim."""
    ngrams = [fasttext.ft_ngram_hashes(word, min_n, max_n, buckets) if buckets else [] for word in words]
    return [[i, *(len(words) + h for h in hashes)] for i, hashes in enumerate(ngrams)]


@pytest.mark.parametrize("buckets", [0, BUCKETS])
@pytest.mark.parametrize("kind", ["skipgram", "cbow"])
def test_step_of_the_model_is_the_step_of_torch(kind, buckets):
    block = draw_block(60)
    model = model_of(VOCABULARY, 5, model=kind, negative=NEGATIVE, buckets=buckets)
    for table, seed in ((model.input.table, 4), (model.output.table, 5)):
        table.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    before = [t.table.torch().double() for t in (model.input, model.output)]
    expected = train(*before, block, kind, NEGATIVE, 0.1, rows_of(buckets))
    *trained, loss, predictions = expected

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model.deposit_gradients(block, rate=0.1)
    optimizer.step()
    assert result.num_pairs == predictions
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    for table, rows in zip((model.input.table, model.output.table), trained, strict=True):
        torch.testing.assert_close(table.torch(), rows.float())
    assert model.deposit_gradients(block, with_loss=False).loss is None


@pytest.mark.parametrize("buckets", [0, BUCKETS])
def test_a_block_prepared_beforehand_gives_the_same(buckets):
    block, model = draw_block(60), model_of(VOCABULARY, 5, buckets=buckets)
    expected = model.deposit_gradients(block).center.clone()  # the next gradient is added to it
    prepared = model.prepare(block)
    assert model.prepare(prepared).places is prepared.places
    model.zero_grad()
    assert torch.equal(model.deposit_gradients(prepared).center, expected)


def test_first_weights():
    model = model_of(WORDS, 8, seed=4)
    weights = model.input.table.numpy()
    assert abs(weights).max() <= 0.5 / 8
    assert weights.std() == pytest.approx(1 / 8 / 12**0.5, rel=0.1)
    assert not model.output.table.numpy().any()
    assert (model_of(WORDS, 8, seed=4).input.table.numpy() == weights).all()
    assert (model_of(WORDS, 8, seed=5).input.table.numpy() != weights).any()
    with_ngrams = model_of(WORDS, 8, buckets=100).input.table.numpy()
    assert with_ngrams.shape == (NUM_WORDS + 100, 8)
    assert 0.9 / 8 < abs(with_ngrams).max() <= 1 / 8


# --- files ------------------------------------------------------------------------------------------------------------


def test_tables_in_files(tmp_path):
    folder = tmp_path / "new" / "tables"
    for others in ([], ["notes.txt"]):
        model = model_of(WORDS, 5, memory="mmap", path=folder)
        for name in others:
            (folder / name).write_text("x")
        assert sorted(p.name for p in folder.iterdir()) == ["input.safetensors", *others, "output.safetensors"]
        vectors = model.word_vectors().clone()
        model.discard()
        assert [p.name for p in folder.glob("*")] == others
        assert folder.exists() == bool(others)
        assert torch.equal(model.word_vectors(), vectors)


def test_a_failure_while_filling_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("speedtransfer.Table.uniform_", lambda *given, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model_of(WORDS, 5, memory="mmap", path=tmp_path / "tables")
    assert not list(tmp_path.iterdir())


def test_rows_of_the_output_table_take_disk_when_they_are_written(tmp_path):
    model_of(WORDS * 10_000, 8, memory="mmap", path=tmp_path)
    used = {p.name: p.stat().st_blocks * 512 for p in tmp_path.iterdir()}
    assert used["input.safetensors"] >= 200_000 * 8 * 4
    assert used["output.safetensors"] < 100_000


def test_clip_shortens_long_gradients_and_leaves_the_others():
    block, grads = draw_block(60), {}
    for clip in (None, 2.0):
        model = model_of(VOCABULARY, 5, negative=NEGATIVE, clip=clip)
        model.input.table.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
        model.output.table.normal_(0, 0.5, generator=torch.Generator().manual_seed(5))
        model.deposit_gradients(block)
        grads[clip] = [table.weight.grad.clone() for table in (model.input, model.output)]
    for plain, clipped in zip(grads[None], grads[2.0], strict=True):
        lengths = plain.norm(dim=1, keepdim=True)
        assert (lengths > 2).any()
        assert (lengths < 2).any()
        torch.testing.assert_close(clipped, plain * (2 / lengths).clamp(max=1))


@pytest.mark.parametrize(
    ("model", "window", "expected"), [("skipgram", 2, 18), ("skipgram", 5, 18), ("skipgram", 10, 33), ("cbow", 10, 9)]
)
def test_spans_take_more_negatives_for_wider_windows(model, window, expected):
    block = draw_block(40, window=window)
    assert int(torch.maximum(block.before, block.after).max()) == window
    prepared = model_of(WORDS, 4, model=model, negative=NEGATIVE).prepare(
        dataclasses.replace(block, negatives=torch.arange(100) % NUM_WORDS)
    )
    assert prepared.places.draws.shape == (-(-40 // prepared.places.span), expected)


# --- n-grams ----------------------------------------------------------------------------------------------------------

LETTERS = "abcdefghijklmnopqrstuvwxyzäßéñдצ日本語中文한😀ç<>'"  # of one to four bytes


def draw_words(count, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(0, 14))) for _ in range(count)]


@pytest.mark.parametrize(
    ("buckets", "min_n", "max_n"), [(2_000_000, 3, 6), (1000, 1, 4), (7, 1, 1), (1 << 32, 2, 2), (97, 5, 10**9)]
)
def test_ngrams_fall_into_the_buckets_of_fasttext(buckets, min_n, max_n):
    words = list(dict.fromkeys([*draw_words(500), "banana", "", "a", "é", "😀", "<", "<>"]))
    bags = Subwords(words, buckets, min_n, max_n)
    found = bags.rows.split(bags.offsets.diff().tolist())
    assert [rows.tolist() for rows in found] == rows_of(buckets, words, min_n, max_n)
    assert bags.rows.dtype == (torch.int64 if buckets == 1 << 32 else torch.int32)


# --- vectors of unseen words against gensim's fastText on the same rows; and their file -------------------------------


def test_words_have_the_vectors_that_fasttext_gives_them(monkeypatch):
    monkeypatch.setattr(model_module, "_WORDS_AT_ONCE", 2)
    words = ["walking", "walked", "talking", "été", "naïve"]
    model = model_of(words, 7, buckets=60, min_n=2, max_n=4)
    ngrams, (table, others) = model.ngram_vectors(), np.split(model.input.table.numpy(), [len(words)])
    theirs = fasttext.FastTextKeyedVectors(7, 2, 4, 60)
    theirs.add_vectors(words, table)
    theirs.vectors_vocab, theirs.vectors_ngrams = table, others
    theirs.recalc_char_ngram_buckets()
    theirs.adjust_vectors()
    for some in (None, 1, 2, 3, 6):
        np.testing.assert_allclose(model.word_vectors(some).numpy(), theirs.vectors[:some], atol=1e-7)
    for word in ("talked", "étéä", "日本", "x"):
        np.testing.assert_allclose(ngrams[word], theirs[word], atol=1e-7)


def test_a_file_and_back(tmp_path):
    ngrams = NgramVectors(np.random.default_rng(0).random((60, 7), np.float32), 2, 4)
    ngrams.save(tmp_path / "ngrams.safetensors")
    again = NgramVectors.load(tmp_path / "ngrams.safetensors")
    assert (again.min_n, again.max_n) == (2, 4)
    assert np.array_equal(again["talked"], ngrams["talked"])
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "ngrams.safetensors")["ngrams"], ngrams.matrix)
    assert [p.name for p in tmp_path.iterdir()] == ["ngrams.safetensors"]
