"""The picture and its layout."""

from __future__ import annotations

import itertools
import struct
import sys

import numpy as np
import pytest

from speedtransfer.errors import SpeedtransferError
from speedtransfer.word2vec import Vectors
from speedtransfer.word2vec import plot as plot_module
from speedtransfer.word2vec.plot import _covered, neighbour_map, plot, spread_labels


def clusters(num_clusters=4, size=12, dim=16, seed=0):
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((num_clusters, dim)) * 3
    rows = np.repeat(centers, size, axis=0) + rng.standard_normal((num_clusters * size, dim)) * 0.4
    return rows.astype(np.float32), np.repeat(np.arange(num_clusters), size)


def some_vectors():
    rows, _ = clusters()
    return Vectors([f"word{i}" if i else "$money$" for i in range(len(rows))], rows)


def test_neighbours_stay_neighbours():
    rows, cluster = clusters()
    place = neighbour_map(rows)
    distance = np.linalg.norm(place[:, None] - place[None, :], axis=2)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1)[:, :5]
    assert (cluster[nearest] == cluster[:, None]).mean() > 0.95


def test_map_is_always_the_same():
    rows, _ = clusters()
    assert (neighbour_map(rows) == neighbour_map(rows.copy())).all()


@pytest.mark.parametrize(
    "rows",
    [np.ones((1, 4)), np.eye(2), np.eye(3), np.ones((6, 4)), np.zeros((5, 4)), np.arange(1, 9.0).reshape(8, 1)],
    ids=["one", "two", "three", "equal", "zero", "dim-1"],
)
def test_awkward_vectors_have_a_place(rows):
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


def test_labels_apart_stay_where_they_are():
    centers = np.array([[5.0, 9], [95, 9]])
    assert (spread_labels(centers, np.full((2, 2), 10.0), (100, 20)) == centers).all()


def test_picture(tmp_path):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plot(some_vectors(), tmp_path / "words.png", num_words=30, title="$ title")
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
        plot(some_vectors(), tmp_path / "words.png")
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


@pytest.mark.parametrize("num_boxes", [0, 1, 2, 60])
def test_pairs_that_cover_one_another_are_all_found(num_boxes):
    draw = np.random.default_rng(num_boxes)
    place, sizes = draw.uniform(0, 100, (num_boxes, 2)), draw.uniform(1, 20, (num_boxes, 2))
    pairs = itertools.combinations(range(num_boxes), 2)
    expected = {(i, j) for i, j in pairs if (np.abs(place[i] - place[j]) < (sizes[i] + sizes[j]) / 2).all()}
    first, second, apart, overlap = _covered(place, sizes)
    assert {(min(pair), max(pair)) for pair in zip(first.tolist(), second.tolist(), strict=True)} == expected
    assert len(first) == len(expected)
    assert np.array_equal(apart, place[first] - place[second])
    assert (overlap > 0).all()
