"""`speedtransfer bench`: what it writes, and how it fails before anything is measured."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from speedtransfer.benchmark import commands
from speedtransfer.benchmark.measure import EFFORT, Case, Group
from speedtransfer.benchmark.results import GroupResult
from speedtransfer.benchmark.run import run_suite
from speedtransfer.benchmark.suites import SUITES, Suite
from speedtransfer.cli import main
from speedtransfer.errors import HostMemoryError


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    """Return a function that runs the command here, in an empty folder: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    # What is measured does not matter here.
    for quick in EFFORT:
        monkeypatch.setitem(EFFORT, quick, {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01})

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speedtransfer", "bench", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return run


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


def failing(error):
    def run():
        raise error

    return run


def test_transfer_writes_figures_pictures_and_report(run, tmp_path):
    small = ["--quick", "--rows", "100", "--table-bytes", "262144"]
    code, out, err = run("transfer", *small, "--json", "t.json", "--plot", "new/plots", "--device", "cpu")
    assert (code, err) == (0, ""), "no bar where there is no terminal"
    assert files(tmp_path) == ["new/plots/report.md", "new/plots/transfer.png", "t.json"]
    result = json.loads((tmp_path / "t.json").read_text())
    assert set(result) == {
        "suite", "quick", "options", "environment", "groups", "failures", "complete", "seconds",
    }  # fmt: skip
    assert (result["failures"], result["complete"]) == ({}, True)
    assert result["options"] == {"seed": 0, "rows": 100, "table_bytes": 262144}
    for data in result["groups"]:
        group = GroupResult.from_json(data)
        assert group.to_json() == data
        assert group.title in out
    assert "x speedtransfer" in out
    assert "gather, GB/s and share of a plain copy, by bytes of a row" in out
    assert "wrote t.json" in out


def test_all_writes_a_file_for_each_suite(run, only, tmp_path):
    case = Case("speedtransfer", lambda: None, payload_bytes=10, role="ours")
    only(transfer=[Group("a gather", lambda: [case], {"kind": "other"})], cache=[])
    code, out, err = run("all", "--json", "results", "--plot", "plots", "--rows", "5", "--device", "cpu")
    assert code == 0, err
    assert files(tmp_path) == ["plots/report.md", "results/cache.json", "results/transfer.json"]
    assert json.loads((tmp_path / "results/cache.json").read_text())["options"] == {"seed": 0, "rows": 5}
    assert "a gather" in out


BAD = [
    (["transfr"], ["transfr", "transfer"]),
    (["everything"], ["everything", "'all'"]),
    ([], ["SUITE"]),
    (["transfer", "--rows", "0"], ["--rows is 0", "at least 1"]),
    (["transfer", "--table-bytes", "65535"], ["--table-bytes is 65535", "at least 65536"]),
    (["transfer", "--table-bytes", "inf"], ["--table-bytes", "inf"]),
    (["transfer", "--seed", "-1"], ["--seed is -1"]),
    (["transfer", "--device", "tpu"], ["tpu"]),
    (["step", "--table-bytes", "1e9"], ["--table-bytes", "'step'", "transfer"]),
    (["transfer", "--json", "missing/t.json"], ["--json", "missing", "does not exist"]),
    (["transfer", "--json", "folder"], ["--json", "folder", "name the file"]),
    (["all", "--json", "file"], ["--json", "file"]),
    (["all", "--json", "/proc/results"], ["--json", "/proc"]),
    (["transfer", "--plot", "file/plots"], ["--plot", "file", "no folder"]),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[" ".join(arguments) or "nothing" for arguments, _ in BAD])
