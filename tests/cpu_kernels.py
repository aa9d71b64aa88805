"""The kernels of speedtransfer/kernels built for the CPU by g++, under the shim in tests/shim."""

import ctypes
import functools
import hashlib
import importlib.resources
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from compiled_once import locked

from speedtransfer.cuda import ARGUMENT_AT

# What compares the kernels of a source with torch before they are trusted: small calls of each.
CHECKS = {
    "catch_up.cu": ("speedtransfer.idle.missed:_check_kernel", "speedtransfer.idle.replay:_check_kernel"),
    "codecs.cu": ("speedtransfer.encoding.cuda_codecs:_check",),
    "ids.cu": ("speedtransfer.vocabulary.device_map:_are_right",),
    "step.cu": ("speedtransfer.optim.fused_step:_check",),
    "sums.cu": ("speedtransfer.tables.padded:_check_sums",),
    "unique.cu": ("speedtransfer.tables.padded:_check_unique",),
    "word2vec.cu": ("speedtransfer.word2vec.gradients:_check_kernel",),
}
MOVING = ("cache.cu", "convert.cu", "rows.cu")  # tests of their own

SHIM = Path(__file__).parent / "shim"
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
# What C++ leaves undefined ends the process, as a fault would: shifts and 64-bit offsets must be right on any compiler.
FLAGS += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]


# As pytest keeps other folders. They are built anew when a source, a flag or the compiler has changed.
BUILDS = Path(__file__).parents[1] / ".pytest_cache" / "d" / "kernels"


@functools.cache
def cpu_kernels():
    """Return the kernels, which are built if nobody has; the test is skipped without g++."""
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    BUILDS.mkdir(parents=True, exist_ok=True)
    folder = BUILDS / _digest()
    with locked(BUILDS):
        if not folder.exists():
            made = Path(tempfile.mkdtemp(dir=BUILDS))
            build_kernels(made)
            made.rename(folder)
    return CpuKernels(folder)


def _digest():
    """Return a name for what is built of these sources by this compiler with these flags."""
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True, check=True).stdout
    found = hashlib.sha256(version + " ".join(FLAGS).encode())
    with importlib.resources.as_file(importlib.resources.files("speedtransfer.kernels")) as kernels:
        for path in sorted([*SHIM.iterdir(), *kernels.iterdir()]):
            if path.is_file():
                found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def build_kernels(folder):
    """Build ``shim/<source>.cpp`` into ``folder/<source>.so``, all at the same time."""
    with importlib.resources.as_file(importlib.resources.files("speedtransfer.kernels")) as kernels:
        command, pipes = ["g++", *FLAGS, f"-I{SHIM}", f"-I{kernels}", "-o"], {"stderr": subprocess.PIPE, "text": True}
        sources = sorted(SHIM.glob("*.cpp"))
        builds = [subprocess.Popen([*command, folder / f"{path.stem}.so", path], **pipes) for path in sources]
        for build in builds:
            _, errors = build.communicate()
            assert build.returncode == 0, errors


class CpuKernels:
    def __init__(self, folder):
        self._libraries = {path.stem: ctypes.CDLL(str(path)) for path in sorted(folder.glob("*.so"))}

    @property
    def move_bytes(self):
        """Size of the argument as C++ sees it."""
        return self._ask("size_of_move")

    @property
    def lanes_read(self):
        """Lanes read by the last launch of rows.cu."""
        return self._ask("lanes_read_by_rows")

    def _ask(self, name):
        function = getattr(self._libraries["rows"], name)
        function.restype = ctypes.c_longlong
        return function()

    def launch(self, function, blocks, threads, move, backwards=False, shared_bytes=0):
        """Run `function` ("gather_rows", ...) on the argument `move`; `backwards`: the last thread comes first."""
        library = next(lib for lib in self._libraries.values() if hasattr(lib, f"cpu_{function}"))
        if hasattr(library, "set_engine"):
            library.set_engine(shared_bytes)
        call = getattr(library, f"cpu_{function}")
        call.restype = ctypes.c_longlong
        size = ctypes.c_uint(blocks), ctypes.c_uint(threads)
        mistakes = call(*size, ctypes.c_void_p(ctypes.addressof(move) + ARGUMENT_AT), ctypes.c_int(backwards))
        assert mistakes == 0, f"{function} broke {mistakes} rules: alignment, waits, places in shared memory"


def launch_by_cpu(monkeypatch, module):
    """Let a module launch kernels on the CPU, in launches of odd sizes; return their names, one for each launch."""
    kernels, made = cpu_kernels(), list[str]()

    def launch(items, source, name, device, packed, on_host=False):
        assert on_host == (source in ("cache.cu", "step.cu") and name != "find_slots")
        if items:
            made.append(name)
            size = [(1, 1), (2, 32), (3, 7), (5, 64)][len(made) % 4]
            kernels.launch(name, *size, packed, backwards=bool(len(made) % 3))

    monkeypatch.setattr(module, "launch_over", launch)
    return made
