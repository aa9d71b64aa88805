"""Small forms of rows: round trips, bounds on their error, and rounding that is right on average and can be repeated."""

from __future__ import annotations

import importlib
import math
import zlib

import pytest
import torch
from cases import same_values
from cpu_kernels import cpu_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import interesting_floats
from torch import Tensor

from speedtransfer.encoding import convert, cuda_codecs
from speedtransfer.encoding.choice import codec_for
from speedtransfer.encoding.codecs import BLOCK, SCALE, Blocks8, Cast, Codec, RowInt8
from speedtransfer.encoding.convert import decode_rows, encode_rows
from speedtransfer.encoding.rounding import Keys, column_keys, random_bits, write_key

FLOAT8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# Those of torch in blocks of as many columns at most.
KINDS = ("bfloat16", "float16", "int8", "float8", *FLOAT8, "e4m3fn/7")


def codec_of(kind: str, width: int) -> Codec:
    if kind in ("bfloat16", "float16"):
        return Cast(width, getattr(torch, kind))
    if kind.partition("/")[0] in FLOAT8:
        name, _, block = kind.partition("/")
        return codec_for(width, torch.float32, FLOAT8[name], int(block) if block else None)
    return RowInt8(width) if kind == "int8" else Blocks8(width)


CPU = torch.device("cpu")


def row_keys(seed: int, writes: int, plane: str, ids: Tensor) -> Tensor:
    return Keys(write_key(seed, writes, plane), ids).rows(slice(None))


def keys_for(count: int, writes: int = 0) -> Keys:
    return Keys(write_key(0, writes, "weight"), torch.arange(count))


def there_and_back(codec: Codec, values: Tensor, writes: int | None = None) -> Tensor:
    return decode_rows(codec, encode_rows(codec, values, None if writes is None else keys_for(len(values), writes)))


def normal(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


# --- the random bits --------------------------------------------------------------------------------------------------


def test_bits_depend_on_seed_write_plane_row_and_column_alone() -> None:
    ids, columns = torch.tensor([5, 2**40, 7]), column_keys(9, CPU)
    words = random_bits(row_keys(3, 1, "weight", ids), columns)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(random_bits(row_keys(3, 1, "weight", ids[order]), columns), words[order])
    assert torch.equal(column_keys(20, CPU)[:9], columns)
    for other in (row_keys(4, 1, "weight", ids), row_keys(3, 2, "weight", ids), row_keys(3, 1, "exp_avg", ids)):
        assert not (random_bits(other, columns) == words).any()


def test_bits_are_these() -> None:
    """Runs go on from a seed and a count in a later version too."""
    words = random_bits(row_keys(2**64 - 1, 3, "exp_avg", torch.tensor([0, 1])), column_keys(2, CPU))
    assert words.tolist() == [[1430091211, 986296673], [-2020184805, -302782914]]


def _word(word: int) -> int:  # SplitMix64 in Python's own integers
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) % 2**64
    return word ^ word >> 31


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**50))
@settings(max_examples=50, deadline=None)
def test_row_keys_are_those_of_exact_arithmetic(seed: int, writes: int, row: int) -> None:
    golden = 0x9E3779B97F4A7C15
    key = _word((_word((seed ^ zlib.crc32(b"weight") << 32) % 2**64) + writes * golden) % 2**64)
    expected = _word((row * golden + key) % 2**64) >> 32
    assert int(row_keys(seed, writes, "weight", torch.tensor([row]))) % 2**32 == expected


# --- error bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_casts_round_to_the_nearest_as_torch_or_to_one_of_two_neighbours(kind: str) -> None:
    dtype, codec = getattr(torch, kind), codec_of(kind, 64)
    values = normal(40, 64) * torch.logspace(-9, 3, 40)[:, None]
    nearest = values.to(dtype)
    assert torch.equal(there_and_back(codec, values), nearest.float())
    ends = (torch.nextafter(nearest, torch.tensor(end, dtype=dtype)).float() for end in (math.inf, -math.inf))
    step = torch.stack([(end - nearest.float()).abs() for end in ends]).amax(0)
    for writes in range(4):
        found = there_and_back(codec, values, writes)
        assert torch.equal(found.to(dtype).float(), found)
        assert ((found - values).abs() < step).all()


