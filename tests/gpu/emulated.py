"""Lets an emulated device run the kernels of this package that it does not know: built under tests/shim, as for the CPU.

An emulator that sets FAKE_KERNELS looks for the kernel "gather_x" or "scatter_x" in ``$FAKE_KERNELS/x.so``, as "cpu_gather_x",
and ignores kernels of other names. So those get a name like that here.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import cpu_kernels

from speedtransfer.cuda import launch

_KNOWN = ("gather_", "scatter_")


def install() -> None:
    """Build the kernels and let launches find them; without an emulator nothing happens."""
    folder = os.environ.get("FAKE_KERNELS")
    if folder is None or launch.get_function is _function:
        return
    sources = importlib.resources.files("speedtransfer.kernels")
    for path in sorted(cpu_kernels.SHIM.glob("*.cpp")):
        code = sources.joinpath(f"{path.stem}.cu").read_text(encoding="utf-8")
        names = [name for name in re.findall(r"__global__ void (\w+)\(", code) if not name.startswith(_KNOWN)]
        missing = [name for name in names if not Path(folder, f"{name}.so").exists()]
        if missing:
            with tempfile.TemporaryDirectory(dir=folder) as made:
                flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-DKERNEL_PREFIX=cpu_gather_"]
                cpu_kernels.build_kernels(Path(made), [path.stem], flags)
                built = Path(folder, f"shim-{path.stem}.so")
                os.replace(Path(made, f"{path.stem}.so"), built)
            for name in missing:
                link = Path(folder, f"{name}.so.{os.getpid()}")
                link.symlink_to(built)
                os.replace(link, Path(folder, f"{name}.so"))
    launch.get_function = _function


def _function(module: Any, name: str) -> Any:
    return module.get_function(name if name.startswith(_KNOWN) else f"gather_{name}")
