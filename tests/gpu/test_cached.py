"""The cache of hot rows on a CUDA device: the table contract, waits, memory, and training. Its engines: test_engines.py."""

from __future__ import annotations

import os

import pytest
import torch
from cases import assert_same_bits
from table_contract import TableContract

import speedtransfer as st
from gpu.test_tables import Made
from gpu.tools import allocated_bytes, synchronizing
from speedtransfer.errors import DeviceError, InvalidValueError


class TestPinnedTable(Made, TableContract):
    memory = "pinned"

    def make(self, num_rows, dim, dtype=torch.float32, **kwargs):
        return super().make(num_rows, dim, dtype, cache_rows=3, **kwargs)

    def from_array(self, array, **kwargs):
        return super().from_array(array, cache_rows=3, **kwargs)

    def load(self, path, **kwargs):
        return super().load(path, cache_rows=3, **kwargs)

    def test_stats(self):
        table = self.make(10, 4)
        table.gather([[1, 2], [2, 9]])
        table.gather(torch.tensor([9, 3], device=self.device))
        stats = table.stats()
        assert stats.cache_hits + stats.cache_misses == stats.gathered_rows == 6
        assert stats.cache_hit_bytes + stats.cache_miss_bytes == stats.gathered_bytes == 96


OPTIONS = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"idle": "lazy", "storage_dtype": torch.int8, "state_dtype": torch.uint8},
    "float8": {"idle": "exact", "storage_dtype": torch.float8_e4m3fn, "scale_block": 4},
    "records": {"idle": "exact", "storage_dtype": torch.bfloat16, "layout": "rows"},
    "max-norm": {"idle": "lazy", "max_norm": 1.0},
}


def train(device, memory, cache, folder, steps=20, **options):
    torch.manual_seed(0)
    path = {"path": folder / f"{len(list(folder.iterdir()))}.safetensors"} if memory == "mmap" else {}
    emb = st.Embedding(300, 16, memory=memory, device=device, **path, **cache, **options)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.1, fused=True)
    generator, seen = torch.Generator().manual_seed(1), []
    for step in range(steps):
        ids = (torch.rand(64, generator=generator) ** 3 * 300).long().to(device)
        found = emb(ids)
        (found.square().sum() + (emb(ids.flip(0)).sum() if step % 3 == 2 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(found.detach())
        if step == 9:
            emb.table.torch()[5] = 1
            emb.table.scatter([7, 8], torch.ones(2, 16, dtype=emb.table.dtype, device=device))
            optimizer.load_state_dict(optimizer.state_dict())
    return emb, optimizer, seen


@pytest.mark.parametrize("memory", ["pinned", "pageable", "mmap"])
@pytest.mark.parametrize("name", OPTIONS)
def test_training_is_the_same(device, tmp_path, name, memory):
    counts = torch.arange(300).flip(0)
    caches = [{}, {"cache_rows": 40}, {"cache_rows": 40, "cache_counts": counts}]
    runs = [train(device, memory, cache, tmp_path, **OPTIONS[name]) for cache in caches]
    emb, optimizer, seen = runs[0]
    for other, its_optimizer, also_seen in runs[1:]:
        for rows, others in zip(seen, also_seen, strict=True):
            assert_same_bits(others.cpu(), rows.cpu())
        ours, theirs = (o.state_dict()["state"][0] for o in (optimizer, its_optimizer))
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(theirs[key].cpu(), ours[key].cpu())
        assert_same_bits(other.weight.detach().cpu(), emb.weight.detach().cpu())
        stats = other.table.stats()
        assert stats.cache_hits > 0
        assert stats.cache_hits + stats.cache_misses == stats.gathered_rows
        assert stats.cache_hit_bytes + stats.cache_miss_bytes == stats.gathered_bytes


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


def test_a_write_to_a_view_that_lacks_rows(device):
    table = st.Table(100, 8, memory="pinned", device=device, cache_rows=50, cache_counts=torch.arange(100))
    view = table.torch()
    table[[90]] = torch.ones(1, 8, device=device)
    view[91] = 2
    with pytest.raises(InvalidValueError, match="its cache held 1 newer rows"):
        table.gather([90])
    assert table.gather([90, 91])[:, 0].tolist() == [1, 2]


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


def test_memory_of_the_device_is_refused(device):
    with pytest.raises(InvalidValueError, match="memory='device' has all rows on the compute device"):
        st.Table(100, 8, memory="device", device=device, cache_rows=10)
