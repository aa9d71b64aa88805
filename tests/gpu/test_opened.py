"""Rows read in place from published files, gathered to a CUDA device by the host."""

from __future__ import annotations

import pytest
import torch
from cases import assert_same_bits, numbers
from opened_cases import write_parts
from safetensors.torch import save_file

import speedtransfer as st

pytestmark = pytest.mark.gpu
IDS = torch.randint(301, (40, 30), generator=torch.Generator().manual_seed(0))


def gather_and_wait(table, ids):
    """Gather, and hear at the latest now of an index that only the device has seen."""
    table.gather(ids)
    table.wait()


@pytest.fixture(params=["parts", "misaligned", "one"])
def opened(request, tmp_path, device):
    values = numbers((301, 12), torch.float32)
    if request.param == "one":
        save_file({"weight": values}, tmp_path / "a.safetensors")
        return tmp_path / "a.safetensors", values
    return write_parts(tmp_path, values, pads=(1, 6) if request.param == "misaligned" else (0,)), values


@pytest.mark.parametrize("cache_rows", [None, 20])
def test_gather(opened, device, cache_rows):
    parts, values = opened
    table = st.Table.open(parts, device=device, cache_rows=cache_rows)
    for _ in range(3):
        for ids in (IDS, IDS.to(device), IDS.to(device).int()):
            rows = table.gather(ids)
            assert rows.device == device
            assert_same_bits(rows, values[IDS])
    assert_same_bits(table.gather(IDS, dtype=torch.bfloat16), values[IDS].bfloat16())
    out = torch.empty(2, 12, device=device)
    assert table.gather([300, 0], out=out) is out
    assert_same_bits(out, values[[300, 0]])
    for ids in ([301], torch.tensor([3, -1], device=device)):
        with pytest.raises(IndexError):
            gather_and_wait(table, ids)
    with pytest.raises(OSError, match="read in place"):
        table.scatter([1], torch.zeros(1, 12, device=device))
    assert_same_bits(table.torch(), values)


def test_modules(opened, device):
    parts, values = opened
    emb, dense = st.Embedding.from_pretrained(st.Table.open(parts, device=device)), values.to(device)
    ids = IDS.to(device)
    assert_same_bits(emb(ids), dense[ids])
    with torch.no_grad():
        assert_same_bits(emb(ids), dense[ids])
        assert_same_bits(emb(emb.prefetch(IDS)), dense[ids])
    assert_same_bits(emb.weight.detach().clone(), dense)
    with torch.no_grad(), pytest.raises(OSError, match="read in place"):
        emb.weight.zero_()
    with pytest.raises(OSError, match="read in place"):
        emb.requires_grad_()
    bag = st.EmbeddingBag.from_pretrained(emb.table, mode="max")
    assert_same_bits(bag(ids), torch.nn.EmbeddingBag.from_pretrained(dense, mode="max")(ids))
    moved = st.Embedding.from_pretrained(st.Table.open(parts, device="cpu")).to(device)
    assert_same_bits(moved(ids), dense[ids])
    assert_same_bits(moved.cpu()(IDS), values[IDS])
    linear = torch.nn.Linear(12, 2, device=device)
    optimizer = torch.optim.Adam([*emb.parameters(), *linear.parameters()])
    for _ in range(3):
        linear(emb(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(emb(ids), dense[ids])


def test_float8_with_scales(tmp_path, device):
    codes = numbers((301, 16), torch.float32).to(torch.float8_e4m3fn)
    scales = torch.randint(118, 134, (301, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for number, part in enumerate(torch.arange(301).split(100)):
        tensors = {f"w.{number}": codes[part[0] : part[-1] + 1], f"s.{number}": scales[part[0] : part[-1] + 1]}
        save_file(tensors, tmp_path / f"{number}.safetensors")
    expected = codes.float() * scales.float().repeat_interleave(4, 1)
    table = st.Table.open(tmp_path, "w.{}", scale_key="s.{}", device=device)
    for dtype in (None, torch.bfloat16):
        emb = st.Embedding.from_pretrained(table, dtype=dtype)
        assert_same_bits(emb(IDS.to(device)), expected[IDS].to(dtype or torch.float32))
    assert_same_bits(emb.float().weight.detach().clone(), expected)
