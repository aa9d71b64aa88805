"""Compile with numba the stochastic rounding of `codecs` in one pass over the rows: the same bits.

Each function takes the rows `start` to `stop`, without the GIL, of values (n, width) float32. Keys of random bits are `rows`
(n,) and `columns` (width,), int32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from speedtransfer.jit import compile_function

_SIGN, _INFINITY = np.uint32(0x80000000), np.uint32(0x7F800000)
_BFLOAT16_LARGEST, _HALF_SMALLEST = np.uint32(0x7F7F), np.float32(2.0**-14)
_LEAST, _LEAST_SIGNED = np.float32(1.25 * 2.0**-32), np.float32(1.25 * 2.0**-16)  # what the code 1 of `Blocks8` means


@njit(inline="always")
def _random(row: Any, column: Any) -> Any:
    """Return the bits of `rounding.random_bits` as uint32."""
    word = np.uint32((row ^ column) * np.uint32(0x7FEB352D))
    word = np.uint32(word ^ (word >> np.uint32(15)))
    return np.uint32(word * np.uint32(0x846CA68B))


@njit(inline="always")
def _as_bfloat16(top: Any, size: Any, word: Any) -> Any:
    """Return `top`, the bits of a bfloat16, with the sign of `word`; infinity or NaN where its magnitude `size` is."""
    top = np.uint32(0x7F80) if size == _INFINITY else top
    top = np.uint32(0x7FC0) if size > _INFINITY else top
    return np.uint16(top | ((word >> np.uint32(16)) & np.uint32(0x8000)))


@compile_function
def encode_bfloat16(values: Any, rows: Any, columns: Any, out: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) int16 with the bits of bfloat16."""
    row_keys, column_keys, target = rows.view(np.uint32), columns.view(np.uint32), out.view(np.uint16)
    words = values.view(np.uint32)
    for i in range(start, stop):
        for j in range(words.shape[1]):
            word, bits = words[i, j], _random(row_keys[i], column_keys[j])
            size = np.uint32(word & np.uint32(0x7FFFFFFF))
            top = np.uint32((size + (bits >> np.uint32(16))) >> np.uint32(16))
            target[i, j] = _as_bfloat16(min(top, _BFLOAT16_LARGEST), size, word)


@compile_function
def encode_split24(values: Any, rows: Any, columns: Any, out: Any, low: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) int16 with the bits of bfloat16, and `low` (n, width) int8."""
    row_keys, column_keys, target = rows.view(np.uint32), columns.view(np.uint32), out.view(np.uint16)
    words = values.view(np.uint32)
    for i in range(start, stop):
        for j in range(words.shape[1]):
            word, bits = words[i, j], _random(row_keys[i], column_keys[j])
            size = np.uint32(word & np.uint32(0x7FFFFFFF))
            rounded = np.uint32((size + (bits >> np.uint32(24))) >> np.uint32(8))
            rounded = min(rounded, np.uint32(0x7F7F7F))
            top = np.uint32((rounded + np.uint32(0x80)) >> np.uint32(8))
            rest = np.uint32(rounded - (top << np.uint32(8)))
            target[i, j] = _as_bfloat16(top, size, word)
            low[i, j] = np.int8(rest if size < _INFINITY else np.uint32(0))


@compile_function
def decode_split24(out: Any, tops: Any, low: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) float32 from the bits of bfloat16, (n, width) int16, and `low` (n, width) int8."""
    words, halves = out.view(np.uint32), tops.view(np.uint16)
    for i in range(start, stop):
        for j in range(words.shape[1]):
            half, rest = np.uint32(halves[i, j]), np.int32(low[i, j])
            size = np.uint32(half & np.uint32(0x7FFF))
            rest = max(rest, np.int32(0)) if size == np.uint32(0) else rest
            rest = rest if size < np.uint32(0x7F80) else np.int32(0)
            words[i, j] = np.uint32(half << np.uint32(16)) + np.uint32(rest << np.int32(8))


