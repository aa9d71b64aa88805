"""The scripts of bench/: what is recorded gets into the docs, and each experiment runs small and notices what is wrong."""

import contextlib
import dataclasses
import functools
import importlib
import json
import lzma
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from speedtransfer.benchmark.measure import measure
from speedtransfer.benchmark.report import markdown, plot
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.cuda import cuda_status
from speedtransfer.errors import InvalidValueError
from speedtransfer.planning.footprint import Form
from speedtransfer.planning.hosts import Link, shared_by
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import Load, Workload

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


def a_result(suite, groups):
    shown = [group.to_json() for group in groups]
    return {"suite": suite, "quick": False, "options": {}, "environment": ABOUT, "groups": shown, "seconds": 1.0}


def test_pages_show_what_is_recorded(tmp_path, script, monkeypatch, capsys):
    """Not what is of a quick or a stopped run."""
    store, readme = script("store"), script("readme")
    monkeypatch.setattr(store, "ROOT", tmp_path)
    written = tmp_path / readme.FIGURES.page
    written.parent.mkdir()
    before = f"before\n{readme.FIGURES.begin}\nold figures\n{readme.FIGURES.end}\nafter\n"
    written.write_text(before)
    assert readme.main(check=False) == 0
    assert written.read_text() == before  # nothing is recorded
    cases = [CaseResult(name, "other", 0, samples_s=[1e-3], host_s=[1e-3]) for name in ("NumPy", "on the device")]
    tax = a_result("tax", [GroupResult("a product", {"experiment": "matmul", "size": 50}, cases)])
    path = store.folder_of(ABOUT["device"]) / "tax.json"
    assert path.relative_to(tmp_path).as_posix() == "bench/results/nvidia-test-1-laptop/tax.json"
    store.write(path, tax)
    for run in (store.QUICK, store.PARTIAL):
        store.write(store.folder_of("A quick GPU") / f"tax{run}.json", tax)
    assert [readme.main(check=check) for check in (True, False, True)] == [1, 0, 0]
    assert "docs/results.md is not of bench/results" in capsys.readouterr().err
    text = written.read_text()
    assert (text.startswith("before\n"), text.endswith("after\n")) == (True, True)
    for part in ("### NVIDIA Test 1", "0123456789ab", "(../bench/results/nvidia-test-1-laptop/tax.png)"):
        assert part in text
    assert "old figures" not in text
    assert "a-quick-gpu" not in text
    assert 1000 < path.with_suffix(".png").stat().st_size < 150_000


# --- experiments --------------------------------------------------------------------------------------------------------


def test_each_is_declared_as_a_suite_is(script, suites, likes, texts):
    data = {"idle": str(likes), "word2vec": str(texts)}
    for name in script("store").EXPERIMENTS:
        given = {"data": data.get(name, "")}
        groups = suites[name].groups(CPU, True, seed=3, rows=5, whatever=1, **given)
        assert len({group.title for group in groups}) == len(groups) <= len(suites[name].groups(CPU, False, **given))
        assert suites[name].declared("NOTE", "")
        if given["data"]:
            with pytest.raises(InvalidValueError, match="name the folder that has"):
                suites[name].groups(CPU, True, data="no such folder")


SHOWN = {
    "gpu": "",
    "idle": "| likes, 30 users x 40 items | loss | recall@20 | ",
    "mixed": "| accuracy, by windows of a batch | 128 | 512 |",
    "ngram_example": '| **speedtransfer, idle="exact"** | ',
    "plan_accuracy": " planned times are within a factor of 1.5 of the measured ones",
    "saves": "| **a delta applied** | ",
    "tax": "| NumPy | ",
    "word2vec": "36 of WS-353",
}


