"""Rows read ahead take memory while somebody waits for them, and no longer."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from reading_ahead import LIMIT_S, held  # noqa: F401 - a fixture

import speedtransfer as st
from speedtransfer.nn import ahead
from speedtransfer.nn import ticket as tickets

ROWS, DIM = 500, 16


@pytest.fixture
def emb():
    torch.manual_seed(0)
    return st.Embedding(ROWS, DIM, memory="pageable", device="cpu")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_steps_with_tickets_do_not_gather_memory(steps, idle):
    torch.manual_seed(0)
    emb = st.Embedding(ROWS, DIM, memory="pageable", device="cpu", idle=idle)
    optimizer = torch.optim.AdamW(emb.parameters())
    table = emb.table

    def train(count: int) -> None:
        waiting = [emb.prefetch(torch.randint(ROWS, (64,))) for _ in range(3)]
        for step in range(count):
            waiting.append(emb.prefetch(torch.randint(ROWS, (64,))))
            ticket = waiting.pop(0)
            if step % 7 == 0:
                continue
            emb(ticket if step % 2 else ticket.ids).sum().backward()
            if step % 5:
                optimizer.step()
                optimizer.zero_grad()

    train(100)
    begin = live_tensors(), threading.active_count(), resident_bytes() if sys.platform == "linux" else 0
    train(steps)
    deadline = time.monotonic() + LIMIT_S
    while (
        table._logs and time.monotonic() < deadline
    ):  # reads of the last tickets, which nobody has any more, are under way
        time.sleep(0.01)
    assert live_tensors() <= begin[0] + 20
    assert threading.active_count() <= begin[1] + ahead.THREADS
    assert not tickets._open[emb._handle]
    assert len(table._logs) == 0
    if sys.platform == "linux":
        # The rows and state of all steps would be 120 MB and more, those of 400 steps 5.
        assert resident_bytes() < begin[2] + (30 << 20)


def test_a_ticket_nobody_uses_holds_back_little(emb):
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1)
    kept = emb.prefetch(torch.tensor([4, 7]))
    log = kept._future.result(LIMIT_S).log
    most = 0
    for step in range(1500):
        emb(torch.tensor([step % ROWS])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        most = max(most, len(log._writes))
    assert most <= 1024
    assert not log._writes
    assert torch.equal(emb(kept), emb.table.torch()[[4, 7]])


def read_rows(ticket: tickets.Ticket) -> weakref.ref:
    return weakref.ref(ticket._future.result(LIMIT_S).fetched["weight"])


def test_rows_are_free_as_soon_as_their_ticket_is_dropped(emb, no_gc):
    ticket = emb.prefetch(torch.arange(ROWS))
    rows = read_rows(ticket)
    assert rows() is not None
    del ticket
    assert rows() is None


def test_a_ticket_that_has_served_holds_no_rows(emb):
    ticket = emb.prefetch(torch.arange(ROWS))
    rows = read_rows(ticket)
    with torch.no_grad():
        emb(ticket)
    assert rows() is None


def test_rows_are_free_as_soon_as_a_loop_is_left(emb):
    seen: list[weakref.ref] = []
    loop = iter(st.prefetch([torch.arange(ROWS)] * 5, lambda ids: {emb: ids}, depth=3))
    next(loop)
    seen += [read_rows(ticket) for ticket in tickets._open[emb._handle]]
    assert len(seen) == 4
    loop.close()
    assert [rows() for rows in seen] == [None] * 4


def test_rows_of_a_ticket_dropped_while_it_is_read_are_freed_by_the_thread(emb, held):
    running, waiting = (emb.prefetch(torch.arange(ROWS)) for _ in range(2))
    assert held.begun.wait(LIMIT_S)
    futures = [running._future, waiting._future]
    logs = weakref.WeakSet(emb.table._logs)
    del running, waiting
    held.set()
    for future in futures:
        if not future.cancelled():
            future.result(LIMIT_S)
    del futures, future
    # The threads let go of what they have read once they have something else to do, or nothing.
    for _ in range(2 * ahead.THREADS):
        other = emb.prefetch(torch.tensor([1]))
        other._future.result(LIMIT_S)
    del other
    gc.collect()
    assert not logs


def test_a_module_is_gone_with_its_table_though_tickets_were_made():
    emb = st.Embedding(ROWS, DIM, memory="pageable", device="cpu")
    emb(emb.prefetch(torch.tensor([1]))).sum().backward()
    dropped = emb.prefetch(torch.tensor([2]))
    dropped._future.result(LIMIT_S)
    table, handle = weakref.ref(emb.table), weakref.ref(emb._handle)
    del dropped, emb
    gc.collect()
    assert table() is None
    assert handle() is None
