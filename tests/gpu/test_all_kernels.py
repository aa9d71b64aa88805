"""Kernels in a few small calls, for compute-sanitizer, which makes each many times slower: see test_engines.py, too.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest tests/gpu -m sanitizer``. Page-locked planes and tensors
then are allocations of exactly their size, so that a byte too many is seen.
"""

import pkgutil

import pytest
import torch
from cpu_kernels import CHECKS
from engine_cases import any_bits, cached

from gpu.tools import check_same, pinned
from speedtransfer.engines import MappedEngine
from speedtransfer.vocabulary.device_map import Slots, fill_unseen

pytestmark = pytest.mark.sanitizer

INDEX = torch.tensor([12, 0, 5, 7, 3, 1, 12, 12, 0, 4, 11, 2, 5, 5, 8, 9, 10, 6, 1])


@pytest.mark.parametrize("width", [3, 8])
def test_rows_of_a_cache(device, width):
    engine, content = cached(4, "lfu", MappedEngine(device), device=device), any_bits((13, width), torch.float32)
    plane, index = pinned(content), INDEX.to(device)
    for ids in (index, index.unique(), index[:3]):
        rows = torch.ones(len(ids), width, device=device)
        engine.gather([plane], ids, [rows])
        check_same([rows], [content[ids.cpu()]])
    engine.scatter([plane], torch.arange(3, 14, device=device), [content.flip(0)[:11].to(device)])
    engine.wait()
    check_same([plane[3:]], [content.flip(0)[:10]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ids(device, dtype):
    """Few slots, so that searches are long and wrap around."""
    slots = Slots.over(torch.zeros(64, 2, dtype=torch.int64, device=device))
    ids, rows = torch.arange(40, device=device) * -(2**57), torch.arange(40, device=device)
    slots.change(ids, rows.clone())
    slots.change(ids[::2].contiguous(), torch.full((20,), -1, device=device))
    slots.change(ids[:8] + 1, rows[:8].clone())
    unknown = torch.zeros(1, dtype=torch.int64, device=device)
    found = slots.find(ids, unknown, 99)
    assert found.tolist() == [99 if row % 2 == 0 else row for row in range(40)]
    assert slots.find(ids[:8] + 1, unknown, 99).tolist() == [*range(8)]
    assert int(unknown) == 20
    values = torch.zeros(40, 7, dtype=dtype, device=device)
    fill_unseen(values, ids, found, 99, 1, ("normal", 0.0, 1.0))
    assert values.any(dim=1).tolist() == [row % 2 == 0 for row in range(40)]


@pytest.mark.parametrize("check", [check for every in CHECKS.values() for check in every])
def test_those_that_compute(device, check):
    compare = pkgutil.resolve_name(check)
    # Those of `padded` take a tensor, and make what compares.
    assert compare(torch.empty(0, device=device))() if "padded" in check else compare(device)
