"""The CUDA kernels without a GPU: compiled for every architecture, and run on the CPU from the same source."""

import ctypes
import importlib
import importlib.resources
import inspect
import itertools
import mmap
import re

import numpy as np
import nvrtc
import pytest
import torch
from cases import same_values
from cpu_kernels import CHECKS, MOVING, cpu_kernels, pack
from engine_cases import CONVERSIONS

from speedtransfer.cuda import ARGUMENT_AT, kernel_source
from speedtransfer.engines.mapped import _MOVES, pack_plane

SOURCES = sorted(
    entry.name for entry in importlib.resources.files("speedtransfer.kernels").iterdir() if entry.name.endswith(".cu")
)
WIDE = ("cache.cu", "rows.cu", "step.cu", "word2vec.cu")
NUM_ROWS = 37
LAUNCHES = [(1, 1), (1, 3), (2, 32), (3, 7), (5, 64), (1, 256)]  # (blocks, threads), odd ones too
BAD = [-1, NUM_ROWS, 2**31, 2**40, 2**62, -(2**63)]  # far off: memory that nobody has


def test_the_sanitizer_sees_every_source():
    assert sorted({*CHECKS, *MOVING}) == SOURCES
    for check in (check for every in CHECKS.values() for check in every):
        module, _, name = check.partition(":")
        assert f"{name}(" in inspect.getsource(importlib.import_module(module)).partition("is_trusted(")[2], check


@pytest.mark.skipif(nvrtc.library() is None, reason="nvidia-cuda-nvrtc is not installed")
class TestCompile:
    @pytest.mark.parametrize("source", SOURCES)
    def test_compiles(self, source):
        """To code for no device: the last step, of which each architecture has its own, takes seconds."""
        self.check_code(source, "compute_90")

    def kernels_of(self, source):
        names = re.findall(r'extern "C" __global__ void (\w+)\(', kernel_source(source))
        assert names
        return names

    def check_code(self, source, architecture):
        code, log = nvrtc.compile_cubin(kernel_source(source), source, architecture, kind="PTX")
        assert log.strip("\0\n") == ""
        assert all(f".entry {name}(".encode() in code for name in self.kernels_of(source))
        # Subnormal numbers stay; the one exception is in CUDA's own expf.
        assert set(re.findall(rb"[\w.]+\.ftz[\w.]*", code)) <= {b"ex2.approx.ftz.f32"}
        # Rows move 16 bytes at a time.
        assert source not in WIDE or {b"ld", b"st"} == set(re.findall(rb"(ld|st)\.global(?:\.\w+)*\.v4\.", code))

    @pytest.mark.slow
    @pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
    def test_compiles_for_every_architecture(self, architecture):
        for source in SOURCES:
            self.check_code(source, architecture.replace("sm_", "compute_"))
            self.check_machine_code(source, architecture)

    def check_machine_code(self, source, architecture):
        cubin, log = nvrtc.compile_cubin(kernel_source(source), source, architecture, ("-Xptxas", "-v"))
        assert cubin.startswith(b"\x7fELF")
        names = self.kernels_of(source)
        assert all(name.encode() in cubin for name in names)
        said = [line for line in log.splitlines() if line.strip() and not re.match(r"ptxas (info)? +[:.] ", line)]
        assert said == [], log
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log) == [("0", "0")] * len(names)
        registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
        assert max(registers) <= 128  # of 65,536: two blocks of 256 threads, the default launch, fit

    def test_catching_up_rounds_every_operation(self):
        """A product and a sum must not become one operation, which rounds once, as they do on no CPU."""
        name = "catch_up.cu"
        code, _ = nvrtc.compile_cubin(kernel_source(name), name, "compute_90", kind="PTX")
        found = set(re.findall(rb"\b((?:mul|fma|mad|add|sub|div|sqrt)[.\w]*\.f(?:32|64))\b", code))
        assert {b"mul.rn.f32", b"mul.rn.f64", b"div.rn.f32", b"sqrt.rn.f32"} <= found
        assert not [kind for kind in found if kind.startswith((b"fma", b"mad", b"mul.f"))]


@pytest.fixture(scope="module")
def kernels():
    return cpu_kernels()


def plane_of(num_rows, row_bytes, stride_bytes, offset, generator):
    """Return a uint8 plane (num_rows, row_bytes), `offset` bytes after a 16-byte boundary, and its memory."""
    memory = torch.from_numpy(generator.integers(0, 256, num_rows * stride_bytes + 64, dtype=np.uint8))
    start = -memory.data_ptr() % 16 + offset
    return memory[start:].as_strided((num_rows, row_bytes), (stride_bytes, 1)), memory


