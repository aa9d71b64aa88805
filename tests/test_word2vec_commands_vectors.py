"""The commands on vectors as a user types them: what they print, what they refuse, nothing written before it is whole."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from late import models
from lazy_oracle import one_thread  # noqa: F401 (acts by being imported)
from test_word2vec_commands import fails_with, run

from speedtransfer.errors import InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.word2vec import UnknownWordError, Vectors
from speedtransfer.word2vec import plot as plot_module
from speedtransfer.word2vec.evaluation import evaluate
from speedtransfer.word2vec.plot import neighbour_map, plot, spread_labels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with vectors and sets."""
    monkeypatch.chdir(tmp_path)
    angle = np.arange(6) * np.pi / 3
    Vectors(["a", "b", "c", "d", "e", "f"], np.stack([np.cos(angle), np.sin(angle)], axis=1)).save("v.txt")
    Path("pairs.txt").write_text("a b 3\na c 2.5\na d 1\nb f 1.5\nc x 9\nA Y 2\n")
    Path("questions.txt").write_text(": [bold]kinds\na b d c\na b d f\n: gram1\na b c d\na b c x\n: gram2\nx y z a\n")
    return tmp_path


def test_evaluate(folder):
    result = run("evaluate", "v.txt", "pairs.txt", "questions.txt", "--json", "figures.json")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["pairs", "4", "2", "(33.3%)", "1.0000", "1.000", "to", "1.000", "1.0000"][:4] in [
        line[:4] for line in lines
    ]
    assert ["[bold]kinds", "1", "2", "0.5000", "0.095", "to", "0.905"] in lines
    assert ["gram1", "1", "1", "1.0000", "0.207", "to", "1.000"] in lines
    assert ["gram2", "0", "0", "-", "-"] in lines
    for name, right, of in (("semantic", 1, 2), ("syntactic", 1, 1), ("total", 2, 3)):
        assert [name, str(right), str(of)] in [line[:3] for line in lines]
    assert ["left", "out", "2", "(40.0%)"] in lines
    assert "pairs: 2 unknown words: x, Y\n" in result.stdout
    assert "questions: 3 unknown words: x, y, z\n" in result.stdout

    facts = json.loads(Path("figures.json").read_text())
    assert (facts["vectors"], facts["restrict"]) == ("v.txt", 300_000)
    vectors = Vectors.load("v.txt")
    assert facts["sets"] == [evaluate(vectors, name).as_dict() for name in ("pairs.txt", "questions.txt")]
    assert facts["sets"][0]["unknown_words"] == ["x", "Y"]


def test_evaluate_with_few_words(folder):
    assert "0.5000" in run("evaluate", "v.txt", "questions.txt").stdout
    fails_with(
        InvalidValueError, "set 'questions' has 0 questions", "evaluate", "v.txt", "questions.txt", "--restrict", 2
    )
    Vectors(["a", "b"] + [f"w{i}" for i in range(50)], np.random.default_rng(0).standard_normal((52, 4))).save("w.txt")
    Path("many.txt").write_text("a b 1\nw1 w2 2\nw3 w4 3\n" + "".join(f"u{i} a 1\n" for i in range(25)))
    assert "many: 25 unknown words: u0, u1, " in run("evaluate", "w.txt", "many.txt").stdout
    assert ", u19 and 5 more\n" in run("evaluate", "w.txt", "many.txt").stdout


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["pairs.txt", "bad.txt"], StorageError, "line 2 of 'bad.txt' is 'a b'"),
        (["pairs.txt", "foreign.txt"], InvalidValueError, "set 'foreign' has 0 pairs"),
        (["pairs.txt", "--json", "no/figures.json"], StorageError, "cannot write"),
    ],
)
def test_evaluate_refuses_before_it_writes(folder, arguments, kind, message):
    Path("bad.txt").write_text("a b 1\na b\n")
    Path("foreign.txt").write_text("q r 1\n")
    Path("figures.json").write_text("old")
    before = sorted(folder.iterdir())
    json_option = [] if "--json" in arguments else ["--json", "figures.json", "--overwrite"]
    fails_with(kind, message, "evaluate", "v.txt", *arguments, *json_option)
    assert sorted(folder.iterdir()) == before
    assert Path("figures.json").read_text() == "old"


def test_files_that_are_there_stay(folder):
    Path("out.json").write_text("old")
    Path("out.bin").write_text("old")
    Path("out.png").write_text("old")
    Path("dir.bin").mkdir()
    fails_with(InvalidValueError, "'out.json' exists; choose", "evaluate", "v.txt", "pairs.txt", "--json", "out.json")
    fails_with(
        InvalidValueError, "'out.bin' exists; choose another name or pass --overwrite", "convert", "v.txt", "out.bin"
    )
    fails_with(InvalidValueError, "'out.png' exists; choose", "plot", "v.txt", "-o", "out.png")
    fails_with(InvalidValueError, "'dir.bin' is a folder", "convert", "v.txt", "dir.bin", "--overwrite")
    for name in ("out.json", "out.bin", "out.png"):
        assert Path(name).read_text() == "old"
    assert run("evaluate", "v.txt", "pairs.txt", "--json", "out.json", "--overwrite").exit_code == 0
    assert len(json.loads(Path("out.json").read_text())["sets"]) == 1


