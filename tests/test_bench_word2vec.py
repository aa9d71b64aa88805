"""bench/word2vec.py: small texts, end to end; what cannot be; how sure means are."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy

from speedtransfer.errors import StorageError

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "bench/results/a-device"
TOPICS, WORDS_A_TOPIC = 6, 8


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def module(name):
    return importlib.import_module(f"word2vec{name}")


def save_picture(draw, result, path):
    return importlib.import_module("experiment").save_picture(draw, result, path)


def planted_words(num_words=6000, seed=0):
    """Sentences of ten words, each from one of six topics: words t<topic>w<number>."""
    rng = np.random.default_rng(seed)
    topics = np.repeat(rng.integers(0, TOPICS, num_words // 10), 10)
    numbers = rng.integers(0, WORDS_A_TOPIC, len(topics))
    return [f"t{topic}w{number}" for topic, number in zip(topics, numbers, strict=True)]


def put_data(folder, words=None):
    """Write a text and the sets about it, as the real ones are laid out, and return the folder."""
    folder.joinpath("corpora").mkdir(parents=True)
    folder.joinpath("wordsim").mkdir()
    text = " ".join(words or planted_words())
    folder.joinpath("corpora/schools_wiki_2007.text8.xz").write_bytes(lzma.compress(text.encode(), preset=0))
    pairs = [(f"t{a}w0", f"t{b}w{1 + a}", 10 if a == b else 1) for a in range(TOPICS) for b in range(TOPICS)]
    lines = ["# word, word, score", *("\t".join(map(str, pair)) for pair in [*pairs, ("nobody", "knows", 5)])]
    for name in ("WS-353-ALL", "RG-65", "MTurk-287", "SIMLEX-999", "RW-STANFORD"):
        folder.joinpath(f"wordsim/EN-{name}.txt").write_text("\n".join(lines) + "\n")
    questions = (
        ": topics\nt0w0 t0w1 t1w0 t1w1\nt2w0 t2w1 t3w0 t3w1\n: gram1\nt4w0 t4w1 t5w0 t5w1\nt4w0 t4w1 t5w0 other\n"
    )
    folder.joinpath("wordsim/questions-words.txt").write_text(questions)
    return folder


# --- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 10])
def test_intervals_are_those_of_scipy(number):
    found, rng = module("_statistics"), np.random.default_rng(number)
    ours = rng.normal(0.4, 0.02, number).tolist()
    value, half = found.mean(ours)
    low, high = scipy.stats.t.interval(0.95, number - 1, np.mean(ours), scipy.stats.sem(ours))
    assert (value - half, value + half) == pytest.approx((low, high))
    assert found.mean(ours[:1]) == (ours[0], None)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (0.02, "better"),
        (0.009, "not worse beyond the confidence interval"),
        (-0.009, "not worse beyond the confidence interval"),
        (-0.02, "worse"),
    ],
)
def test_verdicts(value, verdict):
    assert module("_statistics").Difference(value, value - 0.01, value + 0.01).verdict == verdict


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "read"), [(None, 7), (5, 1 << 20), (5000, 1 << 20), (2001, 64), (3000, 64)])
def test_the_text_in_lines(tmp_path, monkeypatch, words, read):
    """Cut where a read ends within a word, whatever the white space; not a word more than asked for."""
    data = module("_data")
    monkeypatch.setattr(data, "_READ", read)
    all_words = [f"w{number}" for number in range(3100 if words else 400)]
    text = "  ".join(all_words[:50]) + "\n\n" + "\t".join(all_words[50:])
    (tmp_path / "text.txt").write_text(text)
    facts = data.prepare(tmp_path / "text.txt", tmp_path / "lines.txt", words)
    lines = [line.split(" ") for line in (tmp_path / "lines.txt").read_text().splitlines()]
    assert [word for line in lines for word in line] == all_words[:words]
    assert [len(line) for line in lines[:-1]] == [1000] * (len(lines) - 1)
    assert facts["words"] == len(all_words[:words])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\tb\t1\nc d\n", "line 2 of "),
        ("a\tb\tmuch\n", "line 1 of "),
        (": one\na b c d\na b c\n", "line 3 of "),
        ("\n# nothing\n", "holds no lines to evaluate with"),
        (None, "there is no set"),
    ],
)
def test_sets_that_cannot_be_read(tmp_path, text, message):
    data, path = module("_data"), tmp_path / "set.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises((data.DataError, StorageError), match=message) as caught:
        data.find_sets(None, [path])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no words"), (b" \n", "holds no words"), (b"a \xff b", "must be text in UTF-8")],
)
def test_texts_that_cannot_be_read(tmp_path, content, message):
    data = module("_data")
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(data.DataError, match=message):
        data.prepare(tmp_path / "text.txt", tmp_path / "lines.txt")


def test_sets_in_two_groups(tmp_path):
    found = module("_data").find_sets(put_data(tmp_path), None)
    groups = [(one.name, one.group) for one in found]
    assert groups == [
        *((name, "tuned") for name in ("WS-353", "RG-65", "MTurk-287", "analogies")),
        *((name, "reserved") for name in ("SimLex-999", "RW")),
    ]
    (tmp_path / "mine.txt").write_text("a\tb\t1\n")
    named = module("_data").find_sets(None, [tmp_path / "mine.txt", tmp_path / "wordsim/EN-RG-65.txt"])
    assert [(one.name, one.group) for one in named] == [("RG-65", "tuned"), ("mine", "reserved")]


def test_corpora(tmp_path):
    data = module("_data")
    large, small = data.find_corpora(put_data(tmp_path), None)
    assert large.name not in data.OWN_SETTINGS
    assert data.OWN_SETTINGS[small.name] == (25, 5, 1e-3, False)
    assert 600_000 < data.prepare(small, tmp_path / "lines.txt")["words"] < 700_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--data nowhere", "error: there is no corpora/schools_wiki_2007.text8.xz in 'nowhere'; name the folder"),
        ("--data half", "error: there is no wordsim/EN-WS-353-ALL.txt in 'half'; name the folder"),
        ("--data . --corpus no.txt", "error: there is no corpus 'no.txt'"),
        ("--data . --corpus a.txt --corpus x/a.txt", "error: two files are called 'a.txt'"),
        ("--data . --seeds 0", "argument --seeds: invalid positive int value: '0'"),
        ("--corpus no.txt", "are required: --data, or --corpus and --sets"),
    ],
)
def test_what_makes_no_sense_ends_with_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half/corpora").mkdir(parents=True)
    (tmp_path / "half/corpora/schools_wiki_2007.txt").write_text("a b c")
    (tmp_path / "x").mkdir()
    for name in ("a.txt", "x/a.txt"):
        (tmp_path / name).write_text("a b c")
    try:
        code = module("").main(arguments.split())
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert message in printed.err.splitlines()[-1]


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gensim", None)
    assert module("").main(["--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "error: this benchmark needs gensim, which is not installed; run: pip install gensim\n"
    )


# --- a small run ------------------------------------------------------------------------------------------------------


def run_job_here(script, job, end):
    """Do a job in this process, which saves the imports of another one."""
    found = importlib.import_module(Path(script).stem).JOBS[job["task"]](job)
    return json.loads(json.dumps(found))


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("here", "in processes")]
)
def small_run(request, tmp_path_factory):
    """The folder of a run that was stopped after gensim's turn and taken up again, smaller, and what was printed."""
    folder = tmp_path_factory.mktemp("small")
    sys.path.insert(0, str(ROOT / "bench"))
    command, data, printed = module(""), module("_data"), io.StringIO()
    argv = ["--data", str(put_data(folder / "data")), "--out", str(folder / DEVICE / "word2vec.json")]
    small, large = folder / "small.txt", folder / "data/corpora/schools_wiki_2007.text8.xz"
    small.write_text(" ".join(planted_words(3000, seed=1)))
    argv += ["--corpus", str(large), "--corpus", str(small)]
    train = command.Session._train

    def train_gensim_alone(self, system, seed, warm=False):
        if warm:
            return {}
        if system.system != "gensim":
            raise KeyboardInterrupt
        return train(self, system, seed, warm)

    both = contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed)
    with pytest.MonkeyPatch.context() as patch, both[0], both[1]:
        patch.setattr(command, "SETTINGS", data.Settings(dims=(8, 9), optimizers=("adagrad",), seeds=2))
        patch.setitem(data.OWN_SETTINGS, small.name, data.CorpusSettings(2, min_count=1, analogies=False))
        patch.setitem(data.OWN_SETTINGS, large.name, data.CorpusSettings(2))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(command.Session, "_train", train_gensim_alone)
        if request.param == "here":
            patch.setattr(command, "run_job", run_job_here)
        assert command.main(argv) == 1
        stopped = json.loads((folder / DEVICE / "word2vec.partial.json").read_text())
        patch.setattr(command.Session, "_train", train)
        assert command.main([*argv, "--resume", "--words", "100"]) == 2
        assert command.main([*argv, "--resume", "--only", "dim 8", "--seeds", "1"]) == 0
    return folder, stopped, printed.getvalue().splitlines()


