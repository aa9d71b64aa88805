"""The example of a small GPT with n-gram tables: a run of it, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import speedtransfer as st

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import ngram_lm
from ngram_lm import END, PAIRS, UNKNOWN, WAYS, batches, read_tokens, windows_of

_SIZES = {"steps": 9, "batch": 2, "context": 8, "vocabulary": 40, "width": 8, "layers": 2, "rows": 50, "dim": 4}
TINY = [word for name, value in {**_SIZES, "attention-heads": 2}.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A few hundred words of seventy, a document a line."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = torch.Generator().manual_seed(0)
    words = (torch.rand(900, generator=draw) ** 2 * 70).long().tolist()
    lines = [" ".join(f"W{number}" for number in words[start : start + 30]) for start in range(0, 900, 30)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("names", [("dense", "exact-prefetch"), pytest.param(tuple(WAYS), marks=pytest.mark.slow)])
def test_a_run(text, tmp_path, monkeypatch, capsys, names):
    waited, wait = [], st.nn.Ticket.wait
    monkeypatch.setattr(st.nn.Ticket, "wait", lambda *args: waited.append(wait(*args)) or waited[-1])
    arguments = ["--data", str(text), "--json", str(tmp_path / "found.json"), "--dtype", "float64", *TINY]
    assert ngram_lm.main([*arguments, "--only", *names]) == 0
    assert len(waited) == 9 * sum(name.endswith("-prefetch") for name in names)
    assert None not in waited
    result, out = json.loads((tmp_path / "found.json").read_text(encoding="utf-8")), capsys.readouterr().out
    assert tuple(result["contenders"]) == names
    losses = {name: one["losses"] for name, one in result["contenders"].items()}
    for name, one in result["contenders"].items():
        assert len(one["losses"]) == one["validation"][-1][0] == 9
        assert one["losses"][-1] < one["losses"][0] == losses["dense"][0]
        assert one["step_s"] > 0
        assert WAYS[name].title in out
    found = {(one["contender"], one["to"]): one for one in result["comparisons"]}
    assert list(found) == [(name, other) for name, other, _ in PAIRS if {name, other} <= set(names)]
    check_bytes({name: one["table_bytes"] for name, one in result["contenders"].items()})
    if "exact" in names:
        check_comparisons(losses, found, out)


def check_bytes(found: dict[str, int]) -> None:
    """Weights and two planes of state in float64; beside them torch's count of steps, or the last step of each row."""
    rows = found["dense"] // (3 * 4 * 8)
    assert rows >= 16 * 50
    plain = rows * 3 * 4 * 8
    more = {"dense": 4, "exact": 4 * rows, "exact-prefetch": 4 * rows}
    assert found == {name: plain + more.get(name, 0) if name != "none" else 0 for name in found}


def check_comparisons(losses, found, out):
    assert losses["none"][-1] != losses["dense"][-1]
    for name in ("lazy", "exact"):
        ahead = found[f"{name}-prefetch", name]
        assert ahead["losses_equal"]
        assert ahead["table_equal"]
        assert ahead["loss_difference"] == ahead["table_difference"] == 0
    exact, lazy = found["exact", "dense"], found["lazy", "dense"]
    assert exact["loss_difference"] <= 1e-14
    assert exact["table_difference"] <= 1e-11
    assert lazy["table_difference"] > 1e-3
    assert lazy["loss_difference"] > 1e-6
    assert not lazy["losses_equal"]
    assert "losses and the table are the same bits" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "1000"], "pass a longer one, or a smaller --batch or --context"),
        (["--context", "700"], "pass a longer one, or a smaller --batch or --context"),
        (["--data", "no-such.txt"], "no-such.txt cannot be read"),
        (["--data", "."], ". cannot be read"),
        (["--only", "dens"], "invalid choice"),
        (["--dtype", "float16"], "invalid choice"),
        (["--steps", "1.5"], "invalid int"),
    ],
)
def test_what_makes_no_sense_is_refused(text, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        ngram_lm.main(["--data", str(text), *TINY, *arguments])
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_words_by_number(tmp_path):
    path = tmp_path / "text.txt"
    lines = ["The cat sat", "the CAT ran", "the end"] * 10
    path.write_text("\n".join(lines), encoding="utf-8")
    training, validation, vocabulary = read_tokens(path, 4)
    # The two most frequent words; all others are unknown.
    assert vocabulary == 4
    assert torch.cat([training, validation]).tolist() == [2, 3, UNKNOWN, END, 2, 3, UNKNOWN, END, 2, UNKNOWN, END] * 10
    assert len(validation) == 11
    assert read_tokens(path, 1000)[2] == 2 + 5


def test_windows_overlap_by_one_token():
    windows = windows_of(torch.arange(10), 3)
    assert windows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    stream = batches(windows, 2, seed=0)
    seen = [next(stream) for _ in range(4)]
    assert all(batch.shape == (2, 4) for batch in seen)
    assert len({tuple(batch[:, 0].tolist()) for batch in seen}) > 1


def test_the_shipped_text_has_a_vocabulary():
    training, validation, vocabulary = read_tokens(None, 1000)
    assert vocabulary == 1000
    assert len(training) > 9 * len(validation) - 10 > 500_000
    for part in training, validation:
        assert 0 <= int(part.min()) <= int(part.max()) < 1000
