"""Rows: a read in two parts, of which the first may run ahead, and what catching up leaves in the table."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest
import torch

import speedtransfer as st
from speedtransfer.optim import find_handle
from speedtransfer.rows import LAST_STEP, Rows

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"storage_dtype": torch.bfloat16, "state_dtype": torch.bfloat16},
    "8 bits": {"storage_dtype": torch.int8, "state_dtype": torch.uint8},
    "float8": {"storage_dtype": torch.float8_e4m3fn, "state_dtype": torch.uint8, "scale_block": 4},
}
IDS = torch.tensor([2, 3, 11, 17])


def trained(idle: str, kind: str, steps: int = 6) -> tuple[st.Embedding, torch.optim.Optimizer, Rows]:
    torch.manual_seed(0)
    emb = st.Embedding(40, 8, memory="pageable", idle=idle, **KINDS[kind])
    opt = torch.optim.AdamW(emb.parameters(), lr=0.05, weight_decay=0.1)
    train(emb, opt, [torch.randint(0, 20, (9,)) for _ in range(steps)])
    handle = find_handle(emb.weight)
    assert handle is not None
    return emb, opt, handle.rows


def train(emb: st.Embedding, opt: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for ids in batches:
        opt.zero_grad()
        emb(ids).pow(2).sum().backward()
        opt.step()


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert torch.equal(values, other[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_rows_fetched_ahead_on_another_thread_are_finished_at_use(idle: str, kind: str) -> None:
    emb, opt, rows = trained(idle, kind)
    fetched: list[dict[str, torch.Tensor]] = []
    thread = threading.Thread(target=lambda: fetched.append(rows.fetch(IDS)))
    thread.start()
    thread.join()
    train(emb, opt, [torch.arange(20, 33), torch.arange(25, 40)])  # the rows fetched miss these steps
    everything = ("weight", "exp_avg", "exp_avg_sq")
    assert_same(rows.finish(fetched[0], IDS), rows.read(IDS, everything))


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_is_what_the_step_before_has_left(kind: str) -> None:
    emb, _, rows = trained("exact", kind)
    read = rows.read(IDS)
    assert read.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    rows.catch_up(IDS)
    now = rows.table.read(IDS, [LAST_STEP])[LAST_STEP]
    assert now.flatten().tolist() == [6] * len(IDS)
    if kind == "plain":  # others are rounded once more
        assert_same(rows.read(IDS), read)
        assert torch.equal(emb(IDS).detach(), read["weight"])


def test_planes_of_several_widths_are_read_by_name() -> None:
    table = st.Table(6, 4, memory="pageable").normal_()
    rows = Rows(table)
    rows.add("count", (), torch.float32, 2.0)
    rows.add("block", (2, 3), torch.float32, 1.0)
    read = rows.read(torch.tensor([1, 4]), ["block", "count", "weight"])
    shapes = {name: tuple(values.shape) for name, values in read.items()}
    assert shapes == {"block": (2, 2, 3), "count": (2,), "weight": (2, 4)}
    rows.write(torch.tensor([4]), {"count": torch.tensor([7.0]), "block": torch.zeros(1, 2, 3)})
    assert rows.whole("count").tolist() == [2.0, 2.0, 2.0, 2.0, 7.0, 2.0]
    assert rows.whole("block")[4].eq(0).all()


def test_a_step_made_while_all_rows_catch_up_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held up just before it forgets the steps so far, catching up must keep another thread's step waiting."""
    results = []
    for meanwhile in (False, True):
        emb, opt, rows = trained("exact", "plain")
        assert rows.lag is not None
        forget, about_to = rows.lag.forget, threading.Event()

        def held_up(forget: Any = forget, about_to: threading.Event = about_to) -> None:
            about_to.set()
            time.sleep(0.3)
            forget()

        monkeypatch.setattr(rows.lag, "forget", held_up)
        thread = threading.Thread(target=rows.catch_up)
        thread.start()
        about_to.wait()
        if not meanwhile:
            thread.join()
        train(emb, opt, [IDS])
        thread.join()
        monkeypatch.undo()
        results.append(emb.weight.detach().clone())
    assert torch.equal(*results)


def test_rows_die_with_their_table_at_once(no_gc: None) -> None:
    emb, opt, rows = trained("exact", "plain")
    table = weakref.ref(emb.table)
    del emb, opt, rows
    assert table() is None
