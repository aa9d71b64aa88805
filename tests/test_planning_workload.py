"""Workloads of plans: from models, on the meta device too, and from sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import make_workload
from speedtransfer.ranks.zipf import expected_unique


def workload(given, batch=1, lookups=1, zipf=1.05, unique=None):
    return make_workload(given, optimizer_given("AdamW"), batch, lookups, zipf, unique, "auto")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(1000, 16)
        self.items = nn.EmbeddingBag(500, 8)
        self.head = nn.Linear(16, 500)
        self.tied = nn.Embedding(1000, 16)
        self.tied.weight = self.users.weight


def test_a_model_by_names():
    found = workload(Model(), batch=32, lookups={"items": 4})
    users, items = found.tables
    assert (users.name, users.names, users.rows, users.dim, users.kind) == (
        "users",
        ("users", "tied"),
        1000,
        16,
        "Embedding",
    )
    assert (users.lookups, items.lookups, items.bag, items.kind) == (32, 128, 4, "EmbeddingBag")
    assert users.unique == expected_unique(1000, 1.05, 32)
    assert found.dense_bytes == 4 * 500 * 17


def test_a_model_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1 << 33, 128), nn.Linear(128, 1))
    (table,) = workload(model).tables
    assert (table.rows, table.dim, table.names) == (1 << 33, 128, ("0",))


def test_tables_of_this_package():
    model = nn.ModuleDict({"one": st.Embedding(50, 4), "many": st.MultiEmbedding([20, 30], 4)})
    one, many = workload(model, batch=10, lookups=2).tables
    assert one.is_table
    assert (many.kind, many.rows, many.features, many.lookups) == ("MultiEmbedding", 50, ((20, 20), (30, 20)), 40)
    assert many.unique == expected_unique(20, 1.05, 20) + expected_unique(30, 1.05, 20)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((1e6, 8), ["table"]), ([(10, 8), [20, 8]], ["table0", "table1"]), ({"a": (10, 8), "b": (20, 4)}, ["a", "b"])],
)
def test_sizes(sizes, names):
    assert [table.name for table in workload(sizes).tables] == names


def test_other_numbers_of_rows():
    given = workload((1000, 8), 100, 3, unique=50.0)
    larger = given.with_rows(10)
    assert larger.tables[0].rows == 10_000
    ratio = 50 / expected_unique(1000, 1.05, 300)
    assert larger.unique == pytest.approx(ratio * expected_unique(10_000, 1.05, 300))
    assert given.with_rows(1).unique == pytest.approx(50)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((0, 8),), "rows of 'table' is 0 but must be at least 1"),
        (((2**49, 8),), "rows of 'table' is 562949953421312 but must be at most 2**48"),
        (((10, 2**30),), "dim of 'table' is 1073741824 but must be at most 2**20"),
        (((1.5, 8),), "rows of 'table' is 1.5 but must be a whole number"),
        (((10, 8), 0), "batch is 0 but must be at least 1"),
        (((10, 8), 1, 0.5), "lookups is 0.5 but must be a number from 1 on"),
        (((10, 8), 1, float("nan")), "lookups is nan but must be a number from 1 on"),
        (((10, 8), 1, {"tabel": 1}), "lookups names a table 'tabel', which is not there; did you mean 'table'?"),
        (((10, 8), 1, 1, -1), "zipf is -1 but must be a number from 0 on"),
        (
            ((10, 8), 1, 1, 1.0, 2.0),
            "unique is 2.0 but must be above 0 and at most the lookups and the rows of 'table', 1",
        ),
        (([(10, 8), (10, 8)], 1, 1, 1.0, 1.0), "unique is 1.0 for 2 tables; pass a dict"),
        (([],), "sizes are empty"),
        ((nn.Linear(2, 2),), "the model, a Linear, has no nn.Embedding"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(InvalidValueError) as error:
        workload(*arguments)
    assert words in str(error.value)


@pytest.mark.parametrize("sizes", [3, "sizes", [1, 2, 3], {"a": 3}, (10, "8")])
def test_what_has_no_sizes_is_refused(sizes):
    with pytest.raises(InvalidTypeError):
        workload(sizes)
