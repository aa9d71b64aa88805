"""The CUDA kernels without a GPU: compiled for every architecture. What they do, on the CPU: test_engines.py, for one."""

import ctypes
import importlib
import importlib.resources
import inspect
import re

import nvrtc
import pytest
import torch
from cases import elsewhere
from cpu_kernels import CHECKS, MOVING, cpu_kernels

from speedtransfer.cuda import ARGUMENT_AT, kernel_source
from speedtransfer.cuda.launch import argument_memory
from speedtransfer.engines.mapped import _MOVES, pack_plane

SOURCES = sorted(
    entry.name for entry in importlib.resources.files("speedtransfer.kernels").iterdir() if entry.name.endswith(".cu")
)
WIDE = ("cache.cu", "rows.cu", "step.cu", "word2vec.cu")


def test_the_sanitizer_sees_every_source():
    assert sorted({*CHECKS, *MOVING}) == SOURCES
    for check in (check for every in CHECKS.values() for check in every):
        module, _, name = check.partition(":")
        assert f"{name}(" in inspect.getsource(importlib.import_module(module)).partition("is_trusted(")[2], check


@pytest.mark.skipif(nvrtc.library() is None, reason="nvidia-cuda-nvrtc is not installed")
@pytest.mark.timeout(200)  # of some loops a compiler finds no end
class TestCompile:
    @pytest.mark.parametrize("which", [0, -1], ids=["oldest", "newest"])
    @pytest.mark.parametrize("source", SOURCES)
    def test_compiles(self, source, which):
        """To code for no device: the last step, of which each architecture has its own, takes seconds."""
        self.check_code(source, "compute_90", which)

    def kernels_of(self, source):
        names = re.findall(r'extern "C" __global__ void (\w+)\(', kernel_source(source))
        assert names
        return names

    def check_code(self, source, architecture, which=-1):
        # On a thread of its own: the compiler of CUDA 12.1 leaves the locale, by which Python decodes, at C.
        text = kernel_source(source)
        code, log = elsewhere(lambda: nvrtc.compile_cubin(text, source, architecture, (), "PTX", which))
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


def test_the_argument_has_one_layout():
    assert _MOVES[-1].size == cpu_kernels().move_bytes <= ctypes.sizeof(argument_memory()) - ARGUMENT_AT


def test_widest_lane_that_divides_everything():
    for dim, offset, stride, lane_bytes in [(4, 0, 4, 16), (6, 0, 6, 8), (33, 0, 33, 4), (4, 1, 4, 4), (4, 0, 5, 4)]:
        memory, rows = torch.zeros(1000), torch.zeros(1000)
        plane = memory[-memory.data_ptr() % 16 // 4 + offset :][: 5 * stride].view(5, stride)[:, :dim]
        rows = rows[-rows.data_ptr() % 16 // 4 :][:dim].view(1, dim)
        words = pack_plane(plane, rows)
        assert words[:2] == (plane.data_ptr(), rows.data_ptr())
        assert words[2:5] == (stride * 4, dim * 4 // lane_bytes, lane_bytes)
