"""bench/experiments/gpu.py: every experiment runs small, and those that need a GPU say so."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.report import group_table
from speedtransfer.cuda import cuda_status

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module("store").suites()["gpu"].module


def test_every_experiment_measures(gpu):
    found = {}
    for group in gpu.groups(CPU, True):
        result = measure(group, CPU)
        assert not [case.error for case in result.cases if case.error]
        found.setdefault(group.params["experiment"], []).append(result)
    assert list(found) == ["step", "fbgemm", "both_ways", "few_blocks", "host", "words", "profile", "pages"]
    for name, results in found.items():
        for result in results:
            if name in ("both_ways", "few_blocks", "pages"):
                assert (result.skipped, result.cases) == ("needs CUDA", [])
            else:
                assert all(value > 0 for case in result.cases for value in case.figures.values() if name != "profile")
                assert len(result.ran) > 1
    table = group_table(found["step"][0])
    assert table.header == ["", "several kernels", "host, several kernels"]
    assert [row[0] for row in table.rows] == [
        *(", ".join(way) for way in gpu.WAYS),
        "nn.Embedding, SGD",
        "nn.Embedding, AdamW",
    ]


def test_one_that_fails_costs_no_other(gpu):
    def cases(scale):
        yield "fails", lambda: 1 / 0
        yield "runs", lambda: {"ms": 1.0}

    fails, runs = gpu._measured(cases, gpu.TINY)
    assert fails.error == "ZeroDivisionError: division by zero"
    assert (runs.error, runs.figures) == ("", {"ms": 1.0})
