"""Every engine on a CUDA device: the cases of tests/engine_cases.py, and races that are provoked."""

import threading

import numpy as np
import pytest
import torch
from engine_cases import EngineCases

from speedtransfer.device import pinned_empty
from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine

HOLD_CYCLES = 100_000_000  # about 60 ms: far longer than any call here takes


def pinned(tensor):
    memory = pinned_empty(tensor.numel() * tensor.element_size())
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


class OnDevice(EngineCases):
    """The cases, and order between streams."""

    def test_a_scatter_held_back_is_waited_for(self, engine, device, store):
        plane, index = store(torch.zeros(64, 9)), torch.arange(64, device=device)
        rows, out = torch.zeros(64, 9, device=device), torch.zeros(64, 9, device=device)
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep(HOLD_CYCLES)
            rows.fill_(5)
            engine.scatter([plane], index, [rows])
        with torch.cuda.stream(two):
            engine.gather([plane], index, [out])
        two.synchronize()
        assert out.eq(5).all()
        engine.wait()
        assert plane.eq(5).all()

    def test_a_gather_held_back_sees_the_rows_of_its_time(self, engine, device, store):
        plane, index = store(torch.ones(64, 9)), torch.arange(64, device=device)
        rows, out = torch.full((64, 9), 5.0, device=device), torch.zeros(64, 9, device=device)
        one, two = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.gather([plane], index, [out])
        with torch.cuda.stream(two):
            engine.scatter([plane], index, [rows])
        one.synchronize()
        assert out.eq(1).all()
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
        plane, wanted = store(content), torch.arange(49, -1, -1, device=device)
        index, out, side = torch.zeros_like(wanted), torch.zeros(50, 2, device=device), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            index.copy_(wanted)
            engine.gather([plane], index, [out])
        side.synchronize()
        assert torch.equal(out.cpu(), content.flip(0))

    def test_memory_of_the_index_is_not_given_away_early(self, engine, device, store):
        content, side = torch.arange(100_000.0).view(50_000, 2), torch.cuda.Stream()
        plane, out = store(content), torch.zeros(50_000, 2, device=device)
        index = torch.arange(50_000, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.gather([plane], index, [out])
        del index
        thieves = [torch.zeros(50_000, dtype=torch.int64, device=device) for _ in range(4)]
        side.synchronize()
        assert torch.equal(out.cpu(), content)
        assert len(thieves) == 4

    def test_memory_of_the_rows_is_not_given_away_early(self, engine, device, store):
        plane, index, side = store(torch.zeros(50_000, 2)), torch.arange(50_000, device=device), torch.cuda.Stream()
        rows = torch.full((50_000, 2), 3.0, device=device)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(HOLD_CYCLES)
            engine.scatter([plane], index, [rows])
        del rows
        thieves = [torch.zeros(50_000, 2, device=device) for _ in range(4)]
        engine.wait()
        assert plane.eq(3).all()
        assert len(thieves) == 4

    def test_two_threads(self, engine, device, store):
        plane, errors = store(torch.zeros(200, 5)), []

        def work(first):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    index = torch.arange(first, 200, 2, device=device)
                    rows = torch.zeros(100, 5, device=device)
                    for _ in range(50):
                        engine.gather([plane], index, [rows])
                        rows += 1
                        engine.scatter([plane], index, [rows])
            except BaseException as error:
                errors.append(error)

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        engine.wait()
        assert plane.eq(50).all()


class TestReference(OnDevice):
    @pytest.fixture
    def engine(self, device):
        return ReferenceEngine(device)

    @pytest.fixture
    def store(self, device):
        return lambda tensor: tensor.to(device, copy=True)


class TestMapped(OnDevice):
    @pytest.fixture(params=[(None, 256), (1, 32)], ids=["default launch", "one warp"])
    def engine(self, request, device):
        max_blocks, threads = request.param
        return MappedEngine(device, max_blocks=max_blocks, threads=threads)

    @pytest.fixture
    def store(self):
        return pinned

    def test_more_than_2_to_the_31_elements(self, engine, device):
        num_rows = 2**31 // 64 + 1000
        plane = pinned_empty(num_rows * 64, device).view(num_rows, 64)
        index = torch.tensor([num_rows - 1, 0, 2**31 // 64, 2**30 // 64], device=device)
        rows, out = (torch.randint(0, 256, (4, 64), dtype=torch.uint8, device=device) for _ in range(2))
        engine.scatter([plane], index, [rows])
        engine.gather([plane], index, [out])
        engine.wait()
        assert torch.equal(out, rows)
        assert torch.equal(plane[index.cpu()], rows.cpu())


class TestMappedOverDeviceMemory(TestReference):
    @pytest.fixture
    def engine(self, device):
        return MappedEngine(device)


class TestStaged(OnDevice):
    @pytest.fixture(params=[16 << 20, 1024], ids=["one chunk", "many chunks"])
    def engine(self, request, device):
        return StagedEngine(device, buffer_bytes=request.param)

    @pytest.fixture(params=["pageable", "pinned", "mmap"])
    def store(self, request, tmp_path):
        def mapped_file(tensor):
            shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
            path = tmp_path / f"plane{len(list(tmp_path.iterdir()))}"
            if 0 in shape:
                return tensor.clone()  # a file of no bytes cannot be mapped
            array = np.memmap(path, np.uint8, "w+", shape=shape)
            return torch.from_numpy(array).view(tensor.dtype).copy_(tensor)

        return {"pageable": torch.clone, "pinned": pinned, "mmap": mapped_file}[request.param]

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
