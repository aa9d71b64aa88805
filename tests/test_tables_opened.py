"""Rows read in place from files that somebody published: one tensor or many, mapped and never written."""

import copy
import hashlib
import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_same_bits, cuts_of, numbers, refused, take_step, write_file, write_parts
from forked import run_script
from refusals import check_refused, refusals
from safetensors import safe_open
from safetensors.torch import save_file
from table_cases import ConvertCases, GatherCases

import speedtransfer as st
from speedtransfer import safetensors_io
from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError
from speedtransfer.tables import spans

CPU = torch.device("cpu")


@pytest.fixture
def device():
    return CPU


# --- what every table does, as far as reading goes -------------------------------------------------------------------------


class ReadOnly(GatherCases, ConvertCases):
    """The table contract of tables that cannot be written: their rows come from files."""

    pads: tuple[int, ...] = (0,)
    parts = 4

    def filled(self, values, **kwargs):
        folder = self.new_path("")
        folder.mkdir()
        parts = write_parts(folder, values, self.parts, pads=self.pads)
        return st.Table.open(parts, device=self.device, **self.options)

    def make(self, num_rows, dim, dtype=torch.float32, **kwargs):
        return self.filled(torch.zeros(num_rows, dim, dtype=dtype))

    def from_array(self, array, **kwargs):
        return self.filled(torch.as_tensor(array))

    def load(self, path, **kwargs):
        return st.Table.load(path, "mmap", device=self.device, **kwargs)

    # These write.
    test_no_rows = None
    test_index_out_of_range = test_what_is_no_index_names_the_remedy = None
    test_out_inside_the_table = None

    def test_awkward_shapes_and_rows_out_of_range(self):
        for shape in ((0, 3), (5, 0), (0, 0), (1, 1)):
            table = self.filled(torch.ones(shape))
            assert (len(table), table.dim, table.nbytes) == (*shape, 4 * shape[0] * shape[1])
            assert table.gather(range(len(table))).shape == table.torch().shape == shape
        assert table.gather(torch.zeros(0, 3, dtype=torch.int32)).shape == (0, 3, 1)
        for index, first in (([3, 10], 10), ([-1], -1), ([0, 99, -5], 99)):
            with refused(IndexError, rf"is {first} "):
                self.numbered().gather(index)

    def test_rows_of_every_part(self, dtype):
        values = numbers((401, 5), dtype)
        table = self.filled(values)
        edges = [edge for cut in cuts_of(401, self.parts) for edge in (cut - 1, cut) if 0 <= edge < 401]
        index = torch.tensor([edges, edges[::-1]])
        # As bytes: torch 2.6 does not index float8.
        stored = values.view(torch.uint8)
        assert_same_bits(table.gather(index), stored[index].view(dtype))
        many = torch.randint(401, (60, 50), generator=torch.Generator().manual_seed(1))
        assert_same_bits(table[many], stored[many].view(dtype))
        assert_same_bits(table.torch(), values)
        table.save(self.folder / "copy.safetensors")
        with safe_open(self.folder / "copy.safetensors", "pt") as file:
            assert_same_bits(file.get_tensor("weight"), values)


class TestParts(ReadOnly):
    pass


@pytest.mark.sweep
class TestMisalignedParts(ReadOnly):
    """Values begin at any byte, in each file at another one."""

    pads = (1, 3, 6, 2)


@pytest.mark.sweep
class TestPartsThroughACache(ReadOnly):
    options = {"cache_rows": 3}


class TestOneTensor(ReadOnly):
    def filled(self, values, **kwargs):
        path = self.new_path(".safetensors")
        return st.Table.open(write_file(path, {"weight": values, "other": torch.zeros(3)}), device=self.device)


