"""Counts what a step does on the emulated GPU: see launches.py."""

from __future__ import annotations

import ctypes
import gc
import json
import linecache
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakegpu
import torch
from store import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from warm_steps import FORMS, Sizes

sys.path.insert(0, str(ROOT / "tests"))
from gpu import emulated

WARM, TIMED = 5, 40
RETURN_ZERO = b"\x31\xc0\xc3"  # xor eax, eax; ret
MATRIX = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")  # by cuBLAS, which is not emulated
HERE = Path(__file__).name


def count(build: Callable[..., Callable[[], Any]], sizes: Any, folder: Path) -> dict[str, Any]:
    """Return what a warm step does: launches, operations, waits by where they come from, copies, allocations, host time."""
    emulated.install()
    step = build(sizes, torch.device("cuda", 0), folder)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()  # what it frees would be a wait of no step
    with watching() as watch:
        step()
    with without_values():
        for _ in range(WARM):
            clear_free_memory(everything=True)
            step()
        clear_free_memory()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        with fakegpu.recorded() as calls:
            step()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
        seconds = []
        for _ in range(TIMED):
            clear_free_memory()
            step()  # what was cleared is not in the cache
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
    found: dict[str, Counter[str]] = {"launch": Counter(), "copy": Counter(), "memset": Counter(), "alloc": Counter()}
    for call in calls:
        kind, _, text = call.partition(": ")
        if kind in found:
            found[kind][_kernel(text) if kind == "launch" else re.sub(r" \d+$", "", text)] += 1
    products = {f"cuBLAS {name}": n for name, n in watch.operations.items() if name in MATRIX}
    return {
        "launches": dict(found["launch"] + Counter(products)),
        "operations": dict(watch.operations),
        "waits": dict(watch.waits),
        "waits_without_values": len(re.findall(r"(?:wait: .*\n)+", "\n".join([*calls, ""]))),
        "copies": dict(found["copy"] + found["memset"]),
        "allocations": dict(found["alloc"]),
        "tensors_allocated": allocated,
        "host_us": round(1e6 * min(seconds), 1),
    }


def _kernel(text: str) -> str:
    """Return the name of a kernel without what it is instantiated with."""
    text = text.removeprefix("of torch, NOT EMULATED: ").removeprefix("of CuPy, NOT EMULATED: ")
    text = re.sub(r" \d+x\d+$", "", text.removeprefix("void "))
    return re.sub(r"\(anonymous namespace\)::|at::native::|at_cuda_detail::|cub::[^:]*::", "", text).split("(")[0][:60]


# --- with values --------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Notes torch's operations on the device, and every wait of the host with the line it comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation, and look at what it has called."""
        name = func._schema.name.partition("::")[2]
        result = func(*args, **(kwargs or {}))
        self.look(sys._getframe(1))
        values = torch.utils._pytree.tree_leaves((args, kwargs, result))
        if any(map(fakegpu.is_cuda, values)) and fakegpu.kind_of(func) != "real":
            self.operations[name] += 1
        return result

    def profile(self, frame: Any, event: str, _: Any) -> None:
        """See waits that are no operation of torch: of streams, events, CuPy."""
        if event == "c_return":
            self.look(frame)

    def look(self, frame: Any) -> None:
        """Note a wait since the last look as one of `frame`."""
        calls = [fakegpu.fake.fakecuda_event(i) for i in range(self._seen, fakegpu.fake.fakecuda_count())]
        self._seen += len(calls)
        # A copy that waits is followed by a wait for its stream: one wait.
        if any(call.startswith(b"wait: ") for call in calls):
            self.waits[_source(frame)] += 1


def _source(frame: Any) -> str:
    """Return the innermost line of this package that `frame` was called from, else of torch, else of the form."""
    lines = [(Path(entry.f_code.co_filename), line, entry) for entry, line in traceback.walk_stack(frame)]
    for folder in (ROOT / "speedtransfer", Path(torch.__file__).parent / "optim", ROOT):
        for path, line, entry in lines:
            if folder in path.parents and path.name != HERE:
                shown = path.relative_to(ROOT) if ROOT in path.parents else Path("torch", "optim", path.name)
                text = linecache.getline(str(path), line).strip()
                return f"{shown}:{line} {entry.f_code.co_name}: {text[:70]}"
    return "backward of torch"


@contextmanager
def watching() -> Iterator[Watch]:
    """Watch the body."""
    with fakegpu.recorded(), Watch() as watch:
        sys.setprofile(watch.profile)
        try:
            yield watch
        finally:
            sys.setprofile(None)
            watch.look(sys._getframe(1))


# --- without ------------------------------------------------------------------------------------------------------------


@contextmanager
def without_values() -> Iterator[None]:
    """Let torch launch its own kernels, which do nothing here, and let ours do nothing as well."""
    kernels = Path(os.environ["FAKE_KERNELS"])
    for path in [*kernels.glob("*.so"), *(Path(p) for p in _loaded("libcublas"))]:
        _silence(path, "cpu_" if path.parent == kernels else "cublas")
    fakegpu.MODE.__exit__(None, None, None)
    yield
    fakegpu.MODE.__enter__()


def clear_free_memory(everything: bool = False) -> None:
    """Fill the memory that torch holds for new tensors, only small ones unless `everything`, with zeros.

    A count that the host fetches from there is none.
    """
    torch.cuda.synchronize()
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "inactive" and (everything or segment["segment_type"] == "small"):
                ctypes.memset(block["address"], 0, block["size"])


def _loaded(name: str) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if f"/{name}" in line}


def _silence(path: Path, prefix: str) -> None:
    """Let the functions of a library, those whose names start with `prefix`, return 0 at once."""
    library, libc = ctypes.CDLL(str(path)), ctypes.CDLL(None)
    names = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True).stdout
    for name in (line.split()[-1].partition("@")[0] for line in names.splitlines()):
        if name.startswith(prefix):
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
            if libc.mprotect(ctypes.c_void_p(address & ~4095), ctypes.c_size_t(8192), 7):
                raise OSError(f"cannot change {name} in {path.name}")
            ctypes.memmove(address, RETURN_ZERO, len(RETURN_ZERO))


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as files:
        answer = count(FORMS[described["form"]].build, Sizes(**described["sizes"]), Path(files))
    Path(described["result"]).write_text(json.dumps(answer), encoding="utf-8")