def test_nearest_and_analogy(folder):
    assert run("nearest", "v.txt", "a", "d", "-n", 2).stdout == "a: b 0.500, f 0.500\nd: c 0.500, e 0.500\n"
    assert run("analogy", "v.txt", "a", "b", "c", "-n", 1).stdout == "a : b = c : d 0.500\n"
    fails_with(UnknownWordError, "'x', 'y' are not among the 6 words", "nearest", "v.txt", "x", "a", "y")
    fails_with(UnknownWordError, "'X' is not among the 6 words", "analogy", "v.txt", "a", "b", "X")
    Path("empty").mkdir()
    fails_with(StorageError, "folder 'empty' holds no vectors file", "nearest", "empty", "a")
    fails_with(
        StorageError, "'nope' does not exist; pass a file of vectors, or the folder of a run", "nearest", "nope", "a"
    )
    result = run("nearest", "v.txt", "a", "-n", 0)
    assert result.exit_code == 2
    assert "'-n' / '--number'" in result.output


def test_convert(folder):
    assert run("convert", "v.txt", "out.kv").stdout == "6 words, dim 2: out.kv\n"
    assert run("convert", "out.kv", "few.bin", "--max-words", 2).stdout == "2 words, dim 2: few.bin\n"
    assert models.KeyedVectors.load_word2vec_format("few.bin", binary=True).index_to_key == ["a", "b"]


def test_convert_in_place_and_from_packed(folder):
    vectors = Vectors.load("v.txt")
    run("convert", "v.txt", "v.safetensors")
    assert run("convert", "v.safetensors", "v.safetensors", "--max-words", 3, "--overwrite").exit_code == 0  # mapped
    assert Vectors.load("v.safetensors").words == ["a", "b", "c"]
    Path("p.txt.gz").write_bytes(gzip.compress(Path("v.txt").read_bytes()))
    assert run("convert", "p.txt.gz", "p.vec").exit_code == 0
    assert Vectors.load("p.vec").matrix.tobytes() == vectors.matrix.tobytes()


@pytest.mark.parametrize(
    ("source", "target", "kind", "message"),
    [
        ("v.txt", "out.xyz", InvalidValueError, "ends in '.xyz'"),
        ("broken.bin", "out.bin", StorageError, "'broken.bin' is truncated"),
        ("spaces.safetensors", "out.bin", InvalidValueError, "word 'New York' is empty or holds white space"),
    ],
)
def test_convert_refuses_before_it_writes(folder, source, target, kind, message):
    Path("broken.bin").write_bytes(b"3 4\na 1234")
    Vectors(["New York"], [[1.0, 2]]).save("spaces.safetensors")
    Path("out.bin").write_text("old")
    before = sorted(folder.iterdir())
    fails_with(kind, message, "convert", source, target, "--overwrite")
    assert sorted(folder.iterdir()) == before
    assert Path("out.bin").read_text() == "old"


def test_plot_of_words(folder):
    result = run("plot", "v.txt", "-o", "words.png", "--words", "a, d", "-n", 4)
    assert result.stdout == "picture: words.png\n", result.output
    before = Path("words.png").read_bytes()
    assert before.startswith(b"\x89PNG")
    fails_with(
        UnknownWordError, "'x' is not among", "plot", "v.txt", "-o", "words.png", "--words", "a,x", "--overwrite"
    )
    fails_with(InvalidValueError, "there are 0 words to draw", "plot", "v.txt", "-o", "new.png", "--words", " ,")
    fails_with(
        InvalidValueError, "there are 3 words to draw", "plot", "v.txt", "-o", "new.png", "--words", "a,b,c", "-n", 2
    )
    assert Path("words.png").read_bytes() == before
    assert not Path("new.png").exists()


def test_words_and_names_are_not_carried_out_by_the_terminal(folder):
    bad = "x\x1b]0;owned\x07"
    Vectors(["a", bad, "c"], np.array([[1, 0], [1, 0.1], [0, 1]], dtype=np.float32)).save("bad.txt")
    Path("set.txt").write_text(f"a\tc\t1\na\t{bad}\t2\nc\t{bad}\t3\nzz{bad}\ta\t1\n")
    Path(f"{bad}.txt").write_text("a c 1\na x 2\n")
    Path("analogies.txt").write_text(f": {bad}\na {bad} c a\n")
    for arguments in (("nearest", "bad.txt", "a"), ("analogy", "bad.txt", "a", "c", "a")):
        assert r"x\x1b]0;owned\x07" in run(*arguments).output
    assert "\x1b" not in run("evaluate", "bad.txt", "set.txt", "analogies.txt").output
    copied = run("convert", "bad.txt", f"{bad}.vec").output
    assert r"\x1b]0;owned\x07.vec" in copied


