"""Gather and scatter of chosen rows against the ways that PyTorch has, on the CPU with memcpy as the roof."""

from __future__ import annotations

import pytest
import torch
from conftest import DIM, ROWS, turns

import speedtransfer as st

COUNT = min(131_072, ROWS)


@pytest.fixture(scope="module")
def data():
    table = st.Table(ROWS, DIM, memory="pageable", device="cpu").normal_()
    index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:COUNT]
    return table, table.torch(), index, torch.randn(COUNT, DIM)


@pytest.mark.parametrize(
    "case",
    [
        "speedtransfer",
        "speedtransfer, out=",
        "index_select(out=)",
        "index_select",
        "t[index]",
        "F.embedding",
        "memcpy (roof)",
    ],
)
@turns
def test_gather(benchmark, data, case, turn):
    table, plane, index, out = data
    benchmark.group = f"gather {COUNT} x {DIM} float32 of {ROWS} rows, CPU"
    run = {
        "speedtransfer": lambda: table.gather(index),
        "speedtransfer, out=": lambda: table.gather(index, out=out),
        "index_select(out=)": lambda: torch.index_select(plane, 0, index, out=out),
        "index_select": lambda: torch.index_select(plane, 0, index),
        "t[index]": lambda: plane[index],
        "F.embedding": lambda: torch.nn.functional.embedding(index, plane),
        "memcpy (roof)": lambda: out.copy_(plane[:COUNT]),
    }[case]
    if "roof" not in case:
        assert torch.equal(run(), plane[index])
    benchmark.pedantic(run, rounds=11, warmup_rounds=3)


@pytest.mark.parametrize("case", ["speedtransfer", "index_copy_", "t[index] = rows", "index_put_", "memcpy (roof)"])
@turns
def test_scatter(benchmark, data, case, turn):
    table, plane, index, rows = data
    benchmark.group = f"scatter {COUNT} x {DIM} float32 of {ROWS} rows, CPU"
    rows = torch.randn_like(rows)

    def assign() -> None:
        plane[index] = rows

    run = {
        "speedtransfer": lambda: table.scatter(index, rows),
        "index_copy_": lambda: plane.index_copy_(0, index, rows),
        "t[index] = rows": assign,
        "index_put_": lambda: plane.index_put_((index,), rows),
        "memcpy (roof)": lambda: plane[:COUNT].copy_(rows),
    }[case]
    run()
    if "roof" not in case:
        assert torch.equal(plane[index], rows)
    benchmark.pedantic(run, rounds=11, warmup_rounds=3)
