"""float8 rows with scales, read in place from files that somebody published."""

import copy
import pickle

import numpy as np
import pytest
import torch
from cases import assert_same_bits, refused, take_step, write_parts
from refusals import check_refused, refusals
from safetensors import safe_open
from safetensors.torch import save_file

import speedtransfer as st
from speedtransfer.dtypes import FLOAT8_DTYPES, FLOAT8_SCALE
from speedtransfer.errors import InvalidValueError

ROWS, DIM = 211, 24
IDS = torch.randint(ROWS, (40, 30), generator=torch.Generator().manual_seed(0))


def codes_of(dtype, shape=(ROWS, DIM)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(3).to(dtype)


def scales_of(dtype, blocks):
    generator = torch.Generator().manual_seed(2)
    if dtype == FLOAT8_SCALE:
        return torch.randint(118, 134, (ROWS, blocks), dtype=torch.uint8, generator=generator).view(dtype)
    return torch.rand((ROWS, blocks), generator=generator).add_(0.01).to(dtype)


def decoded(codes, scales):
    """Return what NumPy makes of codes and scales, in double precision, rounded once."""
    wide = scales.float().numpy().astype(np.float64).repeat(codes.shape[1] // scales.shape[1], axis=1)
    return torch.from_numpy((codes.float().numpy().astype(np.float64) * wide).astype(np.float32))


SCALES = [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 8)]
SCALES += [(FLOAT8_SCALE, 3), (FLOAT8_SCALE, 24)] if FLOAT8_SCALE else []


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3fn", "e5m2"])
@pytest.mark.parametrize(("scale_dtype", "blocks"), SCALES, ids=str)
@pytest.mark.parametrize("pads", [(0,), (1, 4, 3)], ids=["aligned", "misaligned"])
def test_rows_are_decoded(tmp_path, dtype, scale_dtype, blocks, pads):
    codes, scales = codes_of(dtype), scales_of(scale_dtype, blocks)
    expected = decoded(codes, scales)
    (tmp_path / "w").mkdir()
    (tmp_path / "s").mkdir()
    table = st.Table.open(
        write_parts(tmp_path / "w", codes, pads=pads),
        scales=write_parts(tmp_path / "s", scales, parts=2, pads=pads),
        scale_block=codes.shape[1] // blocks,
        device="cpu",
    )
    assert table.planes == ("weight", "weight.scale")
    assert table.nbytes == codes.nbytes + scales.nbytes
    stored = table.gather(IDS, ["weight", "weight.scale"])
    # As bytes: torch 2.6 does not index float8.
    assert_same_bits(stored["weight"], codes.view(torch.uint8)[IDS].view(dtype))
    assert_same_bits(stored["weight.scale"].view(torch.uint8), scales.view(torch.uint8)[IDS])
    emb = st.Embedding.from_pretrained(table)
    assert_same_bits(emb(IDS), expected[IDS])
    assert_same_bits(emb.weight.detach(), expected)
    assert_same_bits(emb.state_dict()["weight"], expected)
    for out in (torch.bfloat16, torch.float16):
        other = st.Embedding.from_pretrained(table, dtype=out)
        assert other.weight.dtype == out
        assert_same_bits(other(IDS), expected[IDS].to(out))
        assert_same_bits(other.float()(IDS), expected[IDS])
    ours = st.EmbeddingBag.from_pretrained(table, dtype=torch.bfloat16, mode="sum")(IDS)
    assert_same_bits(ours, torch.nn.EmbeddingBag.from_pretrained(expected.bfloat16(), mode="sum")(IDS))
    table.save(tmp_path / "copy.safetensors")
    with safe_open(tmp_path / "copy.safetensors", "pt") as file:
        assert_same_bits(file.get_tensor("weight").view(torch.uint8), codes.view(torch.uint8))
        assert_same_bits(file.get_tensor("weight.scale").view(torch.uint8), scales.view(torch.uint8))
    for memory in ("mmap", "pageable"):
        again = st.Table.load(tmp_path / "copy.safetensors", memory, "cpu")
        assert_same_bits(st.Embedding.from_pretrained(again)(IDS), expected[IDS])
    names = {"scale_key": "weight.scale", "key": "weight", "scale_block": codes.shape[1] // blocks}
    named = st.Table.open(tmp_path / "copy.safetensors", **names, device="cpu", cache_rows=9)
    cached = st.Embedding.from_pretrained(named)
    assert all(torch.equal(cached(IDS), expected[IDS]) for _ in range(3))


@pytest.mark.parametrize(("shape", "dtype"), [((), torch.float32), ((1,), torch.bfloat16), ((1, 1), torch.float32)])
def test_one_scale_for_all_rows_or_for_a_part(tmp_path, shape, dtype):
    codes = codes_of(torch.float8_e4m3fn)
    for number, (start, stop) in enumerate([(0, 100), (100, 100), (100, ROWS)]):
        scale = torch.full(shape, 0.5 + number, dtype=dtype)
        save_file({f"w.{number}": codes[start:stop], f"s.{number}": scale}, tmp_path / f"{number}.safetensors")
    factors = torch.tensor([0.5] * 100 + [2.5] * (ROWS - 100))[:, None]
    table = st.Table.open(tmp_path, "w.{}", scale_key="s.{}", device="cpu")
    emb = st.Embedding.from_pretrained(table)
    assert_same_bits(emb(IDS), (codes.float() * factors)[IDS])
    assert_same_bits(emb.weight.detach(), codes.float() * factors)
    assert_same_bits(copy.deepcopy(emb)(IDS), emb(IDS))
    assert_same_bits(pickle.loads(pickle.dumps(emb))(IDS), emb(IDS))
    one = st.Table.open(tmp_path, "w.{}", scale_key="s.2", device="cpu")
    assert_same_bits(st.Embedding.from_pretrained(one)(IDS), (codes.float() * 2.5)[IDS])


@pytest.mark.sweep
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 1), (ROWS, 3), (1,), ()], ids=str)
@pytest.mark.parametrize("memory", ["mmap", "pageable", "device"])
def test_scales_beside_the_rows_are_loaded(tmp_path, shape, memory):
    codes, scales = codes_of(torch.float8_e4m3fn), torch.rand(shape).add_(0.1)
    save_file({"emb": codes, "emb.scale": scales}, tmp_path / "a.safetensors")
    table = st.Table.load(tmp_path / "a.safetensors", memory, "cpu", key="emb")
    opened = st.Table.open(tmp_path / "a.safetensors", "emb", scale_key="emb.scale", device="cpu")
    wide = scales.view(-1, 1) if scales.dim() < 2 else scales
    expected = decoded(codes, wide.expand(ROWS, wide.shape[1]))
    for each in (table, opened):
        assert_same_bits(st.Embedding.from_pretrained(each)(IDS), expected[IDS])
    table.save(tmp_path / "b.safetensors")
    again = st.Table.load(tmp_path / "b.safetensors", "pageable", "cpu")
    assert_same_bits(st.Embedding.from_pretrained(again)(IDS), expected[IDS])


