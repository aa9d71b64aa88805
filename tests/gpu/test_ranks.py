"""Tables of several processes on a device: alone in a group the bits of an ordinary table, and two processes over gloo.

gloo moves memory of the host, so that several processes may share one device. What only several devices show (NCCL between
them, its order beside that of DistributedDataParallel) is listed in docs/processes.md.
"""

import os

import pytest
import torch
import torch.distributed as dist
from cases import take_step
from ranks.pair import Pair, table

import speedtransfer as st
from gpu.tools import FORMS, embedding_in

ROWS, DIM = 300, 16


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def group(request, tmp_path_factory):
    if request.param == "nccl" and (not dist.is_nccl_available() or "FAKE_KERNELS" in os.environ):
        pytest.skip("no NCCL here")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group(request.param, store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def trained(device, group, memory, folder, ahead=False, **options):
    emb = embedding_in(memory, folder, device, ROWS, DIM, process_group=group, **options)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(5)
    batches = [torch.randint(0, ROWS, (40,), generator=draw).to(device) for _ in range(6)]
    if ahead:
        batches = st.prefetch(batches, lambda ids: {emb: ids})
    for ids in batches:
        take_step(opt, (emb(ids) * torch.arange(DIM, device=device)).square().sum())
    with torch.no_grad():
        return emb(torch.arange(ROWS, device=device))


@pytest.mark.parametrize("memory", ["pinned", "pageable", "device", "mmap"])
@pytest.mark.parametrize("form", FORMS)
def test_alone_in_a_group_the_bits_of_an_ordinary_table(device, group, memory, form, tmp_path):
    """Also where ids are sent ahead."""
    wanted = trained(device, None, memory, tmp_path, **FORMS[form])
    for ahead in (False, True):
        assert torch.equal(trained(device, group, memory, tmp_path, ahead, **FORMS[form]), wanted)


def test_ids_out_of_range_are_told_at_the_lookup(device, group):
    emb = st.Embedding(ROWS, DIM, device=device, process_group=group)
    with pytest.raises(st.errors.RowIndexError, match="300"):
        emb(torch.tensor([ROWS], device=device))
    assert emb(torch.tensor([1], device=device)).shape == (1, DIM)


def in_two_processes(memory, idle):
    options = {"device": torch.device("cuda", 0), "idle": idle}
    ours = table("shared", **options) if memory == "shared" else table("sharded", memory=memory, **options)
    return Pair(ours, table("one", **options), torch.optim.AdamW).train(*range(6))


@pytest.mark.parametrize("memory", ["pinned", "pageable", "device", "shared"])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
def test_two_processes_have_the_numbers_of_one(pool, memory, idle):
    assert max(pool.of(2)(in_two_processes, memory, idle, limit=240)) < 1e-10