def aligned_zeros(num_rows, row_bytes):
    memory = torch.zeros(num_rows * row_bytes + 16, dtype=torch.uint8)
    return memory[-memory.data_ptr() % 16 :][: num_rows * row_bytes].view(num_rows, row_bytes)


def check(kernels, width, launch, backwards):
    """Gather and scatter rows of `width` bytes, and compare with NumPy."""
    generator, num_index = np.random.default_rng(width), 23
    plane, memory = plane_of(NUM_ROWS, width, width, 0, generator)
    index = torch.from_numpy(generator.integers(0, NUM_ROWS, num_index))
    rows = aligned_zeros(num_index, width)
    kernels.launch("gather_rows", *launch, pack([plane], index, [rows]), backwards)
    np.testing.assert_array_equal(rows.numpy(), plane.numpy()[index.numpy()])

    unique = torch.from_numpy(generator.permutation(NUM_ROWS)[:num_index])
    rows.copy_(torch.from_numpy(generator.integers(0, 256, tuple(rows.shape), dtype=np.uint8)))
    want, start = memory.clone(), plane.data_ptr() - memory.data_ptr()
    want[start:].as_strided(tuple(plane.shape), plane.stride())[unique] = rows
    kernels.launch("scatter_rows", *launch, pack([plane], unique, [rows]), backwards)
    np.testing.assert_array_equal(memory.numpy(), want.numpy())  # idle rows as they were