# `open` has a table of six columns "w" with these scales; `pairs` is one of the parts of a table, `more` a file beside it.
BAD_SCALES = r"""
saved(ones(3)) -> InvalidValueError: there are scales for 3 rows but 4 rows of weights
saved(ones(4, 4)) -> InvalidValueError: has 4 scales a row but rows of 6 values are not as many blocks
saved(ones(4, 2, 1)) -> InvalidValueError: but scales are all \(rows,\) or \(rows, blocks\)
saved(ones(4).double()) -> InvalidTypeError: is F64 but must be one of bfloat16, float32
open(pairs, scales=pairs, scale_key="w") -> InvalidValueError: scale_key is 'w' but scales has .* pairs; pass one
open(pairs, scale_key="s.0") -> InvalidValueError: scale_key is 's.0' but scales has .* pairs; pass one of the two
open(pairs, scales=[(more, "u"), (more, "u")]) -> InvalidValueError: there are 2 scales of one value for 1 tensors of rows
open(pairs, scales=[(more, "s"), (more, "t")]) -> InvalidTypeError: holds torch.bfloat16 but .* holds torch.float32; pass
"""
BAD_EXPONENTS = r"""
open(path, "w", scale_key="s") -> InvalidTypeError: is U8 but must be one of bfloat16, float32, float8_e8m0fnu
open(path, "w", scale_key="f", scale_dtype=torch.float8_e8m0fnu) -> InvalidTypeError: is F32 but must be one of float8_e8m0
open(path, "w", scale_dtype=torch.float8_e8m0fnu) -> InvalidValueError: but there are no scales; pass scales or scale_key
"""


def test_scales_that_do_not_fit(tmp_path):
    more, codes = tmp_path / "c.safetensors", codes_of(torch.float8_e4m3fn)
    save_file({"w.0": codes, "s.0": scales_of(torch.bfloat16, 3)}, tmp_path / "a.safetensors")

    def saved(scales):
        save_file({"w": torch.zeros(4, 6).to(torch.float8_e4m3fn), "s": scales}, tmp_path / "d.safetensors")
        return st.Table.open(tmp_path / "d.safetensors", "w", scale_key="s", device="cpu")

    save_file({"s": torch.ones(2), "t": torch.ones(2).bfloat16(), "u": torch.ones(1)}, more)
    names = {"open": st.Table.open, "saved": saved, "pairs": [(tmp_path / "a.safetensors", "w.0")], "more": more}
    for refusal in refusals(BAD_SCALES):
        assert "; " in check_refused(refusal, **names, ones=torch.ones, torch=torch)


