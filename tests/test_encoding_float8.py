"""Rows in float8 with scales for blocks of columns: encoded and decoded as torch's own casts do."""

from __future__ import annotations

import math

import pytest
import torch
from cpu_kernels import cpu_kernels
from test_encoding import keys_for, normal
from torch import Tensor

from speedtransfer.dtypes import SCALE_DTYPES
from speedtransfer.encoding import cuda_codecs
from speedtransfer.encoding.choice import codec_for, codec_named
from speedtransfer.encoding.codecs import SCALE
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.float8 import BlocksFloat8, codec_of_planes
from speedtransfer.encoding.rounding import Keys, write_key
from speedtransfer.errors import InvalidTypeError, InvalidValueError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST = {torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}


def codes_of(parts: dict[str, Tensor]) -> Tensor:
    return parts[""].view(torch.uint8)


def every_number(dtype: torch.dtype) -> Tensor:
    """Return the finite numbers that a code stands for, sorted, float64."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64)
    return values[values.isfinite()].unique()


def by_hand(codes: Tensor, scales: Tensor, blocks: int) -> Tensor:
    """Return ``codes * scale`` as one would write it, whatever the dtypes."""
    wide = scales.to(torch.float32).repeat_interleave(codes.shape[1] // blocks, 1)
    return codes.to(torch.float32) * wide


# --- decode -----------------------------------------------------------------------------------------------------------


def stored_rows(dtype: torch.dtype, blocks: int, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return rows with every code, under scales of every size and sign."""
    codes = torch.stack([torch.arange(256).roll(shift) for shift in range(40)]).to(torch.uint8)
    scales = (2.0 ** torch.arange(-100, 100, 5, dtype=torch.float64))[:, None] * torch.arange(1, blocks + 1)
    if scale_dtype.itemsize == 1:
        scales = 2.0 ** scales.log2().floor()
    else:
        scales[::3] *= -1
    scales[1] = math.nan
    return {"": codes.view(dtype), SCALE: scales.float().to(scale_dtype).contiguous()}


@pytest.mark.sweep(strength=2)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 8, 256])
def test_every_code_under_every_scale(dtype: torch.dtype, scale_dtype: torch.dtype, blocks: int) -> None:
    """By torch, by numba and by the kernel."""
    parts = stored_rows(dtype, blocks, scale_dtype)
    codec = codec_of_planes(256, dtype, blocks, scale_dtype)
    expected = by_hand(parts[""], parts[SCALE], blocks).view(torch.int32)
    known = ~expected.view(torch.float32).isnan()
    assert 0.9 < float(known.double().mean()) < 1
    from_kernel = torch.empty(40, 256)
    wide = {**parts, SCALE: parts[SCALE].float()}
    cpu_kernels().launch("decode_blocks", 2, 32, cuda_codecs.pack_decoding(wide, from_kernel))
    for found in (codec.decode(parts, torch.empty(40, 256)), decode_rows(codec, parts), from_kernel):
        assert torch.equal(found.isnan(), ~known)
        assert torch.equal(found.view(torch.int32)[known], expected[known])


