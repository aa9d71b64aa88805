"""Rows of 24 bits: training beside torch's, files, reads of the bfloat16 alone, and writes to it."""

import copy
import pickle

import pytest
import torch
from cases import take_step
from engine_cases import interesting_floats
from refusals import check_refused, refusals
from safetensors.torch import load_file, save_file
from test_encoding import of_24_bits
from torch import nn

import speedtransfer as st
from speedtransfer.encoding.rounding import Keys, write_key
from speedtransfer.nn.sizing import table_size

ROWS, DIM = 40, 6
EVERY = torch.arange(ROWS)
SPLIT = {"storage_dtype": "split24"}


def made(trained=True, **options):
    torch.manual_seed(1)
    emb = st.Embedding(ROWS, DIM, **{**SPLIT, **options})
    opt = torch.optim.SGD(emb.parameters(), lr=0.1)
    for _ in range(3 * trained):
        take_step(opt, emb(EVERY).square().sum())
    return emb


def rows_of(emb):
    return emb.weight.detach().clone()


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_training_is_that_of_torch_with_the_weight_rounded_after_each_step(kind):
    torch.manual_seed(7)
    ours = st.Embedding(ROWS, DIM, idle="lazy", **SPLIT)
    dense = nn.Embedding.from_pretrained(rows_of(ours), freeze=False)
    sides = [(module, kind(module.parameters(), lr=1e-3)) for module in (ours, dense)]
    assert torch.equal(dense.weight, of_24_bits(dense.weight.detach()))
    for step in range(30):
        for module, opt in sides:
            take_step(opt, (module(EVERY) * torch.linspace(-1, 2, DIM)).square().sum())
        bits = Keys(write_key(7, step, "weight"), EVERY).bits(slice(None), DIM)
        dense.weight.data.copy_(of_24_bits(dense.weight.detach(), (bits >> 24 & 0xFF).double() / 256))
        assert torch.equal(ours.weight.detach(), dense.weight)


# --- what a table holds -----------------------------------------------------------------------------------------------


def test_planes_and_bytes():
    emb = made()
    weight, low = emb.table.plane("weight"), emb.table.plane("weight.low")
    assert (weight.dtype, low.dtype, low.shape) == (torch.bfloat16, torch.int8, (ROWS, DIM))
    words = (weight.view(torch.int16).int() << 16) + (low.int() << 8)
    assert torch.equal(words.view(torch.float32), rows_of(emb))
    assert (weight.float() - rows_of(emb)).abs().max() <= 2.0**-8 * rows_of(emb).abs().max()
    size = table_size(100, 32, storage_dtype="split24", state_dtype=torch.uint8, idle="lazy")
    assert (size.weight_bytes, size.state_bytes, size.scale_bytes) == (9600, 6400, 800)
    assert size.up_row_bytes == size.down_row_bytes == 96 + 2 * 36
    known = st.Embedding(8, DIM, vocabulary=st.Vocabulary(max_capacity=f"{3 * DIM * 50} B"), **SPLIT)
    assert known.table.max_rows == 50
    assert " split24 " in str(st.summary(nn.Sequential(emb)))
    assert "storage_dtype='split24'" in repr(emb)


def test_a_table_in_bfloat16_gets_the_other_bits(tmp_path):
    table = st.Table.from_array(torch.randn(ROWS, DIM).bfloat16(), memory="pageable", device="cpu")
    before = table.torch().clone()
    emb = st.Embedding.from_pretrained(table, freeze=False, **SPLIT)
    assert emb.table is table
    assert table.planes == ("weight", "weight.low")
    assert torch.equal(rows_of(emb), before.float())
    take_step(torch.optim.SGD(emb.parameters(), lr=1e-4), emb(EVERY).sum())
    assert torch.allclose(rows_of(emb), before.float() - 1e-4, rtol=2.0**-14, atol=0)
    # A tensor is copied, and a table that is read in place.
    given = before.clone()
    own = st.Embedding.from_pretrained(given, freeze=False, **SPLIT)
    take_step(torch.optim.SGD(own.parameters(), lr=1e-4), own(EVERY).sum())
    assert torch.equal(rows_of(own), rows_of(emb))
    assert torch.equal(given, before)
    table.save(tmp_path / "a.safetensors")
    opened = st.Table.open(tmp_path / "a.safetensors", "weight", device="cpu")
    copied = st.Embedding.from_pretrained(opened, freeze=False, **SPLIT)
    assert copied.table is not opened
    assert torch.equal(rows_of(copied), table.torch().float())


