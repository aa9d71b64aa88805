"""The kernels of speedtransfer/kernels built for the CPU by g++, under the shim in tests/shim."""

from __future__ import annotations

import ctypes
import importlib.resources
import shutil
import subprocess
from pathlib import Path

import numpy as np

COMPILER = shutil.which("g++")


class CpuKernels:
    """Built into `folder`. Call ``gather_rows(blocks, threads, move)``, or ``scatter_rows``, as a launch."""

    def __init__(self, folder: Path) -> None:
        assert COMPILER is not None
        shim = Path(__file__).parent / "shim"
        library = folder / "rows.so"
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        # The compiler cannot know that a lane is written only where it was read.
        flags += ["-Wno-maybe-uninitialized"]
        with importlib.resources.as_file(importlib.resources.files("speedtransfer.kernels")) as kernels:
            command = [COMPILER, *flags, f"-I{shim}", f"-I{kernels}", "-o", str(library), str(shim / "rows.cpp")]
            subprocess.run(command, check=True, capture_output=True, text=True)
        self._library = ctypes.CDLL(str(library))
        self._library.size_of_move.restype = ctypes.c_longlong

    @property
    def move_bytes(self) -> int:
        return self._library.size_of_move()

    def gather_rows(self, blocks: int, threads: int, move: np.ndarray) -> None:
        self._run("cpu_gather_rows", blocks, threads, move)

    def scatter_rows(self, blocks: int, threads: int, move: np.ndarray) -> None:
        self._run("cpu_scatter_rows", blocks, threads, move)

    def _run(self, name: str, blocks: int, threads: int, move: np.ndarray) -> None:
        function = getattr(self._library, name)
        function.restype = ctypes.c_longlong
        misaligned = function(ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_void_p(move.ctypes.data))
        assert misaligned == 0, f"{misaligned} reads of {name} were not aligned to their lane"