class TestRows:
    def test_the_argument_has_one_layout(self, kernels):
        index, plane, rows = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 4), torch.zeros(1, 4)
        room = ctypes.sizeof(pack([plane], index, [rows])) - ARGUMENT_AT
        assert _MOVES[-1].size == kernels.move_bytes <= room

    @pytest.mark.parametrize("launch", LAUNCHES)
    def test_dims_and_launch_sizes(self, kernels, launch):
        for number, width in enumerate([*range(1, 81), 100, 128, 300, 512, 528, 1040, 3000, 4096]):
            check(kernels, width, launch, bool(number % 2))

    @pytest.mark.parametrize("launch", LAUNCHES)
    def test_every_lane_is_read_once(self, kernels, launch):
        generator = np.random.default_rng(0)
        for width, num_index in [(4, 1), (4, 300), (48, 29), (512, 300), (528, 29), (3000, 300)]:
            plane, _ = plane_of(NUM_ROWS, width, width, 0, generator)
            index, rows = torch.from_numpy(generator.integers(0, NUM_ROWS, num_index)), aligned_zeros(num_index, width)
            move = pack([plane], index, [rows])
            for direction in ("gather", "scatter"):
                kernels.launch(f"{direction}_rows", *launch, move)
                assert kernels.lanes_read == num_index * pack_plane(plane, rows)[3]

    def test_more_than_2_to_the_31_elements(self, kernels):
        dim = 64
        num_rows = 2**31 // dim + 1000
        plane = sparse_plane(num_rows, dim)
        index = torch.tensor([num_rows - 1, 0, 2**31 // dim, 2**30 // dim])
        rows = torch.randn(4, dim)
        kernels.launch("scatter_rows", 2, 64, pack([plane], index, [rows]))
        assert torch.equal(plane[index], rows)
        out = torch.zeros(4, dim)
        kernels.launch("gather_rows", 2, 32, pack([plane], index, [out]))
        assert torch.equal(out, rows)


def sparse_plane(num_rows, dim):
    """Return a float32 plane of more memory than there is: pages that nobody writes cost nothing."""
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, num_rows * dim * 4, flags=flags)
    except (OSError, AttributeError) as error:
        pytest.skip(f"no sparse memory of 9 GB here: {error}")
    return torch.from_numpy(np.frombuffer(memory, dtype=np.float32)).view(num_rows, dim)


class TestFaults:
    @pytest.mark.parametrize("kind", ["rows", "converted"])
    @pytest.mark.parametrize("backwards", [False, True])
    def test_the_first_bad_position(self, kernels, kind, backwards):
        """Rows that do not exist are zeros."""
        generator = np.random.default_rng(0)
        plane = torch.arange(NUM_ROWS * 12, dtype=torch.int32).view(NUM_ROWS, 12) + 1
        for position, bad in itertools.product((0, 1, 63, 64, 150, 199), BAD):
            index = torch.from_numpy(generator.integers(0, NUM_ROWS, 200))
            index[position] = bad
            index[position + 1 :: 7] = -5  # others after it
            fault, rows = np.zeros(5, dtype=np.int64), torch.full((200, 12), -1, dtype=torch.int32)
            kernels.launch(f"gather_{kind}", 2, 32, pack([plane], index, [rows], fault), backwards)
            exists = (index >= 0) & (index < NUM_ROWS)
            assert torch.equal(rows, plane[index.where(exists, 0)] * exists[:, None])
            assert fault.tolist() == [1, position, bad, NUM_ROWS, 1]

    @pytest.mark.parametrize("width", [1, 3, 40, 1000])
    def test_scattered_nowhere(self, kernels, width):
        plane, rows = torch.zeros(NUM_ROWS, width), torch.ones(2 + len(BAD), width)
        index = torch.tensor([2, *BAD, 5])
        kernels.launch("scatter_rows", 2, 32, pack([plane], index, [rows]))
        assert plane.any(dim=1).nonzero().flatten().tolist() == [2, 5]


def check_converted(kernels, values, dtype):
    """Convert `values` (n, dim) by a gather and by a scatter."""
    index = torch.arange(len(values))
    rows, plane = torch.zeros(2, *values.shape, dtype=dtype)
    kernels.launch("gather_converted", 4, 64, pack([values], index, [rows]))
    kernels.launch("scatter_converted", 4, 64, pack([plane], index, [values]))
    for found in (rows, plane):
        same_values(found, values.to(dtype))


def interesting_floats():
    """Return float32 of every sign and exponent, with fractions at, above and below each tie that rounding can meet."""
    ones = [1 << k for k in range(24)]
    fractions = {f for one in ones for f in (one, one - 1, one + 1, 3 * one, 3 * one - 1, 3 * one + 1, -one)}
    fractions = torch.tensor(sorted({f % (1 << 23) for f in fractions}), dtype=torch.int64)
    tops = torch.arange(512, dtype=torch.int64) << 23
    bits = (tops[:, None] | fractions).flatten()
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    return bits[: len(bits) // 8 * 8].view(torch.float32).view(-1, 8)


class TestConvert:
    @pytest.mark.parametrize(("stored", "dense"), CONVERSIONS, ids=str)
    def test_all_halves_and_every_exponent_and_tie(self, kernels, stored, dense):
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(-1, 8)
        check_converted(kernels, interesting_floats() if stored == torch.float32 else halves.view(stored), dense)

    @pytest.mark.parametrize(("stored", "dense"), CONVERSIONS, ids=str)
    def test_dims_strides_and_launches(self, kernels, stored, dense):
        generator = torch.Generator().manual_seed(0)
        for dim in (*range(1, 19), 24, 32, 100, 256, 300, 1032):
            for padding, offset in ((0, 0), (8, 0), (1, 0), (0, 1), (4, 4), (2, 6)):
                launch = LAUNCHES[(dim + padding) % len(LAUNCHES)]
                memory = torch.randn(NUM_ROWS * (dim + padding) + 8, generator=generator).to(stored)
                plane = memory[offset:].as_strided((NUM_ROWS, dim), (dim + padding, 1), offset)
                index = torch.randperm(NUM_ROWS, generator=generator)[:23]
                rows = torch.zeros(23 * dim + 4, dtype=dense)[offset % 3 :][: 23 * dim].view(23, dim)
                kernels.launch("gather_converted", *launch, pack([plane], index, [rows]))
                same_values(rows, plane[index].to(dense))
                rows.copy_(torch.randn(23, dim, generator=generator))
                want = memory.clone()
                want[offset:].as_strided((NUM_ROWS, dim), (dim + padding, 1), offset)[index] = rows.to(stored)
                kernels.launch("scatter_converted", *launch, pack([plane], index, [rows]))
                same_values(memory, want)  # padding and idle rows as they were


def test_widest_lane_that_divides_everything():
    for dim, offset, stride, lane_bytes in [(4, 0, 4, 16), (6, 0, 6, 8), (33, 0, 33, 4), (4, 1, 4, 4), (4, 0, 5, 4)]:
        memory, rows = torch.zeros(1000), torch.zeros(1000)
        plane = memory[-memory.data_ptr() % 16 // 4 + offset :][: 5 * stride].view(5, stride)[:, :dim]
        rows = rows[-rows.data_ptr() % 16 // 4 :][:dim].view(1, dim)
        words = pack_plane(plane, rows)
        assert words[:2] == (plane.data_ptr(), rows.data_ptr())
        assert words[2:5] == (stride * 4, dim * 4 // lane_bytes, lane_bytes)
