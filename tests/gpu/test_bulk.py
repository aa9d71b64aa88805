"""Rows moved by the bulk copy engine (compute capability 9.0), in a process of its own: its waits could last for ever."""

import numpy as np
import pytest
import torch
from cases import bits
from engine_cases import any_bits

from gpu.on_device import OnDevice
from gpu.tools import SWEEPS, check_same, pinned, wrong_dims
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine
from speedtransfer.engines.mapped import bulk_shared_bytes
from speedtransfer.errors import DeviceError, RowIndexError

PROCESS = "bulk"


@pytest.fixture(scope="module", autouse=True)
def _hopper(device):
    if torch.cuda.get_device_capability(device) < (9, 0):
        with pytest.raises(DeviceError, match=r"needs compute capability 9.0 \(Hopper\), but .+; use kernel='lanes'"):
            MappedEngine(device, kernel="bulk")
        pytest.skip(f"{torch.cuda.get_device_name(device)} has no bulk copy engine")


class TestFirst:
    """The simplest calls come first, so that a kernel that does not work at all says so at once."""

    @pytest.fixture
    def engine(self, device):
        return MappedEngine(device, kernel="bulk")

    @pytest.mark.parametrize("dim", [4, 128, 132, 1024, 4096])
    @pytest.mark.parametrize("count", [1, 7, 1000, 20_000])
    def test_gather_and_scatter(self, engine, device, count, dim):
        content = any_bits((301, dim), torch.float32)
        plane, generator = pinned(content), np.random.default_rng(0)
        index = torch.from_numpy(generator.integers(0, 301, count))
        rows = torch.zeros(count, dim, device=device)
        engine.gather([plane], index.to(device), [rows])
        engine.wait()
        check_same([rows], [content[index]])
        index = torch.from_numpy(generator.permutation(301)[:count])
        new = any_bits((len(index), dim), torch.float32, seed=1)
        engine.scatter([plane], index.to(device), [new.to(device)])
        engine.wait()
        content[index] = new
        check_same([plane], [content])

    def test_several_planes(self, engine, device):
        contents = [any_bits((99, dim), torch.float32, seed=dim) for dim in (128, 128, 4, 300)]
        planes, index = [pinned(content) for content in contents], torch.arange(98, -1, -1)
        rows = [torch.zeros(99, content.shape[1], device=device) for content in contents]
        engine.gather(planes, index.to(device), rows)
        check_same(rows, [content[index] for content in contents])
        engine.scatter(planes, torch.arange(99, device=device), rows)
        engine.wait()
        check_same(planes, [content[index] for content in contents])

    def test_device_memory(self, engine, device):
        content = any_bits((301, 128), torch.float32)
        plane, index = content.to(device), torch.randint(301, (5000,))
        rows = torch.zeros(5000, 128, device=device)
        engine.gather([plane], index.to(device), [rows])
        check_same([rows], [content[index]])


@pytest.mark.parametrize(("dtype", "shift", "gap"), SWEEPS)
def test_every_dim(device, dtype, shift, gap):
    assert wrong_dims(MappedEngine(device, kernel="bulk"), device, pinned_empty(1 << 16), dtype, shift, gap) == []


@pytest.mark.parametrize("shift", [0, 4])
@pytest.mark.parametrize("gap", [0, 4, 12])
def test_every_multiple_of_16_bytes(device, shift, gap):
    """All of these rows go by the bulk copies, one piece or several."""
    engine, memory = MappedEngine(device, kernel="bulk"), pinned_empty(1 << 17, device)
    for dim in range(4, 516, 4):
        content, new = (
            any_bits((1, shift + 37 * (dim + gap)), torch.float32, seed=dim)[0],
            any_bits((23, dim), torch.float32),
        )
        flat = memory[: 4 * len(content)].view(torch.float32).copy_(content)

        def rows_of(flat, dim=dim):
            return flat.as_strided((37, dim), (dim + gap, 1), flat.storage_offset() + shift)

        index = torch.randint(37, (300,))
        rows = torch.zeros(300, dim, device=device)
        engine.gather([rows_of(flat)], index.to(device), [rows])
        np.testing.assert_array_equal(bits(rows), bits(rows_of(content)[index]), err_msg=f"gather of {dim}")
        index = torch.randperm(37)[:23]
        engine.scatter([rows_of(flat)], index.to(device), [new.to(device)])
        engine.wait()
        rows_of(content)[index] = new
        np.testing.assert_array_equal(bits(flat), bits(content), err_msg=f"scatter of {dim}")


class TestBulk(OnDevice):
    @pytest.fixture(params=[(None, None), (1, 32), (3, 96)], ids=["default launch", "one warp", "three warps a block"])
    def engine(self, request, device):
        max_blocks, threads = request.param
        return MappedEngine(device, max_blocks=max_blocks, threads=threads, kernel="bulk")

    @pytest.fixture
    def store(self):
        return pinned


class TestFaults:
    @pytest.mark.parametrize("dim", [128, 300, 4096])
    def test_rows_are_zeros_and_nothing_is_written(self, device, dim):
        engine = MappedEngine(device, kernel="bulk")
        content = any_bits((50, dim), torch.float32)
        memory = pinned(torch.cat([torch.zeros(1, dim), content, torch.zeros(1, dim)]))
        plane, index = memory[1:51], torch.arange(5000) % 50
        index[[77, 200, 4999]] = torch.tensor([50, -1, 2**40])
        rows = torch.ones(5000, dim, device=device)
        engine.gather([plane], index.to(device), [rows], check=True)
        with pytest.raises(
            RowIndexError, match=r"^index\[77\] of an earlier gather \(its row is zeros\) is 50 but the table"
        ):
            engine.wait()
        bad = torch.tensor([77, 200, 4999])
        assert not rows[bad.to(device)].any()
        expected = content[index.clamp(0, 49)].index_fill(0, bad, 0)
        check_same([rows], [expected])
        engine.scatter([plane], torch.tensor([50, -1, 2**40, 3], device=device), [torch.ones(4, dim, device=device)])
        engine.wait()
        content[3] = 1
        check_same([plane], [content])
        assert not memory[[0, 51]].any()


def test_more_than_2_to_the_32_bytes(device):
    num_rows = 2**32 // 512 + 1000
    plane = pinned_empty(num_rows * 512, device).view(num_rows, 512)
    engine = MappedEngine(device, kernel="bulk")
    index = torch.tensor([num_rows - 1, 0, 2**31 // 512, 2**31 // 512 - 1, 2**32 // 512, 2**30 // 512])
    rows, out = (any_bits((6, 512), torch.uint8, seed=seed).to(device) for seed in (1, 2))
    engine.scatter([plane], index.to(device), [rows])
    engine.gather([plane], index.to(device), [out])
    engine.wait()
    check_same([out, plane[index]], [rows, rows])


def test_more_shared_memory_than_there_is(device):
    message = rf"asks for {bulk_shared_bytes(512)} bytes of shared memory a block, which .+ refuses \(.+\); pass fewer threads"
    with pytest.raises(DeviceError, match=message):
        MappedEngine(device, threads=512, kernel="bulk")
    assert torch.ones(3, device=device).sum() == 3  # CUDA is none the worse
    engine = MappedEngine(device, kernel="bulk")
    out = torch.zeros(2, 4, device=device)
    engine.gather([pinned(torch.ones(3, 4))], torch.tensor([0, 2], device=device), [out])
    assert out.eq(1).all()
