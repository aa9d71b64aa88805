"""Suite `vocabulary`: every method runs and is checked, and its results are reported."""

from __future__ import annotations

import pytest
import torch

from speedtransfer.benchmark import vocabulary, vocabulary_steps
from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.report import headlines, plot
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.vocabulary_steps import BY_DICT, EVICTED, KNOWN, NEW, PLAIN, names_of, numbers_of
from speedtransfer.benchmark.workload import Lookups
from speedtransfer.errors import HostMemoryError, InvalidValueError

CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
ALL_STEPS = [KNOWN, NEW.format(0.01), EVICTED.format(0.01), PLAIN, BY_DICT]


def test_every_method_runs():
    groups = vocabulary.groups(CPU, True, rows=300)
    found = [measure(group, CPU, **FAST) for group in groups]
    assert not [case.error for group in found for case in group.cases if case.error]
    assert [group.params["kind"] for group in found] == ["find", "insert", "step", "step", "lookup"]
    assert [len(group.ran) for group in found] == [7, 4, 5, 5, 2]
    assert [case.name for case in found[2].ran] == ALL_STEPS
    lines = headlines("vocabulary", found)
    assert len(lines) == 5
    assert lines[0].startswith("map 500 known ids of 300, one core: IdIndex.find ")
    data = {"suite": "vocabulary", "quick": True, "environment": {"device": "CPU"}}
    assert plot({**data, "groups": [group.to_json() for group in found]}).startswith(b"\x89PNG")
    with pytest.raises(InvalidValueError, match="rows is -1"):
        vocabulary.groups(CPU, True, rows=-1)
    full = vocabulary.groups(CPU, False)
    assert len({group.title for group in full}) == len(full) == 10


def test_ids_are_numbers_again():
    numbers = torch.tensor([0, 1, 2, 10**7, -5, 2**63 - 1])
    assert torch.equal(numbers_of(names_of(numbers)), numbers)
    assert len(names_of(torch.arange(10_000)).unique()) == 10_000


def test_wrong_rows_are_noticed():
    ids = torch.tensor([5, 6])
    with pytest.raises(AssertionError, match="not those of the ids"):
        Lookups(lambda wanted: wanted, [(ids, ids + 1)]).check()
    filling = vocabulary._Filling(vocabulary._Dict, [ids])
    filling.before()
    filling.run()
    filling.check()
    filling.filled.known[6] = 0
    with pytest.raises(AssertionError, match="two ids have the same row"):
        filling.check()


@pytest.mark.parametrize("number", range(5))
def test_a_wrong_step_is_noticed(number):
    case = vocabulary_steps._step_cases(CPU, 300, 8, 200, "lazy", 0)[number]
    case.run()
    table = case.run.__self__.training.embedding.table
    table.torch()[:] += 1e-3
    with pytest.raises(AssertionError, match="not close"):
        case.check()


def test_new_ids_come_and_old_ones_go():
    cases = {case.name: case for case in vocabulary_steps._step_cases(CPU, 300, 8, 200, "exact", 0)}
    for name, grows in ((NEW.format(0.01), True), (EVICTED.format(0.01), False)):
        case = cases[name]
        case.run()
        case.check()
        found = case.run.__self__.training.vocabulary
        stats = found.stats()
        # The ids before the first step, then two with each of 33 steps, and those that come again after they went.
        assert stats.admitted >= 300 + 2 * 33
        assert (stats.evicted == 0, stats.size > 300) == (grows, grows)


def test_tables_without_room(monkeypatch):
    monkeypatch.setattr("speedtransfer.benchmark.environment.physical_bytes", lambda: 1000)
    groups = vocabulary.groups(CPU, True, rows=300)
    with pytest.raises(HostMemoryError, match="takes 173 kB but the tables of a comparison may take 600 bytes"):
        groups[2].make()
    found = [measure(group, CPU, **FAST) for group in groups[:2]]
    assert [[case.name for case in group.cases if "takes 39 kB" in case.error] for group in found] == [
        [vocabulary.LOOP, vocabulary.MAP]
    ] * 2


def test_what_is_said():
    def found(params, *seconds):
        names = ((vocabulary.VOCABULARY, "ours"), (vocabulary.LOOP, "other"))
        return GroupResult(
            "map", params, [CaseResult(*name, 0, [s], [s]) for name, s in zip(names, seconds, strict=False)]
        )

    params = {"kind": "find", "ids": 1000}
    (line,) = headlines("vocabulary", [found(params, 1e-5, 1e-4)])
    assert line == "map: Vocabulary.find_in_training 100M ids a second; dict, in a loop 10M"
    assert headlines("vocabulary", [found({"kind": "step"}, 1e-5)]) == []
    steps = [CaseResult(name, "other", 0, [s], [s]) for name, s in ((KNOWN, 1.2e-3), (PLAIN, 1e-3))]
    (line,) = headlines("vocabulary", [GroupResult("step", {"kind": "step"}, steps)])
    assert line == "step: of the 1.00 ms of the plain table, ids are rows: vocabulary, known ids 1.20x"