# --- where the tensors are -------------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path):
    """Return a folder with 12 shards in 5 files with an index, one of them beside a tensor of another name, and all rows."""
    values, weight_map = numbers((130, 6), torch.bfloat16), {}
    cuts = [0, 1, 12, 20, 31, 40, 50, 60, 70, 80, 90, 100, 130]
    for file in range(5):
        tensors = {}
        for number in range(file, 12, 5):
            tensors[f"model.shard_{number}.weight"] = values[cuts[number] : cuts[number + 1]]
        tensors[f"model.norm.{file}"] = torch.ones(file)
        name = f"model-{file:05d}-of-00005.safetensors"
        save_file(tensors, tmp_path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path, values


def test_shards_in_the_order_of_their_numbers(published):
    folder, values = published
    key = "model.shard_{}.weight"
    index = folder / "model.safetensors.index.json"
    for parts in (folder, str(folder), index, sorted(folder.glob("*.safetensors"))):
        table = st.Table.open(parts, key, device="cpu")
        assert_same_bits(table.torch(), values)
        assert table.nbytes == values.nbytes
        assert len(table) == table.num_rows == 130
        assert "and 4 more, writable=False" in repr(table)
        assert (table.memory, table.path, table.writable) == ("mmap", None, False)
    index.unlink()
    assert_same_bits(st.Table.open(folder, key, device="cpu").torch(), values)
    assert_same_bits(st.Table.open(folder, "model.shard_7.weight", device="cpu").torch(), values[60:70])


def test_npy_files_are_parts_too(tmp_path):
    values, paths = numbers((9, 4), torch.float32), [tmp_path / "a.npy", tmp_path / "b.npy"]
    for path, part in zip(paths, values.split([2, 7]), strict=True):
        np.save(path, part.numpy())
    table = st.Table.open(paths, device="cpu")
    assert_same_bits(table.torch(), values)
    assert st.Table.open(paths[0], device="cpu").num_rows == 2
    assert not table.numpy().flags.writeable


# `one` is the first file, `shard` a tensor there, `folder` that of all.
WRONG = r"""
open((one, shard)) -> StorageError: 'model.shard_0.weight' is not a file; .* pass a list: \[\('.*', 'model.sh
open([(one, shard)], shard) -> InvalidValueError: but parts has .* pairs; pass one of the two
open(folder) -> InvalidValueError: has many tensors; pass key
open(one, "model.chard_{}.weight") -> InvalidValueError: no tensor is called .*; did you mean 'model.shard_
open(folder / "gap.safetensors", "x.{}") -> InvalidValueError: key 'x.\{\}' matches 'x.0' and 'x.00'; pass
open(folder / "two" / "a.safetensors", "x.{}") -> InvalidValueError: up to number 2 but none with number 1; download
open(folder / "two", "x.{}") -> InvalidValueError: tensor 'x.0' is in .*a.safetensors' and in .*b.safetensors'; pass
open(folder / "no.safetensors.index.json", "w") -> StorageError: is not an index of safetensors files .*; get
open(others, "v") -> InvalidValueError: shape \(5,\) but a table is 2-D; reshape it
open([(one, shard), (others, "w")]) -> InvalidTypeError: holds torch.float32 but .* holds torch.bfloat16; pass tensors of one
open([(one, shard), (others, "n")]) -> InvalidValueError: has rows of 7 values but .* of 6; pass tensors of one table
open(files, "model.shard_{}.weight", writable=True)
-> InvalidValueError: writable is True but rows in 12 tensors are only read; copy them into one file first
open(one, shard, scale_key="model.norm.0") -> InvalidTypeError: scales are for rows of float8
"""


def test_wrong_arguments(published):
    folder, two = published[0], torch.zeros(2, 3)
    (folder / "two").mkdir()
    for name in ("a", "b"):
        save_file({"x.0": two, "x.2": two.clone()}, folder / "two" / f"{name}.safetensors")
    save_file({"x.0": two, "x.3": two.clone(), "x.00": torch.zeros(1, 3)}, folder / "gap.safetensors")
    others = {"w": torch.zeros(4, 6), "n": torch.zeros(4, 7).bfloat16(), "v": torch.zeros(5)}
    save_file(others, folder / "w.safetensors")
    (folder / "no.safetensors.index.json").write_text('{"weight_map": 3}')
    files = sorted(folder.glob("model*.safetensors"))
    names = {"folder": folder, "files": files, "others": folder / "w.safetensors", "one": files[0]}
    for refusal in refusals(WRONG):
        assert "; " in check_refused(refusal, open=st.Table.open, shard="model.shard_0.weight", torch=torch, **names)


# --- never written ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["parts", "one"])
def opened(request, tmp_path):
    """Return a table that is read in place, the rows, and the folder."""
    values = numbers((300, 16), torch.float32)
    folder = tmp_path / "published"
    folder.mkdir()
    if request.param == "parts":
        return st.Table.open(write_parts(folder, values, pads=(0, 2)), device="cpu"), values, folder
    tensors = {"weight": values}
    if request.param == "float8":
        tensors = {"weight": values.to(torch.float8_e4m3fn), "scale": torch.linspace(0.5, 1, 600).view(300, 2)}
        values = (tensors["weight"].float().view(300, 2, 8) * tensors["scale"][..., None]).view(300, 16)
    save_file(tensors, folder / "all.safetensors")
    scaled = {"key": "weight", "scale_key": "scale"} if request.param == "float8" else {}
    return st.Table.open(folder / "all.safetensors", **scaled, device="cpu"), values, folder


also_float8 = pytest.mark.parametrize("opened", ["parts", "one", "float8"], indirect=True)


def state_of(folder):
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, path.stat().st_ino)
        for path in sorted(folder.iterdir())
    }


