"""Memory that is not there, that is given back, and that ten thousand calls do not lose; and caches of hot rows."""

import gc
import weakref

import pytest
import torch
from cases import one_line, raising

import speedtransfer as st
from gpu.tools import allocated_bytes, embedding_in, is_page_locked, pinned, resident_bytes
from speedtransfer.cuda import streams as cuda_streams
from speedtransfer.cuda.status import load_cupy
from speedtransfer.engines import MappedEngine, StagedEngine
from speedtransfer.errors import HostMemoryError, format_bytes


@pytest.mark.parametrize("memory", ["pageable", "mmap"])
def test_a_staging_buffer_that_there_is_no_room_for(device, tmp_path, memory, monkeypatch):
    """CUDA refuses to lock pages, as at a limit of the container."""
    table = embedding_in(memory, tmp_path, device, 1000, 128, kind=st.Table).fill_(1)
    index, rows = torch.arange(1000, device=device), torch.ones(2, 128, device=device)
    calls = [
        (lambda: table.gather(index), 8192),  # for the index, in steps of 256 bytes
        (lambda: table.gather([1, 2, 1]), 3 * 512),
        (lambda: table.scatter([1, 2], rows), 2 * 512),
    ]
    runtime = load_cupy().cuda.runtime
    monkeypatch.setattr(runtime, "hostAlloc", raising(runtime.CUDARuntimeError(2)))
    for call, num_bytes in calls:
        with pytest.raises(HostMemoryError) as error:
            call()
        message = one_line(error)
        assert f"{format_bytes(num_bytes)} ({num_bytes} bytes): cudaErrorMemoryAllocation" in message
    monkeypatch.undo()
    table.scatter([1, 2], rows * 2)
    assert table.gather(index)[:, 0].tolist() == [1, 2, 2] + [1] * 997


class TestGivenBack:
    def test_page_locked_memory_of_a_table(self, device):
        table = st.Table(1 << 18, 256, memory="pinned", device=device)
        table.add_plane("m", 16)
        table.gather(torch.arange(1000, device=device), ["weight", "m"])
        pointers = [table.plane(name).data_ptr() for name in table.planes]
        assert all(is_page_locked(pointer) for pointer in pointers)
        table.drop_plane("m")
        assert [is_page_locked(pointer) for pointer in pointers] == [True, False]
        alive = weakref.ref(table)
        del table
        assert alive() is None, "a table must not wait for the next garbage collection"
        assert not any(is_page_locked(pointer) for pointer in pointers)

    def test_not_while_a_view_lives(self, device):
        table = st.Table(1000, 16, memory="pinned", device=device).fill_(3)
        views = [table.torch(), table.torch()[5], table.numpy()[2:], table.cupy()]
        pointer = views[0].data_ptr()
        del table
        while views:
            assert is_page_locked(pointer)
            assert float(views.pop().sum()) % 3 == 0
            gc.collect()
        assert not is_page_locked(pointer)

    @pytest.mark.parametrize("memory", ["pinned", "pageable", "mmap", "device"])
    def test_memory_of_the_device(self, device, tmp_path, memory):
        before = allocated_bytes()
        for _ in range(2):
            table = embedding_in(memory, tmp_path, device, 100_000, 64, kind=st.Table).fill_(1)
            taken = torch.cuda.memory_allocated() - before
            assert taken >= 100_000 * 64 * 4 if memory == "device" else taken < 1 << 16
            index = torch.arange(1000, device=device)
            rows = table.gather(index)
            table.scatter(index, rows * 2)
            table.wait()
            del table, rows, index
            assert allocated_bytes() == before


@pytest.mark.parametrize("kind", [MappedEngine, StagedEngine])
def test_ten_thousand_calls_lose_nothing(device, kind):
    """They are of varying length, on many streams: neither host, device nor caches grow."""
    engine, rows = kind(device), torch.zeros(1000, 16, device=device)
    plane, half = pinned(torch.zeros(1000, 16)), pinned(torch.zeros(1000, 16).half())
    index = torch.randperm(1000)
    indices = [index.to(device), index]
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(40))]

    def call(number):
        count, which = 1 + number * 37 % 999, indices[number // 2 % 2]
        other = half if number % 3 == 0 else plane
        with torch.cuda.stream(streams[number % len(streams)]):
            if number % 2:
                engine.gather([plane, other], which[:count], [rows[:count], rows[:count].clone()])
            else:
                engine.scatter([plane], which[:count], [rows[:count]])
        if number % 50 == 0:
            engine.wait()  # the host must not run ahead: what is under way takes memory

    def state():
        engine.wait()
        host = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        caches = [cache.cache_info().currsize for cache in (cuda_streams.cupy_stream, cuda_streams._stream_at)]
        grown = torch.cuda.memory_reserved(), host.get("allocated_bytes.current", 0), resident_bytes()
        return [allocated_bytes(), caches], grown

    for number in range(2500):
        call(number)
    held, before = state()
    for number in range(10_000):
        call(number)
    held_after, after = state()
    assert held_after == held
    assert all(now - then <= most for now, then, most in zip(after, before, (4 << 20, 1 << 20, 32 << 20), strict=True))
    assert not plane.any()


def test_memory_of_a_cache_is_given_back(device):
    table = st.Table(100_000, 64, memory="pinned", device=device, cache_rows=50_000, cache_counts=torch.arange(100_000))
    index = torch.arange(60_000, 60_100, device=device)
    before = allocated_bytes()
    table.scatter(index, torch.ones(100, 64, device=device))
    assert allocated_bytes() - before >= 50_000 * 64 * 4
    table.shrink_cache()
    assert allocated_bytes() - before < 1 << 20
    assert table.torch()[60_000:60_100].eq(1).all()
