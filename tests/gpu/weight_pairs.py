"""Pairs for the tests of ``emb.weight`` on a CUDA device: an embedding with a table, ``nn.Embedding`` with the same rows."""

import pytest
import torch
from torch import nn

import speedtransfer as st
from gpu.tools import embedding_in

ROWS, DIM = 50, 8
MEMORIES = ["pinned", "pageable", "mmap", "device"]
STORED = [
    *((memory, None) for memory in MEMORIES),
    *(
        (memory, dtype)
        for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
        for memory in ("pinned", "device")
    ),
]


def pair_of(memory, dtype, device, folder, **options):
    emb = embedding_in(memory, folder, device, ROWS, DIM, storage_dtype=dtype, **options)
    return emb, nn.Embedding.from_pretrained(rows_of(emb).to(emb.weight.device), freeze=False)


def rows_of(emb):
    """Return all rows on the CPU, not by way of the weight."""
    return emb.state_dict()["weight"].detach().cpu().float().clone()


def tolerance(emb, update=0.0):
    """Return how far a value may be off once `update` at most was added to it and it was stored."""
    dtype = emb._handle.rows.storage_dtype if isinstance(emb, st.Embedding) else None
    steps = {None: 1e-6, torch.bfloat16: 2.0**-7, torch.int8: 2.0 / 127, torch.float8_e4m3fn: 2.0**-3}
    return steps[dtype] * (float(rows_of(emb).abs().max()) + update)


def check_rows(emb, dense):
    torch.testing.assert_close(rows_of(emb), dense.weight.detach().cpu(), rtol=1e-5, atol=tolerance(emb))


@pytest.fixture(params=STORED, ids=lambda stored: f"{stored[0]}-{stored[1] or 'float32'}".replace("torch.", ""))
def stored(request):
    """A memory, and the form in which rows are stored there."""
    return request.param


@pytest.fixture
def pair(stored, device, tmp_path):
    """An embedding with a table, and ``nn.Embedding`` with the same rows."""
    return pair_of(*stored, device, tmp_path, idle="lazy")