def test_a_stopped_run_goes_on(small_run):
    folder, stopped, printed = small_run
    assert [run["system"] for run in stopped["runs"]] == ["gensim"]
    assert {*stopped["runs"][0]["items"]} == {*stopped["runs"][0]["scores"]}
    assert not stopped["complete"]
    assert any("error: stopped; what was measured is in" in line for line in printed)
    assert any("was measured with other corpora and words; drop --resume" in line for line in printed)
    found = json.loads((folder / DEVICE / "word2vec.json").read_text())
    assert found["complete"]
    del stopped["runs"][0]["items"]
    assert found["runs"][0] == stopped["runs"][0]
    assert len(found["runs"]) == 8
    assert not (folder / DEVICE / "word2vec.partial.json").exists()


def test_the_order_of_runs(tmp_path):
    """Whole seeds; only the first model and the first optimizer in further dimensions."""
    settings = module("_data").Settings(dims=(8, 9), optimizers=("adamw", "sgd"), seeds=2)
    session = module("").Session(tmp_path, settings, [], tmp_path / "partial.json")
    session._texts = {"large.txt": tmp_path, "small.txt": tmp_path}
    order = [(seed, *system) for system, seed in session._runs()]
    names = [("gensim", ""), ("speedtransfer", "adamw"), ("speedtransfer", "sgd")]
    of_one = [(model, *name, 8) for model in ("skipgram", "cbow") for name in names]
    of_one += [("skipgram", *name, 9) for name in names[:2]]
    assert order == [
        (seed, f"{name}.txt", *system) for seed in (1, 2) for name in ("large", "small") for system in of_one
    ]


