"""Tables that grow in the middle of training: as one that had all rows from the start, which were zero."""

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from cases import raising, refused, take_step
from forked import run_script
from lazy_oracle import squared_loss
from optimizer_cases import ALL, COUPLED, case_named, some

import speedtransfer as st
from speedtransfer import safetensors_io
from speedtransfer.encoding import dtype_of
from speedtransfer.errors import InvalidValueError, OptimizerError, StorageError
from speedtransfer.optim.plane_view import PlaneView
from speedtransfer.tables import files, reserved, spans
from speedtransfer.tables.longer_files import LongerFile

DIM = 6
SIZES = (5, 9, 30)
Make = Callable[[int], st.Table]


def pageable(num_rows, **options):
    return st.Table(num_rows, DIM, memory="pageable", max_rows=1000, **options)


def embedding(table, idle="lazy", **options):
    """Return an embedding of `table` with weights in its first rows only."""
    # Of the weights, and of stochastic rounding.
    torch.manual_seed(1)
    emb = st.Embedding.from_pretrained(table, freeze=False, idle=idle, **options)
    emb._handle.load(torch.randn(SIZES[0], DIM))
    return emb


def train(emb, opt, reach, steps=5):
    """Train on some of the first `reach` rows, and on the last of them in the first step."""
    generator = torch.Generator().manual_seed(reach)
    for step in range(steps):
        ids = torch.randint(0, reach - 1, (4,), generator=generator)
        if step == 0:
            ids[0] = reach - 1
        take_step(opt, squared_loss(emb(ids), torch.randn(4, DIM, generator=generator)))


def assert_grows(make, case, idle, **options):
    grown, whole = embedding(make(SIZES[0]), idle, **options), embedding(make(SIZES[-1]), idle, **options)
    opts = [case.make(emb.parameters()) for emb in (grown, whole)]
    for size in SIZES:
        grown._handle.grow(size)
        assert grown.weight.shape == (size, DIM)
        for emb, opt in zip((grown, whole), opts, strict=True):
            train(emb, opt, size)
    for emb, opt in zip((grown, whole), opts, strict=True):
        take_step(opt, emb.weight.sum())
    assert torch.equal(grown.weight, whole.weight)
    torch.testing.assert_close(*(opt.state_dict()["state"].get(0, {}) for opt in opts), rtol=0, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("case", some([*ALL, *COUPLED]), ids=str)
def test_training(case, idle):
    assert_grows(pageable, case, idle)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, "split24"], ids=str)
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_encoded_rows(storage, idle):
    options = {"storage_dtype": storage, "state_dtype": torch.bfloat16 if idle == "lazy" else torch.uint8}
    assert_grows(lambda rows: pageable(rows, dtype=dtype_of(storage)), case_named("adamw"), idle, **options)


def test_a_pending_gradient_stays():
    results = []
    for sizes in ((5, 9, 12), (12, 12, 12)):
        emb = embedding(pageable(sizes[0]))
        opt = case_named("adamw").make(emb.parameters())
        train(emb, opt, 5)
        opt.zero_grad()
        late = emb(torch.tensor([4, 2]))
        emb(torch.tensor([1, 2])).sum().backward()
        shown = emb.weight.grad
        emb._handle.grow(sizes[1])
        emb(torch.tensor([8])).sum().backward()
        emb._handle.grow(sizes[2])
        late.sum().backward()
        torch.nn.utils.clip_grad_norm_(emb.parameters(), 0.5)
        assert (emb.weight.grad.shape, shown.shape) == ((12, DIM), (sizes[0], DIM))
        results.append(emb.weight.grad.to_dense())
        opt.step()
        results.append(emb.weight.detach().clone())
    assert all(map(torch.equal, results[:2], results[2:]))


