"""Every engine on a CUDA device: the cases of tests/engine_cases.py, races, every dim."""

import pytest
import torch
from cases import concurrently
from engine_cases import EngineCases, PaddingCases, Twice, cached

from gpu.tools import store_in
from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine, make_engine

# Engines by what is special about each: where their planes are, and how they are made.
ENGINES = {
    "reference": ("device", ReferenceEngine),
    "mapped, device memory": ("device", MappedEngine),
    "mapped": ("pinned", MappedEngine),
    "mapped, one warp": ("pinned", lambda device: MappedEngine(device, max_blocks=1, threads=32)),
    "mapped, three warps a block": ("pinned", lambda device: MappedEngine(device, max_blocks=3, threads=96)),
    "auto": ("pinned", lambda device: make_engine("pinned", device)),
    "staged, one chunk": ("pageable", lambda device: StagedEngine(device, buffer_bytes=16 << 20)),
    "staged, many chunks": ("pageable", lambda device: StagedEngine(device, buffer_bytes=1024)),
    "staged, pinned": ("pinned", lambda device: StagedEngine(device, num_buffers=2, buffer_bytes=4096)),
    "staged, mmap": ("mmap", lambda device: StagedEngine(device, num_buffers=2, buffer_bytes=4096)),
    "static cache of 1": ("pinned", lambda device: cached(1, "static", MappedEngine(device), device=device)),
    "lfu cache of 2": ("pinned", lambda device: cached(2, "lfu", MappedEngine(device), device=device)),
    "cache that is asked twice": (
        "pinned",
        lambda device: cached(30, "static", MappedEngine(device), kind=Twice, device=device),
    ),
    "cache over auto": ("pinned", lambda device: cached(20, "lfu", make_engine("pinned", device), device=device)),
    "cache over staged": (
        "pageable",
        lambda device: cached(
            30, "static", StagedEngine(device, num_buffers=2, buffer_bytes=4096), kind=Twice, device=device
        ),
    ),
}
# For compute-sanitizer, which makes kernels many times slower: one launch of each kernel that moves rows will do.
SANITIZED = {"mapped, three warps a block": pytest.mark.sanitizer}


HOLD_CYCLES = 40_000_000  # about 20 ms: far longer than any call here takes


class TestEngines(PaddingCases, EngineCases):
    """The cases, and order between streams: races that are provoked."""

    @pytest.fixture(params=[pytest.param(name, marks=SANITIZED.get(name, ())) for name in ENGINES])
    def way(self, request):
        return ENGINES[request.param]

    @pytest.fixture
    def engine(self, way, device):
        return way[1](device)

    @pytest.fixture
    def store(self, way, device, tmp_path):
        return store_in(way[0], device, tmp_path)

    @pytest.mark.parametrize("held", ["scatter", "gather"])
    def test_a_call_held_back_is_waited_for(self, engine, device, store, held):
        plane, index = store(torch.ones(64, 9)), torch.arange(64, device=device)
        rows, out = torch.zeros(64, 9, device=device), torch.zeros(64, 9, device=device)
        streams = {"scatter": torch.cuda.Stream(), "gather": torch.cuda.Stream()}
        torch.cuda.synchronize()
        for name in sorted(streams, key=lambda name: name != held):
            with torch.cuda.stream(streams[name]):
                if name == held:
                    torch.cuda._sleep(HOLD_CYCLES)
                if name == "scatter":
                    engine.scatter([plane], index, [rows.fill_(5)])
                else:
                    engine.gather([plane], index, [out])
        streams["gather"].synchronize()
        assert out.eq(5 if held == "scatter" else 1).all()
        engine.wait()
        assert plane.eq(5).all()

    def test_scatters_land_in_order(self, engine, device, store):
        plane, index = store(torch.zeros(64, 9)), torch.arange(64, device=device)
        rows = [torch.full((64, 9), float(i), device=device) for i in range(4)]
        streams = [torch.cuda.Stream() for _ in rows]
        torch.cuda.synchronize()
        for row, stream in zip(rows, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(HOLD_CYCLES // (1 + int(stream is streams[-1]) * 100))
                engine.scatter([plane], index, [row])
        engine.wait()
        assert plane.eq(3).all()

    def test_an_index_held_back_on_the_current_stream(self, engine, device, store):
        content = torch.arange(100.0).view(50, 2)
        plane, other, wanted = store(content), store(torch.zeros(50, 2)), torch.arange(49, -1, -1, device=device)
        out, side = torch.zeros(50, 2, device=device), torch.cuda.Stream()
        indices = [torch.zeros_like(wanted) for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            indices[0].copy_(wanted)
            engine.gather([plane], indices[0], [out])
            torch.cuda._sleep(HOLD_CYCLES)
            indices[1].copy_(wanted)
            engine.scatter([other], indices[1], [out])
        side.synchronize()
        assert torch.equal(out.cpu(), content.flip(0))
        engine.wait()
        assert torch.equal(other.cpu(), content)

    @pytest.mark.parametrize("stored", [torch.float32, torch.float16], ids=str)
    def test_memory_of_a_call_is_not_given_away_early(self, engine, device, store, stored):
        content = torch.arange(100_000.0).view(50_000, 2) % 1000
        plane, side = store(torch.zeros(50_000, 2, dtype=stored)), torch.cuda.Stream()
        index, rows = torch.arange(50_000, device=device), content.to(device)
        out = torch.zeros(50_000, 2, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.scatter([plane], index, [rows])
            engine.gather([plane], index, [out])
        del rows, index
        thieves = [torch.zeros(50_000, width, device=device) for width in (1, 2, 2, 4)]
        torch.cuda.current_stream().synchronize()
        side.synchronize()
        assert torch.equal(out.cpu(), content)
        engine.wait()
        assert torch.equal(plane.cpu().float(), content)
        assert len(thieves) == 4

    def test_two_threads(self, engine, device, store):
        plane = store(torch.zeros(200, 5))

        def work(first):
            with torch.cuda.stream(torch.cuda.Stream()):
                index = torch.arange(first, 200, 2, device=device)
                rows = torch.zeros(100, 5, device=device)
                for _ in range(50):
                    engine.gather([plane], index, [rows])
                    rows += 1
                    engine.scatter([plane], index, [rows])

        torch.cuda.synchronize()
        concurrently(work, (0, 1))
        engine.wait()
        assert plane.eq(50).all()