@pytest.mark.parametrize("error", ["RunError", "OutOfTimeError"])
def test_a_run_that_fails_costs_no_other_and_one_without_time_ends_all(tmp_path, monkeypatch, error):
    command, asked = module(""), []
    settings = module("_data").Settings(dims=(8,), optimizers=("sgd",), models=("cbow",), seeds=1)
    session = command.Session(tmp_path, settings, [], tmp_path / "partial.json")
    session._texts = {"a.txt": tmp_path / "a.txt"}
    own = {"name": "a.txt", "epochs": 1, "min_count": 1, "sample": 0.0, "analogies": True}
    session.result = {"corpora": [own], "runs": [], "failures": []}

    def run_job(script, job, end):
        asked.append(job["task"])
        raise getattr(command, error)("a reason")

    monkeypatch.setattr(command, "run_job", run_job)
    failed = error == "RunError"
    assert session.run_all() == ("" if failed else "a reason")
    assert asked == (["gensim", "speedtransfer"] if failed else ["gensim"])
    assert [one["error"] for one in session.result["failures"]] == (["a reason"] * 2 if failed else [])
    assert (tmp_path / "partial.json").exists()


def test_what_a_run_finds(small_run):
    found = json.loads((small_run[0] / DEVICE / "word2vec.json").read_text())
    large, small = (corpus["name"] for corpus in found["corpora"])
    assert [(run["corpus"], run["model"], run["system"], run["optimizer"]) for run in found["runs"]] == [
        (corpus, model, *system)
        for corpus in (large, small)
        for model in ("skipgram", "cbow")
        for system in (("gensim", ""), ("speedtransfer", "adagrad"))
    ]
    assert found["same_vocabulary"]
    pairs = dict.fromkeys(("WS-353", "RG-65", "MTurk-287", "SimLex-999", "RW"), 36)
    for run in found["runs"]:
        assert run["vocabulary"]["words"] == TOPICS * WORDS_A_TOPIC
        assert run["vocabulary"]["occurrences"] == (6000 if run["corpus"] == large else 3000)
        analogies = {"analogies": 3, "analogies, semantic": 2, "analogies, syntactic": 1}
        assert run["asked"] == pairs | (analogies if run["corpus"] == large else {})
        assert all(-1 <= score <= 1 for score in run["scores"].values())
        assert "items" not in run
        assert run["peak_bytes"] > 20e6
        assert min(run["vocabulary_s"], run["training_s"]) > 0
    scores = [tuple(run["scores"].values()) for run in found["runs"]]
    assert len({*scores}) > 4, "the same corpus, model or system again and again"
    assert 1000 < (small_run[0] / DEVICE / "word2vec.png").stat().st_size < 100_000
    assert any(f"{large}, CBOW, speedtransfer, Adagrad, dim 8, seed 1: " in line for line in small_run[2])
    assert any("Analogies say nothing on a corpus of this size" in line for line in small_run[2])


