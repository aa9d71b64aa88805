"""bench/experiments/gpu.py: every experiment runs small, those that need a GPU say so, and docs/gpu.md shows the results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from speedtransfer.cuda import cuda_status

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


@pytest.fixture
def experiments():
    return importlib.import_module("experiments.gpu")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The result of all experiments, with tiny sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        out = tmp_path_factory.mktemp("experiments") / "experiments.json"
        assert importlib.import_module("experiments.gpu").main(["--quick", "--out", str(out)]) == 0
    return json.loads(out.read_text())


def test_every_experiment_measures(experiments, found):
    assert list(found["experiments"]) == list(experiments.NAMES)
    assert (found["complete"], found["quick"], found["part"]) == (True, True, "experiments")
    for name, cases in found["experiments"].items():
        if name in experiments.NEED_CUDA:
            assert cases == [{"error": "DeviceError: needs CUDA"}]
        else:
            assert not [case for case in cases if "error" in case], name
    assert {(case["layout"], case["idle"]) for case in found["experiments"]["step"] if "layout" in case} == {
        ("planes", "lazy"),
        ("rows", "lazy"),
        ("planes", "exact"),
        ("rows", "exact"),
    }
    assert all(case["ms"] >= case["host_ms"] > 0 for case in found["experiments"]["step"])
    assert all(case["us"] for name in ("profile", "host") for case in found["experiments"][name])


def test_those_that_are_named_run_and_others_are_kept(experiments, tmp_path, capsys):
    out = tmp_path / "experiments.json"
    assert experiments.main(["pages", "--quick", "--out", str(out)]) == 0
    assert experiments.main(["few_blocks", "--quick", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (list(result["experiments"]), result["complete"]) == (["pages", "few_blocks"], False)
    # Of another commit nothing is kept.
    out.write_text(json.dumps({**result, "environment": {**result["environment"], "commit": "other"}}))
    assert experiments.main(["pages", "--quick", "--out", str(out)]) == 0
    assert list(json.loads(out.read_text())["experiments"]) == ["pages"]
    with pytest.raises(SystemExit):
        experiments.main(["paging"])
    assert "there is no experiment 'paging'; choose from step, fbgemm" in capsys.readouterr().err


def test_nothing_begins_when_the_time_is_up(experiments, tmp_path):
    out = tmp_path / "experiments.json"
    assert experiments.main(["--quick", "--seconds", "0", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert all(cases == [{"error": experiments.LATE}] for cases in result["experiments"].values())
    assert not result["complete"]


def test_one_that_fails_costs_no_other(experiments, tmp_path, monkeypatch):
    def fail(scale):
        yield {"number": 1}, lambda: 1 / 0
        yield {"number": 2}, lambda: {"ms": 1.0}
        raise RuntimeError("out of\nmemory")

    monkeypatch.setitem(experiments.NAMES, "host", fail)
    assert list(experiments.run("host", experiments.TINY, float("inf"), cuda=False)) == [
        {"number": 1, "error": "ZeroDivisionError: division by zero"},
        {"number": 2, "ms": 1.0},
        {"error": "RuntimeError: out of memory"},
    ]


# As the experiments that need a GPU leave them.
ON_A_GPU = {
    "both_ways": [
        {"rows": rows, "read": "lanes 16", "written": way, "alone": [45.7, 52.5], "at_once": [28.6, rate]}
        for rows in (1000, 8000)
        for way, rate in (("lanes 16", 49.0), ("bulk 33", 47.8))
    ],
    "few_blocks": [
        {"rows": 8000, "kernel": "none", "blocks": 0, "tflop_per_s": 785.6},
        {"rows": 8000, "kernel": "bulk", "blocks": 8, "alone": 31.7, "beside": 26.1, "tflop_per_s": 757.0},
    ],
    "pages": [
        {"allocator": one, "seconds": 2.0, "gb": 2, "launch": "lanes 16", "gather": 45.7, "scatter": 52.5}
        for one in ("alloc", "register")
    ],
}


def test_the_page_shows_what_was_found(found, tmp_path):
    readme, store = importlib.import_module("readme"), importlib.import_module("store")
    (section,) = [section for section in readme.SECTIONS if section.name == "experiments"]
    page = tmp_path / section.page
    page.parent.mkdir()
    text = f"before\n\n{section.begin}\n\n{section.end}\n\nafter\n"
    page.write_text(text)
    assert readme.main(check=False, root=tmp_path) == 0
    assert page.read_text() == text, "nothing is recorded"
    steps = [{**case, "fused_ms": 4.25} for case in found["experiments"]["step"]]
    every = {**found["experiments"], **ON_A_GPU, "step": steps}
    store.write(store.path_of(tmp_path, "NVIDIA Test", "experiments"), {**found, "experiments": every})
    assert readme.main(check=False, root=tmp_path) == 0
    shown = page.read_text()
    assert shown.startswith("before\n")
    assert shown.endswith("after\n")
    lines = shown.splitlines()
    (line,) = [line for line in lines if line.startswith("| 2,000 | SGD |")]
    assert line.split(" | ")[5] == "4.25"
    assert "| bulk 8 | 31.7 | 26.1 | 757.0 |" in lines
    assert "| none | - | - | 785.6 |" in lines
    assert "| 1,000 | lanes 16 | lanes 16 | 45.7 | 52.5 | 28.6 | 49.0 |" in lines
    assert "| 2 GB | lanes 16 | 45.7 | 52.5 | 45.7 | 52.5 |" in lines
    assert readme.main(check=True, root=tmp_path) == 0
