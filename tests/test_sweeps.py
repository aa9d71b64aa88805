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

    @pytest.mark.sweep
    @pytest.mark.parametrize(("stored", "dense"), [(s, d) for s in DTYPES for d in DTYPES if s != d])
    def test_together(stored, dense):
        pass

    @pytest.mark.sweep("dense", "stored")
    @pytest.mark.parametrize(("stored", "dense"), [(s, d) for s in DTYPES for d in DTYPES if s != d])
    def test_named(stored, dense):
        pass

    class Contract:
        @pytest.mark.parametrize("dtype", DTYPES)
        def test_inherited(self, dtype):
            pass

    class TestMain(Contract):
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

    def collect(mark: str, case: str = "") -> list[str]:
        found = pytester.runpytest_inprocess(f"{path}{case}", "--collect-only", "-qp", "no:benchmark", "-m", mark)
        return [line.partition("::")[2] for line in found.outlines if "::" in line]

    fast, slow = collect("not slow"), collect("slow")
    assert sorted(fast + slow) == sorted(collect(""))
    count = {
        name: sum(line.startswith(name) for line in fast) for name in ("test_values", "test_together", "test_named")
    }
    assert count == {"test_values": 4, "test_together": 6, "test_named": 3}
    assert all(any(word in line for line in fast) for word in ("sgd", "adam", "lion", "adagrad", "half", "double"))
    assert sum(line.startswith("TestMain::") for line in fast) == 3
    assert {line.partition("::")[0] for line in fast if "TestFirst" in line or "TestSecond" in line} > {"TestFirst"}
    assert sum(line.startswith(("TestFirst", "TestSecond")) for line in fast) == 3
    # A case that is named runs.
    (left, *_) = (line for line in slow if line.startswith("test_values"))
    assert collect("not slow", f"::{left}") == [left]


def test_every_pair_runs() -> None:
    axes = {"optimizer": "abcd", "dtype": "xyz", "idle": "le"}
    cases = {"".join(case): list(zip(axes, case, strict=True)) for case in itertools.product(*axes.values())}
    kept = cover(cases, 2)
    pairs = {pair for name in kept for pair in itertools.combinations(name, 2)}
    assert len(pairs) == 4 * 3 + 4 * 2 + 3 * 2
    assert 12 <= len(kept) <= 14