# --- encode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize(("width", "block"), [(1, None), (7, 3), (131, None), (300, 300)])
def test_to_the_nearest_is_the_cast_of_torch(dtype: torch.dtype, width: int, block: int | None) -> None:
    values = normal(90, width) * torch.logspace(-30, 30, 90)[:, None]
    values[::4] *= torch.logspace(0, -7, width)  # as far as below the smallest code
    values[3] = 0.0
    codec = codec_for(width, torch.float32, dtype, block)
    parts = encode_rows(codec, values, None)
    size = codec.size
    scales = parts[SCALE].repeat_interleave(size, 1)[:, :width]
    top = LARGEST[dtype]
    assert torch.equal(codes_of(parts), (values / scales).clamp(-top, top).to(dtype).view(torch.uint8))
    for block_number, columns in enumerate(values.split(size, 1)):
        largest, scale = columns.abs().amax(1).double(), parts[SCALE][:, block_number].double()
        share = largest / (scale * top)
        some = largest > 2.0**-90
        assert some.double().mean() > 0.7
        assert (share[some] >= 1 - 2.0**-23).all()
        assert (share[some] < 1 + 2.0**-19).all()


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
def test_what_was_stored_stays(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Powers of two, too: where their largest code is half of the largest, codes double and the scale halves."""
    codec = BlocksFloat8(96, dtype, 3, scale_dtype)
    values = normal(300, 96) * torch.logspace(-30, 30, 300)[:, None]
    for first in (None, 0):
        stored = encode_rows(codec, values, None if first is None else keys_for(300, first))
        decoded = decode_rows(codec, stored)
        assert decoded.isfinite().all()
        for writes in (None, *range(4)):
            again = encode_rows(codec, decoded, None if writes is None else keys_for(300, writes))
            assert torch.equal(decode_rows(codec, again).view(torch.int32), decoded.view(torch.int32))
            if scale_dtype == torch.float32:
                assert torch.equal(codes_of(again), codes_of(stored))
                assert torch.equal(again[SCALE], stored[SCALE])


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_rows_published_with_scales_that_are_powers_of_two_survive(dtype: torch.dtype) -> None:
    """As the OCP Microscaling specification makes them: the exponent of the largest magnitude less that of the code."""
    if len(SCALE_DTYPES) < 3:
        pytest.skip("this torch has no float8_e8m0fnu")
    blocks = (normal(50, 256) * torch.logspace(-20, 20, 50)[:, None]).view(50, 8, 32)
    exponent = blocks.abs().amax(2, keepdim=True).log2().floor() - math.floor(math.log2(LARGEST[dtype]))
    codes = (blocks / 2.0**exponent).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    parts = {"": codes.view(50, 256), SCALE: (2.0 ** exponent[:, :, 0]).to(torch.float8_e8m0fnu)}
    codec = codec_of_planes(256, dtype, 8, torch.float8_e8m0fnu)
    decoded = decode_rows(codec, parts)
    for writes in (None, 0, 1):
        again = encode_rows(codec, decoded, None if writes is None else keys_for(50, writes))
        assert torch.equal(codes_of(again), codes_of(parts))
        assert torch.equal(again[SCALE].view(torch.uint8), parts[SCALE].view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_scales_in_fewer_bits_are_powers_of_two_that_clip_nothing(dtype: torch.dtype) -> None:
    values = normal(100, 64) * torch.logspace(-20, 20, 100)[:, None]
    for scale_dtype in SCALE_DTYPES[1:]:
        codec = BlocksFloat8(64, dtype, 2, scale_dtype)
        parts = encode_rows(codec, values, None)
        scale = parts[SCALE].double()
        assert torch.equal(scale.log2(), scale.log2().round())
        share = values.view(100, 2, 32).abs().amax(2) / scale
        assert (share <= LARGEST[dtype]).all()
        assert (share > LARGEST[dtype] / 2).all()


def neighbours(dtype: torch.dtype, shares: Tensor) -> tuple[Tensor, Tensor]:
    number = every_number(dtype)
    above = torch.searchsorted(number, shares.clamp(number[0], number[-1]))
    exact = number[above] == shares
    return number[torch.where(exact, above, above - 1).clamp(min=0)], number[above]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES[:2], ids=str)
def test_rounds_to_one_of_two_neighbours_with_the_right_mean(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    """Down to a hundredth of the smallest code."""
    repeats, width = 4000, 80
    values = torch.logspace(0, math.log10(SMALLEST[dtype] / LARGEST[dtype]) - 2, width)
    values[1::2] *= -1
    codec = BlocksFloat8(width, dtype, 1, scale_dtype)
    parts = encode_rows(
        codec, values.expand(repeats, width).contiguous(), Keys(write_key(5, 1, "w"), torch.arange(repeats))
    )
    scale = parts[SCALE].double()
    assert (scale == scale[0]).all()
    shares = (values / scale[0].float()).clamp(-LARGEST[dtype], LARGEST[dtype]).double()
    low, high = neighbours(dtype, shares)
    found = parts[""].double()
    assert ((found == low) | (found == high)).all()
    spread = (high - low) / 2 / math.sqrt(repeats)
    assert ((found.mean(0) - shares).abs() <= 5 * spread + 1e-12).all()
    ups = (found == high).double().mean(0)[high > low]
    assert 0.3 < float(ups.mean()) < 0.7


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("writes", [None, 0])
def test_zeros_keep_their_sign(dtype: torch.dtype, writes: int | None) -> None:
    codec = codec_for(4, torch.float32, dtype)
    parts = encode_rows(codec, torch.tensor([[0.0, -0.0, 0.0, -0.0]]), None if writes is None else keys_for(1, writes))
    assert codes_of(parts).tolist() == [[0, 128, 0, 128]]
    assert decode_rows(codec, parts).signbit().tolist() == [[False, True, False, True]]


# --- which codec ------------------------------------------------------------------------------------------------------


def test_blocks_are_as_even_as_can_be() -> None:
    parts = {
        (width, block): codec_for(width, torch.float32, torch.float8_e5m2, block).parts[SCALE].width
        for width, block in ((0, None), (1, None), (128, None), (129, None), (300, None), (300, 2**62), (10, 3), (5, 1))
    }
    assert list(parts.values()) == [1, 1, 1, 2, 3, 1, 4, 5]


def test_names_say_all_that_a_checkpoint_must_know() -> None:
    for width in (0, 1, 7, 96, 300):
        for dtype in FLOAT8:
            for scale_dtype in SCALE_DTYPES:
                for blocks in {1, max(width, 1)}:
                    codec = BlocksFloat8(width, dtype, blocks, scale_dtype)
                    found = codec_named(codec.name, width)
                    assert (found.name, found.parts) == (codec.name, codec.parts)
    assert codec_for(300, torch.float32, torch.float8_e4m3fn, 128).name == "float8_e4m3fn-block100"
    for name in ("float8_e4m3fn-block128", "float8_e4m3fn-block0", "float8_e4m3fn-block", "float8_e3m4-block100"):
        with pytest.raises(ValueError, match="rows are encoded as 'float8_e"):
            codec_named(name, 300)


@pytest.mark.parametrize(
    ("dtype", "blocks", "scales", "error", "message"),
    [
        (torch.float8_e4m3fn, 7, torch.float32, InvalidValueError, r"300 columns have 7 scales each, but .* evenly"),
        (torch.float8_e4m3fn, 0, torch.float32, InvalidValueError, "0 scales"),
        (torch.int8, 1, torch.float32, InvalidTypeError, "codes of rows are torch.int8 but must be one of"),
        (torch.float8_e5m2, 1, torch.float16, InvalidTypeError, "scales of rows are torch.float16 but must be one of"),
    ],
)
def test_planes_that_are_none(dtype, blocks, scales, error, message) -> None:
    with pytest.raises(error, match=message):
        codec_of_planes(300, dtype, blocks, scales)
