"""How the memories of a table become longer: without copies, with files that are whole at any moment; what fails is undone."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from cases import refused
from forked import run_script

import speedtransfer as st
from speedtransfer import safetensors_io
from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError
from speedtransfer.tables import files, reserved
from speedtransfer.tables.longer_files import LongerFile

SUFFIXES = pytest.mark.parametrize("suffix", [".npy", ".safetensors"])


def read(path: Path) -> torch.Tensor:
    """Return what other programs read in the file."""
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path))
    return safetensors.torch.load_file(path)["weight"]


def filled(path: Path | None = None, **options: Any) -> st.Table:
    memory = "pageable" if path is None else "mmap"
    table = st.Table(5, 4, memory=memory, path=path, **{"max_rows": 2**40, **options})
    table.add_plane("m", 3, fill=0.5)
    table.torch().copy_(torch.arange(20.0).view(5, 4))
    return table


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- ordinary memory ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not reserved.AVAILABLE, reason="addresses cannot be reserved here")
def test_ordinary_memory_becomes_longer_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(16 << 30))
    table = filled()
    table.add_plane("large", 1000)
    before, pointers, views = resident_bytes(), [], table.plane("large")
    for rows in (6, 1000, 500_000):
        table.grow(rows)
        pointers.append([table.stored(name).data_ptr() for name in ("weight", "large")])
    assert table.nbytes > 2e9
    assert resident_bytes() - before < 256e6
    assert pointers[0] == pointers[1] == pointers[2]
    # What was a view is one, of the rows that there were, and no copy of it has more than that.
    views.fill_(2)
    assert table.gather([0, 5, 499_999], "large").sum(1).tolist() == [2000, 0, 0]
    assert copy.deepcopy(table.torch()[:3]).untyped_storage().nbytes() == table.stored("weight").nbytes


@pytest.mark.parametrize("kind", ["pageable", "rows"])
def test_the_system_refuses_addresses(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse(num_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("speedtransfer.tables.memories.Reserved", refuse)
    table = filled(layout="rows" if kind == "rows" else "planes")
    before = table.torch()
    table.grow(9)
    assert table.torch()[:5].equal(before)
    assert table.plane("m").eq(0.5).all()
    assert table.torch().data_ptr() != before.data_ptr()


def test_the_system_refuses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    table = filled()
    extend, left = reserved.Reserved.extend, [1]

    def refuse(block: reserved.Reserved, num_bytes: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(12, "Cannot allocate memory")
        extend(block, num_bytes)

    monkeypatch.setattr(reserved.Reserved, "extend", refuse)
    version = table.version
    with refused(HostMemoryError, "7 rows, 5 so far, ask for 84 bytes for m, which the system refused"):
        table.grow(7)
    assert (table.num_rows, table.version) == (5, version)
    monkeypatch.undo()
    table.grow(7)
    assert table.plane("m").eq(0.5).all()


# --- files --------------------------------------------------------------------------------------------------------------


@SUFFIXES
def test_other_programs_read_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    table = filled(path)
    view = table.torch()
    for rows in (6, 10, 99_999):
        table.grow(rows)
        table[rows - 1] = torch.full((4,), float(rows))
        view[1] = rows
        table.flush()
        assert read(path).equal(table.torch())
        assert table.torch()[[1, rows - 1]].eq(rows).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]
    again = st.Table.load(path, memory="mmap", writable=True, max_rows=10**6)
    again.grow(100_000)
    assert read(path).shape == (100_000, 4)
    assert read(path)[:-1].equal(table.torch())


@SUFFIXES
@pytest.mark.parametrize("growing", [True, False])
def test_a_saved_table_grows_when_it_is_opened_again(tmp_path: Path, suffix: str, growing: bool) -> None:
    path = tmp_path / f"table{suffix}"
    filled(max_rows=100 if growing else None).save(path)
    table = st.Table.load(path, memory="mmap", writable=True, max_rows=10**12)
    if growing or suffix == ".npy":
        table.grow(1_000_000)
        assert read(path)[:5].flatten().tolist() == list(range(20))
    with pytest.raises(InvalidValueError, match=r"max_rows is 9000000 but the file is only read .* pass writable=True"):
        st.Table.load(path, memory="mmap", max_rows=9_000_000)


def made_elsewhere(path: Path, text: str, size: int) -> st.Table:
    """Return the table in a file with a header of just these words."""
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + bytes(size))
    return st.Table.load(path, memory="mmap", writable=True, max_rows=10**6)


@pytest.mark.parametrize(
    ("entries", "rows", "message"),
    [
        ([("weight", (5, 4))], 1000, "its header has no room for a longer number"),
        ([("weight", (5, 4)), ("other", (2,))], 6, "other tensors follow its rows"),
        ([("x" * 5000, (30,)), ("weight", (5, 4))], 6, None),
    ],
)
def test_files_that_others_made(tmp_path: Path, entries: Any, rows: int, message: str | None) -> None:
    path = tmp_path / "table.safetensors"
    header = safetensors_io.make_header([(name, torch.float32, shape) for name, shape in entries])
    size = max(entry["data_offsets"][1] for entry in header.values())
    table = made_elsewhere(path, json.dumps(header, separators=(",", ":")), size)
    before = path.read_bytes()
    if message is None:
        table.grow(rows)
        assert read(path).shape == (rows, 4)
        return
    with refused(StorageError, f"cannot get more rows, as {message}; save the table"):
        table.grow(rows)
    assert path.read_bytes() == before
    assert len(table) == 5


def test_bytes_after_the_rows_become_none(tmp_path: Path) -> None:
    path = tmp_path / "table.npy"
    filled(path)
    with open(path, "ab") as file:
        file.write(b"\xff" * 1000)
    table = st.Table.load(path, memory="mmap", writable=True, max_rows=100)
    table.grow(20)
    assert table.torch()[5:].eq(0).all()
    assert read(path).equal(table.torch())


@SUFFIXES
@pytest.mark.parametrize("broken", ["map", "nameless map", "header", "file"])
def test_what_fails_is_undone(tmp_path: Path, suffix: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"table{suffix}"
    table = filled(path)
    before = path.read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    owner, name = {
        "map": (files, "map_tensor"),
        "nameless map": (reserved.NamelessMap, "of"),
        "header": (LongerFile, "show"),
        "file": (LongerFile, "lengthen"),
    }[broken]
    monkeypatch.setattr(owner, name, fail)
    with refused(StorageError, r"cannot make the files of the table longer, .*No space left on device"):
        table.grow(1000)
    monkeypatch.undo()
    assert path.read_bytes() == before
    table.torch()[0] = 7
    table.flush()
    table.grow(1000)
    assert read(path)[0].eq(7).all()
    assert table.plane("m").eq(0.5).all()


# One process imports torch and forks a child for each line of the code that makes files longer, which kills the child there.
KILLED = r"""
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from in_child import kill_at_line, run_child
import speedtransfer as st

