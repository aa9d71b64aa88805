"""Group an index by its values, compiled by numba: a radix sort, which no length or order of ids slows."""

from __future__ import annotations

import numpy as np

from speedtransfer.jit import compile_function

_DIGIT = 11  # bits that a pass sorts by: its 2,048 counts stay in the first cache


@compile_function
def group(flat: np.ndarray, limit: int, found: np.ndarray, spare: np.ndarray) -> int:
    """Write the unique values of `flat`, where each value is among them, and the groups; return how many there are.

    Parameters
    ----------
    flat : ndarray
        ``(n,)`` int64, n > 0.
    limit : int
        What all values are below.
    found : ndarray
        ``(4, n + 1)`` int64, filled with the fields of `UniqueRows`: ids, inverse, order, starts.
    spare : ndarray
        ``(2, n)`` int64, overwritten.

    Returns
    -------
    int
        -1: a value is negative or not below `limit`, or has, beside its position, more than 63 bits.
    """
    count = len(flat)
    largest = np.uint64(0)  # a negative value is a large one
    for at in range(count):
        largest = max(largest, np.uint64(flat[at]))
    if largest >= np.uint64(limit):
        return -1
    position_bits, value_bits = 0, 0
    while count >> position_bits:
        position_bits += 1
    while largest >> np.uint64(value_bits):
        value_bits += 1
    if value_bits + position_bits > 63:
        return -1
    passes = max(1, (value_bits + _DIGIT - 1) // _DIGIT)
    digit = (value_bits + passes - 1) // passes
    counts = np.zeros((passes, 1 << digit), dtype=np.int64)
    mask = (1 << digit) - 1
    # Value and position in one integer: what is moved is in one place.
    for at in range(count):
        spare[0, at] = (flat[at] << position_bits) | at
        for number in range(passes):
            counts[number, (flat[at] >> (number * digit)) & mask] += 1
    for number in range(passes):
        source, target, places = spare[number % 2], spare[1 - number % 2], counts[number]
        before = 0
        for value in range(len(places)):
            before, places[value] = before + places[value], before
        shift = position_bits + number * digit
        for at in range(count):
            key = source[at]
            value = (key >> shift) & mask
            target[places[value]] = key
            places[value] += 1
    ids, inverse, order, starts = found[0], found[1], found[2], found[3]
    ordered, last, unique = spare[passes % 2], np.int64(-1), -1
    for at in range(count):
        value, position = ordered[at] >> position_bits, ordered[at] & ((1 << position_bits) - 1)
        if value != last:
            unique += 1
            ids[unique], starts[unique], last = value, at, value
        order[at], inverse[position] = position, unique
    starts[unique + 1] = count
    return unique + 1
