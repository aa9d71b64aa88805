"""Rows of the weight that are named, read or written: the same numbers as with torch.nn, and no other row is caught up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import speedtransfer as st
from speedtransfer.rows import LAST_STEP

ROWS, DIM = 60, 4
BATCH = torch.tensor([1, 2, 3])
MASK = torch.arange(ROWS) % 40 == 7
NAMES = {"torch": torch, "np": np, "index": torch.tensor([7, 9, -1]), "mask": MASK, "rows": torch.ones(3, DIM)}
NAMES |= {"two": torch.tensor([[7, 8], [7, 0]]), "row": torch.tensor(7), "column": torch.tensor([0, 2, 1])}
READS = """
w[7], w[-1], w[7, 2], w[7, 1:3], w[7, ...], w[7, None], w[7][2]
w[7:9], w[-2:], w[4:20:5], w[7:9, 1], w[7:9, :2], w[7:9][1]
w[index], w[two], w[[7, 8]], w[index, 1:], w[index, column], w[two, 1], w[mask], w[mask, 1]
w[row], w[np.int64(7)], w[np.array([7, 8])]
w.select(0, 7), w.select(-2, -3), w.select(dim=0, index=7), torch.select(w, 0, 7)
w.narrow(0, 7, 2), torch.narrow(w, 0, 7, 2)
w.index_select(0, index.abs()), torch.index_select(w, dim=0, index=index.abs())
""".strip().splitlines()
WRITES = """
w[7] = 0
w[-1] = rows[0]
w[7, 2] = 1.5
w[7][2] = 1.5
w[7].zero_()
w[7:9] = 2
w[7:9, 1] = 2
w[7:9].mul_(2)
w[4:20:5] += 1
w[index] = rows
w[index, 1:] = 3
w[index, column] = 3
w[two] = 0
w[mask] = 0
w[mask, 1] = 5
w[row] = 4
w[np.int64(7)] = 4
w[[7, 8]] *= 2
w[7] = w[8]
w.select(0, 7).add_(1)
w.narrow(0, 7, 2).add_(1)
w[7:9][0].copy_(rows[0])
w.index_fill_(0, index.abs(), 2.0)
w.index_copy_(0, index.abs(), rows)
w.index_add_(0, index.abs(), rows, alpha=2)
w.index_add_(0, index.abs(), rows)
""".strip().splitlines()
KINDS: dict[str, dict[str, Any]] = {
    "exact": {},
    "lazy": {"idle": "lazy"},
    "cache": {"cache_rows": 8},
    "bfloat16": {"storage_dtype": torch.bfloat16},
}


def trained(make: Any, kind: str) -> Any:
    torch.manual_seed(0)
    emb = make(ROWS, DIM)
    if kind == "bfloat16":
        with torch.no_grad():
            emb.weight.copy_(emb.weight.bfloat16().float())
    momentum = 0.0 if kind == "lazy" else 0.9
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.5 if kind == "bfloat16" else 0.1, momentum=momentum)
    step(emb, optimizer, torch.arange(ROWS))
    for _ in range(2):
        step(emb, optimizer, BATCH)
    return emb, optimizer


def step(emb: Any, optimizer: Any, ids: torch.Tensor, loss: Any = 0.0) -> None:
    (emb(ids).pow(2).sum() + loss).backward()
    optimizer.step()
    optimizer.zero_grad()


def caught_up(emb: Any) -> list[int]:
    """Return the rows that have missed no step."""
    last, lag = emb.table.stored(LAST_STEP), emb._handle.rows.lag
    now = lag.last_steps(len(last), last.device, None, torch.arange(len(last)))
    return (last == now).flatten().nonzero().flatten().tolist() if lag else []


def assert_close(ours: Any, theirs: Any, kind: str, text: str) -> None:
    # Stored rows are rounded, in training too.
    tolerance = 0.05 if kind == "bfloat16" else 1e-5
    torch.testing.assert_close(
        ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda why: f"{text}: {why}", check_dtype=False
    )


def both(kind: str) -> list[tuple[Any, Any]]:
    return [trained(nn.Embedding, kind), trained(lambda *shape: st.Embedding(*shape, **KINDS[kind]), kind)]


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients(kind: str) -> None:
    pairs, found = both(kind), list[Any]()
    for text in [*READS, *WRITES]:
        for emb, optimizer in pairs:
            step(emb, optimizer, BATCH)
            with torch.no_grad():
                names = {**NAMES, "w": emb.weight}
                found.append([part.clone() for part in eval(text, names)] if text in READS else exec(text, names))
            if isinstance(emb, st.Embedding) and kind == "exact":
                assert len(caught_up(emb)) <= len(BATCH) + 10, text
        theirs, ours = found[-2:]
        assert_close(ours, theirs, kind, text)
        for emb, optimizer in pairs:
            step(emb, optimizer, torch.tensor([7, 5]))
        assert_close(pairs[1][0].state_dict()["weight"], pairs[0][0].state_dict()["weight"], kind, text)
        for emb, _ in pairs:
            # Rows that were left to rounding, from the same values again.
            emb.load_state_dict({"weight": pairs[0][0].weight.detach()})


@pytest.mark.parametrize("kind", ["exact", "cache"])
def test_with_gradients(kind: str) -> None:
    pairs = both(kind)
    for text in READS:
        for emb, optimizer in pairs:
            read = eval(text, {**NAMES, "w": emb.weight})
            assert all(part.requires_grad for part in read)
            step(emb, optimizer, BATCH, sum(part.pow(2).sum() for part in read))
            if isinstance(emb, st.Embedding) and kind == "exact":
                assert len(caught_up(emb)) <= len(BATCH) + 10, text
        assert_close(pairs[1][0].state_dict()["weight"], pairs[0][0].state_dict()["weight"], kind, text)


@pytest.mark.parametrize(
    "text", ["w[7].zero_()", "w[7:9].zero_()", "w[7] = 0", "w.select(0, 7).zero_()", "w[7, 1:3].zero_()"]
)
def test_a_leaf_is_not_changed_in_place(text: str) -> None:
    """As in torch, a weight that is trained is written to without gradients."""
    for make in (nn.Embedding, st.Embedding):
        emb, _ = trained(make, "exact")
        with pytest.raises(
            RuntimeError, match=r"a leaf Variable that requires grad|is a view and is being modified inplace"
        ):
            exec(text, {"w": emb.weight})


@pytest.mark.parametrize(
    "text", ["w[60]", "w[-61]", "w[torch.tensor([3, 60])]", "w.narrow(0, 59, 2)", "w.select(0, 60)", "w[7] = rows"]
)
@pytest.mark.parametrize("kind", ["exact", "cache"])
def test_what_torch_refuses(text: str, kind: str) -> None:
    for make in (nn.Embedding, lambda *shape: st.Embedding(*shape, **KINDS[kind])):
        emb, _ = trained(make, kind)
        with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
            exec(text, {**NAMES, "w": emb.weight})


def test_a_row_of_a_table_in_other_memory_is_written_back_alone() -> None:
    """Where no tensor is over the table's memory: no copy of all rows is made."""
    emb, _ = trained(lambda *shape: st.Embedding(*shape, cache_rows=8), "cache")
    emb.table.reset_stats()
    with torch.no_grad():
        emb.weight[9:11] = 3
        row = emb.weight[7]
        row.fill_(5.0)
    stats = emb.table.stats()
    assert stats.gathered_rows < 10
    assert emb.table[[7, 9, 10]].tolist() == [[5.0] * DIM, [3.0] * DIM, [3.0] * DIM]


