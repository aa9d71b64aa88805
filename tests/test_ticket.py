"""Rows read ahead: any sequence of calls gives the bits that it gives without; what is read, how often, and for whom.

Threads that read are few, and end; what they read takes memory while somebody waits for it, and no longer.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
from cases import take_step
from in_child import forks, in_child
from machines import short_and_long
from reading_ahead import LIMIT_S, held  # noqa: F401 - a fixture
from ticket_machine import TicketMachine, run_held

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError
from speedtransfer.nn import ahead
from speedtransfer.nn import ticket as tickets
from speedtransfer.rows import Rows

ROWS, DIM = 60, 4


def make(seed=0, **options):
    torch.manual_seed(seed)
    return st.Embedding(ROWS, DIM, device="cpu", **{"memory": "pageable", **options})


@pytest.fixture
def fetched(monkeypatch):
    seen, read = [], st.Table.read

    def noted(table, ids, *rest):
        seen.append(ids)
        return read(table, ids, *rest)

    monkeypatch.setattr(st.Table, "read", noted)
    return seen


def settled(ticket):
    ticket._task.wait()
    return ticket


# --- what is read, and how often --------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("by_ids", [True, False])
def test_rows_read_ahead_are_not_read_again(fetched, training, by_ids):
    emb, ids = make(), torch.tensor([[5, 3], [5, 9]])
    ticket = settled(emb.prefetch(ids))
    with torch.set_grad_enabled(training):
        found = emb(ids.clone() if by_ids else ticket)
    assert [one.tolist() for one in fetched] == [[3, 5, 9]]
    assert torch.equal(found, emb.table.torch()[ids])


def test_rows_written_since_are_read_again_and_only_those(fetched):
    emb = make(idle="lazy")
    optimizer = torch.optim.Adam(emb.parameters())
    for ids in ([1], [1, 2]):  # the first step adds the planes of state
        take_step(optimizer, emb(torch.tensor(ids)).sum())
    # State is read ahead too.
    emb(settled(emb.prefetch(torch.tensor([1, 2])))).sum().backward()
    gathered = emb.table.stats().gathered_rows
    optimizer.step()
    optimizer.zero_grad()
    assert emb.table.stats().gathered_rows == gathered
    ids = torch.tensor([1, 2, 3, 8])
    emb(torch.tensor([2, 8, 9])).sum().backward()
    ticket = settled(emb.prefetch(ids))
    optimizer.step()
    emb.table.scatter([3, 4], torch.zeros(2, DIM))
    fetched.clear()
    found = emb(ticket)
    assert [one.tolist() for one in fetched] == [[2, 3, 8]]
    assert torch.equal(found, emb.table.torch()[ids])


def test_tickets_for_the_same_ids_serve_one_lookup_each(fetched):
    emb, ids = make(), torch.tensor([4, 7])
    kept = [settled(emb.prefetch(ids)) for _ in range(2)]
    for _ in range(3):
        emb(ids)
    assert len(fetched) == 3
    assert all(ticket._task is None for ticket in kept)


def test_ids_may_be_filled_anew():
    """Those of a ticket, and those of a write."""
    emb, ids, named = make(), torch.tensor([4, 7]), torch.tensor([7])
    ticket = settled(emb.prefetch(ids))
    ids.fill_(1)
    emb.table.scatter(named, torch.zeros(1, DIM))
    named.fill_(4)
    found = emb(ticket)
    assert torch.equal(found, emb.table.torch()[[4, 7]])
    assert found[1].tolist() == [0.0] * DIM
    # It has served, and is ids now.
    assert torch.equal(emb(ticket), found)


# --- whose ticket it is ----------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("kind", [st.Embedding, st.EmbeddingBag])
@pytest.mark.parametrize("by_ids", [True, False])
def test_a_module_with_another_padding_row_of_the_same_table(kind, by_ids):
    def trained(ahead):
        first = make(padding_idx=0)
        second = kind(ROWS, DIM, memory="pageable", device="cpu")
        second.weight = first.weight
        ids = torch.tensor([[0, 3, 5]])
        ticket = settled(first.prefetch(ids)) if ahead else None
        found = second(ids if by_ids or not ahead else ticket)
        take_step(torch.optim.SGD(first.parameters(), lr=0.1), found.sum())
        return found.detach(), first.weight.detach().clone()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


# --- errors, and ends -------------------------------------------------------------------------------------------------


def test_a_lookup_reads_by_itself_what_could_not_be_read_ahead(monkeypatch):
    emb, ids, fetch = make(), torch.tensor([4, 7]), Rows.fetch

    def failing(rows, ids, planes=None):
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("exp_avg")
        return fetch(rows, ids, planes)

    monkeypatch.setattr(Rows, "fetch", failing)
    assert torch.equal(emb(settled(emb.prefetch(ids))), emb.table.torch()[ids])


def test_tickets_that_are_refused():
    emb, ids = make(), torch.tensor([0, 1])
    ticket = settled(emb.prefetch(ids))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(InvalidTypeError):
            emb(ids.to(dtype))
    assert ticket.is_waiting
    ticket = emb.prefetch([[1, 2], [3, ROWS]])
    with pytest.raises(RowIndexError, match=rf"index\[1, 1\] is {ROWS}"):
        emb(ticket)
    with pytest.raises(InvalidTypeError, match="integers"):
        make().prefetch(torch.tensor([1.0]))
    with pytest.raises(InvalidValueError, match="pass it to the module that made it"):
        make()(make().prefetch([1]))


# --- threads and processes --------------------------------------------------------------------------------------------


@forks
def test_a_forked_process_has_tickets_of_its_own_while_the_parent_reads(held):
    emb, ids = make(), torch.tensor([4, 7])
    ticket = emb.prefetch(ids)
    assert held.begun.wait(LIMIT_S)

    def check():
        held.set()
        own = emb.prefetch(ids)
        found = own._task.result().fetched["weight"]
        same = torch.equal(found, emb.table.torch()[ids]) and torch.equal(emb(own), emb.table.torch()[ids])
        return same and torch.equal(emb(ticket), emb.table.torch()[ids])

    assert in_child(check)
    held.set()
    assert torch.equal(emb(ticket), emb.table.torch()[ids])


ENDS = """
import os, sys, time, torch, speedtransfer as st
from speedtransfer.rows import Rows
fetch = Rows.fetch
def slow(rows, ids, planes=None):
    time.sleep(0.05)
    return fetch(rows, ids, planes)