# `rows`: as many zeros as the table has.
WRITES = """
table.scatter([1], rows[:1])
table.write(torch.tensor([1]), {"weight": rows[:1]})
table.fill_(1)
table.normal_()
table.init_(lambda chunk: chunk.zero_())
table.add_plane("m")
table.take("weight", rows)
"""
WEIGHT_WRITES = """
weight.fill_(0)
weight.data.zero_()
weight.detach().zero_()
weight[3].zero_()
weight.data[3:5].mul_(2)
weight[4] = 1.0
torch.nn.init.constant_(tensor=weight, val=1.0)
torch._foreach_mul_([rows, weight.data], 2.0)
torch.add(rows, 1, out=weight.data)
weight.data = rows
weight.requires_grad = True
"""
MODULE_WRITES = """
emb.from_pretrained(table, freeze=False)
emb.from_pretrained(table, max_norm=1.0)
torch.nn.Sequential(emb).requires_grad_()
emb.reset_parameters()
emb.weight = torch.nn.Parameter(rows)
emb.half()
emb.load_state_dict({"weight": rows})
"""
OTHERS = StorageError, InvalidValueError, RuntimeError


def test_writes_raise(opened):
    table, values, folder = opened
    before, emb = state_of(folder), st.Embedding.from_pretrained(table)
    names = {"table": table, "emb": emb, "weight": emb.weight, "torch": torch, "rows": torch.zeros(300, 16)}
    for writes, errors, words in (
        (WRITES, StorageError, r"of weight are read in place from .* and cannot be changed; .*copy"),
        (WEIGHT_WRITES, StorageError, "cannot be changed; "),
        (MODULE_WRITES, OTHERS, "; .*(copy|copies)"),
    ):
        for write in writes.strip().splitlines():
            with torch.set_grad_enabled(writes is MODULE_WRITES), pytest.raises(errors, match=words):
                exec(write, names)
            assert_same_bits(emb(torch.arange(300)), values)
            assert (table.planes, emb.weight.requires_grad) == (("weight",), False), write
    for path in folder.iterdir():
        with pytest.raises(StorageError, match="is the table's own file, which is read in place; choose another"):
            table.save(path)
    assert state_of(folder) == before


def test_the_file_is_as_it_was_after_a_stray_write(tmp_path):
    """torch can write to the memory itself: this process then has another row, and nobody else."""
    save_file({"weight": torch.ones(2000, 8)}, tmp_path / "a.safetensors")
    before = state_of(tmp_path)
    table = st.Table.load(tmp_path / "a.safetensors", "mmap", "cpu")
    table.torch()[7] = 3
    assert table[[7, 8]][:, 0].tolist() == [3, 1]
    assert copy.deepcopy(table)[[7, 8]][:, 0].tolist() == [3, 1]
    assert st.Table.load(tmp_path / "a.safetensors", "mmap", "cpu")[[7]].eq(1).all()
    table.flush()
    del table
    assert state_of(tmp_path) == before


# --- modules ---------------------------------------------------------------------------------------------------------------


