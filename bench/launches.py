"""Counts what a warm training step of each form asks of a GPU: kernels, waits of the host, copies, allocations, and the CPU
time of the host. It needs no GPU but an emulated one, ``cuda-emulator``, which is not part of the repository:

    cuda-emulator/run python bench/launches.py                    # every form, some minutes
    cuda-emulator/run python bench/launches.py --only lazy        # forms with "lazy" in their name
    cuda-emulator/run python bench/launches.py --write            # into bench/launches.json

The table says "before > now" beside the figures that the file has.

Each form has a process of its own. It takes steps with values first, one of them watched: what torch does, and how often the
host waits (tests/gpu/test_waits.py says for what). Then torch's operations and our kernels do nothing when they are launched,
so that all launches are seen, those within an operation too, and the time is that of the host. Free memory of the device is
zero then, so that where the host fetches a number of rows there is one row. Products of matrices are counted as one launch
each. The time is the CPU time of all threads in the shortest of the steps (others may use the machine), without a driver: add
2 to 3 us a launch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from store import ROOT, header, read, write
from torch.utils._python_dispatch import TorchDispatchMode
from warm_steps import FORMS, Sizes

from speedtransfer.benchmark.memory import in_process
from speedtransfer.cuda import launch
from speedtransfer.errors import SpeedtransferError

try:
    import fakegpu  # of the emulated GPU
except ImportError:
    fakegpu = None

PATH = ROOT / "bench" / "launches.json"  # of an emulated device, so that it is no result of one
OURS = "gather_", "scatter_"
COLUMNS = {
    "launches": lambda r: sum(r["launches"].values()),
    "ours": lambda r: sum(n for name, n in r["launches"].items() if name.startswith(OURS)),
    "torch ops": lambda r: sum(r["operations"].values()),
    "waits": lambda r: sum(r["waits"].values()),
    "copies": lambda r: sum(r["copies"].values()),
    "allocs": lambda r: sum(r["allocations"].values()),
    "host us": lambda r: round(r["host_us"]),
}
WARM, TIMED = 5, 40
SIZES = Sizes(rows=1_000_000, lookups=98_304, dim=128)
RETURN_ZERO = b"\x31\xc0\xc3"  # xor eax, eax; ret
MATRIX = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")  # by cuBLAS, which is not emulated


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench/launches.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="forms with that in their name")
    parser.add_argument("--write", action="store_true", help="write the result; of --only into what is there")
    args = parser.parse_args(arguments)
    if fakegpu is None:
        print("error: this counts on the emulated GPU; run it by cuda-emulator/run (see --help)", file=sys.stderr)
        return 2
    about = header("launches")
    before = read(PATH)["forms"] if PATH.exists() else {}
    forms: dict[str, Any] = {}
    print(_line(["form", *COLUMNS]), flush=True)
    os.environ.setdefault("FAKE_DEVICE_BYTES", str(8 << 30))
    for name in (name for name in FORMS if not args.only or any(text in name for text in args.only)):
        with tempfile.TemporaryDirectory() as folder:
            # Without a calibration that an emulated run has left: it would choose the engine.
            os.environ["SPEEDTRANSFER_CACHE"] = folder
            try:
                forms[name] = in_process(count, name, Path(folder))
                old, new = before.get(name, {}), forms[name]
                cells = (
                    (f"{value(old):,} > " if "waits" in old else "") + f"{value(new):,}" for value in COLUMNS.values()
                )
                print(_line([name, *cells]), flush=True)
            except SpeedtransferError as error:
                forms[name] = {"error": str(error)}
                print(f"{name:40} {error}", flush=True)
    if args.write:
        complete = set(forms) >= set(FORMS)
        write(PATH, {**about, "sizes": SIZES._asdict(), "forms": {**before, **forms}, "complete": complete})
        print(f"wrote {PATH.relative_to(ROOT)}")
    return int(any("error" in result for result in forms.values()))


def _line(cells: list[str]) -> str:
    return f"{cells[0]:40}" + "".join(f"{cell:>16}" for cell in cells[1:])


# --- in a process of its own --------------------------------------------------------------------------------------------


def count(form: str, folder: Path) -> dict[str, Any]:
    """Return what a warm step does: launches, operations, waits, copies, allocations, host time.

    Files of tables go to `folder`.
    """
    # So that ours are told from those of torch.
    launch.get_function = lambda module, name: module.get_function(name if name.startswith(OURS) else f"gather_{name}")
    step = FORMS[form].build(SIZES, torch.device("cuda", 0), folder)
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()  # what it frees would be a wait of no step
    with fakegpu.recorded() as with_values, Operations() as operations:
        step()
    with without_values():
        for _ in range(WARM):
            clear_free_memory(everything=True)
            step()
        clear_free_memory()
        with fakegpu.recorded() as calls:
            step()
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
    products = {f"cuBLAS {name}": n for name, n in operations.found.items() if name in MATRIX}
    # A copy that waits is followed by a wait for its stream: one wait.
    pairs = zip(["", *with_values], with_values, strict=False)
    waits = Counter(call for before, call in pairs if call.startswith("wait: ") and not before.startswith("wait: "))
    return {
        "launches": dict(found["launch"] + Counter(products)),
        "operations": dict(operations.found),
        "waits": dict(waits),
        "copies": dict(found["copy"] + found["memset"]),
        "allocations": dict(found["alloc"]),
        "host_us": round(1e6 * min(seconds), 1),
    }


def _kernel(text: str) -> str:
    text = text.removeprefix("of torch, NOT EMULATED: ").removeprefix("of CuPy, NOT EMULATED: ")
    text = re.sub(r" \d+x\d+$", "", text.removeprefix("void "))
    return re.sub(r"\(anonymous namespace\)::|at::native::|at_cuda_detail::|cub::[^:]*::", "", text).split("(")[0][:60]


# --- with values --------------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts torch's operations on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        values = torch.utils._pytree.tree_leaves((args, kwargs, result))
        if any(map(fakegpu.is_cuda, values)) and fakegpu.kind_of(func) != "real":
            self.found[func._schema.name.partition("::")[2]] += 1
        return result


# --- without ------------------------------------------------------------------------------------------------------------


@contextmanager
def without_values() -> Iterator[None]:
    """Let torch launch its own kernels, which do nothing here, and let ours do nothing as well."""
    kernels = Path(os.environ["FAKE_KERNELS"])
    maps = Path("/proc/self/maps").read_text().splitlines()
    cublas = {Path(line.split()[-1]) for line in maps if "/libcublas" in line}
    for path in [*kernels.glob("*.so"), *cublas]:
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
    sys.exit(main())
