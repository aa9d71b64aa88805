"""A step of every model on the device is that of the host, and the same each time."""

import io

import numpy as np
import pytest
import torch

from speedtransfer.word2vec import Block, Corpus, Settings, Trainer, Word2Vec, spans
from speedtransfer.word2vec.progress import TrainingProgress

WORDS = [f"{first}{second}ing" for first in "bcdfgklm" for second in ("a", "ea", "é", "oo")]


def draw_block(num_words=200, window=5):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, len(WORDS), (num_words,), generator=generator)
    windows = torch.randint(0, window + 1, (num_words,), generator=generator)
    position = torch.arange(num_words)
    before, after = torch.minimum(windows, position), torch.minimum(windows, position.flip(0))
    return Block(words, before, after, torch.randint(0, len(WORDS), (48,), generator=generator), window)


def train(block, device, memory, **options):
    model = Word2Vec(WORDS, Settings(dim=12, device=device, memory=memory, **options))
    model.output.table.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        result = model.deposit_gradients(block, rate=0.1)
        optimizer.step()
        optimizer.zero_grad()
    unseen = [torch.from_numpy(model.ngram_vectors()["gooing"])] if model.subwords else []
    return [model.word_vectors(), model.output.table.torch(), result.loss, result.num_pairs, *unseen]


KINDS = [("skipgram", 0), ("cbow", 0), ("skipgram", 100), ("cbow", 100)]


@pytest.mark.parametrize(("kind", "buckets"), KINDS)
def test_steps_repeat_bit_for_bit(kind, buckets):
    """Words that occur a hundred times show sums in any order."""
    block = draw_block(num_words=3000)
    first, *others = [train(block, "cuda", "pinned", model=kind, buckets=buckets) for _ in range(3)]
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(other, first, strict=True))


@pytest.mark.parametrize(("kind", "buckets"), KINDS)
@pytest.mark.parametrize(
    ("memory", "kernel"), [("pinned", True), ("pageable", True), ("device", True), ("device", False)]
)
def test_steps_are_those_of_the_host(memory, kernel, kind, buckets, monkeypatch):
    """By a kernel, and by torch where that does not suit; of words on the host, and on the device."""
    block = draw_block()
    expected = train(block, "cpu", "pageable", model=kind, buckets=buckets)
    train(block, "cuda", memory, model=kind, buckets=buckets)  # tries the kernel out
    used = []
    for name, way in (("kernel", "train_by_kernel"), ("torch", "train_in_torch")):
        right = getattr(spans, way)
        monkeypatch.setattr(spans, way, lambda *given, right=right, name=name: (used.append(name), right(*given))[1])
    if not kernel:
        monkeypatch.setattr(spans, "fits_kernel", lambda rows, places, cbow: False)
    tensors = (block.words, block.before, block.after, block.negatives)
    moved = Block(*(tensor.to("cuda") for tensor in tensors), block.window)
    for given in (block, moved):
        used.clear()
        got = train(given, "cuda", memory, model=kind, buckets=buckets)
        assert {*used} == {"kernel" if kernel else "torch"}
        for ours, host in zip(got, expected, strict=True):
            # Hundreds of additions, in another order.
            torch.testing.assert_close(ours.cpu(), host, rtol=3e-4, atol=5e-5)


@pytest.mark.sanitizer
@pytest.mark.parametrize(("kind", "buckets"), KINDS)
def test_the_kernel_stays_within_its_memory(kind, buckets):
    """For compute-sanitizer, as test_all_kernels.py."""
    assert all(found.isfinite().all() for found in train(draw_block(50), "cuda", "device", model=kind, buckets=buckets))


@pytest.mark.parametrize(("kind", "buckets"), KINDS)
def test_training_is_that_of_the_host(kind, buckets):
    sizes, found = {"dim": 12, "epochs": 2, "block_words": 512, "shared_negatives": 16, "sample": 0}, []
    # At the usual rate n-grams that most words share make a rounding grow ten thousand times in these steps.
    how = {"model": kind, "buckets": buckets, "optimizer": "sgd", "lr": 0.003 if buckets else None}
    for device in ("cpu", "cuda"):
        corpus = Corpus(io.BytesIO(" ".join(np.random.default_rng(0).choice(WORDS, 6000)).encode()))
        trainer = Trainer(corpus, Settings(device=device, **sizes, **how))
        trainer.run(TrainingProgress(enabled=False))
        found.append([trainer.model.word_vectors(), trainer.model.output.table.torch(), torch.tensor(trainer.loss)])
    for host, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours.cpu(), host, rtol=1e-3, atol=1e-4)
