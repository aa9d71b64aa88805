"""Which cases of a sweep always run: all values, or all pairs."""

import itertools

from sweeps import cover


def test_every_value_and_every_pair_runs():
    axes = {"optimizer": "abcd", "dtype": "xyz", "idle": "le"}
    cases = {"".join(case): list(zip(axes, case, strict=True)) for case in itertools.product(*axes.values())}
    assert len(cover(cases, 1)) == 4
    kept = cover(cases, 2)
    pairs = {pair for name in kept for pair in itertools.combinations(name, 2)}
    assert len(pairs) == 4 * 3 + 4 * 2 + 3 * 2
    assert 12 <= len(kept) <= 14
