"""N-gram tables on a device: the rows of the CPU, and the host does not wait."""

from __future__ import annotations

import pytest
import torch

import speedtransfer as st

pytestmark = pytest.mark.gpu
VOCAB = 50


@pytest.mark.parametrize("scheme", ["xor", "polynomial"])
def test_rows_are_those_of_the_cpu(scheme):
    token_map = torch.arange(VOCAB) % 31
    for options in ({}, {"eos": (0, 3)}, {"bos": 1, "pad": 49}, {"token_map": token_map}):
        ngrams = st.NgramHash((1, 2, 4), 2, 2**33, vocab_size=VOCAB, scheme=scheme, **options)
        tokens, context = torch.randint(0, VOCAB, (3, 20)), torch.randint(0, VOCAB, (3, 2))
        expected = ngrams(tokens, context)
        found = ngrams.cuda()(tokens.cuda(), context.cuda())
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected)
        # The module's own device is of no account.
        assert torch.equal(ngrams.cpu()(tokens.cuda(), context.cuda()).cpu(), expected)


def test_a_token_out_of_range_is_no_row():
    ngrams = st.NgramHash(heads=2, rows=100, vocab_size=VOCAB).cuda()
    rows = ngrams(torch.tensor([1, VOCAB, -1, 2], device="cuda")).cpu()
    assert (rows[1:3] == -1).all()
    assert (rows[[0, 3]] >= 0).all()
    module = st.NgramEmbedding(ngrams, 4, std=1.0, device="cuda")
    wrong = torch.tensor([[1, VOCAB, 2]], device="cuda")

    def look_up() -> None:
        module(wrong)
        module.embedding.table.wait()

    with pytest.raises(st.errors.RowIndexError, match="-1"):
        look_up()


@pytest.mark.parametrize("memory", ["pinned", "pageable"])
def test_the_lookup_finds_what_was_read_ahead(memory):
    torch.manual_seed(0)
    ngrams = st.NgramHash(heads=2, rows=100, vocab_size=VOCAB, eos=0)
    module = st.NgramEmbedding(ngrams, 4, 8, std=1.0, memory=memory, device="cuda")
    tokens = torch.randint(0, VOCAB, (2, 9), device="cuda")
    expected = module(tokens)
    ticket = module.prefetch(tokens)
    assert ticket.is_waiting
    assert torch.equal(module(tokens), expected)
    assert not ticket.is_waiting
    # Tokens that were changed since are other tokens.
    ticket = module.prefetch(tokens)
    tokens += 1
    tokens %= VOCAB
    assert torch.equal(module(tokens), module(tokens.clone()))
    if memory == "pinned":
        assert ticket.is_waiting


def test_training_is_that_of_the_cpu():
    tables = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        ngrams = st.NgramHash(heads=2, rows=100, vocab_size=VOCAB, eos=0)
        module = st.NgramEmbedding(ngrams, 4, combine="sum", memory="pageable", device=device)
        opt = torch.optim.AdamW(module.parameters(), lr=0.1)
        draws = torch.Generator().manual_seed(1)
        for _ in range(5):
            tokens = torch.randint(0, VOCAB, (2, 9), generator=draws).to(device)
            module.prefetch(tokens)
            opt.zero_grad()
            (module(tokens) - 1).square().mean().backward()
            opt.step()
        tables.append(module.embedding.weight.detach().cpu().clone())
    assert tables[0].std() > 0.1
    torch.testing.assert_close(*tables)
