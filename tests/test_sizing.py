"""Computed bytes of tables are those of tables that are made and trained."""

from __future__ import annotations

import functools

import pytest
import torch
from optimizer_cases import BASE, some

import speedtransfer as st
from speedtransfer.encoding import STATE_DTYPES, STORAGE_DTYPES
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError
from speedtransfer.nn.sizing import StepBytes, table_size

ROWS = 1000


def trained(optimizer, dim, steps, sparse=False, **options):
    """A table after some steps, and the bytes that the last one moved of how many distinct rows."""
    emb = st.Embedding(ROWS, dim, sparse=sparse, device="cpu", memory="pageable", **options)
    opt = optimizer(emb.parameters())
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        emb.table.reset_stats()
        ids = torch.randint(0, ROWS, (300,), generator=draw)
        emb(ids).square().sum().backward()
        opt.step()
        opt.zero_grad()
    stats = emb.table.stats()
    return emb.table, len(ids.unique()), StepBytes(stats.gathered_bytes, stats.scattered_bytes)


def assert_right(size, table, distinct, moved):
    assert size.total_bytes == table.nbytes
    assert {plane.name: plane.row_bytes * ROWS for plane in size.planes} == {
        name: table.stored(name).nbytes for name in table.planes
    }
    assert [plane.dtype for plane in size.planes] == [table.stored(name).dtype for name in table.planes]
    parts = size.weight_bytes, size.scale_bytes, size.state_bytes, size.last_step_bytes
    assert sum(parts) == size.total_bytes
    assert size.weight_bytes == table.stored("weight").nbytes
    assert size.last_step_bytes == 4 * ROWS * size.exact
    assert size.step(distinct) == moved


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [1, 160, 300])
@pytest.mark.parametrize("storage", [None, *STORAGE_DTYPES])
@pytest.mark.parametrize("state", [None, *STATE_DTYPES])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_every_form(dim, storage, state, idle):
    options = {"storage_dtype": storage, "state_dtype": state, "idle": idle}
    size = table_size(ROWS, dim, **options)
    assert_right(size, *trained(torch.optim.AdamW, dim, 3, **options))
    assert size.exact == (idle == "exact")


@pytest.mark.parametrize("case", some(BASE), ids=str)
def test_every_optimizer(case):
    assert_right(table_size(ROWS, 24, case.make), *trained(case.make, 24, 3))


def test_float64_and_optimizers_of_sparse_gradients():
    assert_right(table_size(ROWS, 24, dtype=torch.float64), *trained(torch.optim.AdamW, 24, 2, dtype=torch.float64))
    size = table_size(ROWS, 24, torch.optim.SparseAdam)
    assert not size.exact
    assert_right(size, *trained(torch.optim.SparseAdam, 24, 2, sparse=True, idle="lazy"))


class Late(torch.optim.Optimizer):
    """SGD that keeps a plane from its fourth step on."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                if state["step"] >= 4:
                    state.setdefault("seen", torch.zeros_like(param)).add_(param.grad)
                param.sub_(param.grad, alpha=group["lr"])


class Unknown(torch.optim.AdamW):
    """An optimizer that nothing is known of but what a probe finds."""


def test_state_that_is_made_late_counts():
    size = table_size(ROWS, 8, Late)
    assert [plane.name for plane in size.planes] == ["weight", "seen"]
    assert_right(size, *trained(Late, 8, 6, idle="lazy"))


def test_a_frozen_table():
    size = table_size(ROWS, 160, None, storage_dtype=torch.int8)
    assert (size.weight_bytes, size.scale_bytes, size.state_bytes) == (160_000, 4_000, 0)
    emb = st.Embedding(ROWS, 160, storage_dtype=torch.int8, device="cpu")
    emb.requires_grad_(False)
    emb(torch.arange(7))
    stats = emb.table.stats()
    assert size.step(7) == (stats.gathered_bytes, stats.scattered_bytes) == (7 * 164, 0)


def test_published_sizes_need_no_memory():
    size = table_size(320_001_536, 160, storage_dtype=torch.bfloat16, state_dtype=torch.uint8)
    assert size.total_bytes == 320_001_536 * (320 + 2 * 168 + 4)
    assert table_size(2**40, 1, None).total_bytes == 2**42


def test_nothing_outside_changes():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode():
        size = table_size(ROWS, 8)
    assert torch.equal(torch.rand(3), wanted)
    assert size.total_bytes == ROWS * (3 * 32 + 4)
    if torch.__version__ >= "2.13":  # torch's own optimizers counted their steps on the default device
        with torch.device("meta"):
            assert table_size(ROWS, 8) == size


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidValueError, match="rows is 0"):
        table_size(0, 8)
    with pytest.raises(InvalidTypeError, match=r"dim is 1\.5"):
        table_size(10, 1.5)
    with pytest.raises(InvalidTypeError, match=r"storage_dtype is torch\.int32"):
        table_size(10, 8, storage_dtype=torch.int32)
    with pytest.raises(OptimizerError, match=r"LBFGS .*closure"):
        table_size(10, 8, torch.optim.LBFGS)
    with pytest.raises(OptimizerError, match="idle='exact' does not know what Unknown does"):
        table_size(10, 8, Unknown, idle="exact")
    assert not table_size(10, 8, Unknown).exact
    with pytest.raises(InvalidValueError, match="distinct is 11 but must be from 0 to the number of rows, 10"):
        table_size(10, 8).step(11)
    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    assert table_size(10, 8, momentum).state_bytes == 320