@pytest.mark.parametrize("options", [{}, {"cache_rows": 5}, {"memory": "mmap"}, {"layout": "rows"}], ids=str)
def test_what_is_written_to_the_bfloat16_alone_is_what_rows_are(options, tmp_path):
    if "memory" in options:
        options = {**options, "path": tmp_path / "rows.safetensors"}
    emb, at, ones = made(**options), torch.tensor([4, 0, 39]), torch.ones(ROWS, DIM)
    table, wanted = emb.table, rows_of(emb)
    torch.manual_seed(3)
    drawn = torch.randn(ROWS, DIM, dtype=torch.bfloat16)
    table[at] = drawn[:3]
    wanted[at] = drawn[:3].float()
    assert torch.equal(rows_of(emb), wanted)
    table.scatter(at[:1], ones[:1], convert=True)
    assert torch.equal(emb(at[:1]).detach(), ones[:1])
    for write, wanted in (
        (table.zero_, 0 * ones),
        (lambda: table.fill_(-0.3), (-0.3 * ones).bfloat16().float()),
        (table.normal_, drawn.float()),
        (lambda: table.scatter(EVERY, {"weight": ones.bfloat16(), "weight.low": ones.char()}), ones + 2.0**-15),
    ):
        torch.manual_seed(3)
        write()
        assert torch.equal(rows_of(emb), wanted)
        assert torch.equal(emb(EVERY).detach(), wanted)


def test_a_write_over_its_memory_gives_numbers_near_it():
    """It is not seen, so that the other bits stay: less than half a step of bfloat16, and no NaN."""
    emb = made()
    for value in (0.0, -0.0, 1.0, float("inf")):
        emb.table.torch().fill_(value)
        found = rows_of(emb)
        near = (found - value).abs() <= 2.0**-8 * abs(value) + 2.0**-133
        assert (near | (found == value)).all()


# --- files ------------------------------------------------------------------------------------------------------------


def saved(tmp_path):
    emb, path = made(), tmp_path / "rows.safetensors"
    emb.table.save(path)
    return emb, path


@pytest.mark.parametrize("memory", ["pageable", "device", "mmap"])
def test_files(memory, tmp_path):
    emb, path = saved(tmp_path)
    table = st.Table.load(path, memory=memory, device="cpu")
    assert table.planes == ("weight", "weight.low")
    found = st.Embedding.from_pretrained(table)
    assert found.weight.dtype == torch.float32
    assert torch.equal(found(EVERY), rows_of(emb))
    assert torch.equal(rows_of(found), rows_of(emb))
    again = tmp_path / "again.safetensors"
    table.save(again)
    assert all(torch.equal(one, load_file(path)[name]) for name, one in load_file(again).items())
    for options in ({"storage_dtype": "split24"}, {}, {"storage_dtype": torch.bfloat16}):
        other = "device" if memory == "pageable" else "pageable"
        copied = st.Embedding.from_pretrained(table, False, memory=other, **options)
        dtype = options.get("storage_dtype", torch.float32)
        wanted = rows_of(emb).to(dtype).float() if isinstance(dtype, torch.dtype) else rows_of(emb)
        assert torch.equal(copied.weight.detach().float(), wanted)
    if memory != "mmap":
        other = st.Table.load(path, memory=memory, device="cpu")
        with pytest.raises(
            TypeError, match=r"bfloat16 but rows of split24 are computed in torch\.float32; leave dtype"
        ):
            st.Embedding.from_pretrained(other, dtype=torch.bfloat16)


