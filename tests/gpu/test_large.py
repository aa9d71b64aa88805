"""More than 2^31 elements and 2^32 bytes, in a plane and in a call, by every engine. One page-locked plane serves all."""

import pytest
import torch
from engine_cases import any_bits

from gpu.tools import DEVICE_ENGINES, ENGINES, check_same
from speedtransfer.cuda import pinned_empty

WIDTH = 64
NUM_ROWS = 2**32 // WIDTH + 1000
WORDS = WIDTH // 8  # of 64 bits
# Rows on both sides of where 31 and 32 bits end, of bytes and of 4-byte words.
EDGES = [0, 1, *(2**bits // WIDTH + side for bits in (30, 31, 32) for side in (-1, 0, 1)), NUM_ROWS - 1]


def words(index):
    """Return the rows that a plane has at first: its 64-bit words count up."""
    return index[:, None] * WORDS + torch.arange(WORDS, device=index.device)


@pytest.fixture(scope="module")
def pinned_plane(device):
    memory = pinned_empty(NUM_ROWS * WIDTH, device)
    torch.arange(NUM_ROWS * WORDS, out=memory.view(torch.int64))
    return memory.view(NUM_ROWS, WIDTH)


@pytest.fixture(scope="module")
def device_plane(device):
    yield torch.arange(NUM_ROWS * WORDS, device=device).view(torch.uint8).view(NUM_ROWS, WIDTH)
    torch.cuda.empty_cache()


@pytest.fixture(
    params=[("pinned", "mapped"), ("pinned", "staged"), *(("device", name) for name in DEVICE_ENGINES)], ids="-".join
)
def way(request):
    return request.param


@pytest.fixture
def engine(way, device):
    return ENGINES[way[1]](device)


@pytest.fixture
def plane(way, request):
    return request.getfixturevalue(f"{way[0]}_plane")


def test_rows_at_the_edges(engine, plane, device):
    rows = torch.zeros(len(EDGES), WIDTH, dtype=torch.uint8, device=device)
    engine.gather([plane], torch.tensor(EDGES, device=device), [rows])
    check_same([rows.view(torch.int64)], [words(torch.tensor(EDGES))])
    for row in EDGES:  # one by one: an offset cut off at 31 or 32 bits would hit another of them
        index, new = torch.tensor([row]), any_bits((1, WIDTH), torch.uint8, seed=row)
        engine.scatter([plane], index.to(device), [new.to(device)])
        engine.wait()
        expected = words(torch.tensor(EDGES)).view(torch.uint8)
        expected[EDGES.index(row)] = new[0]
        check_same([plane[torch.tensor(EDGES, device=plane.device)]], [expected])
        engine.scatter([plane], index.to(device), [words(index).view(torch.uint8).to(device)])
        engine.wait()


def test_a_call_of_more_than_2_to_the_31_elements(engine, plane, device):
    count = 2**31 // WIDTH + 1000
    index = torch.arange(NUM_ROWS - count, NUM_ROWS, device=device)
    rows = torch.zeros(count, WIDTH, dtype=torch.uint8, device=device)
    engine.gather([plane], index, [rows])
    for start in range(0, count, 1 << 22):
        part = slice(start, start + (1 << 22))
        assert torch.equal(rows[part].view(torch.int64), words(index[part])), f"rows from {start} on"
    rows[-1] ^= 255
    engine.scatter([plane], index, [rows])
    engine.wait()
    places = torch.tensor([0, count // 2, 2**31 // WIDTH, count - 2, count - 1])
    expected = words(index.cpu()[places]).view(torch.uint8)
    expected[-1] ^= 255
    check_same([plane[index[places.to(device)].to(plane.device)]], [expected])
    engine.scatter([plane], index[-1:], [words(index[-1:]).view(torch.uint8)])
    engine.wait()