Rows.fetch = slow
emb = st.Embedding(100, 8, memory='pageable', device='cpu')
kept = [emb.prefetch(torch.arange(100)) for _ in range(6)]
sys.stdout.flush()
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    more = [emb.prefetch(torch.arange(100)) for _ in range(6)]
    assert emb(kept[0]).shape == emb(more[0]).shape == (100, 8)
    sys.exit(0)
more = [emb.prefetch(torch.arange(100)) for _ in range(6)]
print('end')
"""


# Python starts anew for it.
@pytest.mark.slow
@forks
def test_python_ends_while_reads_are_under_way_also_in_a_forked_process():
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def live_tensors():
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("steps", [200, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_steps_with_tickets_do_not_gather_memory(steps, idle):
    emb = make(idle=idle)
    optimizer = torch.optim.AdamW(emb.parameters())
    table = emb.table

    def train(count):
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
    # Reads of the last tickets, which nobody has any more, are under way.
    while table._logs and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live_tensors() <= begin[0] + 20
    assert threading.active_count() <= begin[1] + ahead.THREADS
    assert not tickets._open[emb._handle]
    assert len(table._logs) == 0


def test_a_ticket_nobody_uses_holds_back_little():
    emb, most = make(), 0
    optimizer = torch.optim.SGD(emb.parameters(), lr=0.1)
    kept = emb.prefetch(torch.tensor([4, 7]))
    log = kept._task.result().log
    for step in range(1100):
        take_step(optimizer, emb(torch.tensor([step % ROWS])).sum())
        most = max(most, len(log._writes))
    assert most <= 1024
    assert not log._writes
    assert torch.equal(emb(kept), emb.table.torch()[[4, 7]])


@pytest.mark.parametrize("used", [False, True])
def test_rows_are_free_as_soon_as_their_ticket_is_dropped_or_has_served(no_gc, used):
    emb = make()
    ticket = emb.prefetch(torch.arange(ROWS))
    rows = weakref.ref(ticket._task.result().fetched["weight"])
    assert rows() is not None
    if used:
        with torch.no_grad():
            emb(ticket)
    else:
        del ticket
    assert rows() is None


# --- the numbers, last as reads of its modules may still be under way when it ends -----------------------------------------


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("plane", ["weight", "exp_avg"])
def test_a_write_to_an_array_over_a_plane(plane, kept):
    """Between reading ahead and lookup, which no count of changes shows."""

    def train(ask):
        emb, ids, array = make(idle="lazy"), torch.arange(8), None
        optimizer = torch.optim.AdamW(emb.parameters(), lr=0.1)
        take_step(optimizer, emb(ids).square().sum())
        for _ in range(3):
            asked = ask(emb, ids)
            view = emb.weight.detach() if plane == "weight" else optimizer.state[emb.weight][plane]
            array = view.numpy() if array is None else array
            array[3] = 7
            array = array if kept else None
            del view
            take_step(optimizer, emb(asked).square().sum())
        return emb.weight.detach().clone()

    assert torch.equal(train(lambda emb, ids: settled(emb.prefetch(ids))), train(lambda emb, ids: ids))


@short_and_long({"max_examples": 30}, {"max_examples": 500})
def test_any_sequence_of_calls(options):
    run_held(TicketMachine, options)
