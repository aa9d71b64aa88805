"""Every kernel in a few small calls, for compute-sanitizer: it makes each of them many times slower.

``PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m pytest tests/gpu -m sanitizer``. Page-locked planes and tensors
then are allocations of exactly their size, so that a byte too many is seen.
"""

import pkgutil

import pytest
import torch
from cases import same_values
from engine_cases import any_bits
from kernel_checks import CHECKS

from gpu.tools import check_same, pinned
from speedtransfer.engines import MappedEngine
from speedtransfer.errors import RowIndexError
from speedtransfer.vocabulary.device_slots import Slots, fill_unseen

pytestmark = pytest.mark.sanitizer

LAUNCHES = {"default": {}, "one warp": {"max_blocks": 1, "threads": 32}, "odd": {"max_blocks": 3, "threads": 96}}
WIDTHS = [
    (torch.uint8, 1),
    (torch.uint8, 7),
    (torch.int16, 33),
    (torch.float32, 1),
    (torch.float32, 20),
    (torch.float32, 257),
]


def there_and_back(engine, device, planes, contents, index, news):
    """Gather rows of `planes`, which hold `contents`, and write `news` to the first rows of `index`."""
    rows = [torch.empty(len(index), plane.shape[1], dtype=plane.dtype, device=device) for plane in planes]
    engine.gather(planes, index.to(device), rows)
    engine.wait()
    check_same(rows, [content[index] for content in contents])
    some = index[: len(news[0])]
    engine.scatter(planes, some.to(device), [new.to(device) for new in news])
    engine.wait()
    check_same(planes, [content.index_copy(0, some, new) for content, new in zip(contents, news, strict=True)])


INDEX = torch.tensor([12, 0, 5, 7, 3, 1, 12, 12, 0, 4, 11, 2, 5, 5, 8, 9, 10, 6, 1])


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_widths_at_once(device, launch):
    contents = [any_bits((13, width), dtype) for dtype, width in WIDTHS]
    news = [any_bits((6, width), dtype, seed=1) for dtype, width in WIDTHS]
    engine = MappedEngine(device, **LAUNCHES[launch])
    there_and_back(engine, device, [pinned(content) for content in contents], contents, INDEX, news)


@pytest.mark.parametrize("width", [4, 128, 132, 516])
def test_whole_lanes(device, width):
    content, new = any_bits((13, width), torch.float32), any_bits((6, width), torch.float32, seed=1)
    engine = MappedEngine(device)
    there_and_back(engine, device, [pinned(content)], [content], INDEX, [new])
    there_and_back(engine, device, [content.to(device)], [content], INDEX, [new])


@pytest.mark.parametrize(("shift", "gap"), [(1, 0), (0, 3), (4, 4), (2, 2)])
def test_misaligned_and_strided(device, shift, gap):
    content = any_bits((1, shift + 13 * (8 + gap) - gap), torch.float32)[0]  # it ends with the last row
    memory, engine = pinned(content), MappedEngine(device)

    def rows_of(flat):
        return flat.as_strided((13, 8), (8 + gap, 1), shift)

    rows = torch.empty(len(INDEX), 8, device=device)
    engine.gather([rows_of(memory)], INDEX.to(device), [rows])
    engine.wait()
    check_same([rows], [rows_of(content)[INDEX]])
    new = any_bits((6, 8), torch.float32, seed=1)
    engine.scatter([rows_of(memory)], INDEX[:6].to(device), [new.to(device)])
    engine.wait()
    rows_of(content)[INDEX[:6]] = new
    check_same([memory], [content])


def test_more_planes_than_one_launch_takes(device):
    contents = [any_bits((13, 4 * (1 + i % 3)), torch.float32, seed=i) for i in range(18)]
    news = [any_bits((6, content.shape[1]), torch.float32, seed=50 + i) for i, content in enumerate(contents)]
    there_and_back(MappedEngine(device), device, [pinned(c) for c in contents], contents, INDEX, news)


@pytest.mark.parametrize("width", [3, 8, 256])
def test_rows_that_do_not_exist(device, width):
    engine, content = MappedEngine(device), any_bits((13, width), torch.float32)
    plane, index = pinned(content), INDEX.clone()
    index[[3, 18]] = torch.tensor([13, -1])
    rows = torch.ones(len(index), width, device=device)
    engine.gather([plane], index.to(device), [rows], check=True)
    with pytest.raises(RowIndexError, match=r"^index\[3\].* is 13 but the table has 13 rows"):
        engine.wait()
    check_same([rows], [content[index.clamp(0, 12)].index_fill(0, torch.tensor([3, 18]), 0)])
    engine.scatter([plane], torch.tensor([13, -1, 2**62], device=device), [torch.ones(3, width, device=device)])
    engine.wait()
    check_same([plane], [content])


@pytest.mark.parametrize(
    ("stored", "dense"),
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_conversion(device, stored, dense):
    engine, widths = MappedEngine(device), (1, 6, 8, 12, 33)
    contents = [any_bits((13, width), stored, seed=width) for width in widths]
    planes = [pinned(content) for content in contents]
    rows = [torch.empty(len(INDEX), width, dtype=dense, device=device) for width in widths]
    engine.gather(planes, INDEX.to(device), rows)
    engine.wait()
    for got, content in zip(rows, contents, strict=True):
        same_values(got, content[INDEX].to(dense))
    news = [any_bits((6, width), dense, seed=width) for width in widths]
    engine.scatter(planes, INDEX[:6].to(device), [new.to(device) for new in news])
    engine.wait()
    for plane, content, new in zip(planes, contents, news, strict=True):
        same_values(plane, content.index_copy(0, INDEX[:6], new.to(stored)))


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
