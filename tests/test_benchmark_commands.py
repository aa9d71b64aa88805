"""`speedtransfer bench`: what it writes, how it fails, and its reports, also from what this repository has recorded."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import raising

from speedtransfer.benchmark.measure import EFFORT, SUITES, Case, Group, Suite
from speedtransfer.benchmark.report import markdown, plot
from speedtransfer.benchmark.results import GroupResult

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
CPU = torch.device("cpu")


@pytest.fixture
def run(run, monkeypatch, tmp_path):
    """Return a function that runs the command here, in an empty folder; what is measured does not matter."""
    monkeypatch.chdir(tmp_path)
    for quick in EFFORT:
        monkeypatch.setitem(EFFORT, quick, {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01})
    return functools.partial(run, "bench")


@pytest.fixture
def only(monkeypatch):
    """Return a function that makes `groups` what every suite named consists of, and these the only suites, in their order."""
    every = dict(SUITES)

    def only(**groups):
        modules = {name: SimpleNamespace(groups=lambda *a, g=g, **o: g, VALUE=None) for name, g in groups.items()}
        monkeypatch.setattr(Suite, "module", property(lambda self: modules[self.name]))
        SUITES.clear()
        SUITES.update({name: every[name] for name in groups})

    yield only
    SUITES.clear()
    SUITES.update(every)


def files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def group_of(title, *cases, **params):
    return Group(title, lambda: list(cases), params)


def test_transfer_writes_figures_pictures_and_report(run, tmp_path):
    small = ["--quick", "--rows", "100", "--table-bytes", "262144"]
    code, out, err = run("transfer", *small, "--json", "t.json", "--plot", "new/plots", "--device", "cpu")
    assert code == 0, err
    assert files(tmp_path) == ["new/plots/report.md", "new/plots/transfer.png", "t.json"]
    result = json.loads((tmp_path / "t.json").read_text())
    assert (result["suite"], result["quick"], result["failures"], result["complete"]) == ("transfer", True, {}, True)
    assert result["options"] == {"seed": 0, "rows": 100, "table_bytes": 262144}
    assert result["environment"]["versions"]["torch"] == torch.__version__
    ours = ["speedtransfer", "speedtransfer, check=False", "engine: host", "engine: reference"]
    theirs = {"gather": ["index_select(out=)", "t[idx]"], "scatter": ["index_copy_", "t[idx] = rows"]}
    for data in result["groups"]:
        group = GroupResult.from_json(data)
        assert group.to_json() == data
        assert list(group.by_name) == [*ours, *theirs[group.params["direction"]], "memcpy", "copy past the cache"]
        assert data["title"] in out
    for words in ("x speedtransfer", "gather, GB/s and share of a plain copy, by bytes of a row", "wrote t.json"):
        assert words in out


def test_a_group_that_fails_is_an_error_and_the_others_are_measured(run, only, tmp_path):
    bad = Case("bad method", raising(RuntimeError("a fault")), role="ours")
    only(transfer=[group_of("a gather", bad), group_of("a scatter", Case("good method", lambda: None))])
    code, out, err = run("transfer", "--json", "t.json", "--device", "cpu")
    assert (code, err) == (1, "speedtransfer: error: 1 group failed: a gather (RuntimeError: a fault)\n")
    assert "Traceback" in out
    assert "good method" in out
    result = json.loads((tmp_path / "t.json").read_text())
    assert (result["complete"], list(result["failures"])) == (True, ["a gather"])


def test_ctrl_c_keeps_what_was_measured(run, only, tmp_path):
    slow = group_of("the second", Case("slow", raising(KeyboardInterrupt())))
    only(transfer=[], cache=[group_of("the first", Case("fast", lambda: None)), slow], step=[slow])
    code, _, err = run("step", "--json", "t.json", "--plot", "plots", "--device", "cpu")
    assert (code, err) == (130, "speedtransfer: aborted\n")
    assert files(tmp_path) == [], "nothing was measured"
    code, _, err = run("all", "--json", "results", "--plot", "plots", "--device", "cpu")
    assert (code, err) == (130, "speedtransfer: aborted\n")
    assert {"plots/report.md", "results/cache.json", "results/transfer.json"} <= set(files(tmp_path))
    assert json.loads((tmp_path / "results/transfer.json").read_text())["complete"]
    stopped = json.loads((tmp_path / "results/cache.json").read_text())
    assert not stopped["complete"]
    assert [group["title"] for group in stopped["groups"]] == ["the first"]


@pytest.mark.parametrize("suite", ["step", "cache"])  # lines and bars
def test_pictures_of_one_point_and_of_nothing(suite):
    """For one point matplotlib once found no room at a power of ten."""
    result = json.loads(next(RESULTS.glob(f"*/{suite}.json")).read_text())
    assert len(markdown(result, short=True)) < len(markdown(result))
    del result["groups"][1:], result["groups"][0]["cases"][1:]
    result["groups"][0]["cases"][0]["samples_s"] = [1e-6] * 5
    assert plot(result).startswith(b"\x89PNG")
    result["groups"][0]["cases"] = []
    assert plot(result) is None
    assert markdown(result)
