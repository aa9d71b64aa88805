"""Which cases of a sweep always run: all values, all pairs, the same everywhere, and any case that is asked for."""

from __future__ import annotations

import itertools

import pytest

pytest_plugins = ["pytester"]

SWEPT = """
    import pytest

    OPTIMIZERS, DTYPES = ["sgd", "adam", "lion", "adagrad"], ["half", "single", "double"]

    @pytest.mark.sweep
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_values(optimizer, dtype):
        pass

    @pytest.mark.sweep(strength=2)
    @pytest.mark.parametrize("idle", ["lazy", "exact"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_pairs(optimizer, dtype, idle):
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
        def test_inherited(self, dtype, memory):
            pass

        @pytest.fixture
        def memory(self):
            pass

    class TestMain(Contract):
        pass

    @pytest.mark.sweep
    class TestFirst(Contract):
        pass

    @pytest.mark.sweep
    class TestSecond(Contract):
        @pytest.fixture(params=["a", "b"])
        def memory(self, request):
            pass
"""


@pytest.fixture
def collected(pytester, monkeypatch):
    """Return a function that says which cases a command line takes of SWEPT."""
    hook = "import pytest, sweeps\npytest_collection_modifyitems = pytest.hookimpl(tryfirst=True)("
    pytester.makeconftest(hook + "lambda items: sweeps.mark_the_rest_as_slow(items))")
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    sweep")
    path = pytester.makepyfile(test_swept=SWEPT)

    def collect(*args, case=""):
        result = pytester.runpytest_inprocess(f"{path}{case}", "--collect-only", "-q", "-p", "no:benchmark", *args)
        return [line.partition("::")[2] for line in result.outlines if "::" in line]

    return collect


def values(names, test):
    """Return the values of each parameter in the ids of a test."""
    ids = [name.partition("[")[2].rstrip("]").split("-") for name in names if f"{test}[" in name]
    return [set(each) for each in zip(*ids, strict=True)], len(ids)


def test_every_value_runs_and_the_rest_is_slow(collected):
    fast, slow = collected("-m", "not slow"), collected("-m", "slow")
    assert values(fast, "test_values") == ([{"sgd", "adam", "lion", "adagrad"}, {"half", "single", "double"}], 4)
    assert values(fast, "test_together")[1] == 6
    assert values(fast, "test_named") == ([{"half", "single", "double"}] * 2, 3)
    assert sorted(fast + slow) == sorted(collected("-m", "")) == sorted(collected())


def test_every_pair_runs(collected):
    fast = collected("-m", "not slow")
    cases = [name.partition("[")[2].rstrip("]").split("-") for name in fast if name.startswith("test_pairs")]
    pairs = {pair for case in cases for pair in itertools.combinations(case, 2)}
    assert len(pairs) == 4 * 3 + 4 * 2 + 3 * 2
    assert 12 <= len(cases) <= 14


def test_classes_share_the_cases_that_they_inherit(collected):
    fast = collected("-m", "not slow")
    assert sum(name.startswith("TestMain::") for name in fast) == 3
    spread = [name for name in fast if name.startswith(("TestFirst::", "TestSecond::"))]
    assert {name.partition("::")[0] for name in spread} == {"TestFirst", "TestSecond"}
    assert all(any(word in name for name in spread) for word in ["half", "single", "double", "[a", "[b"])
    assert len(spread) < 6


def test_a_case_that_is_named_runs(collected):
    (slow, *_) = (name for name in collected("-m", "slow") if name.startswith("test_values"))
    assert collected("-m", "not slow", case=f"::{slow}") == [slow]
