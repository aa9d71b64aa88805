"""Suite `cache`: computed shares of hits are those of draws, every method runs, and its results are reported."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.benchmark import cache
from speedtransfer.benchmark.measure import WrongResultError, measure
from speedtransfer.benchmark.report import headlines
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.workload import zipf_ids, zipf_shares
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
    assert len(headlines("cache", [found])) == 4


def test_hits_that_are_not_those_computed(tmp_path, monkeypatch):
    one = group(tmp_path, monkeypatch)
    monkeypatch.setattr(cache, "computed_share", lambda *about: 0.01)
    try:
        with pytest.raises(WrongResultError, match=r"hits where 1\.0% are computed"):
            measure(one, CPU, **{**one.effort, **FAST})
    except PagesStayError as error:
        pytest.skip(str(error))


def test_sentences():
    without = CaseResult(cache.WITHOUT, "ours", 0, [40e-3])
    figures = {"hit_share": 0.58, "computed_share": 0.6}
    cached = CaseResult("cache of 10% of the rows, by use", "ours", 0, [20e-3], figures=figures)
    assert headlines("cache", [GroupResult("step", {}, [without, cached])]) == [
        "step, cache of 10% of the rows, by use: 58% of the rows of a batch are hits (60% computed), 20.0 ms, "
        "2.00x the speed of 40.0 ms without"
    ]
