"""The cache of hot rows on a CUDA device: waits, order, memory. Engines: test_engines.py; training: test_training.py."""

from __future__ import annotations

import os

import pytest
import torch

import speedtransfer as st
from gpu.tools import allocated_bytes, synchronizing
from speedtransfer.errors import DeviceError


def test_the_host_does_not_wait(device):
    table = st.Table(1000, 8, memory="pinned", device=device, cache_rows=50, cache_counts=torch.arange(1000))
    table.engine = "mapped"
    index = torch.arange(900, 1000, device=device)
    for _ in range(3):
        table.scatter(index, table.gather(index), check=False)
    with synchronizing("error"):
        for _ in range(3):
            table.scatter(index, table.gather(index) + 1, check=False)
    assert table.torch()[900:].eq(3).all()
    assert table.stats().cache_hits == 250  # of the first gather none


def test_order_between_streams(device):
    table = st.Table(2000, 64, memory="pinned", device=device, cache_rows=300)
    index, expected = torch.arange(0, 2000, 3, device=device), 0
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    torch.cuda.synchronize()
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 3]):
            rows = table.gather(index)
            table.scatter(index, rows + 1)
        expected += 1
        with torch.cuda.stream(streams[(turn + 1) % 3]):
            seen = table.gather(index)
        streams[(turn + 1) % 3].synchronize()
        assert seen.eq(expected).all()
    assert table.torch()[::3].eq(expected).all()


def test_memory_is_given_back(device):
    table = st.Table(100_000, 64, memory="pinned", device=device, cache_rows=50_000, cache_counts=torch.arange(100_000))
    index = torch.arange(60_000, 60_100, device=device)
    before = allocated_bytes()
    table.scatter(index, torch.ones(100, 64, device=device))
    assert allocated_bytes() - before >= 50_000 * 64 * 4
    table.shrink_cache()
    assert allocated_bytes() - before < 1 << 20
    assert table.torch()[60_000:60_100].eq(1).all()


def test_auto(device):
    table = st.Table(1000, 8, memory="pinned", device=device, cache_rows="auto")
    assert table.cache_rows == 1000
    assert "cache_rows=1000" in repr(table)
    table.gather([3])
    table.to("cpu").to(device)
    assert table.gather([3]).eq(0).all()
    assert table.stats().cache_misses == 2


@pytest.mark.skipif("FAKE_KERNELS" in os.environ, reason="captures are not emulated")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph(device):
    emb = st.Embedding(100, 8, memory="pinned", device=device, cache_rows=10)
    ids = torch.arange(10, device=device)
    with torch.no_grad():
        emb(ids)
        torch.cuda.synchronize()
        with pytest.raises(DeviceError, match="cache_rows"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            emb(ids)
        assert torch.equal(emb(ids), emb.weight[:10])
