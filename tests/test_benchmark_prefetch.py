"""Suite `prefetch`: pages are dropped for real, no page is wanted twice, every method runs, and its results are reported."""

from __future__ import annotations

import contextlib
import gc
import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from speedtransfer.benchmark import prefetch
from speedtransfer.benchmark.cold_tables import (
    DIM,
    ColdTables,
    TableFiles,
    read_page_by_page,
)
from speedtransfer.benchmark.measure import Group, measure
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.page_cache import PAGE, PagesStayError, read_pages
from speedtransfer.tables import Table

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
ROWS = 4096


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Small ones, where pages can be dropped."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = ColdTables(ROWS, seed=0)
    try:
        made.files.drop()
    except PagesStayError as error:
        pytest.skip(str(error))
    return made


# --- pages ------------------------------------------------------------------------------------------------------------


def test_pages_of_all_planes_are_dropped_and_nothing_is_lost(tables):
    table = tables.in_file[0].table
    assert tables.files.names == ("weight", "exp_avg", "exp_avg_sq")
    before = {name: table.stored(name).clone() for name in table.planes}
    table.scatter([5], torch.full((1, DIM), 3.0))
    before["weight"][5] = 3.0
    assert tables.files.share_in_memory() > 0.9
    tables.drop_pages()
    assert tables.files.share_in_memory() < 0.01
    assert all(torch.equal(table.stored(name), values) for name, values in before.items())


def test_single_rows_bring_single_pages(tables):
    table = tables.in_file[0].table
    rows = tables.ids(8).sort().values
    tables.drop_pages()
    table.read(rows, ["weight"])
    pages = 3 * math.ceil((4 * DIM * ROWS + 128) / PAGE)
    assert 8 <= round(tables.files.share_in_memory() * pages) <= 10


@pytest.mark.parametrize("threads", [1, 3])
def test_plain_reads_bring_the_pages_of_the_rows(tables, threads):
    table, rows = tables.in_file[0].table, tables.ids(50)
    names = ["weight", "exp_avg_sq"]
    tables.drop_pages()
    read_pages(tables.files.pages(rows, names), threads)
    brought = tables.files.share_in_memory()
    table.read(rows, names)
    assert brought == tables.files.share_in_memory() > 0


def test_plain_reads_read_what_the_table_has(tables):
    table = tables.in_file[0].table
    ((descriptor, pages),) = tables.files.pages(torch.tensor([17]), ["exp_avg"])
    page = np.frombuffer(os.pread(descriptor, PAGE, int(pages[0]) * PAGE), dtype=np.float32)
    assert table.stored("exp_avg")[17, 0].item() in page


def test_a_table_in_memory_has_no_pages_to_drop():
    with pytest.raises(PagesStayError, match="'weight' lies in no file"):
        TableFiles(Table(10, 4, memory="pageable", device="cpu"))


def test_pages_that_stay_are_an_error(tables, monkeypatch):
    monkeypatch.setattr(TableFiles, "share_in_memory", lambda self: 0.5)
    with pytest.raises(PagesStayError, match=r"50% of the pages .* TMPDIR"):
        tables.drop_pages()


@pytest.mark.parametrize("before", [None, "5e9"])
def test_memory_is_only_pretended(monkeypatch, before):
    monkeypatch.delenv("SPEEDTRANSFER_HOST_BYTES", raising=False)
    if before is not None:
        monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", before)
    with contextlib.suppress(KeyError), read_page_by_page(4000):
        assert os.environ["SPEEDTRANSFER_HOST_BYTES"] == "1000"
        raise KeyError
    assert os.environ.get("SPEEDTRANSFER_HOST_BYTES") == before


def test_descriptors_are_closed_and_files_are_gone(tables, tmp_path):
    assert not list(tmp_path.iterdir())
    files = {descriptor: os.fstat(descriptor).st_ino for descriptor in tables.files.descriptors.values()}
    del tables.__dict__["files"]
    gc.collect()
    for descriptor, inode in files.items():
        with contextlib.suppress(OSError):  # another file may have the number already
            assert os.fstat(descriptor).st_ino != inode


# --- ids and tables ---------------------------------------------------------------------------------------------------


