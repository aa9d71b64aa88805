"""Features and n-grams on a CUDA device: launches, waits, ids that are out of range. Their training: test_training.py."""

import contextlib

import pytest
import torch
from torch import nn

import speedtransfer as st
from gpu.tools import embedding_in
from speedtransfer.engines import mapped
from speedtransfer.errors import RowIndexError

SIZES, DIM = [7, 600, 3, 210], 16
VOCAB = 50


def multi(device, memory="pinned", folder=None, **options):
    return embedding_in(memory, folder, device, SIZES, DIM, kind=st.MultiEmbedding, **options)


def together(modules, ids):
    return modules(ids)


def in_parts(modules, ids):
    return torch.stack(modules(list(ids.unbind(1))), 1)


def batches(steps, device, size=32):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (torch.rand(size, len(SIZES), generator=generator) ** 2 * torch.tensor(SIZES)).long().to(device)


def train(modules, forward, ids_of_steps, make=torch.optim.AdamW):
    optimizer = make(modules.parameters(), lr=0.02)
    for ids in ids_of_steps:
        optimizer.zero_grad()
        forward(modules, ids).square().sum().backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 5.0)
        optimizer.step()
    return optimizer


@contextlib.contextmanager
def launched(monkeypatch):
    """Give the names of the kernels that engines launch in the body."""
    names, launch = [], mapped.launch_kernel
    with monkeypatch.context() as patch:
        patch.setattr(mapped, "launch_kernel", lambda kernel, *rest: [names.append(kernel), launch(kernel, *rest)])
        yield names


@pytest.mark.parametrize("idle", ["exact", "lazy"])
@pytest.mark.parametrize("forward", [together, in_parts])
def test_launches_of_a_step_are_those_of_one_table(device, monkeypatch, forward, idle):
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "mapped")
    counts = []
    one = st.Embedding(SIZES[1], DIM, device=device, memory="pinned", idle=idle)
    for module, look_up in ((one, lambda m, ids: m(ids[:, 1])), (multi(device, idle=idle), forward)):
        optimizer = train(module, look_up, batches(3, device))
        ids = next(batches(1, device))
        with launched(monkeypatch) as names:
            optimizer.zero_grad()
            look_up(module, ids).square().sum().backward()
            optimizer.step()
        counts.append(len(names))
    assert counts[0] == counts[1] > 0


def looked_up(ours, module, ids):
    """Look `ids` up; faults of CUDA kernels are reported when they are waited for, at the latest."""
    with torch.no_grad():
        module(ids)
    ours.table.wait()


def test_ids_out_of_range_of_features(device):
    ours = multi(device)
    good = torch.zeros(5, len(SIZES), dtype=torch.int64, device=device)
    for feature, value in ((0, 7), (1, -1), (3, 210), (2, 2**62)):
        ids = good.clone()
        ids[4, feature] = value
        with pytest.raises(RowIndexError, match=rf"index\[{16 + feature}\].* is -1"):
            looked_up(ours, ours, ids)
        with pytest.raises(RowIndexError, match=r"index\[1\].* is -1"):
            looked_up(ours, ours[feature], ids[3:, feature])
        # On the host they are seen at once, and named.
        with pytest.raises(RowIndexError, match=rf"index\[4, {feature}\] of feature '{feature}' is {value}"):
            ours(ids.cpu())
    assert ours(good).shape == (5, 4, DIM)


# --- n-grams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["xor", "polynomial"])
def test_rows_of_n_grams_are_those_of_the_cpu(scheme):
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