WRONG = r"""
Table.load(path, memory="mmap", writable=True) -> InvalidValueError: writable is True but rows in 24 bits are only read; copy
Table.load(short) -> InvalidValueError: 'weight.low' of .* has shape .3, 6. but the rows that it belongs to .4, 6.
Table.load(floats) -> InvalidTypeError: weight.low
Embedding.from_pretrained(table, dtype=torch.half, storage_dtype="split24", memory="pageable") -> InvalidTypeError: leave one
Embedding.from_pretrained(table, freeze=False) -> StorageError: are read in place from .* and cannot be changed
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_wrong_files(refusal, tmp_path):
    _, path = saved(tmp_path)
    weight = torch.zeros(4, 6, dtype=torch.bfloat16)
    short, floats = tmp_path / "short.safetensors", tmp_path / "floats.safetensors"
    save_file({"weight": weight, "weight.low": torch.zeros(3, 6, dtype=torch.int8)}, short)
    save_file({"weight": weight, "weight.low": torch.zeros(4, 6)}, floats)
    names = {"Table": st.Table, "Embedding": st.Embedding, "torch": torch, "path": path}
    names |= {"short": short, "floats": floats, "table": st.Table.load(path, memory="mmap", device="cpu")}
    check_refused(refusal, **names)


# --- two of three bytes -----------------------------------------------------------------------------------------------


def test_read_as_bfloat16_two_of_three_bytes_are_read(tmp_path):
    emb, path = saved(tmp_path)
    alone = load_file(path)["weight"]
    table = st.Table.load(path, memory="mmap", device="cpu")
    half = st.Embedding.from_pretrained(table, dtype=torch.bfloat16)

    def read(module, ids):
        module.table.reset_stats()
        return module(ids), module.table.stats().gathered_bytes

    for ids in (EVERY, EVERY[:2].view(1, 2), torch.randint(0, ROWS, (300, 40))):
        found, num_bytes = read(half, ids)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, alone[ids])
        assert num_bytes == ids.numel() * DIM * 2
    assert half.weight.dtype == half.state_dict()["weight"].dtype == torch.bfloat16
    assert torch.equal(half.weight.detach(), alone)
    for copied in (copy.deepcopy(half), pickle.loads(pickle.dumps(half))):
        assert torch.equal(copied(EVERY), alone)
    # And back: the other bits are still there.
    wide = half.float()
    found, num_bytes = read(wide, EVERY)
    assert torch.equal(found, rows_of(emb))
    assert num_bytes == ROWS * DIM * 3
    assert torch.equal(wide.half()(EVERY), rows_of(emb).half())
    assert torch.equal(wide.bfloat16()(EVERY), alone)
    # Any program reads the file so.
    opened = st.Embedding.from_pretrained(st.Table.open(path, "weight", device="cpu"))
    assert torch.equal(opened(EVERY), alone)
    st.save_checkpoint(tmp_path / "saved", half)
    other = nn.Embedding(ROWS, DIM, dtype=torch.bfloat16)
    st.load_checkpoint(tmp_path / "saved", other)
    assert torch.equal(other.weight.detach(), alone)


def test_conversion_is_that_of_torch():
    """Of a table that can be written: ties go to even, as in torch, and the table becomes one of bfloat16."""
    values = interesting_floats()
    values = of_24_bits(values[values.isfinite().all(1) & (values.abs() < 3e38).all(1)])
    emb = st.Embedding.from_pretrained(values, **SPLIT)
    assert torch.equal(rows_of(emb), values)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(copy.deepcopy(emb).to(dtype).weight.detach(), values.to(dtype))
    half = emb.bfloat16()
    assert (half.table.planes, half.table.dtype) == (("weight",), torch.bfloat16)