@pytest.mark.parametrize("writes", [None, 0, 1])
def test_int8_is_within_a_step_of_its_scale(writes: int | None) -> None:
    values = normal(60, 50) * torch.logspace(-20, 20, 60)[:, None]
    found = there_and_back(RowInt8(50), values, writes)
    step = values.abs().amax(1, keepdim=True) / 127
    assert ((found - values).abs() <= step * (0.501 if writes is None else 1.001)).all()
    assert torch.allclose(found.abs().amax(1), values.abs().amax(1), rtol=2**-15, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("width", [1, 60, 128, 129, 300])
@pytest.mark.parametrize("sign", ["any", "positive"])
def test_8_bit_blocks_are_within_a_step_of_their_float(width: int, sign: str) -> None:
    codec = Blocks8(width)
    assert codec.size <= BLOCK
    values = normal(30, width) * torch.logspace(-12, 12, 30)[:, None]
    values = values.square() if sign == "positive" else values
    for writes, step in ((None, 1 / 16), (0, 1 / 8)):
        found = there_and_back(codec, values, writes)
        whole = torch.stack([c.abs().amax(1) for c in values.split(codec.size, 1)], 1)
        largest = whole.repeat_interleave(codec.size, 1)[:, :width]
        least = largest * (2.0**-15 if sign == "any" else 2.0**-31)
        assert ((found - values).abs() <= torch.maximum(values.abs() * (step + 1e-5), least)).all()
        assert (found * values >= 0).all()


def test_8_bit_codes_are_all_different_and_in_order() -> None:
    known = Blocks8(1).meanings(CPU)
    positive, signed = known[:256], known[256:384]
    assert (positive.diff() > 0).all()
    assert (signed.diff() > 0).all()
    assert torch.equal(known[384:], -signed)
    assert positive[255] == signed[127] == 1
    assert 2**-32 < positive[1] < 2**-31
    assert 2**-16 < signed[1] < 2**-15


@given(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=1, max_size=40), st.sampled_from([None, 0, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_second_moments_never_become_zero(values: list[float], writes: int | None) -> None:
    row = torch.tensor([values])
    assert (there_and_back(Blocks8(len(values)), row, writes) > 0).all()


# --- what must stay as it is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("square", [False, True])
def test_what_was_stored_stays_bit_for_bit(kind: str, square: bool) -> None:
    values = normal(200, 96) * torch.logspace(-18, 15, 200)[:, None]
    values = values.square() if square else values
    codec = codec_of(kind, 96)
    for first in (None, 0):
        stored = there_and_back(codec, values, first)
        for writes in (None, *range(4)):
            assert torch.equal(there_and_back(codec, stored, writes), stored)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("writes", [None, 0])
def test_zeros_stay(kind: str, writes: int | None) -> None:
    values = torch.zeros(3, 40)
    assert torch.equal(there_and_back(codec_of(kind, 40), values, writes), values)
    codec = codec_of(kind, 40)
    untouched = {s: torch.zeros(3, p.width, dtype=p.dtype) for s, p in codec.parts.items()}
    assert torch.equal(decode_rows(codec, untouched), values)  # pages that were never written


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_stored_one_by_one(kind: str) -> None:
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


def awkward(width: int) -> Tensor:
    """Return rows of every size, of zeros, of both signs or one, and with infinities and NaN."""
    values = normal(400, width) * torch.logspace(-44, 38, 400)[:, None]
    values[::3] = values[::3].abs()
    values[::7, : width // 2] *= torch.logspace(0, -12, width // 2)
    values[5], values[6, 0], values[7, -1], values[8, 0] = 0.0, math.inf, -math.inf, math.nan
    values[9, : width // 3] = -0.0
    return values


def empty_parts(codec: Codec, count: int) -> dict[str, Tensor]:
    return {suffix: torch.empty(count, part.width, dtype=part.dtype) for suffix, part in codec.parts.items()}


def check_parts(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for suffix, part in expected.items():
        same_values(found[suffix], part)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 16, 100, 128, 300])
def test_compiled_passes_give_the_bits_of_torch(kind: str, width: int) -> None:
    compiled = importlib.import_module("speedtransfer.encoding.numba_codecs")
    values, codec = awkward(width), codec_of(kind, width)
    for writes in range(3):
        keys = keys_for(400, writes)
        found = empty_parts(codec, 400)
        convert._encode_compiled(compiled, codec, values, keys, found)
        check_parts(found, codec.encode(values, keys.bits(slice(None), width)))
        same_values(decode_rows(codec, found), codec.decode(found, torch.empty(400, width)))


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3, 64, 100, 130])
def test_kernels_give_the_bits_of_torch(kind: str, width: int) -> None:
    """Also for rows that begin at any address, where words of 16 bytes cannot be read."""
    kernels = cpu_kernels()
    codec = codec_of(kind, width)
    for writes, launch, offset in ((0, (2, 64), 0), (1, (1, 1), 1), (2, (3, 7), 2)):
        values = torch.empty(400 * width + 4)[offset:][: 400 * width].view(400, width).copy_(awkward(width))
        keys = Keys(write_key(2**63, writes, "weight"), torch.randperm(400) * 2**33)
        found = empty_parts(codec, 400)
        argument = cuda_codecs.pack_encoding(codec, values, keys, found)
        kernels.launch("encode_rows", *launch, argument, backwards=writes == 1)
        check_parts(found, codec.encode(values, keys.bits(slice(None), width)))
        if isinstance(codec, Blocks8):
            decoded = torch.empty(400, width)
            kernels.launch("decode_blocks", *launch, cuda_codecs.pack_decoding(found, decoded))
            same_values(decoded, codec.decode(found, torch.empty(400, width)))


def test_kernels_round_every_float_as_torch_does() -> None:
    """Of every exponent, near the values at which rounding changes."""
    kernels, values = cpu_kernels(), interesting_floats()
    keys = keys_for(len(values))
    for kind in KINDS:
        codec = codec_of(kind, 8)
        found = empty_parts(codec, len(values))
        kernels.launch("encode_rows", 1, 32, cuda_codecs.pack_encoding(codec, values, keys, found))
        check_parts(found, codec.encode(values, keys.bits(slice(None), 8)))


def test_every_code_is_decoded_as_torch_does() -> None:
    kernels, codec = cpu_kernels(), Blocks8(256)
    codes = torch.arange(256).to(torch.uint8).expand(6, 256).contiguous()
    scales = torch.tensor([[1.0], [-3.0], [2.0**-94], [-(2.0**-94)], [0.0], [math.nan]]).expand(6, 2).contiguous()
    parts, found = {"": codes, SCALE: scales}, torch.empty(6, 256)
    kernels.launch("decode_blocks", 1, 32, cuda_codecs.pack_decoding(parts, found))
    same_values(found, codec.decode(parts, torch.empty(6, 256)))


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes", [None, 0, 5])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_casts_saturate_and_keep_infinities(kind: str, writes: int | None) -> None:
    largest, inf = torch.finfo(getattr(torch, kind)).max, math.inf
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
def test_what_shares_a_scale_with_such_a_number_is_lost_and_says_so(kind: str, bad: float, writes: int | None) -> None:
    values = normal(4, 200)
    values[1, 3] = bad
    parts = encode_rows(codec_of(kind, 200), values, None if writes is None else keys_for(4, writes))
    found, lost = decode_rows(codec_of(kind, 200), parts), 200 if kind == "int8" else 100
    assert not parts[""].view(torch.uint8)[1, :lost].any()
    assert found[1, :lost].isnan().all()
    rest = torch.cat([found[[0, 2, 3]].flatten(), found[1, lost:]])
    assert rest.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_near_the_ends_of_float32(kind: str) -> None:
    top, tiny = torch.finfo(torch.float32).max, 2.0**-149
    for values in (
        torch.tensor([[top, -top, 1.0]]),
        torch.tensor([[tiny, -3 * tiny, 0.0]]),
        torch.tensor([[tiny, top, 0]]),
    ):
        for writes in (None, 0, 1):
            found = there_and_back(codec_of(kind, 3), values, writes)
            assert found.isfinite().all()
            assert (found[values == 0] == 0).all()


# --- right on average -------------------------------------------------------------------------------------------------

_REPEATS = 2000


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("bfloat16", 1.0),
        ("bfloat16", 1e-39),  # subnormal
        ("float16", 1e-5),  # subnormal
        ("int8", 1.0),
        ("float8", 1.0),
        ("positive float8", 1.0),
    ],
)
def test_rounding_is_unbiased(kind: str, factor: float) -> None:
    width = 48
    values = normal(1, width) * factor
    # Also below the smallest code; without a negative one down to it.
    if kind == "float8":
        values[:, :16] *= torch.logspace(0, -6, 16)
    elif kind == "positive float8":
        kind, values = "float8", torch.logspace(0, -9.4, width)[None]
    codec, ids = codec_of(kind, width), torch.zeros(1, dtype=torch.int64)
    keys = torch.cat([row_keys(1, writes, "w", ids) for writes in range(_REPEATS)])
    bits = random_bits(keys, column_keys(width, CPU))
    found = decode_rows(codec, codec.encode(values.expand(_REPEATS, width), bits)).double()
    spread = found.std(0) / math.sqrt(_REPEATS)
    # The largest of a scale is rounded down, by less than the last digits that the scale drops.
    largest = values.abs().double().max() * (2.0**-16 if kind == "int8" else 2.0**-19 if kind == "float8" else 0)
    assert ((found.mean(0) - values[0].double()).abs() <= 5 * spread + largest + 1e-7 * values[0].abs().double()).all()
    assert (found.std(0) > 0).double().mean() > 0.9


def test_layouts() -> None:
    assert Blocks8(300).parts == {"": (300, torch.uint8), SCALE: (3, torch.float32)}
    assert RowInt8(300).parts == {"": (300, torch.int8), SCALE: (1, torch.float32)}
    names = "bfloat16 float16 int8-row float8-block100 float8_e4m3fn-block100 float8_e5m2-block100 float8_e4m3fn-block7"
    assert [codec_of(kind, 300).name for kind in KINDS] == names.split()
