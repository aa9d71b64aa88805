"""Threads that read rows ahead are few, and end: with Python, in forked processes, and beside the workers of data loaders.

What they read takes memory while somebody waits for it, and no longer.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from in_child import forks, in_child
from reading_ahead import LIMIT_S, held  # noqa: F401 - a fixture
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st
from speedtransfer.nn import ahead
from speedtransfer.nn import ticket as tickets

ROWS, DIM = 500, 16


@pytest.fixture
def emb():
    torch.manual_seed(0)
    return st.Embedding(ROWS, DIM, memory="pageable", device="cpu")


# --- threads and processes --------------------------------------------------------------------------------------------


def test_there_are_no_more_threads_than_two(emb):
    modules = [st.Embedding(ROWS, DIM, memory="pageable", device="cpu") for _ in range(5)]
    kept = [module.prefetch(torch.arange(ROWS)) for _ in range(20) for module in [emb, *modules]]
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("speedtransfer-prefetch")]
    assert 1 <= len(names) <= ahead.THREADS == 2
    for ticket in kept:
        ticket._future.result(LIMIT_S)


@forks
def test_a_forked_process_has_tickets_of_its_own_while_the_parent_reads(emb, held):
    ids = torch.tensor([4, 7])
    ticket = emb.prefetch(ids)
    assert held.begun.wait(LIMIT_S)

    def check() -> bool:
        held.set()
        own = emb.prefetch(ids)
        found = own._future.result(LIMIT_S).fetched["weight"]
        same = torch.equal(found, emb.table.torch()[ids]) and torch.equal(emb(own), emb.table.torch()[ids])
        return same and torch.equal(emb(ticket), emb.table.torch()[ids])

    assert in_child(check)
    held.set()
    assert torch.equal(emb(ticket), emb.table.torch()[ids])


HELD = """
import os, sys, time, torch, speedtransfer as st
from speedtransfer.rows import Rows
fetch = Rows.fetch
def slow(rows, ids, planes=None):
    time.sleep(0.05)
    return fetch(rows, ids, planes)
Rows.fetch = slow
emb = st.Embedding(100, 8, memory='pageable', device='cpu')
kept = [emb.prefetch(torch.arange(100)) for _ in range(6)]
"""
ENDS = {
    "while reads are under way": "print('end')",
    "by an error": "print('end', flush=True); raise SystemExit(3)",
    "in a forked process": (
        "sys.stdout.flush()\n"
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    more = [emb.prefetch(torch.arange(100)) for _ in range(6)]\n"
        "    assert emb(kept[0]).shape == emb(more[0]).shape == (100, 8)\n"
        "    sys.exit(0)\n"
        "more = [emb.prefetch(torch.arange(100)) for _ in range(6)]\n"
        "print('end')"
    ),
}


@pytest.mark.parametrize("end", [pytest.param(end, marks=() if "fork" in end else pytest.mark.slow) for end in ENDS])
def test_python_ends(end):
    if "fork" in ENDS[end] and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HELD + ENDS[end]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("end\n", "")
    assert done.returncode == (3 if "3" in ENDS[end] else 0)


# --- data loaders -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_are_forked_while_rows_are_read():
    """Each epoch forks them anew while rows of another table are under way."""
    ends, ids = [], torch.randint(ROWS, (60, 3), generator=torch.Generator().manual_seed(0))
    for early in (False, True):
        torch.manual_seed(0)
        emb, other = (st.Embedding(ROWS, DIM, memory="pageable", device="cpu") for _ in range(2))
        optimizer = torch.optim.Adam(emb.parameters())
        shuffled = torch.Generator().manual_seed(5)
        loader = DataLoader(
            TensorDataset(ids),
            batch_size=8,
            shuffle=True,
            num_workers=2,
            prefetch_factor=1,
            generator=shuffled,
        )
        source = st.prefetch(loader, lambda batch: {emb: batch[0]}, depth=3) if early else loader  # noqa: B023
        for _ in range(3):
            kept = [other.prefetch(torch.arange(ROWS)) for _ in range(10)]
            for (batch,) in source:
                (emb(batch) ** 2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            del kept
        ends.append(emb.weight.detach().clone())
        assert not tickets._open[emb._handle] if early else True
    assert torch.equal(*ends)


# --- memory -----------------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    begin = live_tensors(), threading.active_count()
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


@pytest.mark.parametrize("used", [False, True])
def test_rows_are_free_as_soon_as_their_ticket_is_dropped_or_has_served(emb, no_gc, used):
    ticket = emb.prefetch(torch.arange(ROWS))
    rows = read_rows(ticket)
    assert rows() is not None
    if used:
        with torch.no_grad():
            emb(ticket)
    else:
        del ticket
    assert rows() is None


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
