"""Features looked up one after the other on a CUDA device give what ``nn.ModuleList`` gives; the host does not wait."""

import pytest
import torch
from torch import nn

import speedtransfer as st
from gpu.tools import embedding_in, synchronizing

SIZES, DIM = [40, 600, 50], 16


def features(device, memory="pinned", folder=None, **options):
    return embedding_in(memory, folder, device, SIZES, DIM, kind=st.MultiEmbedding, **options)


def batch(seed, device):
    return torch.randint(40, (32, 3), generator=torch.Generator().manual_seed(seed)).to(device)


def looked_up(model, ids):
    return sum((model[number](ids[:, number]) - 0.1 * number).square().sum() for number in range(len(SIZES)))


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("where", ["on the device", "on the host"])
@pytest.mark.parametrize("memory", ["pinned", "pageable", "mmap", "device"])
def test_trained_as_torch(device, tmp_path, memory, where, padding):
    ours = features(device, memory, tmp_path, padding_idx=padding)
    torch.manual_seed(3)
    theirs = nn.ModuleList([nn.Embedding(n, DIM, padding_idx=padding) for n in SIZES]).to(device)
    opts = [torch.optim.AdamW(tables.parameters(), lr=0.02) for tables in (ours, theirs)]
    for step in range(6):
        ids = batch(step, device)
        for model, opt, given in zip(
            (ours, theirs), opts, (batch(step, "cpu") if where == "on the host" else ids, ids), strict=True
        ):
            opt.zero_grad()
            looked_up(model, given).backward()
            opt.step()
        with torch.no_grad():
            # The ids change in place before the last is looked up.
            shown = [ours[0](ids[:, 0]), theirs[0](ids[:, 0])]
            ids[:, 2] = 7
            shown += [ours[2](ids[:, 2]), theirs[2](ids[:, 2])]
        for one, other in zip(shown[::2], shown[1::2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.weight.detach(), other.weight.detach(), rtol=1e-5, atol=1e-5)


def test_the_host_does_not_wait(device, monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "mapped")
    ours = features(device, idle="lazy")
    opt = torch.optim.AdamW(ours.parameters(), fused=True)
    *warm, ids = [batch(seed, device) for seed in range(4)]
    for given in warm:
        looked_up(ours, given).backward()
        opt.step()
        opt.zero_grad()
    with synchronizing("error"):
        looked_up(ours, ids).backward()
        opt.step()


def test_a_captured_round(device, monkeypatch):
    monkeypatch.setenv("SPEEDTRANSFER_ENGINE", "mapped")
    ours, ids = features(device, idle="lazy"), batch(0, device)
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                looked_up(ours, ids)
            # Rows for the others have been read, before the capture.
            ours[0](ids[:, 0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rows = [ours[number](ids[:, number]) for number in (1, 2)]
        for seed in (1, 2):
            ids.copy_(batch(seed, device))
            graph.replay()
            for number, found in zip((1, 2), rows, strict=True):
                torch.testing.assert_close(found, ours[number].weight.detach()[ids[:, number]])
