"""``MultiEmbeddingBag`` on a CUDA device: the numbers of ``nn.EmbeddingBag``, of bags on the device and on the host."""

import pytest
import torch
from torch import nn

import speedtransfer as st
from gpu.tools import embedding_in, synchronizing
from speedtransfer.errors import RowIndexError

SIZES, DIM = {"a": 40, "b": 600}, 16
FEATURES, MODES = {"x": "a", "y": "b", "z": "a"}, {"x": "sum", "y": "mean", "z": "max"}
PADDING = {"a": 3, "b": None}


def bag(device, memory="pinned", folder=None, **options):
    options = {"features": FEATURES, "mode": MODES, "padding_idx": PADDING, **options}
    return embedding_in(memory, folder, device, SIZES, DIM, kind=st.MultiEmbeddingBag, **options)


def dense(device):
    torch.manual_seed(3)
    return nn.ModuleDict({name: nn.EmbeddingBag(n, DIM, padding_idx=PADDING[name]) for name, n in SIZES.items()}).to(
        device
    )


def batch(seed, device):
    draw = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, 0, 7, 9, 20])
    return {
        name: (torch.randint(SIZES[table], (32,), generator=draw).to(device), offsets.to(device))
        for name, table in FEATURES.items()
    }


def one_by_one(tables, ids):
    found = {}
    for name, table in FEATURES.items():
        tables[table].mode = MODES[name]
        found[name] = tables[table](*ids[name])
    return found


def loss_of(found):
    return sum((part - 0.3).square().sum() for part in found.values())


@pytest.mark.parametrize("where", ["on the device", "on the host", "by a ticket"])
@pytest.mark.parametrize("memory", ["pinned", "pageable", "mmap", "device"])
def test_trained_as_torch(device, tmp_path, memory, where):
    ours, theirs = bag(device, memory, tmp_path), dense(device)
    opts = [torch.optim.AdamW(tables.parameters(), lr=0.02) for tables in (ours, theirs)]
    for step in range(8):
        ids = batch(step, device)
        given = batch(step, "cpu") if where == "on the host" else ids
        found = ours(ours.prefetch(given) if where == "by a ticket" else given), one_by_one(theirs, ids)
        for name in FEATURES:
            torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-5, atol=1e-5)
        for each, opt in zip(found, opts, strict=True):
            opt.zero_grad()
            loss_of(each).backward()
            opt.step()
    for name, table in theirs.items():
        torch.testing.assert_close(ours[name].weight.detach(), table.weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [None, 3])
def test_the_host_does_not_wait(device, monkeypatch, padding):
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "mapped")
    ours = bag(device, idle="lazy", mode="sum", padding_idx=padding)
    opt = torch.optim.AdamW(ours.parameters(), fused=True)
    *warm, ids = [batch(seed, device) for seed in range(4)]
    for given in warm:
        loss_of(ours(given)).backward()
        opt.step()
        opt.zero_grad()
    with synchronizing("error"):
        loss_of(ours(ids)).backward()
        opt.step()


def test_an_id_out_of_range(device):
    ours, ids = bag(device), batch(0, device)
    ids["z"][0][5] = 40
    # The device tells it late.
    look_up = torch.no_grad()(lambda: (ours(ids), ours.table.wait()))
    with pytest.raises(RowIndexError, match="is -1"):
        look_up()
    with pytest.raises(RowIndexError, match=r"index\[5\] of feature 'z of table a' is 40"):
        ours({name: (values.cpu(), offsets.cpu()) for name, (values, offsets) in ids.items()})
