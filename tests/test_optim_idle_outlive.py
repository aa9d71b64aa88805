"""A table that outlives its module still applies the steps that its rows have missed, and its memory is freed at once."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

import speedtransfer as st

ROWS, DIM = 12, 4
FORMS: list[dict[str, Any]] = [{}, {"storage_dtype": torch.int8}, {"state_dtype": torch.uint8}, {"memory": "device"}]


def trained(module: nn.Module, keep: list[Any], steps: int = 5) -> None:
    """Train on few rows, so that most lag behind."""
    opt = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.2)
    for step in range(steps):
        opt.zero_grad()
        module(torch.tensor([step, 2 * step])).sum().backward()
        opt.step()
    keep.append(opt)


def table_left(options: dict[str, Any], keep: list[Any]) -> st.Table:
    torch.manual_seed(0)
    emb = st.Embedding(ROWS, DIM, idle="exact", **options)
    trained(emb, keep)
    return emb.table


def expected(options: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    emb = st.Embedding(ROWS, DIM, idle="exact", **options)
    trained(emb, [])
    return emb.table.torch().clone()


@pytest.mark.parametrize("optimizer_too", [True, False])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_the_rows_of_a_table_that_is_left(options: dict[str, Any], optimizer_too: bool) -> None:
    keep: list[Any] = []
    table, whole = table_left(options, keep), expected(options)
    if not optimizer_too:
        keep.clear()
    if options.get("storage_dtype") is None:
        assert torch.equal(table[[3, 7]], whole[[3, 7]])
        table[[5]] = torch.ones(1, DIM)
        whole[5] = 1
    assert torch.equal(table.torch(), whole)
    assert torch.equal(table.torch(), whole), "the steps are applied once"


def test_memory_is_freed_without_the_garbage_collector(no_gc: None) -> None:
    keep: list[Any] = []
    table = table_left({}, keep)
    alive = weakref.ref(table)
    keep.clear()
    table.torch()
    del table
    assert alive() is None
    emb = st.Embedding(ROWS, DIM, idle="exact")
    trained(emb, keep)
    alive = weakref.ref(emb.table)
    keep.clear()
    del emb
    assert alive() is None


def test_a_table_that_was_converted_is_freed_at_once(no_gc: None) -> None:
    """What waits for the end of the handle holds no table that the handle has left."""
    emb = st.Embedding(ROWS, DIM, idle="exact")
    trained(emb, [])
    before = weakref.ref(emb.table)
    emb.double()
    assert before() is None
    trained(emb, [])
    assert torch.isfinite(emb.table.torch()).all()
