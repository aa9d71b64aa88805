"""Rows read ahead on a stream of their own: writes in between, faults, waits. The same numbers: test_training.py."""

import pytest
import torch
from cases import take_step

import speedtransfer as st
from gpu.tools import embedding_in, no_garbage, synchronizing  # noqa: F401 - one is a fixture
from speedtransfer.errors import RowIndexError

MEMORIES = ["pinned", "pageable", "mmap"]
ROWS, DIM, BATCH = 400, 16, 96


def module(device, memory, folder, **options):
    return embedding_in(memory, folder, device, ROWS, DIM, **options)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_write_in_between(device, tmp_path, memory):
    emb = module(device, memory, tmp_path, idle="lazy")
    ids = torch.arange(10, 30, device=device)
    ticket = emb.prefetch(ids)
    for there in (device, "cpu"):
        emb.table.scatter(torch.tensor([5, 12, 29], device=there), torch.full((3, DIM), 7.0, device=device))
    assert torch.equal(emb(ticket).cpu(), emb.table.torch().cpu()[10:30])
    ticket = emb.prefetch(ids)
    with torch.no_grad():
        emb.weight.data.mul_(2)
    assert torch.equal(emb(ids).cpu(), emb.table.torch().cpu()[10:30])


def test_a_write_on_another_stream(device, tmp_path):
    emb, side = module(device, "pinned", tmp_path, idle="lazy"), torch.cuda.Stream()
    ids, new = torch.arange(10, 30, device=device), torch.full((1, DIM), 7.0, device=device)
    ticket = emb.prefetch(ids)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        emb.table.scatter(torch.tensor([12]).to(device), new)
    assert emb(ticket)[2].tolist() == [7.0] * DIM


def test_ids_changed_where_torch_does_not_see_it(device, tmp_path):
    emb = module(device, "pinned", tmp_path, idle="lazy")
    ids = torch.arange(20, device=device)
    ticket = emb.prefetch(ids)
    ids.data.add_(1)
    emb(ids)
    assert not ticket.is_waiting
    with pytest.raises(RowIndexError, match="was changed between prefetch and the lookup"):
        emb.table.wait()


def test_a_fault_is_not_lost_in_a_thread(device, tmp_path):
    """Threads that read ahead call the table, and must not take the error of another lookup with them."""
    emb = module(device, "pinned", tmp_path, idle="lazy")
    emb.table.check(torch.tensor([ROWS], device=device))
    torch.cuda.synchronize()
    ticket = emb.prefetch(torch.arange(5, device=device))
    ticket._task.result()
    del ticket
    with pytest.raises(RowIndexError):
        emb.table.wait()


@pytest.mark.parametrize(
    ("memory", "idle", "ids_on"), [("pinned", "exact", "cuda"), ("pageable", "lazy", "cpu"), ("mmap", "lazy", "cpu")]
)
def test_the_host_does_not_wait(device, tmp_path, memory, idle, ids_on):
    emb = module(device, memory, tmp_path, idle=idle)
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.02, foreach=True)

    def step(ids):
        take_step(optimizer, emb(ids).square().sum())

    skewed = torch.rand(12, BATCH, generator=torch.Generator().manual_seed(1)) ** 3 * ROWS
    every = [ids.long().to(ids_on) for ids in skewed]
    for ids in st.prefetch(every, lambda ids: {emb: ids}):
        step(ids)
    loader = iter(st.prefetch(every, lambda ids: {emb: ids}))
    step(next(loader))
    torch.cuda.synchronize()
    with synchronizing("warn") as waits:
        for _ in range(4):
            step(next(loader))
    assert not waits
    loader.close()


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_was_written_behind_is_seen(device, tmp_path, memory):
    """By every reader, and whoever wrote it may go on to change it."""
    emb = module(device, memory, tmp_path, idle="lazy")
    ids = torch.arange(10, 14, device=device)
    ticket = emb.prefetch(torch.arange(20, device=device))
    for number, read in enumerate(
        [
            lambda: emb.table.gather(ids, check=False),
            lambda: emb.table.gather([10, 11, 12, 13]),
            lambda: emb.table.torch()[10:14].to(device),
            lambda: emb.weight.detach()[10:14],
            lambda: emb.state_dict()["weight"][10:14].to(device),
            lambda: emb(ids),
        ]
    ):
        rows, named = torch.full((4, DIM), float(number), device=device), ids.clone()
        emb.table.scatter(named, rows)
        rows.fill_(-1)
        named.fill_(0)
        assert read().unique().tolist() == [number]
    assert emb(ticket)[10:14].unique().tolist() == [number]