# --- the picture ------------------------------------------------------------------------------------------------------


def clusters(num_clusters=4, size=12, dim=16, seed=0):
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((num_clusters, dim)) * 3
    rows = np.repeat(centers, size, axis=0) + rng.standard_normal((num_clusters * size, dim)) * 0.4
    return rows.astype(np.float32), np.repeat(np.arange(num_clusters), size)


def map_vectors():
    rows, _ = clusters()
    return Vectors([f"word{i}" if i else "$money$" for i in range(len(rows))], rows)


def test_neighbours_stay_neighbours():
    rows, cluster = clusters()
    place = neighbour_map(rows)
    assert (place == neighbour_map(rows.copy())).all()
    distance = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1)[:, :5]
    assert (cluster[nearest] == cluster[:, None]).mean() > 0.95


def test_awkward_vectors_have_a_place():
    for rows in (np.ones((1, 4)), np.eye(2), np.ones((6, 4)), np.zeros((5, 4)), np.arange(1, 9.0).reshape(8, 1)):
        place = neighbour_map(rows.astype(np.float32))
        assert place.shape == (len(rows), 2)
        assert np.isfinite(place).all()


def test_labels_do_not_cover_one_another():
    rng = np.random.default_rng(0)
    sizes = np.stack([rng.uniform(20, 60, 80), np.full(80, 12.0)], axis=1)
    centers = rng.uniform(0, 500, (80, 2))
    centers[:5] = 250  # one spot
    place = spread_labels(centers, sizes, (500, 500))
    overlap = (sizes[:, None] + sizes[None, :]) / 2 - np.abs(place[:, None] - place[None, :])
    covered = (overlap > 0.5).all(axis=2)
    np.fill_diagonal(covered, False)
    assert not covered.any()
    assert np.median(np.linalg.norm(place - centers, axis=1)) < 40


def test_labels_stay_in_the_frame():
    centers = np.random.default_rng(0).uniform(-20, 40, (12, 2))  # some outside, all in one corner
    place = spread_labels(centers, np.full((12, 2), 20.0), frame=(200, 150))
    assert (place >= 10).all()
    assert (place <= [190, 140]).all()
    apart = np.abs(place[:, None] - place[None, :]).max(axis=2)
    assert apart[~np.eye(12, dtype=bool)].min() > 19
    assert spread_labels(np.zeros((1, 2)), np.array([[50.0, 9.0]]), frame=(20, 20)).tolist() == [[25.0, 4.5]]


def test_picture(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plot(map_vectors(), tmp_path / "words.png", num_words=30, title="$ title")
    data = (tmp_path / "words.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">2I", data[16:24]) == (1920, 1200)
    assert len(data) > 10_000
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot  # it would change the state of the whole process


@pytest.mark.parametrize("words", [["one"], ["東京", "été", "a"]])  # one word; letters that the font lacks
def test_few_words(tmp_path, words):
    plot(Vectors(words, np.eye(len(words), dtype=np.float32)), tmp_path / "words.png")
    assert (tmp_path / "words.png").exists()


@pytest.mark.parametrize("package", ["matplotlib", "sklearn"])
def test_without_a_package(tmp_path, monkeypatch, package):
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf'need {package}, which is not installed; run: pip install "speedtransfer\[plot\]"'
    with pytest.raises(SpeedtransferError, match=message) as caught:
        plot(map_vectors(), tmp_path / "words.png")
    assert isinstance(caught.value, ImportError)
    assert list(tmp_path.iterdir()) == []


def test_words_and_their_neighbours(tmp_path, monkeypatch):
    rows, cluster = clusters()
    vectors = Vectors([f"w{i}" for i in range(len(rows))], rows)
    drawn = []
    monkeypatch.setattr(
        plot_module, "_draw", lambda figure, words, place, num_bold, title: drawn.append((words, num_bold))
    )
    plot(vectors, tmp_path / "words.png", num_words=9, words=["w30", "w1", "w30"])
    ((words, num_bold),) = drawn
    assert (words[:2], num_bold) == (["w30", "w1"], 2)
    kinds = [cluster[int(word[1:])] for word in words]
    assert sorted([kinds.count(cluster[30]), kinds.count(cluster[1])]) == [4, 5]
    assert len(set(words)) == 9
    assert words[2:4] == [vectors.most_similar("w30", 1)[0][0], vectors.most_similar("w1", 1)[0][0]]
    plot(vectors, tmp_path / "words.png", num_words=40)
    assert drawn[1] == ([f"w{i}" for i in range(40)], 4)
