"""The scripts of bench/: what is recorded gets into the docs, and each experiment runs small and notices what is wrong."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import lzma
import math
import re
from pathlib import Path

import pytest
import torch

from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.report import markdown, plot
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.cuda import cuda_status

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
FAST = {"turns": 1, "samples": 1, "min_sample_s": 0.0, "budget_s": 0.01}
ABOUT = {"device": "NVIDIA Test 1 (Laptop)", "cuda": True, "commit": "0123456789abcdef", "dirty": False}
ABOUT |= {"date": "2026-01-02T03:04:05+00:00", "versions": {"torch": "2.13", "cupy": "14.2"}}


@pytest.fixture(autouse=True)
def script(monkeypatch):
    """A function that imports a script of bench/ by its name."""
    for folder in ("examples", "bench"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


@pytest.fixture
def suites(script):
    return script("store").suites()


# --- results ------------------------------------------------------------------------------------------------------------


def a_result(suite: str, groups: list[GroupResult]) -> dict:
    shown = [group.to_json() for group in groups]
    return {"suite": suite, "quick": False, "options": {}, "environment": ABOUT, "groups": shown, "seconds": 1.0}


def of_tax() -> dict:
    cases = [CaseResult(name, "other", 0, samples_s=[1e-3], host_s=[1e-3]) for name in ("NumPy", "on the device")]
    return a_result("tax", [GroupResult("a product", {"experiment": "matmul", "size": 50}, cases)])


def shown(suite: str, groups: list[GroupResult]) -> str:
    """The markdown of a result, of which a picture can be drawn."""
    assert plot(a_result(suite, groups)).startswith(b"\x89PNG")
    return markdown(a_result(suite, groups))


def page(root: Path, section) -> Path:
    """The page of a section, with its marks."""
    made = root / section.page
    made.parent.mkdir(exist_ok=True)
    made.write_text(f"before\n{section.begin}\nold figures\n{section.end}\nafter\n")
    return made


def test_pages_show_what_is_recorded(tmp_path, script, capsys):
    """Not what is of a quick or a stopped run, and no file that is unreadable."""
    store, readme = script("store"), script("readme")
    written = page(tmp_path, readme.FIGURES)
    before = written.read_text()
    assert readme.main(check=False, root=tmp_path) == 0
    assert written.read_text() == before  # nothing is recorded
    path = store.path_of(tmp_path, ABOUT["device"], "tax")
    assert path.relative_to(tmp_path).as_posix() == "bench/results/nvidia-test-1-laptop/tax.json"
    store.write(path, of_tax())
    for run in (store.QUICK, store.PARTIAL):
        store.write(store.path_of(tmp_path, "A quick GPU", "tax", run), of_tax())
    path.with_name("step.json").write_text("{")
    assert [readme.main(check=check, root=tmp_path) for check in (True, False, True)] == [1, 0, 0]
    assert "step.json is unreadable" in capsys.readouterr().err
    text = written.read_text()
    assert (text.startswith("before\n"), text.endswith("after\n")) == (True, True)
    for part in ("### NVIDIA Test 1", "0123456789ab", "(../bench/results/nvidia-test-1-laptop/tax.png)"):
        assert part in text
    assert "old figures" not in text
    assert "a-quick-gpu" not in text
    assert 1000 < path.with_suffix(".png").stat().st_size < 150_000


def test_every_section_has_its_marks(script):
    for section in script("readme").SECTIONS:
        text = (ROOT / section.page).read_text(encoding="utf-8")
        assert text.index(section.begin) < text.index(section.end)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("parallel --quick --steps 6", "| DDP, sharded | (32, 5) | 50 | "),
        (
            "ngram_lm --steps 6 --batch 2 --context 8 --vocabulary 40 --width 8 --layers 2 --attention-heads 2 --rows 50 "
            "--dim 4 --only dense exact",
            '| speedtransfer, idle="exact" | ',
        ),
    ],
)
def test_an_example_is_recorded_and_shown(script, tmp_path, arguments, line):
    store, readme = script("store"), script("readme")
    assert script("record_examples").main(arguments.split(), tmp_path) == 0
    ((part, path),) = store.recorded(tmp_path)
    assert store.read(path)["complete"]
    (section,) = [section for section in readme.SECTIONS if section.parts == (part,)]
    text = page(tmp_path, section)
    assert readme.main(check=False, root=tmp_path) == 0
    assert line in text.read_text()
    assert f"](../{path.with_suffix('.png').relative_to(tmp_path).as_posix()})" in text.read_text()


# --- experiments --------------------------------------------------------------------------------------------------------


def test_each_is_declared_as_a_suite_is(script, suites):
    for name in script("store").EXPERIMENTS:
        groups = suites[name].groups(CPU, True, seed=3, rows=5, whatever=1)
        assert len({group.title for group in groups}) == len(groups) <= len(suites[name].groups(CPU, False))
        assert suites[name].declared("NOTE", "")


def test_tax_compares_the_same_three_ways(suites, monkeypatch):
    tax = suites["tax"].module
    monkeypatch.setattr(tax, "_SPIN_S", 0.0)
    found = [measure(group, CPU, **FAST) for group in tax.groups(CPU, True)[:2]]
    assert all([case.name for case in group.ran] == [tax.HOST, tax.RESIDENT, tax.COPIES] for group in found)
    assert "| NumPy | " in shown("tax", found)
    for case in tax._cases(40, CPU, 0):
        with pytest.raises(AssertionError, match="of its norm off"):
            case.check()  # nothing has run yet


@pytest.fixture
def mixed(suites, monkeypatch):
    """On a tiny network, with no memory measured."""
    module = suites["mixed"].module
    monkeypatch.setattr(module, "memory_of", lambda *given: {"host_bytes": 1000})
    for limit in ("_MOST_STEP_S", "_MOST_TRAINING_S"):
        monkeypatch.setattr(module, limit, math.inf)
    tiny = module._QUICK._replace(classes=50, dim=4, hidden=8, windows=2048, held_out=200, lr=1e-2)
    monkeypatch.setattr(module, "_QUICK", tiny)
    return module


def test_every_form_is_measured_and_judged(mixed, monkeypatch):
    found = measure(mixed.groups(CPU, True)[0], CPU, **FAST)
    assert [case.name for case in found.ran] == [form.name for form in mixed.FORMS]
    for case in found.ran:
        assert 0 <= case.figures[mixed.ACCURACY] <= 1
        assert case.figures[mixed.LOSS] < math.log(50)
    text = shown("mixed", [found])
    assert "- the device lists " in text
    assert "| accuracy, by windows of a batch | 128 |" in text
    case = mixed.Training(mixed.FORMS[2], mixed._QUICK, 64, CPU, 0, {"loss": 1.0, "seconds": 1.0})
    case.run()
    monkeypatch.setattr(mixed.Training, "evaluate", lambda training: (0.1, 1.2))
    with pytest.raises(AssertionError, match=r"ends with a loss of 1\.2000, FP32 with 1\.0000"):
        case.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradients", "rows of a table"])
def test_every_method_comes_to_the_loss_of_one_process(suites, kind):
    exchange = suites["exchange"].module
    (group,) = [group for group in exchange.groups(CPU, True) if group.params["kind"] == kind]
    found = measure(group, CPU, **FAST)
    assert [case.name for case in found.ran] == list(exchange.METHODS[kind])
    sent = [case.figures["sent_bytes"] * case.figures["steps"] for case in found.ran]
    assert max(sent[1:]) < sent[0]
    assert f"| {found.ran[0].name} | " in shown("exchange", [found]).replace("**", "")


def test_what_did_not_come_to_the_loss_is_told(suites, monkeypatch):
    exchange, how = suites["exchange"].module, ("gradients", suites["exchange"].module._QUICK, 2, 16, 1)
    whole = {"losses": [0.5, 0.3], "sent_bytes": 160.0, "seconds": [1.0]}
    found = {"all-reduce": whole, "one_bit_hook": {"losses": [0.5, 0.4], "sent_bytes": 10.0, "seconds": []}}
    alone = {"all-reduce": {"losses": [0.5, 0.3]}}
    monkeypatch.setattr(exchange, "train", lambda ranks, *_: found if ranks > 1 else alone)
    first, signs = exchange._measured(*how)
    assert first.figures == {"steps": 16.0, "sent_bytes": 10.0, "loss": 0.3}
    assert signs.error == "did not come to a loss of 0.303 in 48 steps"
    groups = [GroupResult("train", {"kind": "gradients", "ranks": 2}, [first, signs])]
    assert "- not run: train, one_bit_hook: did not come" in shown("exchange", groups)
    alone["all-reduce"]["losses"] = [0.5, 0.31]
    with pytest.raises(AssertionError, match=r"0\.3, but one process 0\.31"):
        exchange._measured(*how)


@pytest.mark.parametrize("package", ["speedtransfer", "speedtransfer.ranks"])
def test_the_package_says_where_they_are(package):
    for name in ("OneBitState", "one_bit_hook", "BlockMomentumAverager"):
        with pytest.raises(
            ImportError, match=rf"{package}\.{name} is no part of the package any more; copy it from ex"
        ):
            getattr(importlib.import_module(package), name)


@pytest.mark.slow
def test_plans_are_compared_with_what_a_step_takes(suites, monkeypatch, tmp_path):
    plans = suites["plan_accuracy"].module
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plans, "in_process", lambda what, case: what(case))
    monkeypatch.setattr(plans, "CASES", [plans.CASES[number] for number in (3, 6, 9)])
    found = measure(plans.groups(CPU, True)[0], CPU, **FAST)
    assert [case.name for case in found.ran] == [case.name for case in plans.CASES]
    assert found.cases[1].memory == {"host_bytes": 20_000 * 3 * (128 + 4) + 20_000 * 4}
    for case, ratio in zip(found.cases, (1.2, 0.5, 0.8), strict=True):
        case.figures[plans.RATIO] = ratio
    text = shown("plan_accuracy", [found])
    assert "- 2 of 3 planned times are within a factor of 1.5 of the measured ones, the median within 1.25" in text
    assert not list(tmp_path.iterdir())


def test_peers_compares_tables_before_it_times_steps(suites):
    peers, tables = suites["peers"].module, importlib.import_module("peer_tables")
    by_title = {
        group.title: measure(group, CPU, **FAST) for group in peers.groups(CPU, True) if "3 tables" in group.title
    }
    for title, found in by_title.items():
        ran, ours = set(found.by_name), {case.name for case in found.cases if case.role == "ours"}
        assert ours <= ran
        assert len(ours) == (4 if title.endswith("AdamW") else 2)
        missing = [case.error for case in found.cases if case.name in ("FBGEMM", "TorchRec, fused", "TFRA")]
        assert all("not installed" in error or "peers" in error or "not pooled" in error for error in missing)
    data = tables.Data(peers.QUICK[-1], "SGD")
    faster = functools.partial(
        tables.modules, kind=torch.nn.EmbeddingBag, make=functools.partial(torch.optim.SGD, lr=0.02)
    )
    for same in (True, False):
        wrong = peers.Training(peers.Contender("wrong", faster, same), data)
        wrong.run()
        with pytest.raises(AssertionError, match="a weight is") if same else contextlib.nullcontext():
            wrong.check()


@pytest.mark.skipif(cuda_status().available, reason="there is a CUDA device")
def test_what_a_gpu_is_asked_runs_small_and_what_needs_one_says_so(suites):
    gpu, found = suites["gpu"].module, {}
    for group in gpu.groups(CPU, True):
        found.setdefault(group.params["experiment"], []).append(measure(group, CPU))
    assert list(found) == ["step", "fbgemm", "both_ways", "few_blocks", "host", "words", "profile", "pages"]
    for name, results in found.items():
        for result in results:
            assert not [case.error for case in result.cases if case.error]
            if name in gpu.NEED_CUDA:
                assert (result.skipped, result.cases) == ("needs CUDA", [])
            else:
                assert all(value > 0 for case in result.cases for value in case.figures.values() if name != "profile")
                assert len(result.ran) > 1
    names = [*(", ".join(way) for way in gpu.WAYS), "nn.Embedding, SGD", "nn.Embedding, AdamW"]
    assert [case.name for case in found["step"][0].ran] == names

    def cases(scale):
        yield "fails", lambda: 1 / 0
        yield "runs", lambda: {"ms": 1.0}

    fails, runs = gpu._measured(cases, gpu.TINY)
    assert fails.error == "ZeroDivisionError: division by zero"
    assert (runs.error, runs.figures) == ("", {"ms": 1.0})


# --- idle rows ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def idle(script):
    return script("idle")


@pytest.fixture
def likes(tmp_path):
    """Data of 30 users, each of whom likes the even or the odd of 40 items, one file packed."""
    texts = []
    for items in (range(0, 20), range(20, 40)):
        lines = [" ".join(map(str, [user, *(item for item in items if item % 2 == user % 2)])) for user in range(30)]
        texts.append("\n".join(lines) + "\n")
    made = tmp_path / "likes"
    made.mkdir()
    (made / "train.txt").write_text(texts[0])
    (made / "test.txt.xz").write_bytes(lzma.compress(texts[1].encode()))
    return made


def test_data_that_cannot_be_read_end_with_2(idle, likes, capsys):
    (likes / "train.txt").write_text("0 1 2\n1 two\n")
    assert idle.main(["--data", str(likes)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search("cannot read line 2 of .*train.txt' .*'two'", line)


def test_recall_by_hand(idle, likes, monkeypatch):
    monkeypatch.setattr(idle, "TOP", 5)
    data = idle.read_data(likes)
    recall = idle.Recall(data, idle.Settings(users=20))
    users, items = torch.randn(30, 4), torch.randn(40, 4)
    expected = []
    for user in recall.users.tolist():
        scores = (items @ users[user]).tolist()
        known, wanted = ({item for u, item in part.tolist() if u == user} for part in (data.train, data.test))
        best = sorted(set(range(40)) - known, key=lambda item: -scores[item])[:5]
        expected.append(len(wanted & set(best)) / len(wanted))
    assert len(expected) == 20
    assert recall(users, items) == pytest.approx(sum(expected) / 20)


def test_exact_is_dense_and_lazy_is_not(idle, likes, tmp_path, capsys):
    path = tmp_path / "idle.json"
    assert idle.main(["--data", str(likes), "--out", str(path), "--steps", "60", "--batch", "8"]) == 0
    found = json.loads(path.read_text())
    curves = found["curves"]
    assert found["counts"][-1] == 60
    for way in idle.WAYS:
        assert len(curves[way]["loss"]) + 1 == len(curves[way]["recall"]) == len(found["counts"])
    assert curves["dense"]["distance"][-1] == 0
    assert curves["exact"]["distance"][-1] < 1e-3 < 1e-2 < curves["lazy"]["distance"][-1]
    assert found["loss_difference"]["exact"] < 1e-5
    assert (found["complete"], found["data"], found["settings"]["steps"]) == (True, "likes", 60)
    assert capsys.readouterr().out.splitlines()[-4].startswith("Likes, 30 users x 40 items, ")
    assert len(idle.draw(found).axes) == 3
