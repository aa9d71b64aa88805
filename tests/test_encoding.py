"""Rows in fewer bits: round trips, bounds on the error, rounding that is right on average and can be repeated."""

import importlib
import math

import pytest
import torch
from cases import same_values
from cpu_kernels import cpu_kernels
from engine_cases import interesting_floats
from hypothesis import given, settings
from hypothesis import strategies as st

from speedtransfer.dtypes import SCALE_DTYPES
from speedtransfer.encoding import convert, cuda_codecs
from speedtransfer.encoding.choice import codec_for, codec_named
from speedtransfer.encoding.codecs import LOW, SCALE, Blocks8, Cast, RowInt8
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.float8 import BlocksFloat8, codec_of_planes
from speedtransfer.encoding.rounding import Keys, write_key
from speedtransfer.encoding.split24 import SPLIT24, Split24

FLOAT8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Those of torch in blocks of as many columns at most.
KINDS = ("bfloat16", "float16", "int8", "float8", *FLOAT8, "e4m3fn/7", SPLIT24)


def codec_of(kind, width):
    if kind in ("bfloat16", "float16"):
        return Cast(width, getattr(torch, kind))
    if kind.partition("/")[0] in FLOAT8:
        name, _, block = kind.partition("/")
        return codec_for(width, torch.float32, FLOAT8[name], int(block) if block else None)
    if kind == SPLIT24:
        return Split24(width)
    return RowInt8(width) if kind == "int8" else Blocks8(width)


def keys_for(count, writes=0):
    return Keys(write_key(0, writes, "weight"), torch.arange(count))


def there_and_back(codec, values, writes=None):
    return decode_rows(codec, encode_rows(codec, values, None if writes is None else keys_for(len(values), writes)))


