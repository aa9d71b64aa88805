"""Threads that read rows ahead are few, and end: with Python, in forked processes, and beside the workers of data loaders."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from in_child import forks, in_child
from reading_ahead import LIMIT_S, held  # noqa: F401 - a fixture
from torch.utils.data import DataLoader, TensorDataset

import speedtransfer as st
from speedtransfer.nn import ticket as tickets
from speedtransfer.nn.ahead import THREADS
from speedtransfer.tables import stats

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
    assert 1 <= len(names) <= THREADS == 2
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


@forks
def test_a_process_forked_while_a_thread_counts_its_rows_can_read(emb):
    counts, go_on = threading.Event(), threading.Event()

    def count() -> None:
        with stats.counting:
            counts.set()
            go_on.wait(LIMIT_S)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert counts.wait(LIMIT_S)
        assert in_child(lambda: emb(torch.tensor([4])).shape == (1, DIM))
    finally:
        go_on.set()
        thread.join()


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
    "in a loop": "for ids in st.prefetch([torch.arange(9)] * 9, lambda ids: {emb: ids}): break\nprint('end')",
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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_are_forked_while_rows_are_read(persistent):
    """Each epoch forks them anew, unless they persist, while rows of another table are under way."""
    ends, ids = [], torch.randint(ROWS, (60, 3), generator=torch.Generator().manual_seed(0))
    for ahead in (False, True):
        torch.manual_seed(0)
        emb, other = (st.Embedding(ROWS, DIM, memory="pageable", device="cpu") for _ in range(2))
        optimizer = torch.optim.Adam(emb.parameters())
        shuffled = torch.Generator().manual_seed(5)
        loader = DataLoader(
            TensorDataset(ids),
            batch_size=8,
            shuffle=True,
            num_workers=2,
            persistent_workers=persistent,
            prefetch_factor=1,
            generator=shuffled,
        )
        source = st.prefetch(loader, lambda batch: {emb: batch[0]}, depth=3) if ahead else loader  # noqa: B023
        for _ in range(3):
            kept = [other.prefetch(torch.arange(ROWS)) for _ in range(10)]
            for (batch,) in source:
                (emb(batch) ** 2).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            del kept
        ends.append(emb.weight.detach().clone())
        assert not tickets._open[emb._handle] if ahead else True
    assert torch.equal(*ends)


def test_a_loop_over_workers_may_be_left_and_begun_again(emb):
    loader = DataLoader(TensorDataset(torch.arange(40)[:, None]), batch_size=4, num_workers=1)
    source = st.prefetch(loader, lambda batch: {emb: batch[0]}, depth=2)
    for _ in range(2):
        for (batch,) in source:
            assert torch.equal(emb(batch), emb.table.torch()[batch])
            break
    seen = []
    for (batch,) in source:
        seen += batch.tolist()
        emb(batch)
    assert seen == torch.arange(40)[:, None].tolist()
    gc.collect()
    assert not tickets._open[emb._handle]
