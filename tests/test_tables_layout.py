"""layout="rows": planes that are added together lie in one record a row; that training is the same: test_tables_cached.py."""

from __future__ import annotations

import copy

import pytest
import torch
from cases import assert_same_bits, numbers, refused
from torch import nn

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.rows import LAST_STEP
from speedtransfer.tables.memories import PageableMemory
from speedtransfer.tables.records import record_bytes

F32, U8 = torch.float32, torch.uint8


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "offsets", "stride"),
    [
        ({"a": (16, F32), "b": (16, F32)}, [0, 64], 128),
        ({"a": (100, F32), "b": (100, F32)}, [0, 400], 896),  # whole lines cost an eighth at most
        ({"a": (64, U8), "s": (1, F32), "b": (64, U8), "t": (1, F32)}, [0, 128, 64, 132], 144),
        ({"a": (5, U8), "b": (3, torch.float64), "c": (1, torch.int64)}, [32, 0, 24], 48),
    ],
)
def test_records(specs, offsets, stride):
    assert record_bytes(specs) == (dict(zip(specs, offsets, strict=True)), stride)


def made(layout="rows", **options):
    return st.Table(50, 4, device="cpu", layout=layout, **options)


SEVERAL = {"exp_avg": (None, None, 0.5), "step": (1, torch.int32, -1), "half": (7, torch.float16, 2)}


@pytest.mark.parametrize("memory", ["pageable", "mmap", "device"])
def test_planes_added_together_share_one_allocation(tmp_path, memory):
    table = made(memory=memory, path=tmp_path / "t.npy" if memory == "mmap" else None)
    planes = table.add_planes(SEVERAL)
    assert table.planes == ("weight", *SEVERAL)
    assert len({plane.untyped_storage().data_ptr() for plane in planes.values()}) == 1
    for name, (width, dtype, fill) in SEVERAL.items():
        assert planes[name] is table.stored(name)
        assert_same_bits(planes[name], torch.full((50, width or 4), fill, dtype=dtype or F32))
    assert table.torch().is_contiguous()
    assert table.add_plane("alone").is_contiguous()
    table.drop_plane("half")
    assert planes["exp_avg"].eq(0.5).all()


def test_a_layout_that_is_none(tmp_path):
    table = made().fill_(1)
    table.save(tmp_path / "t.npy")
    for call in (
        lambda: made("row"),
        lambda: setattr(table, "layout", "row"),
        lambda: st.Table.load(tmp_path / "t.npy", "mmap", layout="row"),
        lambda: st.Table.from_array(torch.ones(2, 2), layout="row"),
        lambda: st.Embedding(3, 2, layout="row"),
        lambda: st.replace_embeddings(nn.Embedding(3, 2), min_rows=0, layout="row"),
        lambda: st.Embedding(3, 2, memory="mmap", path=tmp_path / "new.npy", layout="row"),
    ):
        with refused(InvalidValueError, "layout is 'row', not one of its values; did you mean 'rows'"):
            call()
    assert table.layout == "rows"
    assert not (tmp_path / "new.npy").exists()


def test_copies_have_the_layout(tmp_path):
    table = made()
    table.add_planes(SEVERAL)
    table.scatter(range(50), {"weight": numbers((50, 4), F32), "exp_avg": numbers((50, 4), F32, 1)})
    duplicate = copy.deepcopy(table)
    for name in table.planes:
        assert_same_bits(duplicate.plane(name), table.plane(name))
        assert duplicate.plane(name).stride() == table.plane(name).stride()
    assert table.astype(torch.float64).layout == "rows"
    table.save(tmp_path / "t.safetensors")
    for memory in ("mmap", "pageable"):
        assert st.Table.load(tmp_path / "t.safetensors", memory, "cpu", layout="rows").layout == "rows"
    emb = st.Embedding(10, 4, device="cpu", layout="rows")
    emb.weight.data = torch.ones(20, 4)
    assert (emb.table.num_rows, emb.table.layout) == (20, "rows")
    model = nn.Sequential(nn.Embedding(10, 4), nn.EmbeddingBag(10, 4))
    st.replace_embeddings(model, min_rows=0, layout="rows")
    assert [module.table.layout for module in model] == ["rows", "rows"]


@pytest.mark.parametrize("layout", ["planes", "rows"])
@pytest.mark.parametrize("bad", [(4, None, torch.ones(3, 3)), (-1, None, 0), (4, torch.bool, 0)])
def test_planes_are_added_all_or_none(layout, bad):
    table = made(layout)
    with pytest.raises((ValueError, TypeError)):
        table.add_planes({**SEVERAL, "bad": bad})
    with pytest.raises(InvalidValueError, match="plane 'weight' exists"):
        table.add_planes({**SEVERAL, "weight": (4, None, 0)})
    assert table.planes == ("weight",)


@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_no_memory_for_them_leaves_the_table_whole(layout, monkeypatch):
    emb = st.Embedding(20, 4, device="cpu", layout=layout)
    before, allocate, count = emb.table.torch().clone(), PageableMemory._allocate, []

    def fails(self, plane, shape, dtype):
        if count or layout == "rows":
            raise HostMemoryError("no room; buy more")
        count.append(plane)
        return allocate(self, plane, shape, dtype)

    opt = torch.optim.AdamW(emb.parameters())
    monkeypatch.setattr(PageableMemory, "_allocate", fails)
    emb(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(HostMemoryError):
        opt.step()
    assert emb.table.planes == ("weight",)
    assert_same_bits(emb.table.torch(), before)
    monkeypatch.undo()
    opt.step()
    assert emb.table.planes == ("weight", "exp_avg", "exp_avg_sq", LAST_STEP)


# --- training ---------------------------------------------------------------------------------------------------------


def trained():
    """Return an embedding and its optimizer after some steps."""
    torch.manual_seed(0)
    emb = st.Embedding(300, 16, device="cpu", layout="rows")
    opt = torch.optim.AdamW(emb.parameters(), lr=0.05, fused=True)
    for step in range(4):
        emb((torch.arange(64) * 7 + step) % 300).square().sum().backward()
        opt.step()
        opt.zero_grad()
    return emb, opt


def test_views_of_the_optimizer_are_the_table():
    emb, opt = trained()
    table, state = emb.table, opt.state[emb.weight]
    for name in ("exp_avg", "exp_avg_sq"):
        assert not table.stored(name).is_contiguous()
        assert state[name].data_ptr() == table.plane(name).data_ptr()
        state[name][7] = 3
        assert table.gather(7, name).eq(3).all()
    assert table.torch().is_contiguous()
    assert emb.weight.view(-1).shape == (4800,)
    assert "layout='rows'" in repr(emb)
