"""Every engine on a CUDA device: the cases of tests/engine_cases.py, races, every dim."""

import numpy as np
import pytest
import torch
from engine_cases import Twice, cached

from gpu.on_device import OnDevice
from gpu.tools import FEW_SWEEPS, SWEEPS, store_in, wrong_dims
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine, make_engine
from speedtransfer.errors import DeviceError, InvalidValueError

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


class TestEngines(OnDevice):
    @pytest.fixture(params=[pytest.param(name, marks=SANITIZED.get(name, ())) for name in ENGINES])
    def way(self, request):
        return ENGINES[request.param]

    @pytest.fixture
    def engine(self, way, device):
        return way[1](device)

    @pytest.fixture
    def store(self, way, device, tmp_path):
        return store_in(way[0], device, tmp_path)


def test_auto_is_the_default(device):
    engine = make_engine("pinned", device)
    assert engine.name == "auto"
    assert list(engine.engines) == ["mapped", "staged"]
    assert engine.choose("gather", 512, 100) == "mapped"


class TestManyStaged:
    def test_a_thousand_calls_over_two_buffers(self, device):
        engine = StagedEngine(device, num_buffers=2, buffer_bytes=4096)
        content = torch.arange(1000 * 16, dtype=torch.float32).view(1000, 16)
        plane, generator = content.clone(), np.random.default_rng(0)
        indices = [torch.from_numpy(generator.permutation(1000)[: 1 + i % 200]).to(device) for i in range(1000)]
        outs = [torch.empty(len(index), 16, device=device) for index in indices]
        for index, out in zip(indices, outs, strict=True):
            engine.gather([plane], index, [out])
        for index, out in zip(indices, outs, strict=True):
            assert torch.equal(out.cpu(), content[index.cpu()])
        for step, (index, out) in enumerate(zip(indices, outs, strict=True)):
            engine.scatter([plane], index, [out.fill_(step)])
            content[index.cpu()] = float(step)
        assert torch.equal(plane, content)

    def test_calls_large_enough_for_compiled_copies_and_many_chunks(self, device):
        engine = StagedEngine(device, buffer_bytes=3 << 20)
        content = torch.arange(300_000 * 24, dtype=torch.int32).view(300_000, 24)
        plane = content.clone()
        index = torch.from_numpy(np.random.default_rng(0).permutation(300_000)[:200_000])
        rows = torch.empty(200_000, 24, dtype=torch.int32, device=device)
        engine.gather([plane], index.to(device), [rows])
        assert torch.equal(rows.cpu(), content[index])
        engine.scatter([plane], index.to(device), [rows + 1])
        content[index] += 1
        assert torch.equal(plane, content)


@pytest.mark.parametrize(
    ("memory", "engine", "sweep"),
    [
        *(("pinned", MappedEngine, sweep) for sweep in SWEEPS),
        *(("device", MappedEngine, sweep) for sweep in SWEEPS),
        *(("pinned", StagedEngine, sweep) for sweep in FEW_SWEEPS),
        *(("pageable", StagedEngine, sweep) for sweep in FEW_SWEEPS),
        *(("device", ReferenceEngine, sweep) for sweep in FEW_SWEEPS),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_dim(device, memory, engine, sweep):
    """1 to 257, float32 and bytes, as they come and where nothing is aligned."""
    room = torch.zeros(1 << 16, dtype=torch.uint8, device=device if memory == "device" else "cpu")
    planes = pinned_empty(1 << 16, device) if memory == "pinned" else room
    assert wrong_dims(engine(device), device, planes, *sweep) == []


class TestMadeByHand:
    def test_an_engine_that_cannot_serve(self, device):
        for memory, name in [
            ("device", "staged"),
            ("pageable", "mapped"),
            ("pinned", "tiled"),
            ("pinned", "reference"),
        ]:
            message = rf"engine is '{name}', which does not move rows of memory='{memory}' on {device}; choose from "
            with pytest.raises(InvalidValueError, match=message):
                make_engine(memory, device, name)

    def test_on_the_cpu(self):
        for kind in (MappedEngine, StagedEngine):
            with pytest.raises(DeviceError, match="needs CUDA, but the compute device is 'cpu'; pass device='cuda'"):
                kind("cpu")
