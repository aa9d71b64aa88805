"""What only some of the processes have rows for, or are part of; other default devices and backends of torch."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from in_child import in_child, plain

import speedtransfer as st
from ranks.pair import DIM, ROWS, rows_of, table, tables
from speedtransfer.errors import DeviceError, ProcessGroupError
from speedtransfer.ranks import Exchange, exchange_of


def set_by_one(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    pair = tables(kind, torch.optim.AdamW, idle="exact")
    pair.train(0, 1, 2)
    emb, before = pair.ours, rows_of(pair.ours)
    # Rows of one owner, so that the others have none to write.
    owned: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(owned, emb.table.local_ids().tolist())
    some = torch.tensor(owned[0][:3])
    mine = some if dist.get_rank() == 1 else some[:0]
    emb.table.scatter(mine, torch.ones(len(mine), DIM, dtype=torch.float64))
    before[some] = 1
    return before, rows_of(emb)


@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_rows_that_one_process_sets_and_one_owns(three, kind):
    for wanted, found in three(set_by_one, kind):
        assert torch.equal(wanted, found)


def of_others() -> dict:
    # In it the last process is the first.
    last = dist.get_world_size() - 1
    group = dist.new_group([last])
    if dist.get_rank() < last:
        return {}
    return st.full_state_dict(st.Embedding(ROWS, DIM, process_group=group))


def test_all_rows_come_to_the_first_of_the_group(two):
    first, second = two(of_others)
    assert first == {}
    assert second["weight"].shape == (ROWS, DIM)


def trained(options: dict) -> torch.Tensor:
    torch.manual_seed(0)
    ids = torch.tensor([1, 2, 5 + dist.get_rank()])
    more = torch.arange(30)
    # What would be made on the default device has no values.
    with torch.device("meta"):
        emb = st.Embedding(30, 4, padding_idx=2, device="cpu", process_group=dist.group.WORLD, **options)
        opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            emb(ids).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(emb.parameters(), 1.0)
            opt.step()
        whole = st.full_state_dict(emb)
        assert not whole or not whole["weight"].is_meta
        with torch.no_grad():
            return emb(more)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's own optimizers count their steps on the default device")
@pytest.mark.parametrize("options", [{"idle": "exact"}, {"memory": "shared"}, {"comm_dtype": torch.int8}], ids=str)
def test_trains(two, options):
    first, second = two(trained, options)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def hottest() -> tuple[int, int]:
    """A cache of the rows with the largest counts, of those that each process owns."""
    counts = torch.arange(100) % 50
    emb = table("sharded", 100, 4, memory="pageable", cache_rows=10, cache_counts=counts)
    own = emb.table.local_ids()
    emb.table.reset_stats()
    emb(own[counts[own].sort(descending=True, stable=True).indices[:10]])
    stats = emb.table.stats()
    return stats.cache_hits, stats.cache_misses


def test_counts_of_a_cache(two):
    assert two(hottest) == [(10, 0)] * 2


# --- a child of fork of a process: it reads what there is in memory, and sends no messages -------------------------------


def forked(kind: str) -> list[object]:
    pair = tables(kind, torch.optim.AdamW, idle="exact")
    pair.train(0, 1, 2)
    every = torch.arange(pair.ours.num_embeddings)
    table = pair.ours.table.local
    stored = {name: table.stored(name).clone() for name in table.planes}
    found: list[object] = []
    for use in (lambda: plain(pair.ours(every)), lambda: plain(pair.ours.table.scatter([0], torch.ones(1, 1)))):
        try:
            found.append(in_child(lambda use=use: use()))
        except Exception as error:
            found.append(type(error))
    same = all(torch.equal(table.stored(name), before) for name, before in stored.items())
    return [*found, same, plain(pair.ours(every))]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["sharded", "shared"])
def test_a_child_of_a_rank(two, kind):
    for lookup, write, same, want in two(forked, kind):
        if kind == "shared":
            torch.testing.assert_close(lookup, want, rtol=0, atol=0)
        else:
            assert lookup is ProcessGroupError
        assert write in (ProcessGroupError, DeviceError)
        assert same


# --- groups whose backend is not named: gloo for the host, NCCL for devices where there are any -----------------------


def trained_by_default() -> tuple[bool, torch.Tensor]:
    group = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(group) != "gloo"
    emb = st.Embedding(20, 4, process_group=group, device="cpu")
    opt = torch.optim.AdamW(emb.parameters())
    emb(torch.arange(dist.get_rank() + 3)).sum().backward()
    opt.step()
    return exchange_of(group).on_host, emb(torch.arange(20)).detach()


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages would be on the device")
def test_without_cuda_messages_are_on_the_host(two):
    (on_host, rows), (_, same) = two(trained_by_default)
    assert on_host
    assert torch.equal(rows, same)


@pytest.mark.parametrize(
    ("config", "cuda", "on_host"),
    [("cpu:gloo,cuda:nccl", True, False), ("cpu:gloo,cuda:nccl", False, True), ("cpu:gloo", True, True)],
)
def test_where_messages_are(monkeypatch, config, cuda, on_host):
    for name, value in (("get_rank", 0), ("get_world_size", 1), ("get_backend_config", config)):
        monkeypatch.setattr(dist, name, lambda group, value=value: value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert Exchange(type("Group", (), {})()).on_host is on_host