@pytest.mark.skipif(FLOAT8_SCALE is None, reason="this torch has no float8_e8m0fnu")
def test_exponents_in_u8(tmp_path):
    codes, scales = codes_of(torch.float8_e4m3fn), scales_of(torch.float8_e8m0fnu, 3)
    save_file({"w": codes, "s": scales.view(torch.uint8), "f": scales.float()}, tmp_path / "a.safetensors")
    path = tmp_path / "a.safetensors"
    table = st.Table.open(path, "w", scale_key="s", scale_dtype=torch.float8_e8m0fnu, device="cpu")
    assert_same_bits(st.Embedding.from_pretrained(table)(IDS), decoded(codes, scales)[IDS])
    for refusal in refusals(BAD_EXPONENTS):
        assert "; " in check_refused(refusal, open=st.Table.open, path=path, torch=torch)


BAD_BLOCKS = """
Table.open(path, scale_key="s") -> InvalidValueError: may be blocks of 80 or of other widths; pass scale_block=80
Table.open(path, scale_key="s", scale_block=128)
-> InvalidValueError: scale_block is 128 but .* has 2 scales for rows of 160 values, 80 for each
Table.load(other) -> InvalidValueError: pass scale_block=80
uneven.save(none) -> InvalidValueError: 129 values have 2 scales, whose blocks are not all as wide
"""


def test_blocks_whose_width_does_not_follow(tmp_path):
    """Two scales of 160 columns may belong to 80 each, or to 128 and the rest; ours say which."""
    path = tmp_path / "a.safetensors"
    emb = st.Embedding(20, 160, storage_dtype=torch.float8_e4m3fn)
    emb.table.save(path)
    for table in (st.Table.load(path), st.Table.load(path, memory="mmap")):
        found = st.Embedding.from_pretrained(table)
        assert torch.equal(found.weight.detach(), emb.weight.detach())
    about = {"weight": emb.table.torch().clone(), "s": emb.table.plane("weight.scale").clone()}
    save_file(about, path)
    opened = st.Table.open(path, scale_key="s", scale_block=80)
    assert torch.equal(st.Embedding.from_pretrained(opened)(torch.arange(20)), emb.weight.detach())
    # Files of others with our names.
    other, uneven = tmp_path / "b.safetensors", st.Embedding(5, 129, storage_dtype=torch.float8_e4m3fn).table
    save_file({"weight": about["weight"], "weight.scale": about["s"]}, other)
    for refusal in refusals(BAD_BLOCKS):
        check_refused(refusal, Table=st.Table, path=path, other=other, uneven=uneven, none=tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()


def test_codes_without_scales_are_numbers(tmp_path):
    values = torch.tensor([[1.0, 2.0, -3.0, 4.0]] * 3)
    for dtype in (*FLOAT8_DTYPES, torch.int8):
        path = tmp_path / f"{dtype}.safetensors"
        table = st.Table.from_array(values.to(dtype))
        table.save(path)
        for source in (table, st.Table.load(path), st.Table.load(path, memory="mmap", writable=True)):
            emb = st.Embedding.from_pretrained(source, storage_dtype=dtype, freeze=False)
            torch.testing.assert_close(emb.weight.detach(), values, rtol=1e-2 * (dtype == torch.int8), atol=0)
            take_step(torch.optim.SGD(emb.parameters(), lr=1.0), emb(torch.tensor([1])).sum())
        assert_same_bits(st.Table.load(path).torch(), values.to(dtype))


def test_int8_rows_are_saved_with_their_scales(tmp_path):
    emb, path = st.Embedding(9, 4, storage_dtype=torch.int8), tmp_path / "rows.safetensors"
    emb.table.save(path)
    for options in ({}, {"memory": "mmap"}):
        assert torch.equal(st.Embedding.from_pretrained(st.Table.load(path, **options)).weight, emb.weight)
    with refused(InvalidValueError, "int8 rows have scales, and a .npy file holds one array"):
        emb.table.save(tmp_path / "rows.npy")
    assert not (tmp_path / "rows.npy").exists()
    save_file({"weight": emb.table.torch(), "weight.scale": torch.ones(9, 2)}, path)
    with refused(InvalidValueError, "int8 rows of shape .* have one scale each"):
        st.Table.load(path)
