"""The constants of n-gram hashes: rows of each head and multipliers, as published models choose them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WORD = (1 << 64) - 1
# SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Seeds of the layers of a model are so far apart, in Engram and in Qwen4-Exp.
_LAYER_STEP = 10007


def head_sizes(rows: Sequence[int], heads: int, earlier: int = 0) -> list[int]:
    """Return the rows of each head, order by order: primes, each of them once in the model.

    Parameters
    ----------
    rows : sequence of int
        For each order, the least that its heads may have.
    heads : int
        For each order.
    earlier : int
        Layers of the model that have taken their primes before.
    """
    # Comes with torch, and takes long to import.
    from sympy import nextprime

    used, sizes = set[int](), list[int]()
    for _ in range(earlier + 1):
        sizes = []
        for start in rows:
            for _ in range(heads):
                start = nextprime(start - 1)
                while start in used:
                    start = nextprime(start)
                used.add(start)
                sizes.append(start)
    return sizes


def largest_multiplier(tokens: int) -> int:
    """Return the bound of half a multiplier: the product of a token id below `tokens` and a multiplier is below 2**63."""
    return max(1, (2**63 - 1) // tokens // 2)


def splitmix_multipliers(count: int, tokens: int, seed: int, layer: int) -> list[int]:
    """Return `count` odd multipliers of the stream of SplitMix64, as Qwen4-Exp draws them."""
    base, bound = seed + _LAYER_STEP * layer, largest_multiplier(tokens)
    return [2 * (_splitmix(base + _GOLDEN * (number + 1) & _WORD) % bound) + 1 for number in range(count)]


def numpy_multipliers(count: int, tokens: int, seed: int, layer: int) -> list[int]:
    """Return `count` odd multipliers of NumPy's default generator, as Engram draws them (arXiv:2601.07372)."""
    drawn = np.random.default_rng(seed + _LAYER_STEP * layer).integers(0, largest_multiplier(tokens), count, np.int64)
    return [2 * int(value) + 1 for value in drawn]


def powers(base: int, count: int, size: int) -> list[int]:
    """Return ``base**0`` to ``base**(count - 1)`` modulo `size`."""
    return [pow(base, exponent, size) for exponent in range(count)]


def _splitmix(word: int) -> int:
    word = word + _GOLDEN & _WORD
    word = (word ^ word >> 30) * _FIRST & _WORD
    word = (word ^ word >> 27) * _SECOND & _WORD
    return word ^ word >> 31