@pytest.mark.parametrize("memory", ["pageable", "mmap"])
def test_what_shows_the_weight_and_its_state_grows(memory, tmp_path):
    path = tmp_path if memory == "mmap" else None
    emb = embedding(st.Table(5, DIM, memory=memory, path=path, device="cpu", max_rows=40), "exact")
    opt = case_named("adamw").make(emb.parameters())
    train(emb, opt, 5)
    view, plane = emb.table.torch(), opt.state[emb.weight]["exp_avg"]
    leaf = emb.weight * 1
    assert isinstance(plane, PlaneView)
    emb._handle.grow(8)
    assert (leaf.shape, (emb.weight * 1).shape, emb.weight.numel()) == ((5, DIM), (8, DIM), 8 * DIM)
    assert plane.shape == (8, DIM)
    assert opt.state_dict()["state"][0]["exp_avg"].shape == (8, DIM)
    assert emb.state_dict()["weight"].shape == (8, DIM)
    assert emb.weight[6].eq(0).all()
    # Memory from before is still that of the rows, which show all steps.
    take_step(opt, emb(torch.tensor([7])).sum())
    assert view.clone().equal(emb.table.torch()[:5])
    view[2] = 5
    assert emb(torch.tensor(2)).eq(5).all()
    with torch.no_grad():
        emb.weight[6] = 3
    assert emb.table[6].eq(3).all()
    assert view.shape == (5, DIM)


@pytest.mark.parametrize("kind", [st.Embedding, st.EmbeddingBag])
def test_one_number_of_rows_everywhere(kind, tmp_path):
    emb = kind.from_pretrained(pageable(10), freeze=False)
    models = [torch.nn.Sequential(emb), torch.nn.Sequential(kind(15, DIM))]
    opts = [torch.optim.Adam(model.parameters()) for model in models]
    emb.table.grow(15)
    take_step(opts[0], models[0](torch.tensor([[12]])).sum())
    assert emb.num_embeddings == len(emb.weight) == 15
    assert f"15, {DIM}" in repr(emb)
    before = emb.weight.detach().clone()
    st.save_checkpoint(tmp_path / "c", models[0], opts[0])
    emb.weight.data.zero_()
    for model, opt in zip(models, opts, strict=True):
        st.load_checkpoint(tmp_path / "c", model, opt)
        assert torch.equal(model[0].weight.detach(), before)
        take_step(opt, model(torch.tensor([[12]])).sum())
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_a_running_step_does_not_grow():
    emb = embedding(pageable(5))
    opt = case_named("adamw").make(emb.parameters())
    handle = emb._handle
    # Torch calls it before the hooks after a step.
    opt._optimizer_step_code = lambda: handle.grow(8)
    with pytest.raises(OptimizerError, match="cannot grow to 8 rows while an optimizer steps"):
        train(emb, opt, 5)
    assert emb.weight.shape == (5, DIM)


# --- memories become longer without copies, files are whole at any moment; what fails is undone -----------------------


SUFFIXES = pytest.mark.parametrize("suffix", [".npy", ".safetensors"])


def read(path):
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path))
    return safetensors.torch.load_file(path)["weight"]


def filled(path=None, **options):
    memory = "pageable" if path is None else "mmap"
    table = st.Table(5, 4, memory=memory, path=path, **{"max_rows": 2**40, **options})
    table.add_plane("m", 3, fill=0.5)
    table.torch().copy_(torch.arange(20.0).view(5, 4))
    return table


@pytest.mark.skipif(not spans.AVAILABLE, reason="addresses cannot be reserved here")
def test_ordinary_memory_becomes_longer_where_it_is(monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(16 << 30))
    table = filled()
    table.add_plane("large", 1000)
    before, pointers, views = psutil.Process().memory_info().rss, [], table.plane("large")
    for rows in (6, 1000, 500_000):
        table.grow(rows)
        pointers.append([table.stored(name).data_ptr() for name in ("weight", "large")])
    assert table.nbytes > 2e9
    assert psutil.Process().memory_info().rss - before < 256e6
    assert pointers[0] == pointers[1] == pointers[2]
    # What was a view is one, of the rows that there were, and no copy of it has more than that.
    views.fill_(2)
    assert table.gather([0, 5, 499_999], "large").sum(1).tolist() == [2000, 0, 0]
    assert copy.deepcopy(table.torch()[:3]).untyped_storage().nbytes() == table.stored("weight").nbytes


def test_a_file_that_has_come_to_its_place_is_left_alone(tmp_path):
    path = tmp_path / "table.npy"
    table = filled(path)
    path.rename(tmp_path / "moved.npy")
    other = filled(path)
    before, rows = path.read_bytes(), table.torch().clone()
    with refused(StorageError, "another file by now.*move the file of this table back"):
        table.grow(10)
    assert path.read_bytes() == before
    assert table.torch().equal(rows)
    other.grow(10)
    path.unlink()
    (tmp_path / "moved.npy").rename(path)
    table.grow(10)
    assert table.torch()[:5].equal(rows)