@also_float8
def test_module_of_an_opened_table(opened):
    table, values, _ = opened
    emb = st.Embedding.from_pretrained(table, padding_idx=3)
    dense = torch.nn.Embedding.from_pretrained(values, padding_idx=3)
    ids = torch.randint(300, (5, 70), generator=torch.Generator().manual_seed(3))
    assert_same_bits(emb(ids), dense(ids))
    with torch.inference_mode():
        assert_same_bits(emb(ids), dense(ids))
    assert_same_bits(emb(emb.prefetch(ids)), dense(ids))
    assert_same_bits(emb.state_dict()["weight"], values)
    assert_same_bits(emb.weight[5], values[5])
    assert torch.equal(torch.ones(2, 16) @ emb.weight.T, torch.ones(2, 16) @ values.T)
    assert emb.load_state_dict(emb.state_dict()).missing_keys == []
    duplicate = copy.deepcopy(emb)
    assert_same_bits(duplicate(ids), dense(ids))
    assert duplicate.table.memory == "mmap"
    again = pickle.loads(pickle.dumps(emb))
    assert_same_bits(again(ids), dense(ids))
    assert again.table.memory == "pageable"
    with torch.no_grad(), pytest.raises(IndexError, match="is 300 but the table has 300 rows"):
        emb(torch.tensor([3, 300]))
    assert_same_bits(st.to_dense(emb).weight.detach(), values)
    for mode in ("sum", "mean", "max"):
        bag = st.EmbeddingBag.from_pretrained(table, mode=mode)
        assert_same_bits(bag(ids), torch.nn.EmbeddingBag.from_pretrained(values, mode=mode)(ids))


@also_float8
def test_checkpoints(opened, tmp_path):
    table, values, folder = opened
    emb, before = st.Embedding.from_pretrained(table), state_of(folder)
    st.save_checkpoint(tmp_path / "run", emb)
    st.load_checkpoint(tmp_path / "run", emb)
    dense = torch.nn.Embedding(300, 16)
    st.load_checkpoint(tmp_path / "run", dense)
    assert_same_bits(dense.weight.detach(), values)
    with torch.no_grad():
        dense.weight[211, 4] += 1
    st.save_checkpoint(tmp_path / "other", dense)
    with refused(InvalidValueError, "row 211 in the checkpoint is another one; open the files"):
        st.load_checkpoint(tmp_path / "other", emb)
    with pytest.raises(RuntimeError, match="row 211 of what is to be loaded is another one; leave its key out"):
        emb.load_state_dict(dense.state_dict())
    assert state_of(folder) == before


@also_float8
def test_copies_of_an_opened_table_train(opened, tmp_path):
    table, values, folder = opened
    before = state_of(folder)
    for options, stored, computed, kind in (
        ({"memory": "device"}, torch.float32, torch.float32, st.Embedding),
        ({"storage_dtype": torch.bfloat16}, torch.bfloat16, torch.float32, st.EmbeddingBag),
        ({"memory": "pageable", "storage_dtype": torch.int8}, torch.int8, torch.float32, st.Embedding),
        ({"memory": "pageable", "dtype": torch.bfloat16}, torch.bfloat16, torch.bfloat16, st.Embedding),
        ({"path": tmp_path / "copy.safetensors", "memory": "mmap"}, torch.float32, torch.float32, st.EmbeddingBag),
    ):
        emb = kind.from_pretrained(table, freeze=False, **options)
        assert (emb.table.dtype, emb.weight.dtype, emb.weight.requires_grad) == (stored, computed, True)
        error = (emb.weight.detach() - values).abs().amax()
        assert error <= (0 if stored == torch.float32 else 0.05)
        optimizer = torch.optim.SGD(emb.parameters(), lr=1.0)
        take_step(optimizer, emb(torch.tensor([[3, 299]])).sum())
        assert (emb.weight.detach() - values)[[3, 299]].abs().amin() > 0.3
    assert_same_bits(st.Embedding.from_pretrained(table).weight.detach(), values)
    assert state_of(folder) == before


def test_a_writable_table_is_trained_in_place():
    table = st.Table.from_array(torch.zeros(20, 4), "pageable", device="cpu")
    emb = st.Embedding.from_pretrained(table, freeze=False)
    take_step(torch.optim.SGD(emb.parameters(), lr=1.0), emb(torch.tensor([3])).sum())
    assert table[[3]].eq(-1).all()
    with pytest.raises(InvalidValueError, match=r"is that of another module, .*; share its weight"):
        st.Embedding.from_pretrained(table)


