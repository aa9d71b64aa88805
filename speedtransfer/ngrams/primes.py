"""Prime numbers: sizes of hash tables."""

from __future__ import annotations

# A composite number below 3.3e24 fails Miller's test for one of these bases (Sorenson and Webster, "Strong pseudoprimes to
# twelve prime bases", 2015).
_BASES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Tell whether `number`, below 2**64, is prime."""
    if number < 2:
        return False
    for base in _BASES:
        if number % base == 0:
            return number == base
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, base, odd, twos) for base in _BASES)


def _passes(number: int, base: int, odd: int, twos: int) -> bool:
    """Apply Miller's test, where ``number - 1 == odd * 2**twos``."""
    power = pow(base, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def next_prime(number: int, used: set[int]) -> int:
    """Return the smallest prime that is at least `number` and not in `used`."""
    while not is_prime(number) or number in used:
        number += 1
    return number
