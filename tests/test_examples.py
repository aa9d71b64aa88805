"""The examples that are programs: a run of each, and what they refuse."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import speedtransfer as st

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import memory_layer
import ngram_lm
import parallel
from ngram_lm import PAIRS, WAYS

# --- a small GPT with n-gram tables --------------------------------------------------------------------------------------

TINY = "--steps 9 --batch 2 --context 8 --vocabulary 40 --width 8 --layers 2 --attention-heads 2 --rows 50 --dim 4"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A few hundred words of seventy, a document a line."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = torch.Generator().manual_seed(0)
    words = (torch.rand(900, generator=draw) ** 2 * 70).long().tolist()
    lines = [" ".join(f"W{number}" for number in words[start : start + 30]) for start in range(0, 900, 30)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("names", [("dense", "exact-prefetch"), pytest.param(tuple(WAYS), marks=pytest.mark.slow)])
def test_a_run_of_ngram_lm(text, monkeypatch, capsys, names):
    waited, wait = [], st.nn.Ticket.wait
    monkeypatch.setattr(st.nn.Ticket, "wait", lambda *args: waited.append(wait(*args)) or waited[-1])
    result = ngram_lm.main(["--data", str(text), "--dtype", "float64", *TINY.split(), "--only", *names])
    assert len(waited) == 9 * sum(name.endswith("-prefetch") for name in names)
    assert None not in waited
    runs, out = result["contenders"], capsys.readouterr().out
    assert tuple(runs) == names
    for name, one in runs.items():
        assert len(one["losses"]) == one["validation"][-1][0] == 9
        assert one["losses"][-1] < one["losses"][0] == runs["dense"]["losses"][0]
        assert one["step_s"] > 0
        assert WAYS[name].title in out
    # Weights and two planes of state in float64; beside them torch's count of steps, or the last step of each row.
    rows = runs["dense"]["table_bytes"] // (3 * 4 * 8)
    more = {"dense": 4, "exact": 4 * rows, "exact-prefetch": 4 * rows, "none": -96 * rows}
    assert rows >= 16 * 50
    assert {name: one["table_bytes"] - 96 * rows for name, one in runs.items()} == {n: more.get(n, 0) for n in names}
    found = {(one["contender"], one["to"]): one for one in result["comparisons"]}
    assert list(found) == [(name, other) for name, other, _ in PAIRS if {name, other} <= set(names)]
    if "exact" in names:
        for name in ("lazy", "exact"):
            ahead = found[f"{name}-prefetch", name]
            assert (ahead["loss_difference"], ahead["table_difference"]) == (0, 0)
        exact, lazy = found["exact", "dense"], found["lazy", "dense"]
        assert exact["loss_difference"] <= 1e-14 < 1e-6 < lazy["loss_difference"]
        assert exact["table_difference"] <= 1e-11 < 1e-3 < lazy["table_difference"]
        assert "losses and the table are the same bits" in out


# --- what is refused -----------------------------------------------------------------------------------------------------

REFUSED = """
ngram_lm --batch 1000 -> pass a longer one, or a smaller --batch or --context
ngram_lm --context 700 -> pass a longer one, or a smaller --batch or --context
ngram_lm --data no-such.txt -> no-such.txt cannot be read
ngram_lm --data . -> . cannot be read
ngram_lm --only dens -> invalid choice
ngram_lm --steps 0 -> --steps is 0 but must be at least 1
memory_layer --plot no-folder/x.png -> --plot is no-folder/x.png but must be a .png in a folder that exists
memory_layer --values 49 -> --values is 49 but each head reads 8 of sqrt(values) half-keys
parallel --processes 1 -> --processes is 1 but must be at least 2
parallel --batch 63 -> --batch is 63 but must be a multiple of --processes, 2
parallel --steps 0 -> --steps is 0 but must be at least 1
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_what_makes_no_sense_is_refused(text, tmp_path, monkeypatch, capsys, line):
    monkeypatch.chdir(tmp_path)
    call, words = line.split(" -> ")
    example, *arguments = call.split()
    run, given = {
        "ngram_lm": (ngram_lm.main, ["--data", str(text), *TINY.split()]),
        "memory_layer": (memory_layer.main, []),
        "parallel": (parallel.main, []),
    }[example]
    with pytest.raises(SystemExit) as stop:
        run([*given, *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


# --- a server that follows a trainer --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_follows(tmp_path):
    script = Path(__file__).resolve().parents[1] / "examples" / "follow.py"
    arguments = [sys.executable, str(script), "--rows", "500", "--deltas", "4", "--steps", "2"]
    arguments += ["--plot", str(tmp_path / "lag.png")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lag.png").read_bytes().startswith(b"\x89PNG")
    assert re.match(
        r"4 deltas of [\d.]+ MB of a table of 0.1 MB\n\d+ batches looked up meanwhile\nserved \d+ ms", done.stdout
    )


# --- forgetting, and a memory layer --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_rows_forget_less(tmp_path, capsys):
    memory_layer.main(["--plot", str(tmp_path / "forgetting.png")])
    lines = re.findall(
        r"^(.*?) +\d+ steps: ([\d.]+)% of the new facts, ([\d.]+)%", capsys.readouterr().out, re.MULTILINE
    )
    assert [way for way, _, _ in lines] == list(memory_layer.WAYS)
    assert all(float(new) >= 99 for _, new, _ in lines)
    kept = {way: float(old) for way, _, old in lines}
    assert kept[memory_layer.ROWS] > 95 > kept["all weights"]
    assert kept["low-rank changes"] < 95
    assert (tmp_path / "forgetting.png").read_bytes().startswith(b"\x89PNG")


def test_a_memory_in_a_file(monkeypatch, capsys):
    monkeypatch.setattr(memory_layer, "IN_FILE", 4_000)
    monkeypatch.setattr(memory_layer, "MOST_STEPS", 3)
    memory_layer.main(["--values", "4000"])
    out = capsys.readouterr().out
    assert "4,096 values in a file of 0.00 GB" in out
    assert "of 4,096 values used in 12 batches" in out
