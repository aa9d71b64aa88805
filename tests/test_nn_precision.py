"""Embeddings stored in a small form: what goes in and out, copies, conversions, state dicts, and what is moved."""

import pickle

import pytest
import torch
from cases import FLOAT8_DTYPES, take_step
from refusals import check_refused, refusals
from test_encoding import there_and_back
from torch import nn

import speedtransfer
from speedtransfer.encoding.choice import codec_for

SMALL = (torch.bfloat16, torch.float16, torch.int8, *FLOAT8_DTYPES, "split24")
IDS = torch.tensor([[3, 1, 3], [0, 11, 1]])


def made(stored, rows=12, dim=6, **options):
    torch.manual_seed(2)
    return speedtransfer.Embedding(rows, dim, storage_dtype=stored, idle="lazy", **options)


def dense(rows=12, dim=6):
    torch.manual_seed(2)
    return nn.Embedding(rows, dim)


def quantised(weight, dtype):
    """What a table of `dtype` holds of float32 rows, to the nearest, with one scale for a row."""
    width = weight.shape[1]
    return there_and_back(codec_for(width, torch.float32, dtype, width if dtype in FLOAT8_DTYPES else None), weight)


def values(emb):
    return emb.state_dict()["weight"].float()


# --- first values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", SMALL)
def test_first_values_are_those_of_torch_rounded(dtype):
    ours, theirs = made(dtype, 5000, 33), dense(5000, 33)
    assert torch.equal(values(ours), quantised(theirs.weight.detach(), dtype))
    assert torch.equal(torch.randn(3), (dense(5000, 33), torch.randn(3))[1])  # no draw more or less


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_from_pretrained_rounds_to_the_nearest(dtype, given):
    weight = dense(40, 7).weight.detach().to(given)
    emb = speedtransfer.Embedding.from_pretrained(weight, storage_dtype=dtype)
    assert torch.equal(values(emb), quantised(weight.float(), dtype))
    assert emb.weight.dtype == emb(IDS).dtype == torch.float32
    assert (emb.table.torch().data_ptr() == weight.data_ptr()) == (dtype == given)  # then in place
    bag = speedtransfer.EmbeddingBag.from_pretrained(weight, storage_dtype=dtype, mode="sum")
    torch.testing.assert_close(bag(IDS), emb(IDS).sum(1))
    if given == torch.float32:
        model = nn.Sequential(nn.Embedding.from_pretrained(weight))
        speedtransfer.replace_embeddings(model, min_rows=0, storage_dtype=dtype, state_dtype=torch.uint8)
        assert torch.equal(values(model[0]), values(emb))
        assert f"storage_dtype={dtype!r}, state_dtype=torch.uint8" in repr(model)


# --- dtypes -----------------------------------------------------------------------------------------------------------


WRONG = r"""
storage_dtype="int8" -> InvalidTypeError: storage_dtype is 'int8' but .*torch.float8_e5m2, 'split24'; pass one of them
state_dtype="split24" -> InvalidTypeError: state_dtype is 'split24' but must be None or one of torch.float32, torch.bfloat16
storage_dtype=torch.uint8 -> InvalidTypeError: storage_dtype is torch.uint8
state_dtype=torch.int8 -> InvalidTypeError: state_dtype is torch.int8 .*torch.uint8 \(uint8: blocks of 8-bit floats\)
storage_dtype=torch.int8, dtype=torch.float64 -> InvalidTypeError: storage_dtype is torch.int8 but the rows are torch.float64
state_dtype=torch.bfloat16, dtype=torch.float16 -> InvalidTypeError: state_dtype is torch.bfloat16 but the rows are
scale_block=32 -> InvalidValueError: scale_block is 32 but storage_dtype is None, and only float8 rows
scale_block=32, storage_dtype=torch.int8 -> InvalidValueError: storage_dtype is torch.int8, and only
scale_block=0, storage_dtype=torch.float8_e4m3fn -> InvalidValueError: scale_block is 0 but must be at least 1
scale_block=2.0, storage_dtype=torch.float8_e4m3fn -> InvalidTypeError: scale_block is 2.0 .float. but must be an
dtype=torch.float8_e4m3fn -> InvalidTypeError: dtype is torch.float8_e4m3fn, .* pass storage_dtype=torch.float8_e4m3fn
"""