FILES = "longer_files.py", "mapped_file.py", "growing.py", "reserved.py"

path, line, seen = Path(sys.argv[1]), int(sys.argv[2]), set()
expected = torch.arange(20.0).view(5, 4)
while True:
    # Every third: a file of the other format is killed at the next ones.
    line += 3
    path.unlink(missing_ok=True)

    def grow():
        table = st.Table(5, 4, memory="mmap", path=path, device="cpu", max_rows=1 << 40)
        table.add_plane("m", 3, fill=0.5)
        table.torch().copy_(expected)
        kill_at_line(line, FILES)
        table.grow(12345)
        sys.settrace(None)

    ended = run_child(grow)
    table = st.Table.load(path, memory="mmap", writable=True, max_rows=20000, device="cpu")
    rows = len(table)
    assert rows in (5, 12345) and table.torch()[:5].equal(expected) and not table.torch()[5:].any(), (line, rows)
    table.grow(rows + 10)
    assert table.torch()[:5].equal(expected) and not table.torch()[5:].any(), line
    seen.add((rows, ended))
    if ended:
        break
assert seen == {(5, False), (12345, False), (12345, True)}, seen
print(line)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("suffix", [pytest.param(".npy", marks=pytest.mark.slow), ".safetensors"])
def test_a_kill_leaves_a_whole_file(tmp_path: Path, suffix: str) -> None:
    done = run_script(KILLED, str(tmp_path / f"table{suffix}"), str(len(suffix) % 3))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


IN_ANOTHER_PROCESS = """
import sys
import speedtransfer as st
from speedtransfer.errors import StorageError
try:
    st.Table.load(sys.argv[1], memory="mmap", writable=True)
except StorageError as error:
    print(error)
else:
    print("opened")
print(st.Table.load(sys.argv[1], memory="mmap").num_rows)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_another_process_cannot_write_to_the_file_of_a_table(tmp_path: Path) -> None:
    """It would cut off rows that this one adds."""
    path = tmp_path / "t.safetensors"
    table = filled(path)
    # The tables of one process may share a file.
    again = st.Table.load(path, memory="mmap", writable=True, max_rows=2**40)
    found = run_script(IN_ANOTHER_PROCESS, str(path))
    assert "is open for writing in another process" in found.stdout, found.stderr
    assert found.stdout.endswith("5\n")
    del again
    assert "is open for writing" in run_script(IN_ANOTHER_PROCESS, str(path)).stdout
    del table
    assert run_script(IN_ANOTHER_PROCESS, str(path)).stdout == "opened\n5\n"
