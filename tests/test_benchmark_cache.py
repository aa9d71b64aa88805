"""Suites `cache` and `lookup`: computed shares of hits are those of draws, and every method runs and is checked."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.benchmark import cache, lookup
from speedtransfer.benchmark.measure import WrongResultError, measure
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.workload import zipf_ids, zipf_shares
from speedtransfer.errors import InvalidValueError
from speedtransfer.page_cache import PagesStayError

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
ROWS, LOOKUPS = 500, 200


def test_shares_of_draws():
    shares = zipf_shares(ROWS)
    assert shares.sum().item() == pytest.approx(1)
    drawn = zipf_ids(ROWS, 400_000, torch.Generator().manual_seed(0)).bincount(minlength=ROWS) / 400_000
    assert (drawn - shares).abs().max() < 5 * (shares.max() / 400_000) ** 0.5


@pytest.mark.parametrize("cached", [5, 50, ROWS])
def test_computed_shares_of_hits(cached):
    generator, shares = torch.Generator().manual_seed(0), zipf_shares(ROWS)
    hottest = torch.zeros(ROWS, dtype=torch.bool)
    hottest[shares.sort(descending=True).indices[:cached]] = True
    batches = [zipf_ids(ROWS, LOOKUPS, generator).unique() for _ in range(300)]
    hits = sum(int(hottest[ids].sum()) for ids in batches) / sum(map(len, batches))
    assert cache.computed_share(shares, LOOKUPS, cached) == pytest.approx(hits, abs=0.01)


def group(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cache, "_QUICK_LOOKUPS", LOOKUPS)
    (found,) = cache.groups(CPU, True, rows=4096)
    return found


def test_every_method_runs_and_says_its_hits(tmp_path, monkeypatch):
    one = group(tmp_path, monkeypatch)
    try:
        found = measure(one, CPU, **{**one.effort, **FAST})
    except PagesStayError as error:
        pytest.skip(str(error))
    assert [case.error for case in found.cases] == [""] * 5
    by_counts, by_use = (found.cases[number].figures for number in (3, 4))
    assert by_counts["hit_share"] == pytest.approx(by_counts["computed_share"], abs=0.02)
    assert 0 < by_use["hit_share"] < 1


def test_hits_that_are_not_those_computed(tmp_path, monkeypatch):
    one = group(tmp_path, monkeypatch)
    monkeypatch.setattr(cache, "computed_share", lambda *about: 0.01)
    try:
        with pytest.raises(WrongResultError, match=r"hits where 1\.0% are computed"):
            measure(one, CPU, **{**one.effort, **FAST})
    except PagesStayError as error:
        pytest.skip(str(error))


def test_hits_are_said():
    found = CaseResult("cache of 10% of the rows, by use", "ours", 0, [20e-3])
    assert cache.describe(GroupResult("step", {}, [found]), found) == ""
    found.figures = {"hit_share": 0.58, "computed_share": 0.6}
    assert cache.describe(GroupResult("step", {}, [found]), found) == "58% hits, 60% computed"


# --- lookup -------------------------------------------------------------------------------------------------------------


def test_every_lookup_runs():
    groups = lookup.groups(CPU, True, rows=500)
    assert [group.params["tokens"] for group in groups] == [1, 8, 64]
    for group in groups:
        found = measure(group, CPU, **FAST)
        assert {case.name for case in found.ran} == {lookup.OURS, lookup.MODULE, lookup.FUNCTION}
        assert not [case.error for case in found.cases if case.error]
    with pytest.raises(InvalidValueError, match="rows is -1"):
        lookup.groups(CPU, True, rows=-1)


def test_wrong_rows_are_noticed():
    lookups = lookup.Lookups(lambda ids: torch.zeros(2, 3), [(torch.tensor([1, 2]), torch.ones(2, 3))])
    with pytest.raises(AssertionError, match="not those"):
        lookups.check()
