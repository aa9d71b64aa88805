"""Steps of the models against autograd on the plain loss, prediction by prediction; and the tables around them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import word2vec_oracle
from late import fasttext
from lazy_oracle import one_thread  # noqa: F401 (a fixture that acts on every test here)

from speedtransfer.errors import RowIndexError, StorageError
from speedtransfer.word2vec import Block, UnknownWordError, Vocabulary, Word2Vec
from speedtransfer.word2vec import model as model_module
from speedtransfer.word2vec.sampler import Sampler

WORDS = [f"{first}{second}ing" for first in "bcdfg" for second in ("a", "ea", "é", "oo")]  # which share n-grams
VOCABULARY = Vocabulary(WORDS, range(len(WORDS), 0, -1))
NUM_WORDS, BUCKETS, NEGATIVE = len(WORDS), 50, 3


def draw_block(num_words, vocabulary=NUM_WORDS, window=4, groups=2, k=6, seed=0):
    """Return a block of two sequences, whose windows end where they meet."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, vocabulary, (num_words,), generator=generator)
    windows = torch.randint(1, window + 1, (num_words,), generator=generator)
    negatives = torch.randint(0, vocabulary, (groups * k,), generator=generator)
    place, cut = torch.arange(num_words), num_words // 3
    first, end = torch.where(place < cut, 0, cut), torch.where(place < cut, cut, num_words)
    return Block(
        words, torch.minimum(windows, place - first), torch.minimum(windows, end - 1 - place), negatives, num_words
    )


def rows_of(buckets, words=WORDS):
    """Return which rows each word is the mean of."""
    ngrams = [fasttext.ft_ngram_hashes(word, 3, 6, buckets) if buckets else [] for word in words]
    return [[i, *(len(words) + h for h in hashes)] for i, hashes in enumerate(ngrams)]


def vectors_of(table, buckets, words=WORDS):
    """Return the vector of each word as the definition says, from a whole table."""
    return torch.stack([table[of_word].mean(0) for of_word in rows_of(buckets, words)])


@pytest.mark.parametrize("buckets", [0, BUCKETS])
@pytest.mark.parametrize("kind", ["skipgram", "cbow"])
def test_step_of_the_model_is_the_step_of_torch(kind, buckets):
    block = draw_block(60)
    model = Word2Vec(VOCABULARY, 5, model=kind, negative=NEGATIVE, buckets=buckets, device="cpu")
    for table, seed in ((model.input.table, 4), (model.output.table, 5)):
        table.normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
    before = [t.table.torch().double() for t in (model.input, model.output)]
    expected = word2vec_oracle.train(*before, block, kind, NEGATIVE, 0.1, rows_of(buckets))
    *trained, loss, predictions = expected

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = model.deposit_gradients(block, rate=0.1)
    optimizer.step()
    assert result.num_pairs == predictions
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    for table, rows in zip((model.input.table, model.output.table), trained, strict=True):
        torch.testing.assert_close(table.torch(), rows.float())
    assert model.deposit_gradients(block, with_loss=False).loss is None


@pytest.mark.parametrize("kind", ["skipgram", "cbow"])
@pytest.mark.parametrize("buckets", [0, BUCKETS])
def test_preparing_a_block_changes_nothing(buckets, kind):
    block, tables = draw_block(60), []
    for prepare in (False, True):
        model = Word2Vec(VOCABULARY, 5, model=kind, buckets=buckets, device="cpu")
        model.output.table.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        given = model.prepare(block) if prepare else block
        for _ in range(2):
            model.deposit_gradients(given)
            optimizer.step()
            optimizer.zero_grad()
        tables.append([table.table.torch() for table in (model.input, model.output)])
    assert all(map(torch.equal, *tables))


def test_a_block_prepared_for_another_model_is_prepared_anew():
    block = draw_block(60)
    model, with_ngrams = (Word2Vec(VOCABULARY, 5, buckets=buckets, device="cpu") for buckets in (0, BUCKETS))
    expected = with_ngrams.deposit_gradients(block).center.clone()  # the second gradient is added to the first
    with_ngrams.zero_grad()
    prepared = model.prepare(block)
    assert model.prepare(prepared).places is prepared.places
    result = with_ngrams.deposit_gradients(prepared)
    assert torch.equal(result.center, expected)
    with pytest.raises(RowIndexError, match="5"):
        Word2Vec(5, 5, device="cpu").deposit_gradients(prepared)