@pytest.mark.parametrize("refusal", refusals(WRONG), ids=str)
def test_wrong_dtypes_and_blocks(refusal):
    model, dtype_given = nn.Sequential(nn.Embedding(4, 2)), ", dtype=" in f", {refusal.call}"
    calls = ["st.Embedding(4, 2, {})", "st.EmbeddingBag(4, 2, {})", "st.MultiEmbedding([4, 3], 2, {})"]
    if not dtype_given:
        calls.append("st.replace_embeddings(model, min_rows=0, {})")
    if not dtype_given and "scale_block" not in refusal.call:
        calls.append("st.Embedding.from_pretrained(torch.zeros(4, 2), {})")
    for call in calls:
        check_refused(refusal._replace(call=call.format(refusal.call)), st=speedtransfer, torch=torch, model=model)
    assert type(model[0]) is nn.Embedding


# --- float8 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_scales_for_blocks_of_columns(dtype):
    for block, scales in ((None, 2), (3, 67), (100, 2), (200, 1), (10**6, 1), (1, 200)):
        emb = made(dtype, 30, 200, scale_block=block, state_dtype=torch.uint8)
        assert emb.table.plane("weight.scale").shape == (30, scales)
        assert (f"scale_block={block}" in repr(emb)) == (block is not None)
        size = -(-200 // scales)
        blocks = [quantised(part, dtype) for part in dense(30, 200).weight.detach().split(size, 1)]
        assert torch.equal(values(emb), torch.cat(blocks, 1))
        take_step(torch.optim.AdamW(emb.parameters()), emb(IDS).square().sum())
        emb.table.reset_stats()
        with torch.no_grad():
            emb(torch.tensor([1, 5, 1, 7]))
        assert emb.table.stats().gathered_bytes == 4 * (200 + 4 * scales)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_codes_without_a_scale_are_stored_as_they_are(dtype):
    codes = torch.arange(252).view(42, 6).to(torch.uint8).view(dtype)
    # As bytes: torch 2.6 does not index float8.
    codes = codes.view(torch.uint8)[codes.float().isfinite().all(1)].view(dtype)
    emb = speedtransfer.Embedding.from_pretrained(codes, storage_dtype=dtype, scale_block=3)
    assert torch.equal(values(emb), codes.float())
    assert torch.equal(emb.table.torch().view(torch.uint8), codes.view(torch.uint8))
    assert (emb.table.plane("weight.scale") == 1).all()
    assert emb.table.torch().data_ptr() != codes.data_ptr()
    emb.weight.data[5, 2] = 0.3
    assert float(values(emb)[5, 2]) == pytest.approx(0.3, rel=0.2)
    emb.load_state_dict(emb.state_dict())
    others = torch.arange(len(codes)) != 5
    assert torch.equal(values(emb)[others], codes.float()[others])
    other = made(dtype, len(codes), scale_block=1)
    other.load_state_dict({"weight": codes})
    assert torch.equal(values(other), codes.float())


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_float8_weights_without_a_storage_dtype_are_those_of_torch(dtype):
    codes = torch.randn(12, 6).to(dtype)
    ours, theirs = (library.Embedding.from_pretrained(codes.clone()) for library in (speedtransfer, nn))
    assert ours(IDS).dtype == theirs(IDS).dtype == dtype
    assert torch.equal(ours(IDS).float(), theirs(IDS).float())
    assert ours.weight.dtype == ours.state_dict()["weight"].dtype == dtype
    again = pickle.loads(pickle.dumps(ours))
    assert torch.equal(again(IDS).float(), theirs(IDS).float())
    cast = made(None).to(dtype)
    assert torch.equal(cast(IDS).float(), dense().to(dtype)(IDS).float())


# --- memories ---------------------------------------------------------------------------------------------------------


def test_a_file_keeps_its_dtype(tmp_path):
    emb = made(torch.bfloat16, memory="mmap", path=tmp_path / "rows.safetensors")
    with pytest.raises(ValueError, match="cannot change its dtype"):
        emb.half()
    assert emb.float().table.dtype == torch.bfloat16