@pytest.mark.filterwarnings("ignore:.*GradScaler")
def test_steps_that_are_counted_on_a_gpu_are_made_on_the_cpu(script, tmp_path):
    warm = script("warm_steps")
    for number, form in enumerate(warm.FORMS.values()):
        memory = "pageable" if form.memory in ("pinned", "device") else form.memory
        (folder := tmp_path / str(number)).mkdir()
        step = dataclasses.replace(form, memory=memory).build(warm.Sizes(2600, 832, 8), CPU, folder)
        for _ in range(2):
            step()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_each_runs_small(suites, likes, texts, monkeypatch, tmp_path, name):
    """In this process, with few cases and words and a tiny network, and no memory measured."""
    if name == "gpu" and cuda_status().available:
        pytest.skip("there is a CUDA device")
    module, changed, given = suites[name].module, {}, {}
    if name == "idle":
        given = {"data": str(likes), "points": 7}
    elif name == "mixed":
        tiny = module._QUICK._replace(classes=50, dim=4, hidden=8, windows=2048, held_out=200, lr=1e-2)
        changed = {"memory_of": lambda *given: {"host_bytes": 1000}, "_QUICK": tiny}
        changed |= dict.fromkeys(("_MOST_STEP_S", "_MOST_TRAINING_S"), math.inf)
    elif name == "plan_accuracy":
        changed = {"CASES": [module.CASES[n] for n in (3, 6, 9)], "in_process": lambda what, case: what(case)}
    elif name == "word2vec":
        changed = {"WARM_WORDS": 500, "in_process": lambda job, given: json.loads(json.dumps(job(given)))}
        given = {"models": ("skipgram",), "optimizers": ("adagrad",), "seeds": 2, "words": 3000, "data": str(texts)}
    monkeypatch.chdir(tmp_path)
    for what, value in changed.items():
        monkeypatch.setattr(module, what, value)
    groups = suites[name].groups(CPU, True, **given)
    found = [measure(group, CPU, **FAST) for group in (groups[:1] if name == "word2vec" else groups)]
    assert all(group.cases == group.ran for group in found)
    assert {group.skipped for group in found} <= {"", "needs CUDA"}
    if SHOWN[name]:
        assert SHOWN[name] in markdown(a_result(name, found))
        assert plot(a_result(name, found)).startswith(b"\x89PNG")


def test_rounding_compares_every_form_with_float32(suites, monkeypatch):
    rounding = suites["rounding"].module
    monkeypatch.setattr(rounding, "_QUICK", dataclasses.replace(rounding._QUICK, steps=40, seeds=2))
    found = measure(rounding.groups(CPU, True)[0], CPU)
    assert [case.name for case in found.cases] == list(rounding.FORMS)
    cases = found.by_name
    assert abs(cases["split24"].figures[rounding.FARTHEST]) < rounding.MAX_SHARE
    assert all(len(case.values[rounding.LOSS]) == 2 for case in cases.values())
    assert "| **float32** | 48 | " in markdown(a_result("rounding", [found]))
    assert "more than 0.1%" in rounding._wrong("split24", 0.0011)
    assert "shows nothing" in rounding._wrong("bfloat16", -0.0009)
    assert not rounding._wrong("bfloat16", 0.01) + rounding._wrong("split24", -0.0009)


def test_recorded_steps_of_two_hosts_take_what_is_planned():
    """Where the delays of the network are most of it; and of many or few bytes, on a fast or a slow wire."""
    (path,) = (ROOT / "bench" / "results").glob("*/hosts.json")
    rows, near = 10_000, 0
    for group in map(GroupResult.from_json, json.loads(path.read_text(encoding="utf-8"))["groups"]):
        link = Link("wire", 1e9 / 8 * group.params["gbit"], 1e-3 * group.params["delay_ms"], "as set")
        for name, case in group.by_name.items():
            tables, features = (1, 26) if name == "MultiEmbedding of 26" else (int(name.split()[0]), 1)
            ids = 8192 if "8,192 ids" in name else 256
            unique = features * rows * (1 - (1 - 1 / rows) ** ids)
            loads = (Load("", rows * features, 64, ((rows, ids),) * features, unique),) * tables
            work = Workload(loads, 1, 0.0, optimizer_given("AdamW"))
            plan, took = shared_by(work, Form(), 2, link, together="one tensor" in name), min(case.samples_s)
            if plan.parts["delays"] > took / 2:
                near += 1
                alone = 1e-3 * case.figures["one process, ms"]
                assert alone + plan.seconds == pytest.approx(took, rel=0.25), (group.title, name)
    assert near >= 7


