"""Maps of large files: the system is told that rows are touched at random, and passes read ahead all the same."""

import mmap
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from cases import assert_same_bits, numbers

import speedtransfer as st
from speedtransfer.checkpoint.tensors import read_chunks
from speedtransfer.tables import page_advice as advice

ROWS, DIM = 70_000, 16  # 4.5 MB: 1100 pages, and not whole in a chunk that begins elsewhere
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


@pytest.fixture
def all_large(monkeypatch):
    monkeypatch.setattr(advice, "LARGE_PART", 1e-15)


def at_random(plane):
    """Ask the kernel whether the map that `plane` begins in was advised so."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found = int(match[1], 16) <= plane.data_ptr() < int(match[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "rr" in line.split()
    raise AssertionError("no map of this address")


def evicted(path, values):
    """Return a table in a file that is on the disk and, where the system complies, no longer in memory."""
    st.Table.from_array(values, "pageable", device="cpu").save(path)
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return st.Table.load(path, "mmap", "cpu", writable=True)


def disk_faults(run):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    result = run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before, result


@linux
@pytest.mark.parametrize(("parts", "told"), [(0.9, False), (1.1, True)])
def test_large_planes_only(tmp_path, monkeypatch, parts, told):
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(round(ROWS * DIM * 4 / advice.LARGE_PART / parts)))
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.safetensors", device="cpu")
    planes = [table.torch(), table.add_plane("exp_avg"), table.add_plane("step", 1, torch.int32)]
    assert [at_random(plane) for plane in planes] == [told, told, False]
    table.flush()
    assert at_random(st.Table.load(tmp_path / "t.safetensors", "mmap", "cpu").torch()) == told


def saved(table):
    copy = table.path.with_name("copy.safetensors")
    table.save(copy)
    return st.Table.load(copy, "pageable", "cpu").torch()


PASSES = {
    "save": saved,
    "checkpoint": lambda table: torch.cat([chunk.clone() for chunk in read_chunks(table.torch())]),
    "copy": lambda table: table.astype(torch.float32).torch(),
    "gather": lambda table: torch.cat([table[start : start + 10_000] for start in range(0, ROWS, 10_000)]),
    "init_": lambda table: table.init_(lambda chunk: None).torch().clone(),
}


@linux
@pytest.mark.parametrize("name", PASSES)
def test_passes_read_ahead(tmp_path, all_large, name):
    values = numbers((ROWS, DIM), torch.float32)
    table = evicted(tmp_path / "t.npy", values)
    faults, result = disk_faults(lambda: PASSES[name](table))
    assert faults < 200  # page by page 1100 of them, where the file was evicted
    assert_same_bits(result.view(ROWS, DIM), values)


@pytest.fixture
def asked(monkeypatch):
    """Return the ranges that the system is asked to read, as (first, last) page of a map."""
    ranges, ask = [], advice._advise_all

    def recorded(block, start, begins, ends):
        ranges.extend(zip((begins // mmap.PAGESIZE).tolist(), (-(-ends // mmap.PAGESIZE) - 1).tolist(), strict=True))
        ask(block, start, begins, ends)

    monkeypatch.setattr(advice, "_advise_all", recorded)
    return ranges


SPREAD = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:2000]
CALLS = {
    "gather": lambda table: table.gather(SPREAD),
    "sorted": lambda table: table.gather(SPREAD.sort().values),
    "read": lambda table: table.read(SPREAD, ["weight"])["weight"],
    "scatter": lambda table: table.scatter(SPREAD, torch.ones(2000, DIM)),
}


@linux
@pytest.mark.parametrize("name", CALLS)
def test_rows_that_are_on_the_disk_are_read_at_once(tmp_path, all_large, asked, name):
    values = numbers((ROWS, DIM), torch.float32)
    table = evicted(tmp_path / "t.safetensors", values)
    begin = table.torch().data_ptr() - advice.map_of(table.torch())[1]
    touched = {(begin + row * DIM * 4 + side) // mmap.PAGESIZE for row in SPREAD.tolist() for side in (0, DIM * 4 - 1)}
    faults, _ = disk_faults(lambda: CALLS[name](table))
    assert faults < 200  # page by page 900 of them, where the file was evicted
    if asked:  # nothing, where the system has kept the file
        assert {page for first, last in asked for page in range(first, last + 1)} == touched
    assert_same_bits(table.gather(SPREAD), torch.ones(2000, DIM) if name == "scatter" else values[SPREAD])


@linux
def test_no_more_is_asked_for_than_memory_holds(tmp_path, all_large, asked, monkeypatch):
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu")
    monkeypatch.setattr(advice, "physical_bytes", lambda: 80 * mmap.PAGESIZE)
    assert not table.gather(torch.arange(0, ROWS, 256)).any()
    assert len(asked) == 10
