"""The CUDA kernels without a GPU: compiled for every architecture, and run on the CPU from the same source."""

import importlib.resources
import mmap

import numpy as np
import nvrtc
import pytest
import torch
from cpu_kernels import COMPILER, CpuKernels

from speedtransfer.engines.mapped import MAX_PLANES, pack_move

SOURCES = sorted(
    entry.name for entry in importlib.resources.files("speedtransfer.kernels").iterdir() if entry.name.endswith(".cu")
)
NUM_ROWS = 37
LAUNCHES = [(1, 1), (1, 3), (2, 32), (3, 7), (5, 64), (1, 256)]  # (blocks, threads), odd ones too


@pytest.mark.skipif(nvrtc.library() is None, reason="nvidia-cuda-nvrtc is not installed")
class TestCompile:
    @pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
    @pytest.mark.parametrize("source", SOURCES)
    def test_compiles(self, source, architecture):
        code = importlib.resources.files("speedtransfer.kernels").joinpath(source).read_text(encoding="utf-8")
        cubin, log = nvrtc.compile_cubin(code, source, architecture)
        assert cubin.startswith(b"\x7fELF")
        assert log == "", log
        if source == "rows.cu":
            assert b"gather_rows" in cubin
            assert b"scatter_rows" in cubin

    def test_an_error_names_the_file_and_its_own_line(self):
        with pytest.raises(AssertionError, match=r"bad\.cu\(2\): error"):
            nvrtc.compile_cubin('#line 1 "bad.cu"\n\nint x = y;', "prog", "sm_90")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    return CpuKernels(tmp_path_factory.mktemp("kernels"))


def plane_of(num_rows, row_bytes, stride_bytes, offset, generator):
    """Return a uint8 plane (num_rows, row_bytes), `offset` bytes after a 16-byte boundary, and its memory."""
    memory = torch.from_numpy(generator.integers(0, 256, num_rows * stride_bytes + 64, dtype=np.uint8))
    start = -memory.data_ptr() % 16 + offset
    return memory[start:].as_strided((num_rows, row_bytes), (stride_bytes, 1)), memory


def check(kernels, row_bytes, paddings=(0,), offsets=(0,), launch=(2, 64), num_index=23):
    """Gather and scatter planes of `row_bytes` each, with some padding and misalignment, and compare with NumPy."""
    generator = np.random.default_rng(sum(row_bytes))
    planes, memories = [], []
    for i, width in enumerate(row_bytes):
        padding, offset = paddings[i % len(paddings)], offsets[i % len(offsets)]
        plane, memory = plane_of(NUM_ROWS, width, width + padding, offset, generator)
        planes.append(plane)
        memories.append(memory)
    index = torch.from_numpy(generator.integers(0, NUM_ROWS, num_index))
    rows = [torch.zeros(num_index, width, dtype=torch.uint8) for width in row_bytes]
    kernels.gather_rows(*launch, pack_move(planes, index, rows))
    for plane, out in zip(planes, rows, strict=True):
        np.testing.assert_array_equal(out.numpy(), plane.numpy()[index.numpy()])

    unique = torch.from_numpy(generator.permutation(NUM_ROWS)[:num_index])
    rows = [torch.from_numpy(generator.integers(0, 256, (num_index, width), dtype=np.uint8)) for width in row_bytes]
    expected = [memory.clone() for memory in memories]
    for plane, memory, want, new in zip(planes, memories, expected, rows, strict=True):
        start = plane.data_ptr() - memory.data_ptr()
        view = want[start:].as_strided(tuple(plane.shape), plane.stride())
        view.numpy()[unique.numpy()] = new.numpy()
    kernels.scatter_rows(*launch, pack_move(planes, unique, rows))
    for memory, want in zip(memories, expected, strict=True):
        np.testing.assert_array_equal(memory.numpy(), want.numpy())  # padding and idle rows as they were


