"""Which cases of a sweep always run: all values, all pairs, of each class, and any case that is asked for."""

from __future__ import annotations

import itertools

import pytest
from sweeps import cover

pytest_plugins = ["pytester"]

SWEPT = """
    import pytest

    OPTIMIZERS, DTYPES = ["sgd", "adam", "lion", "adagrad"], ["half", "single", "double"]

    @pytest.mark.sweep
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_values(optimizer, dtype):
        pass

    class Contract:
        @pytest.mark.parametrize("dtype", DTYPES)
        def test_inherited(self, dtype):
            pass

    @pytest.mark.sweep
    class TestFirst(Contract):
        pass

    @pytest.mark.sweep
    class TestSecond(Contract):
        pass
"""


def test_every_value_and_class_runs_and_the_rest_is_slow(pytester: pytest.Pytester) -> None:
    hook = "import pytest, sweeps\npytest_collection_modifyitems = pytest.hookimpl(tryfirst=True)("
    pytester.makeconftest(hook + "lambda items: sweeps.mark_the_rest_as_slow(items))")
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    sweep")
    path = pytester.makepyfile(test_swept=SWEPT)
    found = pytester.runpytest_inprocess(path, "--collect-only", "-qp", "no:benchmark", "-m", "not slow")
    fast = [line.partition("::")[2] for line in found.outlines if "::" in line]
    count = {name: sum(line.startswith(name) for line in fast) for name in ("test_v", "Test")}
    assert count == {"test_v": 4, "Test": 3}
    values = "sgd", "adam", "lion", "adagrad", "half", "double", "TestFirst", "TestSecond"
    assert all(any(word in line for line in fast) for word in values)


def test_every_pair_runs() -> None:
    axes = {"optimizer": "abcd", "dtype": "xyz", "idle": "le"}
    cases = {"".join(case): list(zip(axes, case, strict=True)) for case in itertools.product(*axes.values())}
    kept = cover(cases, 2)
    pairs = {pair for name in kept for pair in itertools.combinations(name, 2)}
    assert len(pairs) == 4 * 3 + 4 * 2 + 3 * 2
    assert 12 <= len(kept) <= 14
