"""Rows read ahead: any sequence of calls gives the bits that it gives without; what is read, how often, and for whom."""

import sys
import threading

import pytest
import torch
from hypothesis import settings
from ticket_machine import MODERATE, TicketMachine, run_machine

import speedtransfer as st
from speedtransfer.errors import InvalidTypeError, InvalidValueError, RowIndexError
from speedtransfer.nn import ticket as tickets
from speedtransfer.rows import Rows

ROWS, DIM = 60, 4


def make(seed: int = 0, **options) -> st.Embedding:
    torch.manual_seed(seed)
    return st.Embedding(ROWS, DIM, device="cpu", **{"memory": "pageable", **options})


@pytest.fixture
def fetched(monkeypatch) -> list[torch.Tensor]:
    """The ids of each read, in order."""
    seen, read = [], st.Table.read

    def noted(table, ids, *rest):
        seen.append(ids)
        return read(table, ids, *rest)

    monkeypatch.setattr(st.Table, "read", noted)
    return seen


def settled(ticket: tickets.Ticket) -> tickets.Ticket:
    """Wait until its rows were read."""
    ticket._future.exception()
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
        emb(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ids = torch.tensor([1, 2, 3, 8])
    emb(torch.tensor([2, 8, 9])).sum().backward()
    ticket = settled(emb.prefetch(ids))
    optimizer.step()
    emb.table.scatter([3, 4], torch.zeros(2, DIM))
    fetched.clear()
    found = emb(ticket)
    assert [one.tolist() for one in fetched] == [[2, 3, 8]]
    assert torch.equal(found, emb.table.torch()[ids])


def test_state_is_read_ahead_too(fetched):
    emb = make(idle="lazy")
    optimizer = torch.optim.Adam(emb.parameters())
    emb(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    emb(settled(emb.prefetch(torch.tensor([1, 2])))).sum().backward()
    gathered = emb.table.stats().gathered_rows
    optimizer.step()
    assert emb.table.stats().gathered_rows == gathered


def test_tickets_for_the_same_ids_serve_one_lookup_each(fetched):
    emb, ids = make(), torch.tensor([4, 7])
    kept = [settled(emb.prefetch(ids)) for _ in range(2)]
    for _ in range(3):
        emb(ids)
    assert len(fetched) == 3
    assert all(ticket._future is None for ticket in kept)


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


def test_a_write_that_fails_halfway_is_seen(monkeypatch):
    emb, ids = make(), torch.tensor([4, 7])
    ticket = settled(emb.prefetch(ids))
    engine = emb.table._engine

    class Failing(type(engine)):
        def scatter(self, planes, index, rows, unsorted=False, behind=False):
            planes[0].numpy()[4] = 7.0
            raise OSError("no disk")

    monkeypatch.setattr(engine, "__class__", Failing)
    with pytest.raises(OSError, match="no disk"):
        emb.table.scatter([4], torch.zeros(1, DIM))
    assert (emb(ticket)[0] == 7).all()


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
        found.sum().backward()
        torch.optim.SGD(first.parameters(), lr=0.1).step()
        return found.detach(), first.weight.detach().clone()

    for got, wanted in zip(trained(True), trained(False), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_ids_of_another_kind_are_refused_with_a_ticket_too(dtype):
    emb, ids = make(), torch.tensor([0, 1])
    ticket = settled(emb.prefetch(ids))
    with pytest.raises(InvalidTypeError):
        emb(ids.to(dtype))
    assert ticket.is_waiting


def test_tickets_of_inference_mode_may_be_trained():
    emb, ids = make(), torch.tensor([0, 1])
    with torch.inference_mode():
        ticket = settled(emb.prefetch(ids))
    emb(ticket).sum().backward()
    torch.optim.SGD(emb.parameters(), lr=1.0).step()
    assert torch.equal(emb.weight[0], make().weight[0] - 1)


def test_threads_that_ask_while_another_writes():
    emb, go, failed = make(idle="lazy"), threading.Event(), []

    def ask():
        while not go.is_set():
            try:
                emb.prefetch(torch.tensor([1, 2]))
            except RuntimeError as error:
                failed.append(error)

    threads, interval = [threading.Thread(target=ask) for _ in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for number in range(300):
            emb.table.scatter([number % ROWS], torch.zeros(1, DIM))
    finally:
        go.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert not failed


# --- errors, and ends -------------------------------------------------------------------------------------------------


def test_an_id_out_of_range_is_told_where_the_ticket_is_used():
    emb = make()
    ticket = emb.prefetch([[1, 2], [3, ROWS]])
    with pytest.raises(RowIndexError, match=rf"index\[1, 1\] is {ROWS}"):
        emb(ticket)


def test_a_lookup_reads_by_itself_what_could_not_be_read_ahead(monkeypatch):
    emb, ids, fetch = make(), torch.tensor([4, 7]), Rows.fetch

    def failing(rows, ids, planes=None):
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("exp_avg")
        return fetch(rows, ids, planes)

    monkeypatch.setattr(Rows, "fetch", failing)
    assert torch.equal(emb(settled(emb.prefetch(ids))), emb.table.torch()[ids])


def test_tickets_that_are_refused():
    with pytest.raises(InvalidTypeError, match="integers"):
        make().prefetch(torch.tensor([1.0]))
    with pytest.raises(InvalidValueError, match="pass it to the module that made it"):
        make()(make().prefetch([1]))


# --- the numbers, last as reads of its modules may still be under way when it ends -----------------------------------------


def test_any_sequence_of_calls(monkeypatch):
    run_machine(TicketMachine, MODERATE, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_calls(monkeypatch):
    run_machine(TicketMachine, settings(MODERATE, max_examples=500, derandomize=False), monkeypatch)