def test_a_row_of_one_feature() -> None:
    emb = st.MultiEmbedding({"a": 40, "b": ROWS}, DIM)
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1, momentum=0.9)
    for ids in (torch.arange(ROWS), BATCH, BATCH):
        optimizer.zero_grad()
        emb({"b": ids})["b"].sum().backward()
        optimizer.step()
    with torch.no_grad():
        emb["b"].weight[7] = 1.0
    # Those of the feature that no step was of have missed none.
    assert caught_up(emb) == [*range(40), 41, 42, 43, 47]
    assert emb["b"].weight[7].tolist() == [1.0] * DIM


@pytest.mark.parametrize("held", [False, True])
def test_a_write_by_numpy_to_a_row_of_the_batch(held: bool) -> None:
    """No version tells of it; the step reads the row again."""
    pairs = both("exact")
    for emb, optimizer in pairs:
        with torch.no_grad():
            row = emb.weight[2]
        emb(BATCH).pow(2).sum().backward()
        if not held:
            with torch.no_grad():
                row = emb.weight[2]
        row.detach().numpy()[:] = 1.0
        optimizer.step()
    assert_close(pairs[1][0].state_dict()["weight"], pairs[0][0].state_dict()["weight"], "exact", "row")


@pytest.mark.parametrize("text", ["w[7]", "w[7] = 0", "w[7:9] = 0"])
def test_rows_of_the_batch_are_read_once(text: str) -> None:
    """Though another one is read or written between backward and step."""
    emb, optimizer = trained(st.Embedding, "exact")
    emb(BATCH).pow(2).sum().backward()
    emb.table.reset_stats()
    with torch.no_grad():
        exec(text, {"w": emb.weight})
    optimizer.step()
    assert emb.table.stats().gathered_rows <= 2