def test_peers_compares_tables_before_it_times_steps(suites):
    peers, tables = suites["peers"].module, importlib.import_module("peer_tables")
    by_title = {
        group.title: measure(group, CPU, **FAST) for group in peers.groups(CPU, True) if "3 tables" in group.title
    }
    for title, found in by_title.items():
        ran, ours = set(found.by_name), {case.name for case in found.cases if case.role == "ours"}
        assert ours <= ran
        # Ids alone are looked up one by one, too.
        ways = 2 if "EmbeddingBag" in " ".join(ours) else 3
        assert len(ours) == ways * (2 if title.endswith("AdamW") else 1)
    data = tables.Data(peers.QUICK[-1], "SGD")
    faster = functools.partial(
        tables.modules, kind=torch.nn.EmbeddingBag, make=functools.partial(torch.optim.SGD, lr=0.02)
    )
    for same in (True, False):
        wrong = peers.Training(peers.Contender("wrong", faster, same), data)
        wrong.run()
        with pytest.raises(AssertionError, match="a weight is") if same else contextlib.nullcontext():
            wrong.check()


# --- idle rows ----------------------------------------------------------------------------------------------------------


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


# --- word2vec: a small text, end to end; how sure differences are -------------------------------------------------------


TOPICS, WORDS_A_TOPIC = 6, 8


@pytest.fixture
def texts(tmp_path):
    """A text of ten words a topic and the sets about it, as the real ones are laid out."""
    folder = tmp_path / "data"
    folder.joinpath("corpora").mkdir(parents=True)
    folder.joinpath("wordsim").mkdir()
    rng = np.random.default_rng(0)
    topics = np.repeat(rng.integers(0, TOPICS, 300), 10)
    numbers = rng.integers(0, WORDS_A_TOPIC, len(topics))
    text = " ".join(f"t{topic}w{number}" for topic, number in zip(topics, numbers, strict=True))
    folder.joinpath("corpora/schools_wiki_2007.text8.xz").write_bytes(lzma.compress(text.encode(), preset=0))
    pairs = [(f"t{a}w0", f"t{b}w{1 + a}", 10 if a == b else 1) for a in range(TOPICS) for b in range(TOPICS)]
    lines = ["# word, word, score", *("\t".join(map(str, pair)) for pair in [*pairs, ("nobody", "knows", 5)])]
    for name in ("WS-353-ALL", "RG-65", "MTurk-287", "SIMLEX-999", "RW-STANFORD"):
        folder.joinpath(f"wordsim/EN-{name}.txt").write_text("\n".join(lines) + "\n")
    questions = ": topics\nt0w0 t0w1 t1w0 t1w1\n: gram1\nt4w0 t4w1 t5w0 t5w1\nt4w0 t4w1 t5w0 other\n"
    folder.joinpath("wordsim/questions-words.txt").write_text(questions)
    return folder


# --- differences ----------------------------------------------------------------------------------------------------------

RANDOM = np.random.default_rng(1)
GOLD = RANDOM.integers(0, 12, 40).astype(float)  # with ties
OURS, THEIRS = ((GOLD + noise * RANDOM.standard_normal((3, 40))).round(1) for noise in (4, 7))
APART, EVEN = np.repeat([[0.2], [0.5], [0.8]], 40, axis=1), np.full((3, 40), 0.4)
RIGHT = (RANDOM.random(4000) < 0.4).astype(float)
MORE = RIGHT.copy()
MORE[np.flatnonzero(RIGHT == 0)[:200]] = 1
HALF = 1.96 * (MORE - RIGHT).std() / np.sqrt(4000)  # of paired differences, far from that of two samples


@pytest.mark.parametrize(
    ("ours", "theirs", "gold", "value", "low", "high"),
    [
        (OURS, 2 * OURS + 1, GOLD, 0, 0, 0),  # ranks do not change, whatever the scale
        (MORE[None], RIGHT[None], None, 0.05, 0.05 - HALF, 0.05 + HALF),
        (APART, EVEN, None, 0.1, -0.2, 0.4),  # items hardly matter: as wide as the seeds are apart
    ],
)
def test_differences_that_are_known(suites, monkeypatch, ours, theirs, gold, value, low, high):
    word2vec = suites["word2vec"].module
    monkeypatch.setattr(word2vec, "RESAMPLES", 200)
    found = word2vec.bootstrap(ours, theirs, gold)
    assert found == word2vec.bootstrap(ours, theirs, gold), "the same draws each time"
    more = [np.pad(side, ((0, 0), (0, 1)), constant_values=last) for side, last in ((ours, 1.0), (theirs, np.nan))]
    people = None if gold is None else np.append(gold, 1.0)
    assert found == word2vec.bootstrap(*more, people), "an item that one does not know is left out"
    assert found[0] == pytest.approx(value)
    assert found[1:] == pytest.approx([low, high], abs=0.2 * HALF)