def test_bad_input_is_one_line_before_anything_is_measured(run, tmp_path, monkeypatch, arguments, words):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(commands, "run_suite", lambda *a, **o: pytest.fail("it measures"))
    code, out, err = run(*arguments)
    assert code == 2, out + err
    (line,) = [line for line in err.splitlines() if line.strip()]
    for word in words:
        assert word in line
    assert files(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "precious"


def test_plots_without_matplotlib_name_the_extra(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(commands, "run_suite", lambda *a, **o: pytest.fail("it measures"))
    code, _, err = run("transfer", "--plot", "plots")
    assert code == 2
    assert "speedtransfer[plot]" in err
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("case", "reason", "traceback"),
    [
        (
            Case("bad method", lambda: None, failing(AssertionError("other rows")), role="ours"),
            "WrongResultError: a gather: bad method gives a wrong result (other rows), so nothing is timed; please report it",
            False,
        ),
        (Case("bad method", failing(RuntimeError("a fault")), role="ours"), "RuntimeError: a fault", True),
    ],
)
def test_a_group_that_fails_is_an_error_and_the_others_are_measured(run, only, tmp_path, case, reason, traceback):
    only(transfer=[Group("a gather", lambda: [case]), Group("a scatter", lambda: [Case("good method", lambda: None)])])
    code, out, err = run("transfer", "--json", "t.json", "--device", "cpu")
    assert (code, err) == (1, f"speedtransfer: error: 1 group failed: a gather ({reason})\n")
    assert ("Traceback" in out) == traceback
    assert "good method" in out
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["complete"]
    assert list(result["failures"]) == ["a gather"]
    assert result["groups"][0]["cases"] == []


def test_what_is_skipped_says_why_and_nothing_of_ours_is_an_error(run, only, tmp_path):
    no_room = failing(HostMemoryError("no room for 50 GB"))
    ours, large = Group("a gather", lambda: [Case("ours", lambda: None, role="ours")]), Group("a large gather", no_room)
    cases = [Case("ours", no_room, role="ours"), Case("another", lambda: None)]
    only(transfer=[large, ours], step=[large], memory=[Group("of rows", lambda: cases)], cache=[])
    code, out, err = run("transfer", "--device", "cpu")
    assert code == 0, err
    assert "a large gather: not run: no room for 50 GB" in out
    for suite in ("step", "memory", "all"):
        code, _, err = run(suite, "--json", "out" if suite == "all" else "t.json", "--device", "cpu")
        assert code == 2
        (line,) = err.splitlines()
        assert "could measure nothing of this library here: no room for 50 GB" in line
    names = ("cache", "memory", "step", "transfer")
    assert files(tmp_path) == [*(f"out/{name}.json" for name in names), "t.json"], "the others run"


def test_ctrl_c_keeps_what_was_measured(run, only, tmp_path):
    stop = failing(KeyboardInterrupt())
    first = Group("the first", lambda: [Case("fast", lambda: None)], {"experiment": "matmul", "size": 5})
    slow = Group("the second", lambda: [Case("slow", stop)])
    only(transfer=[], cache=[first, slow], step=[slow])
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


def test_a_group_is_not_begun_when_the_time_is_up(only):
    only(transfer=[Group(name, lambda: [Case("ours", lambda: None, role="ours")]) for name in "ab"])
    result = run_suite(SUITES["transfer"], torch.device("cpu"), True, seconds=0.0)
    assert not result["complete"]
    assert [group["skipped"] for group in result["groups"]] == ["the time was up"] * 2


def test_a_narrow_terminal_gets_fewer_columns(only):
    case = Case("speedtransfer", lambda: None, payload_bytes=10, role="ours")
    only(transfer=[Group("a gather", lambda: [case])])
    for width, shown in ((79, False), (80, True)):
        console = Console(width=width, record=True, quiet=False, file=io.StringIO())
        run_suite(SUITES["transfer"], torch.device("cpu"), True, console)
        text = console.export_text()
        assert ("quartiles" in text) == ("GB/s" in text.split("a gather")[1].split("1 GB")[0]) == shown
        assert "of host memory" in text.splitlines()[0] + text.splitlines()[1]