def test_block_of_another_vocabulary():
    model = Word2Vec(VOCABULARY, 5, device="cpu")
    for use in (model.prepare, model.deposit_gradients):
        with pytest.raises(RowIndexError, match=f"{NUM_WORDS}"):
            use(draw_block(60, vocabulary=NUM_WORDS + 5))


@pytest.mark.parametrize("buckets", [0, BUCKETS])
def test_scores_of_single_pairs_go_through_autograd(buckets):
    model = Word2Vec(VOCABULARY, 5, buckets=buckets, device="cpu")
    model.output.table.fill_(1.0)
    centers = torch.tensor([[1, 2, 1]])
    scores = model(centers, torch.tensor([[3, 4, 5]]))
    assert scores.shape == (1, 3)
    table = model.input.table.torch().clone().requires_grad_()
    expected = vectors_of(table, buckets)[centers].sum(-1)
    torch.testing.assert_close(scores, expected.detach())
    optimizer = torch.optim.SGD(model.input.parameters(), lr=1.0)
    scores.sum().backward()
    expected.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.input.table.torch(), (table - table.grad).detach())


def test_first_weights():
    model = Word2Vec(50, 8, device="cpu", seed=4)
    weights = model.input.table.numpy()
    assert abs(weights).max() <= 0.5 / 8
    assert weights.std() == pytest.approx(1 / 8 / 12**0.5, rel=0.1)
    assert not model.output.table.numpy().any()
    assert (Word2Vec(50, 8, device="cpu", seed=4).input.table.numpy() == weights).all()
    assert (Word2Vec(50, 8, device="cpu", seed=5).input.table.numpy() != weights).any()
    with_ngrams = Word2Vec(WORDS, 8, buckets=100, device="cpu").input.table.numpy()
    assert with_ngrams.shape == (NUM_WORDS + 100, 8)
    assert 0.9 / 8 < abs(with_ngrams).max() <= 1 / 8


