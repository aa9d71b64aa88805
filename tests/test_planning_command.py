"""The command that computes what tables take, in one process and in several."""

from __future__ import annotations

import json
import sys

import pytest

from speedtransfer.cli import main
from speedtransfer.planning import this_machine

SIZES = ["--rows", "1e6", "--dim", "64", "--ranks", "4", "--lookups", "65536"]


@pytest.fixture
def run(monkeypatch, capfd):
    # What this machine copies in a second is no matter here; test_planning_this_machine.py measures it.
    monkeypatch.setattr(this_machine, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(this_machine, "_BUDGET_S", 0.01)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speedtransfer", "plan", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return run


def lines(text: str) -> dict[str, list[str]]:
    """The cells of a table, by the first."""
    planes = text.partition("this machine:")[0]
    rows = [line for line in planes.splitlines() if "  " in line]
    return {cells[0]: cells[1:] for cells in ([c for c in row.split("  ") if c.strip()] for row in rows)}


def test_bytes_and_times(run):
    given = ["--unique", "1000", "--distinct-share", "0.5"]
    code, out, _ = run(*SIZES, "--idle", "lazy", *given)
    assert code == 0
    assert "each looks up 1,000 distinct rows a step, 0.50 of these are distinct over all" in out
    found = {name: [cell.strip() for cell in cells] for name, cells in lines(out).items()}
    # 750 rows of others: 8 bytes of id, 256 of row, 256 of gradient; 500 rows owned, with two planes of state.
    assert found["sharded"] == ["192 MB", "384 bytes", "6 kB", "192 kB", "192 kB", "5", "384 kB", "384 kB"]
    assert found['memory="shared"'] == ["192 MB", "768 bytes", "6 kB", "192 kB", "6", "640 kB", "384 kB"]
    assert found["nn.Embedding, DDP"] == ["1.02 GB", "384 MB", "1"]


TABLE = ["--rows", "1000", "--dim", "160"]


def test_one_process(run):
    asked = ["--tokens", "50", "--rows-per-token", "16", "--unique", "500"]
    code, out, _ = run(*TABLE, "--storage", "bfloat16", "--state", "uint8", *asked)
    assert code == 0
    told = " ".join(out.split())
    assert "distinct" not in run(*TABLE)[1], "memory alone needs no lookups"
    assert "table: 1,000 x 160, 800 lookups a step, 500 of them distinct" in told
    # 320 bytes of weights; 160 with a scale of 8 bytes twice; 4 of the last step.
    held = "320 kB of weights, 320 kB of state, 4 kB of last steps, 16 kB of scales, 660 bytes a row"
    assert f"AdamW, idle rows exact, ids by Zipf's law with exponent 1.05; in bfloat16, uint8 state {held}" in told


def test_names_of_optimizers(run):
    for name, row_bytes in (
        ("SGD", 640),
        ("SGD(momentum=0.9, nesterov=True)", 1284),
        ("torch.optim.Adagrad", 1280),
        ("SparseAdam()", 1920),
        ("none", 640),
    ):
        code, out, _ = run(*TABLE, "--optimizer", name, "--storage", "float32")
        assert code == 0
        assert f"{row_bytes:,} bytes a row" in " ".join(out.split())


FAST = ["--rows", "1000", "--dim", "8", "--machine", "h200", "--host-memory", "512GB"]


def test_another_machine(run):
    code, out, _ = run(*FAST, "--batch", "64", "--lookups", "2", "--dense-ms", "1")
    assert code == 0
    assert "h200: 141 GB of" in out
    assert "estimated" in out
    assert "recommended: " in out


def test_blocks_of_the_forms_that_are_planned_by_default(run):
    def scales(*blocks):
        code, out, _ = run(*FAST, "--batch", "64", *blocks, "--json", "-")
        assert code == 0
        return {
            form["storage_dtype"]: form["scale"] for form in json.loads(out)["bytes"] if form["state_dtype"] == "uint8"
        }

    usual, small = scales(), scales("--scale-block", "4")
    assert small == {**usual, "float8_e4m3fn": usual["float8_e4m3fn"] + 4 * 1000}, "one more for half a row of weights"


def test_several_tables_as_json_and_a_picture(run, tmp_path):
    picture = tmp_path / "plan.png"
    code, out, _ = run(*FAST, "--rows", "2000", "--batch", "64", "--json", "-", "--picture", str(picture))
    assert code == 0
    found = json.loads(out)
    assert [(table["rows"], table["dim"], table["lookups"]) for table in found["tables"]] == [
        (1000, 8, 64),
        (2000, 8, 64),
    ]
    assert picture.stat().st_size > 5000
    code, _, _ = run(*FAST, "--batch", "64", "--json", str(tmp_path / "plan.json"))
    assert code == 0
    assert json.loads((tmp_path / "plan.json").read_text())["batch"] == 64


RANKED = ["--rows", "1e6", "--dim", "64", "--lookups", "65536", "--rank", "--host-memory", "64GB"]


def test_machines_are_ranked(run, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("base: h200\nname: mine\n")
    prices = tmp_path / "prices.yaml"
    prices.write_text("mine: {hourly_price: 3, currency: EUR, date: 2026}")
    out = tmp_path / "ranking.json"
    code, text, _ = run(*RANKED, "--machine", str(own), "--json", str(out), "--picture", str(tmp_path / "rank.png"))
    assert code == 0
    assert "by the time of a step" in text
    data = json.loads(out.read_text())
    assert {"h200", "a100-pcie", "mine"} <= {each["machine"] for each in data["ranked"]}
    assert (tmp_path / "rank.png").read_bytes().startswith(b"\x89PNG")
    code, text, _ = run(*RANKED, "--machine", str(own), "--by", "hour", "--prices", str(prices), "--json", "-")
    assert json.loads(text)["ranked"][0]["machine"] == "mine"


BASES = {"SIZES": SIZES, "TABLE": TABLE, "FAST": FAST, "RANKED": RANKED}
# One of these, further arguments, and what is told.
WRONG = """
SIZES --comm-dtype in8 -> --comm-dtype is 'in8'; did you mean 'int8'?
SIZES --distinct-share 0.1 -> --distinct-share is 0.1 but must be from 1 / --ranks to 1
SIZES --tokens 4 -> --lookups is given, and --tokens or --rows-per-token too; pass one or the others
SIZES --optimizer none -> --ranks is for one table and its training steps
SIZES --optimizer ASGD --idle exat -> --idle is 'exat'; did you mean 'exact'?
SIZES --rank -> --rank is given with --ranks
SIZES --json x.json -> --json is given with --ranks
TABLE --ranks 2 -> --ranks is given without the lookups of a step
TABLE --unique 2 -> --unique is given without the lookups of a step
TABLE --rank -> --rank is given without the lookups of a step; pass --lookups
TABLE --rows-per-token 2 -> --rows-per-token is given without --tokens
TABLE --scale-block 64 --storage int8 -> --scale-block is 64 but --storage is 'int8', and only float8 rows have blocks; leave
TABLE --storage int9 -> --storage-dtype is 'int9'; did you mean 'int8'?
TABLE --by hour -> --by is 'hour' without --rank
FAST --lookups 0.5 -> --lookups is 0.5 but must be a number from 1 on
FAST --dim 8 --dim 9 -> --dim is given 3 times and --rows 1
FAST --rows 5 --lookups 2 --ranks 2 -> --ranks is for one table
FAST --picture none/plan.png -> cannot write 'none/plan.png' (there is no folder 'none')
FAST --picture plan.qqq -> 'plan.qqq' ends in '.qqq' but the picture is a PNG; use the ending .png
FAST --dense-ms -1 -> --dense-ms is -1.0
RANKED --by hours -> --by is 'hours'; did you mean 'hour'?
RANKED --prices none.yaml -> none.yaml
"""


@pytest.mark.parametrize("wrong", WRONG.strip().splitlines())
def test_what_makes_no_sense_is_told_in_one_line(run, wrong):
    arguments, words = wrong.split(" -> ")
    sizes, *others = arguments.split()
    code, _, err = run(*BASES[sizes], *others)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_the_help_lists_what_there_is():
    """It is shown without the modules that know."""
    from speedtransfer.planning import command
    from speedtransfer.planning.footprint import STATE, STORAGE
    from speedtransfer.planning.rank import MEASURES

    assert (tuple(STORAGE), tuple(STATE)) == (command.STORAGE_NAMES, command.STATE_NAMES)
    assert tuple(MEASURES) == command.MEASURE_NAMES
