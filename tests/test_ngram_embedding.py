"""Embeddings of n-grams and of layers: against the same written out with ``torch.nn``."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from refusals import check_refused, refusals
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.nn.ticket import _open as open_tickets

VOCAB = 50


def make_hash(**options):
    return st.NgramHash(**{"orders": (2, 3), "heads": 2, "rows": 200, "vocab_size": VOCAB, "eos": 0, **options})


def tokens_of(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def weight_of(module):
    return module.embedding.weight.detach().clone()


@pytest.mark.sweep
@pytest.mark.parametrize("combine", ["concat", "sum", "mean"])
@pytest.mark.parametrize("head_scale", [False, True])
@pytest.mark.parametrize("out_dim", [None, 7])
def test_combines_the_rows_of_the_heads(combine, head_scale, out_dim):
    torch.manual_seed(0)
    module = st.NgramEmbedding(make_hash(), 5, out_dim, combine, head_scale, std=0.5)
    tokens = tokens_of(3, 6)
    rows = F.embedding(module.ngrams(tokens), weight_of(module))
    if head_scale:
        with torch.no_grad():
            module.head_scale.normal_()
        rows = rows * module.head_scale.detach()
    expected = {"concat": rows.flatten(2), "sum": rows.sum(2), "mean": rows.mean(2)}[combine]
    if out_dim:
        expected = expected @ module.value.weight.detach().T
    torch.testing.assert_close(module(tokens), expected)
    assert module(tokens).shape[-1] == module.out_dim


def test_gate_and_convolution_are_those_of_the_paper():
    torch.manual_seed(0)
    module = st.NgramEmbedding(make_hash(), 5, 8, gate=True, conv=3, std=0.5).double()
    with torch.no_grad():
        for part in module.gate.parameters():
            part.normal_()
    tokens, hidden = tokens_of(2, 20), torch.randn(2, 20, 8, dtype=torch.float64)
    x = F.embedding(module.ngrams(tokens), weight_of(module)).flatten(2)

    def norm(values, weight):
        return values / (values.square().mean(-1, keepdim=True) + torch.finfo(torch.float64).eps).sqrt() * weight

    gate = module.gate
    fit = (norm(x @ gate.key.weight.T, gate.key_norm.weight) * norm(hidden, gate.hidden_norm.weight)).sum(
        -1
    ) / math.sqrt(8)
    y = torch.sigmoid(fit.sign() * fit.abs().clamp(min=1e-6).sqrt())[..., None] * (x @ module.value.weight.T)
    normed, mixed = norm(y, gate.conv_norm.weight), torch.zeros_like(y)
    for back in range(3):
        moved = F.pad(normed, (0, 0, 3 * back, 0))[:, :20]
        mixed = mixed + moved * gate.conv.weight[:, 0, 2 - back]
    torch.testing.assert_close(module(tokens, hidden), y + F.silu(mixed))
    # One series is as good as a batch of one.
    torch.testing.assert_close(module(tokens[0], hidden[0]), module(tokens, hidden)[0])


def test_nothing_is_added_at_first():
    module = st.NgramEmbedding(make_hash(), 5, 8, gate=True, conv=3)
    assert not module(tokens_of(2, 6), torch.randn(2, 6, 8)).any()
    assert not module.embedding.weight.any()
    module(tokens_of(2, 6), torch.randn(2, 6, 8)).sum().backward()
    assert module.embedding.weight.grad.any()


def test_layers_share_a_lookup():
    torch.manual_seed(0)
    module = st.NgramEmbedding(make_hash(), 5, layers=3, combine="sum", head_scale=True, std=1.0)
    with torch.no_grad():
        module.head_scale.normal_()
    tokens = tokens_of(2, 6)
    rows = F.embedding(module.ngrams(tokens), weight_of(module)) * module.head_scale.detach()
    expected = rows.sum(2).view(2, 6, 3, 5)
    torch.testing.assert_close(module(tokens), expected)
    module = st.NgramEmbedding(make_hash(), 5, layers=3, std=1.0)
    rows = F.embedding(module.ngrams(tokens), weight_of(module)).view(2, 6, 4, 3, 5)
    assert torch.equal(module(tokens), rows.transpose(2, 3).flatten(3))


def test_trains_as_a_dense_embedding_does():
    torch.manual_seed(0)
    module = st.NgramEmbedding(make_hash(pad=49), 6, 8, gate=True, conv=2, head_scale=True, std=0.1).double()
    dense = st.to_dense(module)
    assert type(dense.embedding).__mro__[1] is not st.Embedding
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (module, dense)]
    for step in range(6):
        tokens, hidden = tokens_of(2, 9, seed=step), torch.randn(2, 9, 8, dtype=torch.float64)
        for m, opt in zip((module, dense), opts, strict=True):
            opt.zero_grad()
            (m(tokens, hidden) - 1).square().mean().backward()
            opt.step()
    for ours, theirs in ((module.embedding, dense.embedding), (module.value, dense.value)):
        torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach(), rtol=1e-12, atol=1e-14)


def test_padding_reads_zeros_and_is_not_trained():
    module = st.NgramEmbedding(make_hash(pad=49), 4, combine="sum", std=1.0)
    tokens = torch.tensor([[49, 49, 3, 4], [3, 4, 5, 49]])
    out = module(tokens)
    assert not out[0, :2].any()
    assert not out[1, 3].any()
    assert out[0, 2:].any()
    out.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert not module.embedding.weight[module.ngrams.padding_row].any()


def test_context_goes_on_where_a_prompt_ended():
    module = st.NgramEmbedding(make_hash(), 4, 8, std=1.0)
    tokens = tokens_of(2, 10)
    whole = module(tokens)
    for cut in range(1, 10):
        torch.testing.assert_close(module(tokens[:, cut:], context=tokens[:, :cut]), whole[:, cut:])


def test_the_lookup_finds_what_was_read_ahead():
    module = st.NgramEmbedding(make_hash(), 4, 8, std=1.0)
    tokens, context = tokens_of(2, 6), tokens_of(2, 2, seed=1)
    for given in (None, context):
        expected = module(tokens, context=given)
        ticket = module.prefetch(tokens, given)
        assert ticket.is_waiting
        assert torch.equal(module(tokens.clone(), context=given), expected)
        assert not ticket.is_waiting
    batches = [tokens_of(2, 6, seed=seed) for seed in range(4)]
    for batch in st.prefetch(batches, lambda batch: {module: batch}):
        assert module.embedding._handle.reads_ahead
        module(batch)
    pairs, handle = [(batch, tokens_of(2, 3, seed=9)) for batch in batches], module.embedding._handle
    for batch, before in st.prefetch(pairs, lambda pair: {module: pair}):
        waiting = len(open_tickets[handle])
        module(batch)
        assert len(open_tickets[handle]) == waiting
        module(batch, context=before)
        assert len(open_tickets[handle]) == waiting - 1


@pytest.mark.parametrize("std", [0.0, 0.5])
@pytest.mark.parametrize("way", ["made here", "copied", "made on the meta device"])
def test_reset_parameters(std, way):
    with torch.device("meta" if "meta" in way else "cpu"):
        module = st.NgramEmbedding(make_hash(), 6, 8, gate=True, conv=2, head_scale=True, std=std)
    module = copy.deepcopy(module) if way == "copied" else module.to_empty(device="cpu")
    for param in module.parameters() if "meta" not in way else ():
        nn.init.constant_(param, 3.0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert (module.head_scale == 1).all()
    assert not module.gate.conv.weight.any()
    assert weight_of(module).square().mean().sqrt() == pytest.approx(std, rel=0.05)
    # Zeros are not written to a table that is new, whose pages take no memory.
    assert bool(module.embedding.table.version) == (std > 0 or "meta" not in way)


def test_tickets_in_the_place_of_tokens():
    module = st.NgramEmbedding(make_hash(), 6, 8, gate=True, std=0.5)
    tokens, hidden = tokens_of(2, 9), torch.ones(2, 5, 8)
    expected = module(tokens[:, 4:], hidden, tokens[:, :4])
    assert torch.equal(module(module.prefetch(tokens[:, 4:], tokens[:, :4]), hidden), expected)


WRONG = {
    "did you mean 'concat'": {"combine": "concatenate"},
    "gate needs out_dim": {"gate": True},
    "conv is 3 but follows the gate": {"conv": 3},
    "each layer projects its own part": {"layers": 2, "out_dim": 8},
    "padding_idx of embedding is 7 but the row of padding is None": {"embedding": st.Embedding(890, 4, padding_idx=7)},
    "embedding is a EmbeddingBag": {"embedding": st.EmbeddingBag(890, 4)},
    "embedding is a PerLayerEmbedding": {"embedding": st.PerLayerEmbedding(890, 2, 2)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises((InvalidValueError, InvalidTypeError)) as caught:
        st.NgramEmbedding(**{"ngrams": make_hash(), "dim": 4, **WRONG[message]})
    assert message in str(caught.value)


WRONG_CALLS = """
gated(tokens) -> InvalidValueError: pass hidden
gated(tokens, torch.zeros(2, 1, 8)) -> InvalidValueError: hidden has shape \\(2, 1, 8\\) but what is looked up \\(2, 3, 8\\)
plain(tokens + 40) -> RowIndexError: vocab_size is 50
plain(gated.prefetch(tokens)) -> InvalidValueError: was made for
make(table(890), memory="pageable") -> InvalidValueError: so are \\['memory'\\]
make(table(891)) -> InvalidValueError: but the hash has
make(table(891), pad=49) -> InvalidValueError: padding_idx of embedding is None
other.load_state_dict(plain.state_dict()) -> InvalidValueError: another hash
"""


@pytest.mark.parametrize("refusal", refusals(WRONG_CALLS), ids=str)
def test_wrong_calls(refusal):
    gated, plain = st.NgramEmbedding(make_hash(), 4, 8, gate=True), st.NgramEmbedding(make_hash(), 4, 8)

    def make(embedding, pad=None, **options):
        st.NgramEmbedding(make_hash(pad=pad), 4, embedding=embedding, **options)

    def table(rows, dim=4):
        return st.Embedding(rows, dim)

    other = st.NgramEmbedding(make_hash(seed=1), 4, 8)
    names = {"gated": gated, "plain": plain, "other": other, "make": make, "table": table, "st": st, "torch": torch}
    check_refused(refusal, tokens=tokens_of(2, 3), **names)
    assert not other.embedding.weight.any()


# --- per-layer embeddings ---------------------------------------------------------------------------------------------


def test_per_layer_embedding_is_slices_of_one_table():
    torch.manual_seed(0)
    module = st.PerLayerEmbedding(VOCAB, 3, 4, padding_idx=2)
    torch.manual_seed(0)
    dense = nn.Embedding(VOCAB, 12, padding_idx=2)
    ids = tokens_of(2, 5)
    assert torch.equal(module(ids), dense(ids).view(2, 5, 3, 4))
    dense.load_state_dict(module.state_dict())
    opts = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, dense)]
    for step in range(4):
        ids = tokens_of(2, 5, seed=step)
        for m, opt in zip((module, dense), opts, strict=True):
            opt.zero_grad()
            (m(ids).view(2, 5, 3, 4)[..., step % 3, :] - 1).square().sum().backward()
            opt.step()
    torch.testing.assert_close(module.weight.detach(), dense.weight.detach())


def test_per_layer_embedding_of_pretrained_rows():
    rows = torch.randn(VOCAB, 12)
    module = st.PerLayerEmbedding.from_pretrained(rows, layers=3)
    assert torch.equal(module(torch.tensor([4]))[0], rows[4].view(3, 4))
    assert not module.weight.requires_grad
    assert torch.equal(copy.deepcopy(module)(torch.tensor(4)), rows[4].view(3, 4))
    assert torch.equal(st.to_dense(module)(torch.tensor([4])), rows[4].view(1, 3, 4))
    with pytest.raises(InvalidValueError, match="12 columns, which 5 layers cannot share"):
        st.PerLayerEmbedding.from_pretrained(rows, layers=5)
    ticket = module.prefetch(torch.tensor([4, 5]))
    assert torch.equal(module(ticket), rows[[4, 5]].view(2, 3, 4))


def test_a_ticket_that_nobody_keeps_is_kept_by_the_module():
    module = st.NgramEmbedding(make_hash(), 4, std=0.1)
    batches, tickets = [tokens_of(2, 6, seed=seed) for seed in range(12)], weakref.WeakSet()
    for tokens in batches:
        tickets.add(module.prefetch(tokens))
    gc.collect()
    assert len(tickets) == 8
    expected = copy.deepcopy(module)(batches[-1])
    assert torch.equal(module(batches[-1]), expected)
    assert sum(ticket.is_waiting for ticket in tickets) == 7
    del module
    gc.collect()
    assert not tickets