class TestRun:
    def test_the_argument_has_one_layout(self, kernels):
        index, plane, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 4), torch.zeros(1, 4)
        assert pack_move([plane], index, [rows]).nbytes == kernels.move_bytes

    def test_literal(self, kernels):
        plane = torch.tensor([[0, 1, 2], [10, 11, 12], [20, 21, 22]], dtype=torch.int32)
        index = torch.tensor([2, 0, 2])
        rows = torch.zeros(3, 3, dtype=torch.int32)
        kernels.gather_rows(1, 32, pack_move([plane], index, [rows]))
        assert rows.tolist() == [[20, 21, 22], [0, 1, 2], [20, 21, 22]]
        index, rows = torch.tensor([2, 1]), torch.tensor([[7, 8, 9], [4, 5, 6]], dtype=torch.int32)
        kernels.scatter_rows(1, 32, pack_move([plane], index, [rows]))
        assert plane.tolist() == [[0, 1, 2], [4, 5, 6], [7, 8, 9]]

    @pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
    def test_dims(self, kernels, element_bytes):
        for dim in [*range(1, 41), 64, 100, 128, 300, 4096 // element_bytes]:
            check(kernels, [dim * element_bytes])

    @pytest.mark.parametrize("launch", LAUNCHES)
    def test_launch_sizes(self, kernels, launch):
        for width in (1, 12, 16, 48, 528, 1040):
            check(kernels, [width], launch=launch)

    @pytest.mark.parametrize("offset", [1, 2, 4, 8])
    def test_misaligned_and_strided(self, kernels, offset):
        for width, padding in [(16, 0), (64, 16), (64, 3), (512, 128), (7, 1), (4, 12)]:
            check(kernels, [width], paddings=[padding], offsets=[offset])

    def test_several_planes(self, kernels):
        check(kernels, [512, 512, 512, 4], launch=(3, 64))
        check(kernels, [1, 2, 3, 1024, 7], paddings=[0, 5, 16], offsets=[0, 1, 2, 4])
        check(kernels, [8 * (1 + i) for i in range(MAX_PLANES)])

    def test_nothing_to_move(self, kernels):
        none = torch.zeros(0, dtype=torch.int64)
        assert pack_move([torch.zeros(3, 4)], none, [torch.zeros(0, 4)]) is None
        assert pack_move([torch.zeros(3, 0)], torch.tensor([1]), [torch.zeros(1, 0)]) is None
        check(kernels, [0, 8, 0])

    def test_more_than_2_to_the_31_elements(self, kernels):
        dim = 64
        num_rows = 2**31 // dim + 1000
        try:  # pages that nobody writes cost nothing
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            memory = mmap.mmap(-1, num_rows * dim * 4, flags=flags)
        except (OSError, AttributeError) as error:
            pytest.skip(f"no sparse memory of 9 GB here: {error}")
        plane = torch.from_numpy(np.frombuffer(memory, dtype=np.float32)).view(num_rows, dim)
        index = torch.tensor([num_rows - 1, 0, 2**31 // dim, 2**30 // dim])
        rows = torch.randn(4, dim)
        kernels.scatter_rows(2, 64, pack_move([plane], index, [rows]))
        assert torch.equal(plane[index], rows)
        out = torch.zeros(4, dim)
        kernels.gather_rows(2, 64, pack_move([plane], index, [out]))
        assert torch.equal(out, rows)

    @pytest.mark.slow
    def test_sweep(self, kernels):
        for launch in LAUNCHES:
            for width in [*range(1, 130), *range(130, 4097, 61), 4096, 16384]:
                for padding, offset in [(0, 0), (16, 0), (1, 0), (0, 4), (8, 8), (4, 2)]:
                    check(kernels, [width, 4], paddings=[padding, 0], offsets=[offset, 0], launch=launch)


class TestPackMove:
    @pytest.mark.parametrize(
        ("dim", "offset", "lane_bytes"),
        [(4, 0, 16), (8, 0, 16), (2, 0, 8), (6, 0, 8), (1, 0, 4), (33, 0, 4), (4, 1, 4), (4, 2, 8)],
    )
    def test_widest_lane_that_divides_everything(self, dim, offset, lane_bytes):
        memory = torch.zeros(1000)
        aligned = -memory.data_ptr() % 16 // 4
        plane = memory[aligned + offset :][: 5 * dim].view(5, dim)
        rows = torch.zeros(1000)
        rows = rows[-rows.data_ptr() % 16 // 4 :][:dim].view(1, dim)
        move = pack_move([plane], torch.tensor([3]), [rows])
        assert move["planes"]["lane_bytes"][0, 0] == lane_bytes

    def test_an_odd_stride_narrows_the_lane(self):
        plane = torch.zeros(5, 5)[:, :4]
        move = pack_move([plane], torch.tensor([3]), [torch.zeros(1, 4)])
        assert move["planes"]["lane_bytes"][0, 0] == 4
        assert move["planes"]["stride_bytes"][0, 0] == 20
        assert move["planes"]["row_bytes"][0, 0] == 16
