"""Corpora in .parquet files, and tables of words and counts that other engines write: the recipes of docs/word2vec.md."""

import collections
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speedtransfer.errors import StorageError
from speedtransfer.word2vec import Corpus, Vocabulary
from speedtransfer.word2vec.vocabulary import read_counts

for package in ("duckdb", "polars", "pyarrow", "ray"):
    pytest.importorskip(package, reason=f"{package} is not installed: make projects")

import pyarrow as pa  # noqa: E402
from pyarrow import parquet  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "word2vec.md").read_text(encoding="utf-8")


def recipe(language, start):
    (found,) = re.findall(rf"^```{language}\n({start}.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def write(path, columns):
    """Write a table, or a file that is cut off."""
    if columns is None:
        path.write_bytes(b"PAR1 but not whole")
    else:
        parquet.write_table(pa.table(dict(columns)), path, row_group_size=50)


@pytest.mark.parametrize("engine", ["duckdb", "polars", pytest.param("ray", marks=pytest.mark.slow)])
def test_recipes_count_as_we_do(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, counts = random.Random(2), collections.Counter[str]()
    Path("texts").mkdir()
    for i in range(3):
        lines = []
        for _ in range(50):
            words = [f"w{int(draw.paretovariate(0.7))}" for _ in range(20)] + ['"quoted', "a,b", "\u00e9t\u00e9"]
            counts.update(words)
            lines.append(" \t ".join(words) + " ")
        Path(f"texts/{i}.txt").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    if engine == "duckdb":
        import duckdb

        duckdb.sql(recipe("text", "COPY"))
    elif engine == "ray":
        begin = "import ray; ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)"
        subprocess.run([sys.executable, "-c", f"{begin}\n{recipe('py', 'import ray')}"], check=True, timeout=300)
        assert len(list(Path("counts.parquet").glob("*.parquet"))) > 1
    else:
        exec(recipe("py", "import polars"))
    words, found = read_counts("counts.parquet")
    assert dict(zip(words, found.tolist(), strict=True)) == counts


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"word": ["a", "b", "a"], "count": [1, 2, 3]}, "row 3 of .* has the word 'a' again"),
        ({"word": ["a", "b"], "count": [1, 0]}, "row 2 of .* counts 'b' 0 times"),
        ({"word": ["a", None], "count": [1, 2]}, "row 2 of .* is the word 'None' and the count 2 but must be"),
        ({"word": ["a"], "count": [1.5]}, "row 1 of .* is the word 'a' and the count 1.5 but"),
        ({"word": [], "count": []}, "is empty"),
        ("a folder", "is empty"),
        ({"token": ["a"], "n": [1]}, "its columns are token, n, not word and count"),
        (None, "is not a table of words and counts"),
    ],
)
def test_what_is_no_table_of_counts_is_refused(columns, message, tmp_path):
    path = tmp_path / "counts.parquet"
    path.mkdir() if columns == "a folder" else write(path, columns)
    with pytest.raises(StorageError, match=message):
        read_counts(path)


def test_words_in_dictionaries(tmp_path):
    words = pa.array(["a", "b"]).dictionary_encode()
    write(tmp_path / "c.parquet", {"count": pa.array([3, 4], pa.uint32()), "more": [1, 2], "word": words})
    assert Vocabulary.load(tmp_path / "c.parquet").counts.tolist() == [3, 4]


TEXTS = ["one two", None, "", "two three\nthree", *[f"word{i % 7} \u00e9t\u00e9" for i in range(300)]]


@pytest.mark.parametrize("kind", ["text", "lines"])
@pytest.mark.parametrize(
    "columns", [{"text": TEXTS, "url": ["u"] * len(TEXTS)}, {"n": range(len(TEXTS)), "body": TEXTS}]
)
def test_a_corpus_in_a_column_is_that_in_files(columns, kind, tmp_path):
    (tmp_path / "there").mkdir()
    write(tmp_path / "there" / "b.parquet", columns)
    (tmp_path / "there" / "a.txt").write_text("begun here\n")
    (tmp_path / "all.txt").write_text("begun here\n" + "\n".join(text or "" for text in TEXTS), encoding="utf-8")
    ours, plain = (Corpus(tmp_path / name, min_count=1, kind=kind) for name in ("there", "all.txt"))
    assert ours.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"word": ["a"], "count": [1], "url": ["u"]},
            "its columns of strings are word, url; a corpus is one named text, or one alone",
        ),
        ({"word": ["a"], "count": [1]}, "a table of words and counts, which --vocabulary takes"),
        ({"n": [1]}, "its columns of strings are none; "),
        (None, "is not a Parquet file with a column of text"),
    ],
)
def test_a_column_of_text_that_is_not_there(columns, message, tmp_path):
    write(tmp_path / "texts.parquet", columns)
    with pytest.raises(StorageError, match=message):
        Corpus(tmp_path / "texts.parquet")
