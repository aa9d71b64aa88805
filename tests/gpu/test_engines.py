"""Every engine on a CUDA device: the cases of tests/engine_cases.py, races, every dim."""

import numpy as np
import pytest
import torch

from gpu.on_device import OnDevice
from gpu.tools import FEW_SWEEPS, SWEEPS, file_tensor, pinned, wrong_dims
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine, make_engine
from speedtransfer.errors import DeviceError, InvalidValueError

LAUNCHES = {"default": {}, "one warp": {"max_blocks": 1, "threads": 32}, "odd": {"max_blocks": 3, "threads": 96}}


class TestReference(OnDevice):
    @pytest.fixture
    def engine(self, device):
        return ReferenceEngine(device)

    @pytest.fixture
    def store(self, device):
        return lambda tensor: tensor.to(device, copy=True)


class TestMappedOverDeviceMemory(TestReference):
    @pytest.fixture
    def engine(self, device):
        return MappedEngine(device)


class TestMapped(OnDevice):
    @pytest.fixture(params=LAUNCHES.values(), ids=LAUNCHES)
    def engine(self, request, device):
        return MappedEngine(device, **request.param)

    @pytest.fixture
    def store(self):
        return pinned


class TestAuto(OnDevice):
    @pytest.fixture
    def engine(self, device):
        return make_engine("pinned", device)

    @pytest.fixture
    def store(self):
        return pinned

    def test_it_is_the_default(self, engine):
        assert engine.name == "auto"
        assert list(engine.engines) == ["mapped", "staged"]
        assert engine.choose("gather", 512, 100) == "mapped"


class TestStaged(OnDevice):
    @pytest.fixture(params=[16 << 20, 1024], ids=["one chunk", "many chunks"])
    def engine(self, request, device):
        return StagedEngine(device, buffer_bytes=request.param)

    @pytest.fixture
    def store(self):
        return torch.clone


class TestStagedOfOtherMemories(OnDevice):
    @pytest.fixture
    def engine(self, device):
        return StagedEngine(device, num_buffers=2, buffer_bytes=4096)

    @pytest.fixture(params=["pinned", "mmap"])
    def store(self, request, tmp_path):
        return pinned if request.param == "pinned" else lambda tensor: file_tensor(tensor, tmp_path)


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


class TestEveryDim:
    """1 to 257, float32 and bytes, as they come and where nothing is aligned."""

    @pytest.mark.parametrize(("dtype", "shift", "gap"), SWEEPS)
    def test_mapped(self, device, dtype, shift, gap):
        assert wrong_dims(MappedEngine(device), device, pinned_empty(1 << 16, device), dtype, shift, gap) == []

    @pytest.mark.parametrize(("dtype", "shift", "gap"), SWEEPS)
    def test_mapped_over_device_memory(self, device, dtype, shift, gap):
        memory = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        assert wrong_dims(MappedEngine(device), device, memory, dtype, shift, gap) == []

    @pytest.mark.parametrize(("dtype", "shift", "gap"), FEW_SWEEPS)
    def test_staged(self, device, dtype, shift, gap):
        assert wrong_dims(StagedEngine(device), device, pinned_empty(1 << 16), dtype, shift, gap) == []

    @pytest.mark.parametrize(("dtype", "shift", "gap"), FEW_SWEEPS)
    def test_pageable(self, device, dtype, shift, gap):
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        assert wrong_dims(StagedEngine(device), device, memory, dtype, shift, gap) == []

    @pytest.mark.parametrize(("dtype", "shift", "gap"), FEW_SWEEPS)
    def test_reference(self, device, dtype, shift, gap):
        memory = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        assert wrong_dims(ReferenceEngine(device), device, memory, dtype, shift, gap) == []


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
