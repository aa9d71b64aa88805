"""Suite `lookup`: every method runs and is checked, and its results are reported."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.benchmark import lookup
from speedtransfer.benchmark.measure import WrongResultError, measure
from speedtransfer.benchmark.report import headlines
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.workload import Lookups
from speedtransfer.errors import InvalidValueError

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}


def test_every_method_runs():
    groups = lookup.groups(CPU, True, rows=500)
    assert [group.params["tokens"] for group in groups] == [1, 8, 64]
    found = [measure(group, CPU, **FAST) for group in groups]
    for group in found:
        assert {case.name for case in group.ran} == {lookup.OURS, lookup.MODULE, lookup.FUNCTION}
        assert not [case.error for case in group.cases if case.error]
    assert len(headlines("lookup", found)) == 3
    with pytest.raises(InvalidValueError, match="rows is -1"):
        lookup.groups(CPU, True, rows=-1)


def test_wrong_rows_are_noticed():
    lookups = Lookups(lambda ids: torch.zeros(2, 3), [(torch.tensor([1, 2]), torch.ones(2, 3))])
    with pytest.raises(AssertionError, match="not those"):
        lookups.check()
    assert issubclass(WrongResultError, AssertionError)


def test_what_is_said():
    cases = [
        CaseResult(lookup.OURS, "ours", 0, [6e-6], [6e-6]),
        CaseResult(lookup.FUNCTION, "other", 0, [2e-6], [2e-6]),
    ]
    lines = headlines("lookup", [GroupResult("lookup of 8 ids", {"tokens": 8}, cases)])
    assert lines == ["lookup of 8 ids: 6.00 us of the host a call, 3.00x the 2.00 us of F.embedding"]
    assert headlines("lookup", [GroupResult("lookup of 8 ids", {"tokens": 8}, cases[:1])]) == []