def test_no_page_is_wanted_twice():
    tables = ColdTables(ROWS, seed=0)
    for _ in range(3):
        ids = tables.ids(5, 16, 2)
        assert ids.shape == (5, 16, 2)
        assert len((ids // 16).unique()) == 160
        assert 0 <= ids.min() <= ids.max() < ROWS
        assert ((128 + ids % 16 * 256) // PAGE == (128 + ids % 16 * 256 + 255) // PAGE).all()


def test_more_ids_than_pages():
    ids = ColdTables(20, seed=0).ids(100)
    assert len(ids) == 100
    assert ids.max() < 20


def test_both_tables_have_the_same_rows(tables):
    file, memory = tables.in_file[0].table, tables.in_memory[0].table
    assert file.planes == memory.planes
    assert all(torch.equal(file.stored(name), memory.stored(name)) for name in file.planes)


# --- the suite --------------------------------------------------------------------------------------------------------


def small(monkeypatch, rows: int = ROWS) -> list[Group]:
    monkeypatch.setattr(prefetch, "QUICK", prefetch.Sizes(examples=4, warm=5, steps=2, turns=1))
    return prefetch.groups(CPU, True, rows=rows, seed=1)


def test_every_method_is_measured(tables, monkeypatch, tmp_path):
    found = [measure(group, CPU, **FAST) for group in small(monkeypatch)]
    assert [group.params["experiment"] for group in found] == [prefetch.TRAINING, prefetch.EVALUATION]
    for group in found:
        assert not [case.error for case in group.cases if case.error]
        assert [case.name for case in group.ran] == [
            "without prefetch",
            "prefetch, depth 1",
            "prefetch, depth 2",
            "prefetch, depth 4",
            "table in memory",
            "reads of the same pages on 1 thread",
            "reads of the same pages on 32 threads",
        ]
        planes = 3 if group.params["experiment"] == prefetch.TRAINING else 1
        assert group.ran[0].payload_bytes == planes * 32 * PAGE
    assert not list(tmp_path.iterdir())


def test_training_by_prefetch_and_without_is_the_same(tables, monkeypatch):
    """The dense part and the rows: one method on the file, the other in memory, with the same ids."""
    monkeypatch.setattr(tables, "drop_pages", lambda: None)
    sizes, batches = prefetch.Sizes(4, 3, 5, 1), tables.ids(10, 4, prefetch.FIELDS)
    monkeypatch.setattr(tables, "ids", lambda count, *rest: batches[:count])
    ends = []
    for depth, in_file in ((2, True), (0, False)):
        dense = prefetch._Dense(8, sizes.examples)
        method = prefetch._Runs(tables, dense, sizes, True, depth, in_file)
        method.before()
        method.run()
        ends.append([parameter.detach() for parameter in dense.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    file, memory = tables.in_file[0].table, tables.in_memory[0].table
    assert all(torch.equal(file.stored(name), memory.stored(name)) for name in file.planes)


def test_a_wrong_row_is_noticed(tables, monkeypatch):
    method = small(monkeypatch)[0].make()[2].run.__self__
    method.run()
    method.check()
    emb = method.tables.in_file[0]
    monkeypatch.setattr(type(emb), "forward", lambda self, ids: torch.zeros(4, prefetch.FIELDS, DIM))
    with pytest.raises(AssertionError, match="not those of the table"):
        method.check()


def test_as_many_batches_are_read_ahead_as_are_taken(tables, monkeypatch):
    sizes, asked = prefetch.Sizes(4, 5, 6, 1), []
    used = SimpleNamespace(is_waiting=False, is_changed=lambda: False, part=None)
    monkeypatch.setattr(type(tables.in_file[0]), "prefetch", lambda self, ids: asked.append(ids) or used)
    method = prefetch._Runs(tables, prefetch._Dense(8, 4), sizes, True, depth=4)
    method.before()
    assert len(asked) == 9
    method.run()
    assert len(asked) == 15


# --- what is said -------------------------------------------------------------------------------------------------------


def said(*ahead: float, without: float = 50e-3, memory: float = 10e-3) -> list[str]:
    """What is said of each case, reading ahead or not."""
    times = {
        prefetch.WITHOUT: without,
        **{f"{prefetch.AHEAD}{i}": s for i, s in enumerate(ahead)},
        prefetch.IN_MEMORY: memory,
    }
    group = GroupResult("a step", {}, [CaseResult(name, "ours", 0, [seconds] * 5) for name, seconds in times.items()])
    return [prefetch.describe(group, case) for case in group.cases]


def test_what_is_hidden_is_said():
    assert said(30e-3, 20e-3) == ["", "50% of the waiting hidden", "75% of the waiting hidden", ""]


def test_nothing_is_hidden_where_nothing_waits_or_reading_ahead_is_slower():
    assert said(51e-3, 50e-3)[1:3] == ["none of the waiting hidden"] * 2
    assert said(9e-3, without=9e-3)[1] == "none of the waiting hidden"