def test_making_a_model_leaves_the_generator_of_torch_alone():
    before = torch.get_rng_state()
    Word2Vec(50, 8, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_word_vectors_are_the_table_where_words_have_one_row():
    model = Word2Vec(VOCABULARY, 5, device="cpu")
    assert model.word_vectors().data_ptr() == model.input.table.torch().data_ptr()
    torch.testing.assert_close(model.vector(WORDS[3]), model.input.table.torch()[3])
    with pytest.raises(UnknownWordError, match="'xyzzy' is not among the 20 words; train with buckets"):
        model.vector("xyzzy")


@pytest.mark.parametrize("at_once", [7, 1 << 16])
def test_word_vectors_with_ngrams(monkeypatch, at_once):
    monkeypatch.setattr(model_module, "_WORDS_AT_ONCE", at_once)
    model = Word2Vec(VOCABULARY, 5, buckets=BUCKETS, device="cpu")
    vectors, table = model.word_vectors(), model.input.table.torch()
    assert (vectors.dtype, vectors.shape) == (torch.float32, (NUM_WORDS, 5))
    torch.testing.assert_close(vectors, vectors_of(table, BUCKETS))
    for some in (1, 7, 9, NUM_WORDS + 1):
        assert torch.equal(model.word_vectors(some), vectors[:some])
    for i, word in enumerate(WORDS):
        torch.testing.assert_close(model.vector(word), vectors[i])
    unseen = [NUM_WORDS + h for h in fasttext.ft_ngram_hashes("bea", 3, 6, BUCKETS)]
    torch.testing.assert_close(model.vector("bea"), table[unseen].mean(0))
    with pytest.raises(UnknownWordError, match="'' has no n-grams of 3 to 6 characters"):
        model.vector("")


def test_state_of_the_model_holds_the_tables_alone():
    model = Word2Vec(VOCABULARY, 5, buckets=BUCKETS, device="cpu")
    assert list(model.state_dict()) == ["input.weight", "output.weight"]
    other = Word2Vec(VOCABULARY, 5, buckets=BUCKETS, device="cpu", seed=9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.word_vectors(), model.word_vectors())


# --- files ------------------------------------------------------------------------------------------------------------


def test_tables_in_files(tmp_path):
    folder = tmp_path / "new" / "tables"
    model = Word2Vec(20, 5, memory="mmap", path=folder, device="cpu")
    assert sorted(p.name for p in folder.iterdir()) == ["input.safetensors", "output.safetensors"]
    assert model.input.table.memory == "mmap"
    vectors = model.word_vectors().clone()
    model.discard()
    assert not (tmp_path / "new").exists()
    assert torch.equal(model.word_vectors(), vectors)
    model.discard()  # nothing left to remove


def test_discard_leaves_what_others_made(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    Word2Vec(20, 5, memory="mmap", path=tmp_path, device="cpu").discard()
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    Word2Vec(20, 5, device="cpu").discard()


@pytest.mark.parametrize("present", ["input.safetensors", "output.safetensors"])
def test_a_table_that_exists_is_neither_overwritten_nor_are_others_left_beside_it(tmp_path, present):
    (tmp_path / present).write_text("old")
    with pytest.raises(StorageError, match="exists and would be overwritten"):
        Word2Vec(20, 5, memory="mmap", path=tmp_path, device="cpu")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(present, "old")]


def test_a_failure_while_filling_leaves_no_files(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("speedtransfer.Table.uniform_", fail)
    with pytest.raises(KeyboardInterrupt):
        Word2Vec(20, 5, memory="mmap", path=tmp_path / "tables", device="cpu")
    assert not list(tmp_path.iterdir())


def test_rows_of_the_output_table_take_disk_when_they_are_written(tmp_path):
    Word2Vec(200_000, 8, memory="mmap", path=tmp_path, device="cpu")
    used = {p.name: p.stat().st_blocks * 512 for p in tmp_path.iterdir()}
    assert used["input.safetensors"] >= 200_000 * 8 * 4
    assert used["output.safetensors"] < 100_000


def test_numbers_of_words_as_numpy_gives_them():
    assert Word2Vec(np.int64(20), 5, device="cpu").num_words == 20


def test_clip_shortens_long_gradients_and_leaves_the_others():
    block, grads = draw_block(60), {}
    for clip in (None, 2.0):
        model = Word2Vec(VOCABULARY, 5, negative=NEGATIVE, clip=clip, device="cpu")
        model.input.table.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
        model.output.table.normal_(0, 0.5, generator=torch.Generator().manual_seed(5))
        model.deposit_gradients(block)
        grads[clip] = [table.weight.grad.clone() for table in (model.input, model.output)]
    for plain, clipped in zip(grads[None], grads[2.0], strict=True):
        lengths = plain.norm(dim=1, keepdim=True)
        assert (lengths > 2).any()
        assert (lengths < 2).any()
        torch.testing.assert_close(clipped, plain * (2 / lengths).clamp(max=1))


@pytest.mark.parametrize("buckets", [0, 50])
@pytest.mark.parametrize("kind", ["skipgram", "cbow"])
def test_another_default_device_changes_nothing(kind, buckets):
    words = [f"w{i}ing{i % 7}" for i in range(60)]
    vocabulary = Vocabulary(words, [5] * 60)
    model = Word2Vec(vocabulary, 7, model=kind, buckets=buckets, device="cpu")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    before = model.word_vectors().clone()
    for _ in range(3):
        with torch.device("meta"):
            blocks = Sampler((np.arange(2000) % 60).astype(np.int32), vocabulary, seed=3, block_words=300).blocks(0, 1)
            for block in blocks:
                model.deposit_gradients(block)
            model(torch.tensor([1, 2], device="cpu"), torch.tensor([3, 4], device="cpu"))
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.word_vectors(), before)
    assert model.word_vectors().isfinite().all()


@pytest.mark.parametrize(
    ("model", "window", "expected"), [("skipgram", 2, 18), ("skipgram", 5, 18), ("skipgram", 10, 33), ("cbow", 10, 9)]
)
def test_spans_take_more_negatives_for_wider_windows(model, window, expected):
    block = draw_block(40, window=window)
    assert int(torch.maximum(block.before, block.after).max()) == window
    prepared = Word2Vec(NUM_WORDS, 4, model=model, negative=NEGATIVE, device="cpu").prepare(
        dataclasses.replace(block, negatives=torch.arange(100) % NUM_WORDS)
    )
    assert prepared.places.draws.shape == (-(-40 // prepared.places.span), expected)