def test_differences_of_a_run(small_run):
    """Those of the scores, though found from the outcome of each pair; not with three questions."""
    statistics = module("_statistics")
    found = json.loads((small_run[0] / DEVICE / "word2vec.json").read_text())
    ours = [system for system in statistics.systems(found) if system.system != "gensim"]
    assert len(ours) == 4
    for system in ours:
        differences = dict(statistics.differences(found, system))
        assert {*differences} == {"WS-353", "RG-65", "MTurk-287", "SimLex-999", "RW"}
        for name, (value, low, high) in differences.items():
            sides = [statistics.scores(found, who, name)[0] for who in (system, system.gensim)]
            assert value == pytest.approx(sides[0] - sides[1], abs=1e-6)
            assert low < high
    assert {(one["seeds"], one["items"]) for one in found["differences"]["found"]} == {(1, 36)}
    assert any("over word pairs or questions only: one seed says nothing" in line for line in small_run[2])


def test_words_a_second(small_run):
    statistics, found = module("_statistics"), json.loads((small_run[0] / DEVICE / "word2vec.json").read_text())
    run = {"corpus": "schools_wiki_2007.text8.xz", "vocabulary_s": 2.0, "training_s": 4.0}
    assert statistics.speeds(found, run) == (6000 * 2 / 6, 6000 * 2 / 4, 6000 / 2)


def test_vectors_are_asked_alike(tmp_path):
    """Words of equal count lie in another order, and the same questions are asked; the answers by hand."""
    child, words = module("_child"), [f"w{number:02}" for number in range(40)]
    matrix = np.random.default_rng(0).standard_normal((40, 6)).astype("f4")
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    near, right = unit[:20] @ unit[:20].T, 0
    questions = [": any"]
    for a, b, c in ((i, i + 1, i + 2) for i in range(30)):
        scores = (unit[:20] @ (unit[b] - unit[a] + unit[c])).tolist() if c < 20 else [0.0] * 20
        best = max(set(range(20)) - {a, b, c}, key=scores.__getitem__)
        right += c < 20 and a % 2
        questions.append(" ".join(words[i] for i in (a, b, c, best if a % 2 else (best + 1) % 20)))
    (tmp_path / "set.txt").write_text("\n".join(questions))
    (tmp_path / "pairs.txt").write_text("".join(f"{words[i]}\t{words[i + 1]}\t{i % 7}\n" for i in range(19)))
    expected = scipy.stats.spearmanr([near[i, i + 1] for i in range(19)], [i % 7 for i in range(19)]).statistic
    sets = [("a", "analogies", str(tmp_path / "set.txt")), ("p", "pairs", str(tmp_path / "pairs.txt"))]
    for order in (np.arange(40), np.arange(40)[::-1]):
        np.save(tmp_path / "vectors.npy", matrix[order])
        (tmp_path / "words.txt").write_text("".join(f"{words[row]} 7\n" for row in order))
        found = child.evaluate({"folder": str(tmp_path), "restrict": 20, "sets": sets})
        assert found["asked"] == {"a": 18, "a, semantic": 18, "a, syntactic": 0, "p": 19}
        assert found["scores"]["a"] == found["scores"]["a, semantic"] == pytest.approx(right / 18)
        assert found["scores"]["a, syntactic"] is None
        assert found["scores"]["p"] == pytest.approx(expected)
        outcome = {name: np.array(items, dtype=float) for name, items in found["items"].items()}
        assert outcome["p"] == pytest.approx([near[i, i + 1] for i in range(19)], abs=1e-6)
        assert np.isfinite(outcome["a"]).tolist() == [True] * 18 + [False] * 12
        assert outcome["a"][:18].tolist() == [i % 2 for i in range(18)]
        assert np.isnan(outcome["a, syntactic"]).all()