@compile_function
def encode_float16(values: Any, rows: Any, columns: Any, out: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) int16 with the bits of float16."""
    row_keys, column_keys, target = rows.view(np.uint32), columns.view(np.uint32), out.view(np.uint16)
    words = values.view(np.uint32)
    shifted: Any = np.empty(values.shape[1], np.float32)
    sums = shifted.view(np.uint32)
    for i in range(start, stop):
        for j in range(values.shape[1]):
            value = np.float32(abs(values[i, j]))
            shifted[j] = value + _HALF_SMALLEST if value < _HALF_SMALLEST else value
        for j in range(values.shape[1]):
            word, size = words[i, j], np.uint32(words[i, j] & np.uint32(0x7FFFFFFF))
            bits = _random(row_keys[i], column_keys[j])
            top = np.uint32((sums[j] + (bits >> np.uint32(19))) >> np.uint32(13))
            # Below the smallest, which was added, a number of steps; above it significand and exponent in another place.
            top = np.uint32(top - (np.uint32(113 << 10) if size < np.uint32(113 << 23) else np.uint32(112 << 10)))
            top = min(top, np.uint32(0x7BFF))
            top = np.uint32(0x7C00) if size == _INFINITY else top
            top = np.uint32(0x7E00) if size > _INFINITY else top
            target[i, j] = np.uint16(top | ((word >> np.uint32(16)) & np.uint32(0x8000)))


@compile_function
def encode_int8(values: Any, rows: Any, columns: Any, out: Any, scales: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) int8 and `scales` (n, 1) float32."""
    words, row_keys, column_keys = values.view(np.uint32), rows.view(np.uint32), columns.view(np.uint32)
    scale: Any = np.empty(1, np.float32)
    scale_word: Any = scale.view(np.uint32)
    for i in range(start, stop):
        largest: Any = np.uint32(0)  # of the magnitudes' bits, which are in the order of the magnitudes
        for j in range(words.shape[1]):
            largest = max(largest, np.uint32(words[i, j] & np.uint32(0x7FFFFFFF)))
        if largest >= _INFINITY:
            scales[i, 0] = np.nan
            for j in range(words.shape[1]):
                out[i, j] = 0
            continue
        scale_word[0] = largest
        scale[0] /= np.float32(127.0)
        scale_word[0] &= np.uint32(0xFFFFFF80)
        scales[i, 0] = factor = max(scale[0], np.float32(2.0**-126))
        for j in range(words.shape[1]):
            bits = np.int32(_random(row_keys[i], column_keys[j]) >> np.uint32(16))
            code = np.floor(values[i, j] / factor + np.float32(bits) * np.float32(2.0**-16))
            code = code if code > np.float32(-127.0) else np.float32(-127.0)
            code = code if code < np.float32(127.0) else np.float32(127.0)
            out[i, j] = np.int8(np.int32(code))


@compile_function
def encode_float8_e4m3fn(values: Any, rows: Any, columns: Any, out: Any, scales: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) uint8 with the bits of float8_e4m3fn, and `scales` (n, blocks) float32."""
    _encode_float8(values, rows, columns, out, scales, start, stop, 3, 448.0, -6)


@compile_function
def encode_float8_e5m2(values: Any, rows: Any, columns: Any, out: Any, scales: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) uint8 with the bits of float8_e5m2, and `scales` (n, blocks) float32."""
    _encode_float8(values, rows, columns, out, scales, start, stop, 2, 57344.0, -14)


@njit(error_model="numpy", inline="always")
def _encode_float8(
    values: Any,
    rows: Any,
    columns: Any,
    out: Any,
    scales: Any,
    start: int,
    stop: int,
    digits: Any,
    top: Any,
    least: Any,
) -> None:
    """Encode in a float8 of `digits` bits of significand, largest `top` and smallest ordinary number ``2**least``."""
    words, row_keys, column_keys = values.view(np.uint32), rows.view(np.uint32), columns.view(np.uint32)
    sums = np.empty(values.shape[1], np.float32)
    for i in range(start, stop):
        _encode_float8_row(
            values[i], words[i], row_keys[i], column_keys, sums, out[i], scales[i], digits, np.float32(top), least
        )


