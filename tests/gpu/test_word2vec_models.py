"""A step of every model on the device is that of the host."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.word2vec import Block, Word2Vec

WORDS = [f"{first}{second}ing" for first in "bcdfgklm" for second in ("a", "ea", "é", "oo")]


def draw_block(num_words=200, window=5):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, len(WORDS), (num_words,), generator=generator)
    windows = torch.randint(0, window + 1, (num_words,), generator=generator)
    position = torch.arange(num_words)
    before, after = torch.minimum(windows, position), torch.minimum(windows, position.flip(0))
    return Block(words, before, after, torch.randint(0, len(WORDS), (3, 16), generator=generator), num_words)


def train(block, device, memory, **options):
    model = Word2Vec(WORDS, 12, device=device, memory=memory, **options)
    model.output.table.uniform_(-1, 1, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        result = model.deposit_gradients(block)
        optimizer.step()
        optimizer.zero_grad()
    pairs = model(torch.tensor([1, 2]), torch.tensor([3, 4])).detach()
    unseen = [model.vector("gooing")] if model.subwords else []
    return [model.word_vectors(), model.output.table.torch(), result.loss, result.num_pairs, pairs, *unseen]


@pytest.mark.parametrize("blocks_on", ["cpu", "cuda"])
@pytest.mark.parametrize("memory", ["pinned", "pageable", "device"])
@pytest.mark.parametrize("buckets", [0, 100])
@pytest.mark.parametrize("kind", ["skipgram", "cbow"])
def test_steps_are_those_of_the_host(kind, buckets, memory, blocks_on):
    block = draw_block()
    expected = train(block, "cpu", "pageable", model=kind, buckets=buckets)
    tensors = (block.words, block.before, block.after, block.negatives)
    moved = Block(*(tensor.to(blocks_on) for tensor in tensors), block.num_corpus_words)
    got = train(moved, "cuda", memory, model=kind, buckets=buckets)
    for ours, host in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), host, rtol=1e-4, atol=1e-5)