def test_the_current_folder_may_change(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    table, opened = filled(Path("table.npy")), st.Table.load("table.npy", memory="mmap")
    monkeypatch.chdir("elsewhere")
    for each in (table, opened):
        with refused(StorageError, "is the table's own file"):
            each.save("../table.npy")
    assert copy.deepcopy(opened).memory == "mmap"
    table.add_plane("n")
    table.grow(9)
    assert len(read(tmp_path / "table.npy")) == 9
    assert not list(Path().iterdir())


@SUFFIXES
def test_other_programs_read_the_file(tmp_path, suffix):
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


@SUFFIXES
@pytest.mark.parametrize("growing", [True, False])
def test_a_saved_table_grows_when_it_is_opened_again(tmp_path, suffix, growing):
    path = tmp_path / f"table{suffix}"
    filled(max_rows=100 if growing else None).save(path)
    table = st.Table.load(path, memory="mmap", writable=True, max_rows=10**12)
    if growing or suffix == ".npy":
        table.grow(1_000_000)
        assert read(path)[:5].flatten().tolist() == list(range(20))
    with pytest.raises(InvalidValueError, match=r"max_rows is 9000000 but the file is only read .* pass writable=True"):
        st.Table.load(path, memory="mmap", max_rows=9_000_000)


@pytest.mark.parametrize(
    ("entries", "rows", "message"),
    [
        ([("weight", (5, 4))], 1000, "its header has no room for a longer number"),
        ([("weight", (5, 4)), ("other", (2,))], 6, "other tensors follow its rows"),
        ([("x" * 5000, (30,)), ("weight", (5, 4))], 6, None),
    ],
)
def test_files_that_others_made(tmp_path, entries, rows, message):
    path = tmp_path / "table.safetensors"
    header = safetensors_io.make_header([(name, torch.float32, shape) for name, shape in entries])
    size = max(entry["data_offsets"][1] for entry in header.values())
    # A header of just these words.
    text = json.dumps(header, separators=(",", ":")).encode()
    before = len(text).to_bytes(8, "little") + text + bytes(size)
    path.write_bytes(before)
    table = st.Table.load(path, memory="mmap", writable=True, max_rows=10**6)
    if message is None:
        table.grow(rows)
        assert read(path).shape == (rows, 4)
        return
    with refused(StorageError, f"cannot get more rows, as {message}; save the table"):
        table.grow(rows)
    assert path.read_bytes() == before
    assert len(table) == 5


BROKEN = {
    "map": (files, "map_tensor"),
    "nameless map": (reserved.NamelessMap, "of"),
    "header": (LongerFile, "show"),
    "file": (LongerFile, "lengthen"),
}


@SUFFIXES
@pytest.mark.parametrize("broken", BROKEN)
def test_what_fails_is_undone(tmp_path, suffix, broken, monkeypatch):
    path = tmp_path / f"table{suffix}"
    table = filled(path)
    before = path.read_bytes()

    monkeypatch.setattr(*BROKEN[broken], raising(OSError(28, "No space left on device")))
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
    # Some: a file of the other format is killed at others.
    line += 13
    path.unlink(missing_ok=True)

    def grow():
        table = st.Table(5, 4, memory="mmap", path=path, device="cpu", max_rows=1 << 40)
        table.add_plane("m", 3, fill=0.5)
        table.torch().copy_(expected)
        kill_at_line(line, FILES)
        table.grow(12345)
        sys.settrace(None)

    ended = run_child(grow)
    assert list(path.parent.iterdir()) == [path], line
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
def test_a_kill_leaves_a_whole_file(tmp_path, suffix):
    done = run_script(KILLED, str(tmp_path / f"table{suffix}"), str(len(suffix)))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50


IN_ANOTHER_PROCESS = """
import sys
import speedtransfer as st
print(st.Table.load(sys.argv[1], memory="mmap").num_rows)
st.Table.load(sys.argv[1], memory="mmap", writable=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
def test_another_process_cannot_write_to_the_file_of_a_table(tmp_path):
    """It would cut off rows that this one adds."""
    path = tmp_path / "t.safetensors"
    table = filled(path)
    # The tables of one process may share a file.
    again = st.Table.load(path, memory="mmap", writable=True, max_rows=2**40)
    del again
    found = run_script(IN_ANOTHER_PROCESS, str(path))
    assert "is open for writing in another process" in found.stderr
    assert found.stdout == "5\n"
    del table
    assert run_script(IN_ANOTHER_PROCESS, str(path)).returncode == 0