def test_a_job_that_fails_says_why():
    running = importlib.import_module("experiment")
    with pytest.raises(running.RunError, match="KeyError: 'juggle'"):
        running.run_job("word2vec_child.py", {"task": "juggle"})
    with pytest.raises(running.OutOfTimeError):
        running.run_job("word2vec_child.py", {"task": "juggle"}, end=0)


# --- what is shown ----------------------------------------------------------------------------------------------------


def made_run(dim, system, optimizer, seconds, score, seed):
    wiggle = 0.004 * (seed - 2)
    similarity = {"WS-353": score + wiggle, "RW": 0.7 + wiggle}
    analogies = {"analogies": score - 0.2, "analogies, semantic": 0.3, "analogies, syntactic": None}
    return {
        "corpus": "text8",
        "model": "skipgram",
        "system": system,
        "optimizer": optimizer,
        "dim": dim,
        "seed": seed,
        "vocabulary_s": 1.0,
        "training_s": seconds + seed,
        "peak_bytes": 5e8,
        "scores": similarity | analogies,
    }


@pytest.fixture
def made():
    """A result of three seeds by hand: AdamW faster and better, SGD slower and worse than gensim."""
    systems = (("gensim", "", 10, 0.6), ("speedtransfer", "adamw", 8, 0.63), ("speedtransfer", "sgd", 20, 0.5))
    environment = {"device": "A device", "versions": {"gensim": "4.4", "torch": "2.13"}, "cuda": False}
    settings = {"epochs": 5, "sample": 1e-4, "min_count": 5}
    return {
        "environment": {**environment, "commit": "0123456789abcdef", "dirty": False, "date": "2026-11-21"},
        "digest": "",
        "complete": True,
        "quick": False,
        "workers": 2,
        "same_vocabulary": True,
        "failures": [],
        "corpora": [{"name": "text8", "words": 1_000_000, **settings, "analogies": True}],
        "groups": {"WS-353": "tuned", "analogies": "tuned", "RW": "reserved"},
        "settings": {"negative": 5, "window": 5, "restrict": 30_000, "seeds": 3},
        "runs": [made_run(dim, *system, seed) for dim in (100, 300) for system in systems for seed in (1, 2, 3)],
        "differences": {
            "resamples": 2000,
            "least_items": 20,
            "found": [
                {
                    "corpus": "text8",
                    "model": "skipgram",
                    "system": "speedtransfer",
                    "optimizer": name,
                    "dim": 100,
                    "set": one,
                    "value": value,
                    "low": value - 0.01,
                    "high": value + 0.01,
                    "seeds": 3,
                    "items": 99,
                }
                for name, one, value in (
                    ("adamw", "WS-353", 0.03),
                    ("adamw", "analogies", 0.0),
                    ("adamw", "RW", 0.005),
                    ("sgd", "WS-353", -0.1),
                )
            ],
        },
    }