def normal(rows, width, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


# --- the random bits --------------------------------------------------------------------------------------------------


def test_bits_are_these():
    """Runs go on from a seed and a count in a later version too."""
    keys = Keys(write_key(2**64 - 1, 3, "exp_avg"), torch.tensor([0, 1]))
    assert keys.bits(slice(None), 2).tolist() == [[1430091211, 986296673], [-2020184805, -302782914]]


# --- error bounds -----------------------------------------------------------------------------------------------------


def largest_of_blocks(codec, values):
    largest = torch.stack([columns.abs().amax(1) for columns in values.split(codec.size, 1)], 1)
    return largest.repeat_interleave(codec.size, 1)[:, : values.shape[1]]


# How far from a value are those that it may be rounded to.
STEPS = {
    "bfloat16": lambda codec, values: values.abs() * 2.0**-7,
    "float16": lambda codec, values: values.abs() * 2.0**-10 + 2.0**-24,
    SPLIT24: lambda codec, values: values.abs() * 2.0**-15,
    "int8": lambda codec, values: values.abs().amax(1, keepdim=True) / 127 * 1.001,
    "float8": lambda codec, values: torch.maximum(
        values.abs() * (1 / 8 + 2e-5), largest_of_blocks(codec, values) * (2.0**-14 if values.min() < 0 else 2.0**-30)
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("width", [1, 60, 128, 129, 300])
@pytest.mark.parametrize("sign", ["any", "positive"])
@pytest.mark.parametrize("kind", STEPS)
def test_values_are_within_a_step(kind, sign, width):
    """To the nearest within half of it."""
    codec = codec_of(kind, width)
    values = normal(40, width) * torch.logspace(-9, 3, 40)[:, None]
    values = (values.square() if sign == "positive" else values).clamp(-6e4, 6e4)
    step = STEPS[kind](codec, values)
    for writes in (None, 0, 1):
        found = there_and_back(codec, values, writes)
        far = (found - values).abs()
        assert (far <= (step / 2 if writes is None else step)).all()
        assert (found * values >= 0).all()
    if kind in ("bfloat16", "float16"):
        assert torch.equal(there_and_back(codec, values), values.to(getattr(torch, kind)).float())


@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=40), st.sampled_from([None, 0, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_second_moments_never_become_zero(values, writes):
    row = torch.tensor([values])
    assert (there_and_back(Blocks8(len(values)), row, writes) > 0).all()


# --- what must stay as it is ------------------------------------------------------------------------------------------


CODECS = [codec_of(kind, 96) for kind in KINDS]
CODECS += [BlocksFloat8(96, dtype, 3, scale_dtype) for dtype in FLOAT8.values() for scale_dtype in SCALE_DTYPES]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name} {list(codec.parts.values())[-1].dtype}")
@pytest.mark.parametrize("square", [False, True])
def test_what_was_stored_stays_bit_for_bit(codec, square):
    """Under scales that are powers of two, too: where their largest code is half of the largest, the scale halves."""
    values = normal(300, 96) * torch.logspace(-18, 15, 300)[:, None]
    values = values.square() if square else values
    for first in (None, 0):
        stored = there_and_back(codec, values, first)
        assert stored.isfinite().all()
        for writes in (None, *range(4)):
            again = there_and_back(codec, stored, writes)
            assert torch.equal(again.view(torch.int32), stored.view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_stored_one_by_one(kind):
    """A row comes out the same alone and among others, also where the CPU takes some at a time."""
    width, rows = 100, convert._CHUNK // 100 + 10
    values, keys = normal(rows, width), keys_for(rows)
    codec, bits = codec_of(kind, width), keys.bits(slice(None), width)
    whole = encode_rows(codec, values, keys)
    at_once = codec.encode(values, bits)
    some = torch.tensor([0, 1, 17, rows - 1])
    alone = codec.encode(values[some], bits[some])
    for suffix, part in whole.items():
        assert torch.equal(part, at_once[suffix])
        # As bytes: torch 2.6 does not index float8.
        assert torch.equal(part.view(torch.uint8)[some], alone[suffix].view(torch.uint8))
        assert part.is_contiguous()
    assert torch.equal(decode_rows(codec, whole), codec.decode(whole, torch.empty(rows, width)))


def awkward(width):
    """Return rows of every size, of zeros, of both signs or one, and with infinities and NaN."""
    values = normal(400, width) * torch.logspace(-44, 38, 400)[:, None]
    values[::3] = values[::3].abs()
    values[::7, : width // 2] *= torch.logspace(0, -12, width // 2)
    values[5], values[6, 0], values[7, -1], values[8, 0] = 0.0, math.inf, -math.inf, math.nan
    values[9, : width // 3] = -0.0
    return values


def empty_parts(codec, count):
    return {suffix: torch.empty(count, part.width, dtype=part.dtype) for suffix, part in codec.parts.items()}


def check_parts(found, expected):
    for suffix, part in expected.items():
        same_values(found[suffix], part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 8, 16, 100, 128, 300])
def test_compiled_passes_and_kernels_give_the_bits_of_torch(kind, width):
    """Kernels also of rows that begin at any address, where words of 16 bytes cannot be read."""
    compiled = importlib.import_module("speedtransfer.encoding.numba_codecs")
    codec = codec_of(kind, width)
    for writes, launch, offset in ((0, (2, 64), 0), (1, (1, 1), 1), (2, (3, 7), 2)):
        # Of 8 columns, every exponent near the values at which rounding changes.
        given = interesting_floats() if width == 8 else awkward(width)
        count = len(given)
        values = torch.empty(given.numel() + 4)[offset:][: given.numel()].view(given.shape).copy_(given)
        keys = Keys(write_key(2**63, writes, "weight"), torch.randperm(count) * 2**33)
        expected = codec.encode(values, keys.bits(slice(None), width))
        decoded = codec.decode(expected, torch.empty(count, width))
        found, from_kernel = empty_parts(codec, count), empty_parts(codec, count)
        convert._encode_compiled(compiled, codec, values, keys, found)
        check_parts(found, expected)
        same_values(decode_rows(codec, found), decoded)
        argument = cuda_codecs.pack_encoding(codec, values, keys, from_kernel)
        cpu_kernels().launch("encode_rows", *launch, argument, backwards=writes == 1)
        check_parts(from_kernel, expected)
        if isinstance(codec, Blocks8 | Split24):
            from_kernel = torch.empty(count, width)
            cpu_kernels().launch(codec.decoder, *launch, cuda_codecs.pack_decoding(found, from_kernel))
            same_values(from_kernel, decoded)


# --- 24 bits ----------------------------------------------------------------------------------------------------------

# Beyond it the nearest bfloat16 would be infinite.
LARGEST_24 = (2 - 2.0**-7 + 127 * 2.0**-15) * 2.0**127


def of_24_bits(values, up=None):
    """Return float32 (n, width) in 24 bits, by arithmetic in float64; `up`: shares of a step from which it is rounded up."""
    wide = values.double()
    step = 2.0 ** (wide.abs().log2().floor().clamp(min=-126) - 15)
    steps = wide.abs() / step
    steps = steps.round() if up is None else (steps + up).floor()
    rounded = (steps * step).clamp(max=LARGEST_24).copysign(wide)
    return torch.where(wide.isfinite() & (wide != 0), rounded, wide).float()


def test_rows_of_24_bits_are_those_of_arithmetic():
    values = interesting_floats()
    known = ~values.isnan()
    keys = keys_for(len(values))
    up = (keys.bits(slice(None), 8) >> 24 & 0xFF).double() / 256
    for found, expected in (
        (there_and_back(Split24(8), values), of_24_bits(values)),
        (there_and_back(Split24(8), values, 0), of_24_bits(values, up)),
    ):
        assert torch.equal(found.view(torch.int32)[known], expected.view(torch.int32)[known])
        assert found[~known].isnan().all()


def test_the_bfloat16_alone_is_the_nearest():
    """Of two as near it is the larger, where torch has the even one."""
    floats = interesting_floats()
    values = there_and_back(Split24(8), floats[floats.isfinite().all(1)])
    parts = encode_rows(Split24(8), values, None)
    assert torch.equal(decode_rows(Split24(8), parts), values)
    wide, alone = values.double(), parts[""].double()
    finite = alone.isfinite() & (values.abs() <= torch.finfo(torch.bfloat16).max)
    far, ties = (alone - wide).abs(), parts[LOW] == -128
    assert torch.equal(parts[""][finite & ~ties], values.bfloat16()[finite & ~ties])
    assert torch.equal(far[finite], (values.bfloat16().double() - wide).abs()[finite])
    assert (alone.abs() > wide.abs())[ties & finite].all()
    assert ties.any()


def test_any_two_parts_decode_to_one_number_everywhere():
    """Also those that encoding never makes: a write to the bfloat16 alone leaves the others as they were."""
    tops = torch.tensor([0, 1, 2, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FC0, 0x3F80], dtype=torch.int32)
    tops = torch.cat([tops, tops - 0x8000]).to(torch.int16).repeat_interleave(256).view(18, 256)
    parts = {"": tops.view(torch.bfloat16), LOW: torch.arange(-128, 128).to(torch.int8).repeat(18, 1)}
    expected = Split24(256).decode(parts, torch.empty(18, 256))
    from_kernel = torch.empty(18, 256)
    cpu_kernels().launch("decode_split24", 2, 32, cuda_codecs.pack_decoding(parts, from_kernel))
    for found in (decode_rows(Split24(256), parts), from_kernel):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    alone = parts[""].float()
    assert torch.equal(expected.isnan(), alone.isnan())
    assert torch.equal(expected.isinf(), alone.isinf())
    assert torch.equal(expected.signbit(), alone.signbit())


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [None, 0, 5])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", SPLIT24])
def test_casts_saturate_and_keep_infinities(kind, writes):
    largest, inf = LARGEST_24 if kind == SPLIT24 else torch.finfo(getattr(torch, kind)).max, math.inf
    top = torch.finfo(torch.float32).max
    values = torch.tensor([[top, -top, largest * 1.0001, inf, -inf, math.nan, 0.0, -0.0]])
    found = there_and_back(codec_of(kind, 8), values, writes)
    assert found[0, :5].tolist() == [largest, -largest, largest, inf, -inf]
    assert found[0, 5].isnan()
    assert found[0, 6:].tolist() == [0.0, 0.0]
    pattern = torch.tensor([[0x7FFFFFFF, -1, 0x7F800001]], dtype=torch.int32).view(torch.float32)
    assert there_and_back(codec_of(kind, 3), pattern, writes).isnan().all()


@pytest.mark.parametrize("writes", [None, 0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["int8", "float8", *FLOAT8])
def test_what_shares_a_scale_with_such_a_number_is_lost_and_says_so(kind, bad, writes):
    values = normal(4, 200)
    values[1, 3] = bad
    parts = encode_rows(codec_of(kind, 200), values, None if writes is None else keys_for(4, writes))
    found, lost = decode_rows(codec_of(kind, 200), parts), 200 if kind == "int8" else 100
    assert not parts[""].view(torch.uint8)[1, :lost].any()
    assert found[1, :lost].isnan().all()
    rest = torch.cat([found[[0, 2, 3]].flatten(), found[1, lost:]])
    assert rest.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_near_the_ends_of_float32(kind):
    top, tiny = torch.finfo(torch.float32).max, 2.0**-149
    values = torch.tensor([[top, -top, 1.0], [tiny, -3 * tiny, 0.0], [tiny, top, 0]])
    for writes in (None, 0, 1):
        found = there_and_back(codec_of(kind, 3), values, writes)
        assert found.isfinite().all()
        assert (found[values == 0] == 0).all()


# --- right on average -------------------------------------------------------------------------------------------------

_REPEATS = 2000


SUBNORMAL = {"bfloat16": 1e-39, "float16": 1e-5, SPLIT24: 1e-41}
UNBIASED = [*SUBNORMAL.items(), *((kind, 1.0) for kind in ("bfloat16", SPLIT24, "int8", "float8", *FLOAT8))]


@pytest.mark.parametrize(("kind", "factor"), [*UNBIASED, ("positive float8", 1.0)])
def test_rounding_is_unbiased(kind, factor):
    width = 48
    values = normal(1, width) * factor
    # Also below the smallest code; without a negative one down to it.
    if kind in ("float8", *FLOAT8):
        values[:, :16] *= torch.logspace(0, -6, 16)
    elif kind == "positive float8":
        kind, values = "float8", torch.logspace(0, -9.4, width)[None]
    codec, ids = codec_of(kind, width), torch.zeros(1, dtype=torch.int64)
    bits = torch.cat([Keys(write_key(1, writes, "w"), ids).bits(slice(None), width) for writes in range(_REPEATS)])
    found = decode_rows(codec, codec.encode(values.expand(_REPEATS, width), bits)).double()
    spread = found.std(0) / math.sqrt(_REPEATS)
    # The largest of a scale is rounded down, by less than the last digits that the scale drops.
    digits = {"int8": 2.0**-16} | dict.fromkeys(("float8", *FLOAT8), 2.0**-19)
    largest = values.abs().double().max() * digits.get(kind, 0)
    assert ((found.mean(0) - values[0].double()).abs() <= 5 * spread + largest + 1e-7 * values[0].abs().double()).all()
    assert (found.std(0) > 0).double().mean() > 0.9


# --- float8 of torch --------------------------------------------------------------------------------------------------


LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def codes(parts):
    return parts[""].view(torch.uint8)


def stored_rows(dtype, blocks, scale_dtype):
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
@pytest.mark.parametrize("dtype", FLOAT8.values(), ids=FLOAT8)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 8, 256])
def test_every_code_under_every_scale(dtype, scale_dtype, blocks):
    """By torch, by numba and by the kernel."""
    parts = stored_rows(dtype, blocks, scale_dtype)
    codec = codec_of_planes(256, dtype, blocks, scale_dtype)
    # As one would write it, whatever the dtypes.
    wide = parts[SCALE].float().repeat_interleave(256 // blocks, 1)
    expected = (parts[""].float() * wide).view(torch.int32)
    known = ~expected.view(torch.float32).isnan()
    assert 0.9 < float(known.double().mean()) < 1
    from_kernel = torch.empty(40, 256)
    wide = {**parts, SCALE: parts[SCALE].float()}
    cpu_kernels().launch("decode_blocks", 2, 32, cuda_codecs.pack_decoding(wide, from_kernel))
    for found in (codec.decode(parts, torch.empty(40, 256)), decode_rows(codec, parts), from_kernel):
        assert torch.equal(found.isnan(), ~known)
        assert torch.equal(found.view(torch.int32)[known], expected[known])


@pytest.mark.parametrize("dtype", FLOAT8.values(), ids=FLOAT8)
@pytest.mark.parametrize(("width", "block"), [(1, None), (7, 3), (131, None), (300, 300)])
def test_to_the_nearest_is_the_cast_of_torch(dtype, width, block):
    values = normal(90, width) * torch.logspace(-30, 30, 90)[:, None]
    values[::4] *= torch.logspace(0, -7, width)  # as far as below the smallest code
    values[3] = 0.0
    codec = codec_for(width, torch.float32, dtype, block)
    parts = encode_rows(codec, values, None)
    size = codec.size
    scales = parts[SCALE].repeat_interleave(size, 1)[:, :width]
    top = LARGEST[dtype]
    assert torch.equal(codes(parts), (values / scales).clamp(-top, top).to(dtype).view(torch.uint8))
    for block_number, columns in enumerate(values.split(size, 1)):
        largest, scale = columns.abs().amax(1).double(), parts[SCALE][:, block_number].double()
        share = largest / (scale * top)
        some = largest > 2.0**-90
        assert some.double().mean() > 0.7
        assert (share[some] >= 1 - 2.0**-23).all()
        assert (share[some] < 1 + 2.0**-19).all()


@pytest.mark.parametrize("dtype", FLOAT8.values(), ids=FLOAT8)
def test_scales_in_fewer_bits_are_powers_of_two_that_clip_nothing(dtype):
    values = normal(100, 64) * torch.logspace(-20, 20, 100)[:, None]
    for scale_dtype in SCALE_DTYPES[1:]:
        codec = BlocksFloat8(64, dtype, 2, scale_dtype)
        parts = encode_rows(codec, values, None)
        scale = parts[SCALE].double()
        assert torch.equal(scale.log2(), scale.log2().round())
        share = values.view(100, 2, 32).abs().amax(2) / scale
        assert (share <= LARGEST[dtype]).all()
        assert (share > LARGEST[dtype] / 2).all()


# --- which codec ------------------------------------------------------------------------------------------------------


def test_names_say_all_that_a_checkpoint_must_know():
    for width in (0, 1, 7, 96, 300):
        for dtype in FLOAT8.values():
            for scale_dtype in SCALE_DTYPES:
                for blocks in {1, max(width, 1)}:
                    codec = BlocksFloat8(width, dtype, blocks, scale_dtype)
                    found = codec_named(codec.name, width)
                    assert (found.name, found.parts) == (codec.name, codec.parts)
    assert codec_for(300, torch.float32, torch.float8_e4m3fn, 128).name == "float8_e4m3fn-block100"
    for name in ("float8_e4m3fn-block128", "float8_e4m3fn-block0", "float8_e4m3fn-block", "float8_e3m4-block100"):
        with pytest.raises(ValueError, match="rows are encoded as 'float8_e"):
            codec_named(name, 300)


def test_layouts():
    """Blocks are as even as can be."""
    assert Blocks8(300).parts == {"": (300, torch.uint8), SCALE: (3, torch.float32)}
    assert RowInt8(300).parts == {"": (300, torch.int8), SCALE: (1, torch.float32)}
    for width, block, count in ((0, None, 1), (128, None, 1), (129, None, 2), (300, 2**62, 1), (10, 3, 4), (5, 1, 5)):
        assert codec_for(width, torch.float32, torch.float8_e5m2, block).parts[SCALE].width == count
    for codec in (codec_of(kind, 40) for kind in KINDS):
        # Pages that were never written.
        untouched = {suffix: torch.zeros(3, part.width, dtype=part.dtype) for suffix, part in codec.parts.items()}
        assert torch.equal(decode_rows(codec, untouched), torch.zeros(3, 40))
    names = "bfloat16 float16 int8-row float8-block100 float8_e4m3fn-block100 float8_e5m2-block100 float8_e4m3fn-block7"
    assert [codec_of(kind, 300).name for kind in KINDS] == [*names.split(), SPLIT24]
