"""The kernel that trains the rows of a block on a CUDA device, run on the CPU from the same source."""

import dataclasses

import nvrtc
import pytest
import torch
from cpu_kernels import cpu_kernels
from test_word2vec_gradients import draw_block, draw_tables, in_rounds
from test_word2vec_model import BUCKETS, WORDS

from speedtransfer.cuda import kernel_source
from speedtransfer.word2vec import gradients, spans
from speedtransfer.word2vec.gradients import MODELS
from speedtransfer.word2vec.places import Places
from speedtransfer.word2vec.subwords import Subwords


def train(tables, places, model, threads=16, backwards=False, rate=0.05, with_loss=True, negative=5, blocks=1):
    rows = [tables[0][places.bags.rows.ids], tables[1][places.outputs.ids]]
    losses = torch.zeros(places.most_spans, blocks, spans.THREADS, dtype=torch.float64) if with_loss else None
    work = spans.pack_spans(*rows, places, model == "cbow", negative, rate, losses, blocks)
    for memory in work.memory:
        memory.fill_(-1 if memory.dtype == torch.int32 else float("nan"))  # what was there before must not count

    def launch(name, blocks, _, shared_bytes=0):
        cpu_kernels().launch(name, blocks, threads, work.argument, backwards, shared_bytes)

    spans.run_rounds(work, places, blocks, launch)
    return [*rows, losses.sum().to(torch.float32) if with_loss else None]


def train_in_torch(tables, places, model, rate=0.05, negative=5):
    rows = [tables[0][places.bags.rows.ids], tables[1][places.outputs.ids]]
    return [*rows, spans.train_in_torch(*rows, places, model == "cbow", negative, rate, True)]


def check_same(found, expected, rtol=1e-4, atol=2e-6):
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weighted", [False, True], ids=["drawn", "weighted"])
@pytest.mark.parametrize(
    ("num_words", "window", "num_rows", "pool", "num_draws", "dim"),
    [(1, 3, 17, 4, 5, 5), (33, 5, 1000, 40, 30, 8), (50, 20, 17, 9, 10, 3), (130, 2, 40, 64, 1, 4),
     (300, 7, 500, 33, 12, 100)],
)  # fmt: skip
def test_rows_move_as_in_torch(num_words, window, num_rows, pool, num_draws, dim, weighted, model):
    block = draw_block(num_words, window, 1, pool, num_rows)
    tables = draw_tables(dim, num_rows, torch.float32)
    places = Places.find(dataclasses.replace(block, window=window if weighted else 0), num_rows, num_draws)
    for blocks, at_once in ((1, 4), (2, 1), (3, 16), (spans.CLUSTER, 5)):
        places = in_rounds(places, at_once)
        check_same(train(tables, places, model, blocks=blocks), train_in_torch(tables, places, model))


@pytest.mark.parametrize("model", MODELS)
def test_words_of_several_rows_and_extreme_scores(model):
    block, subwords = draw_block(60, 4, k=6, num_rows=len(WORDS)), Subwords(WORDS, BUCKETS, 3, 6)
    places = in_rounds(Places.find(block, len(WORDS), 7, subwords), 3)
    tables = draw_tables(33, len(WORDS) + BUCKETS, torch.float32)
    check_same(train(tables, places, model), train_in_torch(tables, places, model))
    tables = [table * 40 for table in tables]
    check_same(train(tables, places, model), train_in_torch(tables, places, model), 1e-3, 0.05)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("blocks", [1, 4])
def test_any_number_of_threads_in_any_order_gives_the_same_bits(model, blocks, monkeypatch):
    """Were a thread to read what another has yet to write, or to write what another reads, it would not.

    Also of rows that shared memory does not hold.
    """
    block, tables = draw_block(70, 4, 1, 20, 60), draw_tables(33, 60, torch.float32)
    places = in_rounds(Places.find(block, 60, 11), 4)
    first = train(tables, places, model, 1, blocks=blocks)
    runs = [(1, True), (7, False), (64, True), (128, False), (64, False), (64, True)]
    for number, (threads, backwards) in enumerate(runs):
        if number == 4:
            monkeypatch.setattr(spans, "_SHARED_BYTES", 0)
        found = train(tables, places, model, threads, backwards, blocks=blocks)
        assert torch.equal(found[0], first[0])
        assert torch.equal(found[1], first[1])
        torch.testing.assert_close(found[2], first[2])


@pytest.mark.parametrize("fault", [None, "center_rows", "loss"])
def test_a_kernel_is_tried_out_before_it_is_used(fault, monkeypatch):
    def launch(kernel, blocks, threads, packed, stream, shared_bytes=0):
        cpu_kernels().launch(kernel, blocks, threads, packed, shared_bytes=shared_bytes)

    right = spans.train_in_torch

    def other(center_rows, *arguments):
        loss = right(center_rows, *arguments)
        if fault == "center_rows":
            center_rows[3, 2] += 1e-3
        return loss + 1 if fault == "loss" else loss

    monkeypatch.setattr(spans, "_kernel", lambda device, name: name)
    monkeypatch.setattr(spans, "_blocks", lambda device: spans.CLUSTER)
    monkeypatch.setattr(spans, "current_stream", lambda device: None)
    monkeypatch.setattr(spans, "launch_kernel", launch)
    monkeypatch.setattr(spans, "train_in_torch", other)
    assert gradients._check_kernel(torch.device("cpu")) == (fault is None)


@pytest.mark.skipif(nvrtc.library() is None, reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.parametrize(("architecture", "together"), [("compute_80", 0), ("compute_90", spans.CLUSTER)])
def test_blocks_are_a_cluster_from_hopper_on(architecture, together):
    code, _ = nvrtc.compile_cubin(kernel_source("word2vec.cu"), "word2vec.cu", architecture, kind="PTX")
    assert f".maxntid {spans.THREADS},".encode() in code
    assert code.count(b".reqnctapercluster") == bool(together)
    assert not together or f".reqnctapercluster {together},".encode() in code
