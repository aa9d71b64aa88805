"""The commands on vectors as a user types them: what they print, what they refuse, nothing written before it is whole."""

import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from late import models
from refusals import refusals
from test_word2vec_commands import fails_with, run

from speedtransfer import errors
from speedtransfer.lazy import MissingPackageError
from speedtransfer.word2vec import Vectors
from speedtransfer.word2vec import plot as plot_module
from speedtransfer.word2vec.evaluation import evaluate
from speedtransfer.word2vec.plot import neighbour_map, plot

QUESTIONS = "# by hand\n\n: [bold]kinds\na b d c\na b d f\n: gram1\nA B C D\na b c x\n: gram2\nx y z a\n: gramless\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    angle = np.arange(6) * np.pi / 3
    Vectors(["a", "b", "c", "d", "e", "f"], np.stack([np.cos(angle), np.sin(angle)], axis=1)).save("v.txt")
    Path("pairs.txt").write_text("a b 3\na c 2.5\na d 1\nb f 1.5\nc x 9\nA Y 2\n")
    Path("questions.txt").write_text(QUESTIONS)
    return tmp_path


def test_evaluate(folder):
    result = run("evaluate", "v.txt", "pairs.txt", "questions.txt", "--json", "figures.json")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["pairs", "4", "2", "(33.3%)"] in [line[:4] for line in lines]
    assert ["[bold]kinds", "1", "2", "0.5000", "0.095", "to", "0.905"] in lines
    assert ["gram1", "1", "1", "1.0000", "0.207", "to", "1.000"] in lines
    assert ["gram2", "0", "0", "-", "-"] in lines
    assert ["gramless", "0", "0", "-", "-"] in lines
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


def test_evaluate_takes_names_that_are_no_text(folder):
    vectors, pairs = (
        Path("v.txt").rename(os.fsdecode(b"v\xe9.txt")),
        Path("pairs.txt").rename(os.fsdecode(b"p\xe9.txt")),
    )
    assert run("evaluate", vectors, pairs, "--json", "figures.json").exit_code == 0
    facts = json.loads(Path("figures.json").read_text())
    assert (facts["vectors"], facts["sets"][0]["name"]) == (str(vectors), r"p\udce9")


REFUSED = """\
evaluate v.txt pairs.txt foreign.txt --json old.json --overwrite -> InvalidValueError: 'foreign' has 0 pairs
evaluate v.txt questions.txt --restrict 2 -> InvalidValueError: set 'questions' has 0 questions
evaluate v.txt pairs.txt --json no/figures.json -> StorageError: cannot write
evaluate v.txt pairs.txt --json old.json -> InvalidValueError: 'old.json' exists; choose
convert v.txt old.bin -> InvalidValueError: 'old.bin' exists; choose another name or pass --overwrite
convert v.txt dir.bin --overwrite -> InvalidValueError: 'dir.bin' is a folder
convert v.txt out.xyz -> InvalidValueError: ends in '.xyz'
convert broken.bin old.bin --overwrite -> StorageError: 'broken.bin' is truncated
convert spaces.safetensors old.bin --overwrite -> InvalidValueError: word 'New York' is empty or holds white
plot v.txt -o old.png -> InvalidValueError: 'old.png' exists; choose
plot v.txt -o old.png --words a,x --overwrite -> InvalidValueError: 'x' is not among
plot v.txt -o new.png --words , -> InvalidValueError: there are 0 words to draw
plot v.txt -o new.png --words a,b,c -n 2 -> InvalidValueError: there are 3 words to draw
nearest v.txt x a y -> InvalidValueError: 'x', 'y' are not among the 6 words
analogy v.txt a b X -> InvalidValueError: 'X' is not among the 6 words
nearest dir.bin a -> StorageError: folder 'dir.bin' holds no vectors file
nearest nope a -> StorageError: 'nope' does not exist; pass a file of vectors, or the folder of a run
"""