def test_nothing_lost_is_hidden(made):
    adamw, tuned, reserved, *rest = module("_report").verdicts(made, "text8")
    assert adamw == "- skip-gram, speedtransfer, AdamW, dim 100: 1.18x gensim's words/s (seed by seed 1.17x to 1.20x)"
    assert tuned == (
        "  - tuned: better: WS-353 +0.030 [+0.020, +0.040]; not worse beyond the confidence interval: analogies +0.000 "
        "[-0.010, +0.010]"
    )
    assert reserved == "  - reserved: not worse beyond the confidence interval: RW +0.005 [-0.005, +0.015]"
    assert rest[0].endswith("words/s (seed by seed 0.55x to 0.58x), slower")
    assert rest[1] == "  - tuned: **worse**: WS-353 -0.100 [-0.110, -0.090]"
    made["same_vocabulary"] = False
    made["failures"] = [{"title": "speedtransfer, SGD", "seed": 2, "error": "lr is too large"}]
    text = module("_report").markdown(made, "")
    assert "The vocabularies were not the same" in text
    assert "**Failed**: speedtransfer, SGD, seed 2: lr is too large" in text
    assert "paired bootstrap over word pairs or questions and over seeds (2,000 resamples)" in text
    assert "Tuned sets, on which settings of the package were chosen: WS-353, analogies. Reserved sets" in text


def test_nothing_trained_yet(made):
    made["runs"], made["settings"]["models"] = [], ["cbow"]
    assert module("_report").markdown(made, "").startswith("CBOW with 5 negative samples")


def test_the_table(made):
    head, _, gensim, *rest = module("_report").table(made, "text8").splitlines()
    assert head.count("|") == gensim.count("|")
    assert "| analogies, syntactic (tuned) | RW (reserved) | peak memory |" in head
    cells = [cell.strip() for cell in gensim.strip("|").split("|")]
    assert cells[0] == "skip-gram, gensim, dim 100"
    assert cells[1].startswith("386 ± 74 k")  # 5M words in 12, 13, 14 s
    assert cells[3:6] == ["1,000 ± 0 k", "0.600 ± 0.010", "0.400 ± 0.000"]
    assert cells[-3:] == ["", "0.700 ± 0.010", "500 MB"]
    assert len(rest) == 5


@pytest.mark.slow
def test_recorded_results_are_shown(tmp_path, capsys):
    record = importlib.import_module("record")
    paths = sorted((ROOT / "bench/results").glob("*/word2vec.json"))
    assert paths
    for path in paths:
        result = json.loads(path.read_text())
        text = module("_report").markdown(result, "")
        for run in result["runs"]:
            assert f", {run['system']}, " in text
            assert {*run["scores"]} <= {cell.split(" (")[0] for cell in text.replace("\n", "|").split("| ")}
        assert "  - tuned: " in text
        assert save_picture(module("_report").draw, result, tmp_path / "word2vec.png") == ""
        copy = tmp_path / "bench/results" / path.parent.name / path.name
        copy.parent.mkdir(parents=True)
        copy.write_bytes(path.read_bytes())
    assert record.status(tmp_path) == 0
    assert capsys.readouterr().out.count("came to its end") == len(paths)


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_picture(made, tmp_path, seeds):
    made["runs"] = [run for run in made["runs"] if run["seed"] <= seeds]
    made["settings"]["seeds"] = seeds
    path = tmp_path / "word2vec.png"
    assert save_picture(module("_report").draw, made, path) == ""
    assert 1000 < path.stat().st_size < 100_000
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_the_docs_and_the_list_of_results_show_it(made, tmp_path, capsys):
    readme, record = importlib.import_module("readme"), importlib.import_module("record")
    folder = tmp_path / DEVICE
    folder.mkdir(parents=True)
    folder.joinpath("word2vec.json").write_text(json.dumps(made))
    (section,) = [section for section in readme.SECTIONS if section.name == "word2vec"]
    begin, end = section.begin, section.end
    page = tmp_path / section.page
    page.parent.mkdir()
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert readme.main(check=True, root=tmp_path) == 1
    assert readme.main(check=False, root=tmp_path) == 0
    assert readme.main(check=True, root=tmp_path) == 0
    shown = page.read_text()
    assert shown.startswith(f"before\n{begin}\n\n![")
    assert shown.endswith(f"\n\n{end}\nafter\n")
    assert "(../bench/results/a-device/word2vec.png)" in shown
    assert "| skip-gram, speedtransfer, AdamW, dim 300 |" in shown
    assert "old" not in shown
    capsys.readouterr()
    assert record.status(tmp_path) == 0
    assert "came to its end" in capsys.readouterr().out
