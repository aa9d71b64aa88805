"""Maps of large files: the system is told that rows are touched at random, and passes read ahead all the same."""

from __future__ import annotations

import gc
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
    return st.Table.load(path, "mmap", "cpu")


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


@linux
@pytest.mark.parametrize("lacking", ["system", "memory"])
def test_not_told_where_nobody_knows(tmp_path, monkeypatch, all_large, lacking):
    if lacking == "system":
        monkeypatch.setattr(advice, "_CAN_ADVISE", False)
    else:
        monkeypatch.setattr(advice, "physical_bytes", lambda: 0)
    assert not at_random(st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu").torch())


def test_other_memories_are_left_alone(tmp_path, all_large):
    before = len(advice._at_random)
    st.Table(ROWS, DIM, memory="pageable", device="cpu").fill_(1).save(tmp_path / "t.npy")
    table = st.Table.load(tmp_path / "t.npy", "pageable", "cpu")
    assert table.torch().eq(1).all()
    assert len(advice._at_random) == before


def test_a_plane_that_is_dropped_is_forgotten(tmp_path, all_large):
    gc.collect()  # what other tests left
    before = len(advice._at_random)
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.npy", device="cpu")
    table.add_plane("exp_avg")
    assert len(advice._at_random) == before + 2
    table.drop_plane("exp_avg")
    gc.collect()
    assert len(advice._at_random) == before + 1
    del table
    gc.collect()
    assert len(advice._at_random) == before


def save(table, folder):
    table.save(folder / "copy.safetensors")
    return st.Table.load(folder / "copy.safetensors", "pageable", "cpu").torch()


def gather_in_runs(table, folder):
    return torch.cat([table[start : start + 10_000] for start in range(0, ROWS, 10_000)])


PASSES = {
    "save": save,
    "checkpoint": lambda table, folder: torch.cat([chunk.clone() for chunk in read_chunks(table.torch())]).view(
        ROWS, DIM
    ),
    "copy": lambda table, folder: table.astype(torch.float32).torch(),
    "gather": gather_in_runs,
    "init_": lambda table, folder: table.init_(lambda chunk: None).torch().clone(),
}


@linux
@pytest.mark.parametrize("suffix", [".npy", ".safetensors"])
@pytest.mark.parametrize("name", PASSES)
def test_passes_read_ahead(tmp_path, all_large, name, suffix):
    values = numbers((ROWS, DIM), torch.float32)
    table = evicted(tmp_path / f"t{suffix}", values)
    faults, result = disk_faults(lambda: PASSES[name](table, tmp_path))
    assert faults < 200  # page by page 1100 of them, where the file was evicted
    assert_same_bits(result, values)


def test_rows_of_a_large_file(tmp_path, all_large):
    values, order = numbers((ROWS, DIM), torch.float32), torch.randperm(ROWS)
    table = st.Table(ROWS, DIM, memory="mmap", path=tmp_path / "t.safetensors", device="cpu")
    table.scatter(order, values)
    for index in (order[:1000], torch.arange(ROWS - 300, ROWS), torch.arange(7, 7 + 256), torch.arange(255), 5):
        expected = torch.empty_like(values)
        expected[order] = values
        assert_same_bits(table.gather(index), expected[index])
