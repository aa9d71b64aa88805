"""Vocabularies on a device: the rows, the ids and the training of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import speedtransfer as st

pytestmark = pytest.mark.gpu
MEMORIES = ["pinned", "pageable", "mmap", "device"]


def trained(device: str, ids_on: str, tmp_path: Any, memory: str = "pageable", **options: Any) -> Any:
    """Return losses, ids, rows and statistics of a run in which ids come, return and go."""
    path = {"path": tmp_path / f"{device}-{ids_on}.npy"} if memory == "mmap" else {}
    torch.manual_seed(0)
    kind = options.pop("kind", st.Embedding)
    vocabulary = st.Vocabulary(8, 20, evict="lru", seed=3, **options.pop("about", {}))
    module = kind(8, 4, vocabulary=vocabulary, memory=memory, device=device, **path, **options)
    opt = torch.optim.AdamW(module.parameters(), lr=0.1)
    draw, losses = torch.Generator().manual_seed(1), []
    for step in range(30):
        ids = torch.randint(step, step + 12, (2, 4), generator=draw) * -(2**59)
        opt.zero_grad()
        loss = (module(ids.to(ids_on)) - 1).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.detach().cpu())
    with torch.no_grad():
        losses.append(module(torch.tensor([[5, 7]], device=ids_on)).sum().cpu())
    return torch.stack(losses), *vocabulary.export(), vocabulary.stats()


@pytest.mark.parametrize("ids_on", ["cpu", "cuda"])
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_training_is_that_of_the_cpu(memory, idle, ids_on, tmp_path):
    losses, ids, rows, stats = trained("cpu", "cpu", tmp_path, idle=idle)
    found, found_ids, found_rows, found_stats = trained("cuda", ids_on, tmp_path, memory, idle=idle)
    assert torch.equal(found_ids, ids)
    assert found_stats == stats
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_rows, rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"about": {"unseen": "row", "admit": 2}},
        {"about": {"unseen": "zeros", "admit": 2}, "padding_idx": 0},
        {"about": {"admit": 3}, "kind": st.EmbeddingBag, "mode": "mean"},
        {"cache_rows": 4},
        {"storage_dtype": torch.bfloat16},
        {"about": {"deferred": True}},
        {"about": {"deferred": True, "unseen": "row", "admit": 2}, "idle": "exact"},
        {"about": {"deferred": True, "admit": 2}, "kind": st.EmbeddingBag, "mode": "sum", "padding_idx": 0},
        {"about": {"deferred": True}, "kind": st.EmbeddingBag, "mode": "max", "storage_dtype": torch.bfloat16},
        {"about": {"deferred": True}, "storage_dtype": torch.int8, "state_dtype": torch.uint8},
    ],
    ids=str,
)
def test_forms(options, tmp_path):
    losses, ids, rows, stats = trained("cpu", "cpu", tmp_path, **{**options, "about": dict(options.get("about", {}))})
    found = trained("cuda", "cuda", tmp_path, "pinned", **{**options, "about": dict(options.get("about", {}))})
    assert torch.equal(found[1], ids)
    assert found[3] == stats
    torch.testing.assert_close(found[0], losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2], rows, rtol=1e-3, atol=1e-4)


def test_moving_the_module_keeps_its_ids(tmp_path):
    torch.manual_seed(0)
    module = st.Embedding(8, 4, vocabulary=st.Vocabulary(max_capacity=50))
    ids = torch.tensor([3, -7, 2**40])
    expected = module(ids)
    found = module.cuda()(ids.cuda())
    assert found.is_cuda
    assert torch.equal(found.cpu(), expected)
    module(torch.arange(30, device="cuda"))
    assert torch.equal(module.cpu()(ids), expected)