WRONG_COPIES = r"""
make(table, cache_rows=5) -> InvalidValueError: cache_rows is 5 but the rows are those of a table that exists; pass it
make(table, dtype=torch.float16) -> InvalidTypeError: dtype is torch.float16 but the table holds torch.float32; convert
make(table, memory="pageable", storage_dtype=torch.int8, dtype=torch.float16) -> InvalidTypeError: leave one of
make(table, comm_dtype=torch.int8) -> InvalidValueError: comm_dtype are for tables of several processes
make(torch.zeros(2, 2), dtype=torch.float16)
-> InvalidTypeError: dtype is torch.float16 but embeddings are torch.float32; pass
"""


def test_wrong_arguments_of_from_pretrained(opened):
    for refusal in refusals(WRONG_COPIES):
        assert "; " in check_refused(refusal, make=st.Embedding.from_pretrained, table=opened[0], torch=torch)


# --- all rows at once ------------------------------------------------------------------------------------------------------


def test_all_rows_that_do_not_fit(tmp_path, monkeypatch):
    values = numbers((300, 16), torch.float32)
    table = st.Table.open(write_parts(tmp_path, values), device="cpu")
    emb = st.Embedding.from_pretrained(table)
    monkeypatch.setenv("SPEEDTRANSFER_HOST_BYTES", str(values.nbytes - 1))
    for call in (table.torch, table.numpy, emb.state_dict, lambda: emb.weight.norm(), lambda: st.to_dense(emb)):
        with refused(HostMemoryError, r"19.2 kB .*but .* 19.2 kB"):
            call()
    assert_same_bits(emb(torch.arange(300)), values)
    table.save(tmp_path / "copy.safetensors")
    st.save_checkpoint(tmp_path / "run", emb)
    st.load_checkpoint(tmp_path / "run", emb)
    monkeypatch.undo()
    assert_same_bits(st.Table.load(tmp_path / "copy.safetensors", device="cpu").torch(), values)


def test_a_copy_after_the_files_have_changed_has_the_rows_that_were_opened(opened):
    table, values, folder = opened
    path = sorted(folder.iterdir())[-1]
    os.utime(path, ns=(1, 1))
    duplicate = copy.deepcopy(table)
    assert duplicate.memory == "pageable"
    assert_same_bits(duplicate.torch(), values)


# --- many and large files --------------------------------------------------------------------------------------------------

LARGE = """
import os, sys, torch, speedtransfer as st
st.Table(4, 4, memory="pageable", device="cpu").gather([1])
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
table = st.Table.open(sys.argv[1], "m.shard_{}.weight", device="cpu")
assert len(os.listdir("/proc/self/fd")) < 40
assert (len(table), table.nbytes) == (50_000_480, 50_000_480 * 400)
assert table.gather([0, 1_250_010, 1_250_012, 50_000_479])[:, 0].tolist() == [0, 0, 0, 39]
assert resident() - before < 60_000_000
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_table_larger_than_memory_opens_without_reading_it(tmp_path):
    rows = 1_250_012
    for number in range(40):
        entry = (f"m.shard_{number}.weight", torch.bfloat16, (rows, 200))
        header = safetensors_io.header_bytes(safetensors_io.make_header([entry]))
        with open(tmp_path / f"model-{number:05d}.safetensors", "wb") as file:
            file.write(header)
            file.seek(len(header) + (rows - 1) * 400)
            file.write(torch.full((200,), number, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    result = run_script(LARGE, str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_a_map_that_the_system_refuses(opened, monkeypatch):
    """Where it counts every page that might be copied, one tensor is read as parts are: no tensor over it is handed out."""
    _, values, folder = opened
    path = folder / "strict.safetensors"
    save_file({"weight": values}, path)
    mapped = spans._map

    def strict(at, size, access, *rest):
        if access & 2:
            raise StorageError("cannot map; too much")
        return mapped(at, size, access, *rest)

    monkeypatch.setattr(spans, "_map", strict)
    table = st.Table.open(path, device="cpu")
    assert table.in_parts
    table.torch().zero_()  # a copy
    assert_same_bits(table[range(300)], values)


def test_memory_is_given_back(tmp_path):
    pairs = write_parts(tmp_path, numbers((300, 16), torch.float32))
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("reads /proc")
    table = st.Table.open(pairs, device="cpu")
    rows = table.gather([5])
    assert str(tmp_path) in maps.read_text()
    del table
    assert str(tmp_path) not in maps.read_text()
    assert rows.shape == (1, 16)
