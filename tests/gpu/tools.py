"""What the tests of this folder share: page-locked tensors, work that holds a stream back."""

import contextlib
import functools
import gc
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import bits

import speedtransfer as st
from speedtransfer.cuda import pinned_empty
from speedtransfer.engines import MappedEngine, ReferenceEngine, StagedEngine, make_engine

try:
    import fakegpu  # the emulated GPU, which lists every call
except ImportError:
    fakegpu = None

HOLD_MS = 200  # far longer than any call here takes

# Engines by name, those that serve page-locked memory and that of the device, and all pairs of a memory and an engine.
ENGINES = {
    "mapped": MappedEngine,
    "staged": StagedEngine,
    "auto": lambda device: make_engine("pinned", device, "auto"),
    "reference": ReferenceEngine,
}
PINNED_ENGINES = ["mapped", "staged", "auto"]
DEVICE_ENGINES = ["mapped", "reference"]
WAYS = [
    *(("pinned", name) for name in PINNED_ENGINES),
    *(("device", name) for name in DEVICE_ENGINES),
    ("pageable", "staged"),
]

# Tables of every kind whose rows are read ahead, or shared out.
FORMS = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"idle": "lazy", "storage_dtype": torch.int8, "state_dtype": torch.uint8},
    "float8": {"idle": "lazy", "storage_dtype": torch.float8_e4m3fn, "scale_block": 5},
    "split24": {"idle": "lazy", "storage_dtype": "split24"},
    "max_norm": {"idle": "lazy", "max_norm": 1.0},
    "padding": {"idle": "exact", "padding_idx": 3},
}


def pinned(tensor):
    """Return a copy of a CPU tensor in page-locked memory."""
    memory = pinned_empty(tensor.numel() * tensor.element_size())
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def file_tensor(tensor, folder):
    """Return a copy of a CPU tensor in a file mapped into memory."""
    if tensor.numel() == 0:
        return tensor.clone()  # a file of no bytes cannot be mapped
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
    array = np.memmap(folder / f"plane{len(list(folder.iterdir()))}", np.uint8, "w+", shape=shape)
    return torch.from_numpy(array).view(tensor.dtype).copy_(tensor)


def store_in(memory, device, folder):
    """Return what copies a CPU tensor to where an engine for `memory` has its planes; "mmap" has a file in `folder`."""
    return {
        "pinned": pinned,
        "pageable": torch.clone,
        "mmap": lambda tensor: file_tensor(tensor, folder),
        "device": lambda tensor: tensor.to(device, copy=True),
    }[memory]


@pytest.fixture(autouse=True)
def no_garbage():
    """Page-locked memory that garbage collection finds is freed, and that waits for the device; for modules that import it."""
    gc.disable()
    yield
    gc.enable()


def embedding_in(memory, folder, device, *sizes, kind=st.Embedding, **options):
    """Return a module, or a table, with the first values of one seed in any memory; "mmap" has its file in `folder`."""
    if memory == "mmap":
        options["path"] = folder / f"rows{len(list(folder.iterdir()))}.safetensors"
    torch.manual_seed(3)
    return kind(*sizes, memory=memory, device=device, **options)


# --- time ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _cycles_per_ms():
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(50_000_000)  # the clock rises with work
    start.record()
    torch.cuda._sleep(20_000_000)
    stop.record()
    stop.synchronize()
    return 20_000_000 / start.elapsed_time(stop)


def hold(stream, milliseconds=HOLD_MS):
    """Keep `stream` busy and return the event of its end."""
    cycles = int(milliseconds * _cycles_per_ms())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        event = torch.cuda.Event()
        event.record(stream)
    return event


@contextlib.contextmanager
def synchronizing(mode):
    """Let torch's own waits for the device raise ("error"), or be listed in what this gives ("warn")."""
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            messages = [str(warning.message) for warning in caught]
            found += [text for text in messages if "Synchronization debug mode is a prototype" not in text]


# --- memory -------------------------------------------------------------------------------------------------------------


def resident_bytes():
    """Return the memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def allocated_bytes():
    """Return what tensors hold of the device, once garbage is gone."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def is_page_locked(pointer):
    """Ask CUDA itself whether there is page-locked memory at a host address."""
    from speedtransfer.cuda.status import load_cupy

    return int(load_cupy().cuda.runtime.pointerGetAttributes(pointer).type) == 1  # cudaMemoryTypeHost


def check_same(tensors, expected):
    """Compare the bits of tensors wherever they are."""
    for tensor, other in zip(tensors, expected, strict=True):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(bits(tensor.reshape(-1)), bits(other.reshape(-1)))