@pytest.mark.parametrize("refusal", refusals(REFUSED), ids=str)
def test_refused_before_anything_is_written(folder, refusal):
    Path("foreign.txt").write_text("q r 1\n")
    Path("broken.bin").write_bytes(b"3 4\na 1234")
    Vectors(["New York"], [[1.0, 2]]).save("spaces.safetensors")
    for name in ("old.json", "old.bin", "old.png"):
        Path(name).write_text("old")
    Path("dir.bin").mkdir()
    before = {path: path.is_dir() or path.read_bytes() for path in folder.iterdir()}
    fails_with(getattr(errors, refusal.error), refusal.words, *refusal.call.split())
    assert before == {path: path.is_dir() or path.read_bytes() for path in folder.iterdir()}


def test_nearest_and_analogy(folder):
    assert run("nearest", "v.txt", "a", "d", "-n", 2).stdout == "a: b 0.500, f 0.500\nd: c 0.500, e 0.500\n"
    assert run("analogy", "v.txt", "a", "b", "c", "-n", 1).stdout == "a : b = c : d 0.500\n"


def test_convert(folder):
    assert run("convert", "v.txt", "out.safetensors").stdout == "6 words, dim 2: out.safetensors\n"
    assert run("convert", "out.safetensors", "few.bin", "--max-words", 4).stdout == "4 words, dim 2: few.bin\n"
    assert models.KeyedVectors.load_word2vec_format("few.bin", binary=True).index_to_key == ["a", "b", "c", "d"]
    assert run("convert", "few.bin", "few.bin", "--max-words", 2, "--overwrite").exit_code == 0
    assert Vectors.load("few.bin").words == ["a", "b"]


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


def clusters(num_clusters=4, size=12, dim=16, seed=0):
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((num_clusters, dim)) * 3
    rows = np.repeat(centers, size, axis=0) + rng.standard_normal((num_clusters * size, dim)) * 0.4
    return rows.astype(np.float32), np.repeat(np.arange(num_clusters), size)


def test_neighbours_stay_neighbours():
    rows, cluster = clusters()
    place = neighbour_map(rows)
    assert (place == neighbour_map(rows.copy())).all()
    distance = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1)[:, :5]
    assert (cluster[nearest] == cluster[:, None]).mean() > 0.95


def test_awkward_vectors_have_a_place():
    for rows in (np.ones((1, 4)), np.eye(2), np.zeros((5, 4)), np.arange(1, 9.0).reshape(8, 1)):
        place = neighbour_map(rows.astype(np.float32))
        assert place.shape == (len(rows), 2)
        assert np.isfinite(place).all()


@pytest.mark.parametrize("package", ["matplotlib", "sklearn"])
def test_without_a_package(tmp_path, monkeypatch, package):
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf'need {package}, which is not installed; run: pip install "speedtransfer\[plot\]"'
    with pytest.raises(MissingPackageError, match=message):
        plot(Vectors(["a", "b"], np.eye(2)), tmp_path / "words.png")
    assert list(tmp_path.iterdir()) == []


def test_picture(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    words = ["$money$", "東京", *(f"word{i}" for i in range(46))]  # a formula; letters that the font lacks
    plot(Vectors(words, clusters()[0]), tmp_path / "words.png", num_words=30)
    data = (tmp_path / "words.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">2I", data[16:24]) == (1920, 1200)
    assert len(data) > 10_000
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot  # it would change the state of the whole process


def test_words_and_their_neighbours(tmp_path, monkeypatch):
    rows, cluster = clusters()
    vectors = Vectors([f"w{i}" for i in range(len(rows))], rows)
    drawn = []
    monkeypatch.setattr(plot_module, "_draw", lambda figure, words, place, num_bold: drawn.append((words, num_bold)))
    plot(vectors, tmp_path / "words.png", num_words=9, words=["w30", "w1", "w30"])
    ((words, num_bold),) = drawn
    assert (words[:2], num_bold) == (["w30", "w1"], 2)
    kinds = [cluster[int(word[1:])] for word in words]
    assert sorted([kinds.count(cluster[30]), kinds.count(cluster[1])]) == [4, 5]
    assert len(set(words)) == 9
    assert words[2:4] == [vectors.most_similar("w30", 1)[0][0], vectors.most_similar("w1", 1)[0][0]]
    plot(vectors, tmp_path / "words.png", num_words=40)
    assert drawn[1] == ([f"w{i}" for i in range(40)], 4)