@njit(error_model="numpy", inline="always")
def _encode_float8_row(
    values: Any, words: Any, row: Any, columns: Any, sums: Any, out: Any, scales: Any, digits: Any, top: Any, least: Any
) -> None:
    """Fill `out` (width,) and `scales` (blocks,). Loops over columns are such that the compiler makes vectors of."""
    width, blocks = values.shape[0], scales.shape[0]
    size, sum_words, smallest = -(-width // blocks), sums.view(np.uint32), np.float32(2.0**least)
    kept, least_scale = np.uint32(0xFFFFFFFF << (digits + 1) & 0xFFFFFFFF), np.float32(2.0 ** (digits - least - 126))
    for block in range(blocks):
        low, high = block * size, min((block + 1) * size, width)
        largest = np.uint32(0)
        for j in range(low, high):
            largest = max(largest, np.uint32(words[j] & np.uint32(0x7FFFFFFF)))  # as in encode_int8
        sum_words[low] = largest
        sums[low] /= top
        sum_words[low] &= kept
        scales[block] = scale = max(sums[low], least_scale) if largest < _INFINITY else np.float32(np.nan)
        for j in range(low, high):
            share = np.float32(abs(values[j])) / scale
            share = share if share < top else top
            # Minus where the smallest was added, which the sum no longer tells.
            sums[j] = -(share + smallest) if share < smallest else share
    lost, unused = np.uint32(23 - digits), np.uint32(9 + digits)
    first, next_one = np.uint32((126 + least) << digits), np.uint32(1 << digits)
    for j in range(width):
        bits = np.uint32(_random(row, columns[j]) >> unused)
        added = np.uint32(sum_words[j] >> np.uint32(31))
        code = np.uint32(np.uint32(np.uint32(sum_words[j] & np.uint32(0x7FFFFFFF)) + bits) >> lost)
        code = np.uint32(code - first - np.uint32(added * next_one))
        out[j] = np.uint8(code | np.uint32((words[j] >> np.uint32(24)) & np.uint32(128)))
    for block in range(blocks):
        if scales[block] != scales[block]:
            for j in range(block * size, min((block + 1) * size, width)):
                out[j] = 0


@compile_function
def encode_blocks(values: Any, rows: Any, columns: Any, out: Any, scales: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) uint8 and `scales` (n, blocks) float32."""
    size = -(-values.shape[1] // scales.shape[1])
    words, row_keys, column_keys = values.view(np.uint32), rows.view(np.uint32), columns.view(np.uint32)
    shares = np.empty(size, np.float32)
    for i in range(start, stop):
        for block in range(scales.shape[1]):
            low, high = block * size, (block + 1) * size
            scales[i, block] = _encode_block(
                values[i][low:high], words[i][low:high], row_keys[i], column_keys[low:high], shares, out[i][low:high]
            )


@njit(error_model="numpy")
def _encode_block(values: Any, words: Any, row: Any, columns: Any, shares: Any, out: Any) -> Any:
    """Fill `out` (width,) and return the scale. Every loop is one that the compiler makes vectors of."""
    count = values.shape[0]
    share_words, largest, with_sign = shares.view(np.uint32), np.uint32(0), np.uint32(0)
    for j in range(count):
        largest = max(largest, np.uint32(words[j] & np.uint32(0x7FFFFFFF)))  # as in encode_int8
        with_sign = max(with_sign, np.uint32(words[j]))
    if largest >= _INFINITY:
        out[:] = 0
        return np.float32(np.nan)
    share_words[0] = largest & np.uint32(0xFFFFFFF0)
    scale = max(shares[0], np.float32(2.0**-94))
    for j in range(count):
        share = np.float32(abs(values[j])) / scale
        shares[j] = share if share < np.float32(1.0) else np.float32(1.0)
    if with_sign <= _SIGN:  # minus zero is no negative number
        for j in range(count):
            bits = np.uint32(_random(row, columns[j]) >> np.uint32(12))
            code = np.uint32(np.uint32(np.uint32(share_words[j] + bits) >> np.uint32(20)) - np.uint32(761))
            some = np.uint32(1) if np.uint32(words[j] & np.uint32(0x7FFFFFFF)) > np.uint32(0) else np.uint32(0)
            out[j] = np.uint8(some if shares[j] < _LEAST else code)
        return scale
    for j in range(count):
        bits = np.uint32(_random(row, columns[j]) >> np.uint32(12))
        code = np.uint32(np.uint32(np.uint32(share_words[j] + bits) >> np.uint32(20)) - np.uint32(889))
        chance = np.float32(np.int32(bits)) * np.float32(2.0**-20) * _LEAST_SIGNED
        some = np.uint32(1) if shares[j] > chance else np.uint32(0)
        sign = np.uint32(128) if words[j] > _SIGN else np.uint32(0)
        out[j] = np.uint8(np.uint32(some if shares[j] < _LEAST_SIGNED else code) | sign)
    return -scale


@compile_function
def decode_blocks(out: Any, codes: Any, scales: Any, table: Any, start: int, stop: int) -> None:
    """Fill `out` (n, width) float32 from codes (n, width), scales (n, blocks) and what codes mean (512,)."""
    size = -(-out.shape[1] // scales.shape[1])
    for i in range(start, stop):
        for block in range(scales.shape[1]):
            scale = scales[i, block]
            known = table[256:] if scale < np.float32(0.0) else table[:256]
            source, target = codes[i][block * size : (block + 1) * size], out[i][block * size : (block + 1) * size]
            for j in range(source.shape[0]):
                target[j] = known[source[j]] * np.float32(abs(scale))
