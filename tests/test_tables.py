"""The table contract for every memory that works without a GPU, and what only one of them does."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import NPY_DTYPES, assert_same_bits, numbers, raising, refused
from refusals import check_refused, refusals
from table_cases import TableContract, TableOfRecords

import speedtransfer as st
from speedtransfer.cuda import cuda_status
from speedtransfer.errors import RowIndexError, StorageError
from speedtransfer.tables import unique_rows


class TestPageable(TableContract):
    memory = "pageable"


@pytest.mark.sweep
class TestPageableRecords(TableContract):
    memory, kind = "pageable", TableOfRecords


@pytest.mark.sweep
class TestDevice(TableContract):
    memory = "device"


class OnDisk(TableContract):
    memory = "mmap"
    added_plane = "'m'"

    def test_an_existing_path_is_not_overwritten(self):
        path = self.new_path(self.suffix)
        path.write_bytes(b"precious")
        with refused(StorageError, r"path .* exists and would be overwritten; open it with Table.load"):
            self.make(4, 4, path=path)
        assert path.read_bytes() == b"precious"

    def test_no_disk_space(self, monkeypatch):
        usage = shutil.disk_usage(self.folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with refused(StorageError, r"plane 'weight' asks for 1.6 kB but .* has 1 kB free; "):
            self.make(100, 4)
        table = self.make(10, 4)
        with pytest.raises(StorageError, match=f"plane {self.added_plane} asks for 4[01] kB"):
            table.add_plane("m", 1000)
        assert table.planes == ("weight",)
        assert len(list(self.folder.iterdir())) == 1

    def test_a_failure_leaves_nothing_behind(self, monkeypatch):
        monkeypatch.setattr(np, "memmap", raising(OSError(28, "No space left on device")))
        with refused(StorageError, "No space left on device"):
            self.make(4, 4)
        assert list(self.folder.iterdir()) == []

    def test_state_planes_leave_no_file(self):
        table = self.make(100, 4)
        table.add_plane("exp_avg", fill=1)
        table.add_plane("step", 1, torch.int32)
        assert list(self.folder.iterdir()) == [table.path]
        duplicate, converted = table.astype(torch.float64), table.astype(torch.bfloat16)
        assert duplicate.path is converted.path is None
        assert list(self.folder.iterdir()) == [table.path]

    def test_save_onto_its_own_file(self):
        table = self.numbered()
        (self.folder / "link.npy").symlink_to(table.path)
        relative = Path(os.path.relpath(table.path))
        for path in (table.path, str(table.path), relative, self.folder / "link.npy"):
            with refused(StorageError, r"is the table's own file, which has every change; use flush\(\)"):
                table.save(path)
        assert self.rows_of(table)[:, 0].tolist() == list(range(10))


@pytest.mark.sweep
class TestMmapNpy(OnDisk):
    suffix, dtypes = ".npy", NPY_DTYPES


@pytest.mark.sweep
class TestMmapSafetensors(OnDisk):
    pass


@pytest.mark.sweep
class TestMmapRecords(OnDisk):
    kind, added_plane = TableOfRecords, "'m, beside m'"


# `new` makes a table of a file in an empty folder.
REFUSED = r"""
Table(4, 4, memory="pined") -> InvalidValueError: ^memory is 'pined', not one of its values; did you mean 'pinned'\?$
Table(4, 4, memory="pageable", path="a.npy") -> InvalidValueError: memory='pageable' has no file; drop path or pass
Table(4, 4, memory="mmap") -> InvalidValueError: memory='mmap' needs a file; pass path=
Table(10**12, 128, memory="pageable")
-> HostMemoryError: 'weight' of 1000000000000 x 128 torch.float32 asks for 512 TB but this machine has .*; pass memory='mmap'
Table(2**62, 1, memory="device", device="cpu") -> HostMemoryError: asks for 18,446,744 TB but .*; pass memory='mmap'
new("a.npy", 10**12, 128) -> StorageError: asks for 512 TB but .* free; choose a path on a larger disk
Table(4, 4, memory="mmap", path="") -> InvalidValueError: path is '', not a path; pass the path of a file
Table(4, 4, memory="mmap", path="a" * 300 + ".npy") -> InvalidValueError: is too long for the file system
Table.open("a" * 300) -> StorageError: File name too long
new("no/folder") -> InvalidValueError: is not a folder that exists, and does not end in
new("table.bin") -> InvalidValueError: but a table is .npy or .safetensors; rename it
new("missing/table.npy") -> StorageError: No such file or directory.*; choose a
new("/proc/table.npy")
-> StorageError: (No such file or directory|Permission denied|Operation not permitted|has 0 bytes free).*; choose a
new("a.npy", dtype=torch.bfloat16) -> InvalidTypeError: torch.bfloat16 has no .npy form .*; use a path that ends in .safe
Table(-1, 4) -> InvalidValueError: num_rows is -1 but must be at least 0
Table(2**63, 4) -> InvalidValueError: num_rows is 9223372036854775808 but must be below 2\*\*63
Table(4, 4, torch.bool) -> InvalidTypeError: dtype is torch.bool but a table holds one of torch's bfloat16, float16,
Table(5, 4, max_rows=4) -> InvalidValueError: max_rows is 4 but the table has 5 rows; pass a larger max_rows
Table(4, 4, max_rows=6).grow(3)
-> InvalidValueError: num_rows is 3 but the table has 4 rows already, and never loses any
Table(4, 4, max_rows=6).grow(7) -> InvalidValueError: num_rows is 7 but the table was made with max_rows=6
Table.from_array(np.zeros(3)) -> InvalidValueError: array has shape \(3,\) but a table is 2-D
Table.from_array(np.zeros((3, 2), bool)) -> InvalidTypeError: array has dtype bool
Table.from_array(torch.eye(3) > 0) -> InvalidTypeError: dtype is torch.bool but a table holds one of
Table.from_array(torch.eye(3).to_sparse()) -> InvalidTypeError: array has layout torch.sparse_coo
Table.from_array(torch.eye(3, device="meta")) -> InvalidTypeError: array is on the meta device
"""
# `table` has ten rows of four, and a plane "m" of one. None of these changes it.
REFUSED_CALLS = r"""
table.add_plane("weight") -> InvalidValueError: plane 'weight' exists
table.add_plane("n", -1) -> InvalidValueError: width is -1 but must be at least 0
table.add_plane("n", fill=torch.ones(1, 4)) -> InvalidValueError: fill has shape \(1, 4\) but the plane is \(10, 4\)
table.add_plane("n", fill="a") -> InvalidTypeError: fill is a str
table.add_plane("n", dtype=torch.int32, fill=1.5) -> InvalidValueError: fill is 1.5 but the plane holds torch.int32
table.drop_plane("weight") -> InvalidValueError: plane 'weight' is the table itself
table.drop_plane("n") -> InvalidValueError: the table has no plane 'n'; choose from 'weight', 'm'
table.plane("weigth") -> InvalidValueError: the table has no plane 'weigth'; did you mean 'weight'\?
table[1, 2] -> InvalidTypeError: the index of the table is \(1, 2\) but must be of rows; pass a list, as table\[\[1, 2\]\]
pickled(table) -> InvalidTypeError: a table cannot be pickled; pickle the module that has it
table.gather([1], ["weight", ["weight"]]) -> InvalidValueError: the table has no plane \['weight'\]
table.gather([1, 2], out=torch.zeros(2, 3)) -> InvalidValueError: out has shape \(2, 3\) but index and table ask for \(2, 4\);
table.gather([1], out=torch.zeros(1, 4).double()) -> InvalidTypeError: out has dtype torch.float64 but the plane holds torch.f
table.gather([1], out=torch.zeros(1, 4, device="meta")) -> InvalidValueError: out is on meta but the table computes on cpu;
table.gather([1], out=np.zeros((1, 4))) -> InvalidTypeError: out is a ndarray but must be a tensor;
table.gather([1], ["weight"], out=torch.zeros(1, 4)) -> InvalidValueError: out is one tensor but planes is \['weight'\];
table.scatter([1, 2], torch.zeros(2, 3)) -> InvalidValueError: has shape \(2, 3\) but index and table ask for \(2, 4\); reshape
table.scatter([1], torch.zeros(1, 4).double()) -> InvalidTypeError: torch.float64 but .* torch.float32
table.scatter([1], torch.zeros(1, 4).to_sparse()) -> InvalidTypeError: has layout
table.scatter([1], torch.zeros(1, 4, device="meta")) -> InvalidValueError: on meta but the table computes on cpu
table.scatter([1], [[1.0, 2.0], [3.0]]) -> InvalidValueError: ragged
table.scatter([1], {"wieght": torch.zeros(1, 4)}) -> InvalidValueError: no plane 'wieght'; did you mean 'weight'
table.init_(lambda chunk: torch.zeros(3)) -> InvalidValueError: returned shape \(3,\) for a chunk of \(10, 4\)
table.astype(torch.bool) -> InvalidTypeError: dtype is torch.bool
table.grow(11) -> InvalidValueError: num_rows is 11 but the table was made to keep its 10 rows; make it with max_rows
table.lengthen(11, {"x": 1}) -> InvalidValueError: the table has no plane 'x'
table.load(folder / "no.npy") -> StorageError: cannot read .* \(No such file or directory\); check the path
table.load(folder / "folder.npy", "mmap") -> StorageError: cannot read .* \(Is a directory\)
table.save(folder / "table.txt") -> InvalidValueError: ends in '.txt' but a table is .npy or .safetensors; rename it
table.save(folder / "missing" / "table.npy") -> StorageError: cannot write .* \(No such file or directory\); choose a folder
"""
WITHOUT_CUDA = """
Table(4, 4, memory="pinned") -> DeviceError: memory='pinned' needs CUDA, but
Table(4, 4, device="cuda") -> DeviceError: device='cuda' needs CUDA, but
Table(4, 4).cupy() -> DeviceError: needs CUDA, but
Table(4, 4).to("cuda") -> DeviceError: needs CUDA, but
"""


def test_refused(tmp_path):
    def new(name, num_rows=4, dim=4, **options):
        return st.Table(num_rows, dim, memory="mmap", path=tmp_path / name, device="cpu", **options)

    for refusal in refusals(REFUSED) + ([] if cuda_status().available else refusals(WITHOUT_CUDA)):
        assert "; " in check_refused(refusal, Table=st.Table, new=new, torch=torch, np=np)
        assert list(tmp_path.iterdir()) == []


def test_refused_calls(tmp_path):
    table = st.Table.from_array(torch.arange(40.0).view(10, 4), "pageable", device="cpu")
    table.add_plane("m", 1, fill=3)
    (tmp_path / "folder.npy").mkdir()
    for refusal in refusals(REFUSED_CALLS):
        assert "; " in check_refused(refusal, table=table, torch=torch, np=np, folder=tmp_path, pickled=pickle.dumps)
        assert table.planes == ("weight", "m")
        assert table.torch().flatten().tolist() == list(range(40))
    assert [path.name for path in tmp_path.iterdir()] == ["folder.npy"]


@pytest.mark.parametrize("memory", ["pageable", "device", "mmap"])
def test_high_rows(memory, tmp_path):
    """Over 2**31 elements, the normal case; only pages that are written take room."""
    num_rows, dim, dtype = 70_000_000, 32, torch.int8
    path = tmp_path / "table.npy" if memory == "mmap" else None
    table = st.Table(num_rows, dim, dtype, memory, path, "cpu")
    assert num_rows * dim > 2**31
    assert path is None or path.stat().st_blocks * 512 < 1_000_000
    table.add_plane("last_step", 1, torch.int32)
    # Rows just below and above the offsets where 32-bit arithmetic wraps, signed and unsigned, and where it lands.
    edge = 2**31 // dim
    index = torch.tensor([num_rows - 1, edge - 1, edge, edge + 1, 0, 1, num_rows // 2])
    rows, steps = numbers((len(index), dim), dtype), torch.arange(len(index), dtype=torch.int32)[:, None]
    table.scatter(index, {"weight": rows, "last_step": steps})
    assert_same_bits(table.gather(index), rows)
    assert_same_bits(table.gather(index, "last_step"), steps)
    assert not table.gather([2, edge - 2, edge + 2, num_rows - 2]).any()
    assert_same_bits(table.torch()[edge], rows[2])
    with pytest.raises(RowIndexError, match=rf"index\[1\] is {num_rows} but the table has {num_rows} rows"):
        table.gather([0, num_rows])


def test_autograd_knows_of_writes_by_compiled_copies():
    table, index, out = st.Table(3000, 64, memory="pageable", device="cpu"), torch.arange(3000), torch.empty(3000, 64)
    view = table.torch()
    versions = view._version, out._version
    table.scatter(index, torch.ones(3000, 64))
    table.gather(index, out=out)
    assert view._version > versions[0]
    assert out._version > versions[1]
    assert out.eq(1).all()


@pytest.mark.parametrize("high", [1, 2, 50, 2**11, 2**31, 2**50, 2**62])
@pytest.mark.parametrize("count", [0, 1, 2, 1000, 2000])  # the last one is sorted by us, all of them if grouped
@pytest.mark.parametrize("low", [0, -5])
@pytest.mark.parametrize("grouped", [False, True])
def test_unique_rows_against_torch(high, count, low, grouped):
    flat = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(0))
    unique = unique_rows(flat, grouped=grouped)
    ids, inverse = torch.unique(flat, return_inverse=True)
    assert (unique.order is not None) == (grouped or count > 1024) or low < 0 or high > 2**50 or not count
    assert torch.equal(unique.ids, ids)
    assert torch.equal(unique.inverse, inverse)
    if unique.order is not None:
        assert torch.equal(unique.order, flat.argsort(stable=True))
        assert unique.starts[-1] == count
        assert torch.equal(flat[unique.order][unique.starts[:-1]], ids)
    # One that is there, and the one before it, which may not be.
    for wanted in (int(flat.max()), int(flat.max()) - 1) if count else (5,):
        place = (ids == wanted).nonzero().flatten().tolist() or [-1]
        assert unique_rows(flat, look_for=wanted).found == place[0]
