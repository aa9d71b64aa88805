"""Memory that is used again: soon, but never while anybody can still see it."""

import gc
import threading

import numpy as np
import pytest
import torch
from cases import concurrently, raising
from in_child import forks, in_child

from speedtransfer import buffers
from speedtransfer.buffers import BlockPool
from speedtransfer.errors import HostMemoryError

CPU = torch.device("cpu")
LARGE = 1 << 20


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    """Give each test a pool of its own."""
    pool = BlockPool()
    monkeypatch.setattr(buffers, "_pool", pool)
    return pool


def empty(num_floats=LARGE):
    return buffers.empty((num_floats,), torch.float32, CPU)


# --- never while somebody sees it -------------------------------------------------------------------------------------

VIEWS = {
    "itself": lambda t: t,
    "slice": lambda t: t[5:9],
    "last element": lambda t: t[-1:],
    "other dtype": lambda t: t.view(torch.int32)[::2],
    "storage": lambda t: t.untyped_storage(),
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: torch.from_dlpack(t),
    "capsule": lambda t: torch.utils.dlpack.to_dlpack(t),
    "in a cycle": lambda t: (lambda box: box.append(box) or box)([t]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_not_while_a_view_is_alive(view):
    tensor = empty().fill_(3)
    address = tensor.data_ptr()
    seen = view(tensor)
    del tensor
    others = [empty().fill_(9) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    del others, seen
    gc.collect()
    assert address in {other.data_ptr() for other in [empty() for _ in range(4)]}


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_free_bytes_never_exceed_what_was_once_in_use(pool):
    rng = np.random.default_rng(0)
    alive, sizes, peak = [], [], 0
    for _ in range(400):
        if alive and rng.random() < 0.5:
            at = rng.integers(len(alive))
            del alive[at], sizes[at]
        else:
            size = int(rng.integers(1 << 16, 1 << 20))
            alive.append(empty(size))
            sizes.append(4 * size)
        peak = max(peak, sum(sizes))
        # A size is rounded up by 1/8, and a block serves sizes down to half of its own.
        assert pool.free_bytes <= 2.25 * peak
    alive.clear()
    assert 0 < pool.free_bytes <= 2.25 * peak


def test_more_than_the_system_gives(monkeypatch):
    monkeypatch.setattr(buffers, "anonymous", raising(OSError(12, "Cannot allocate memory")))
    with pytest.raises(
        MemoryError, match=r"rows ask for .* which the system refused \(Cannot allocate memory\); "
    ) as error:
        empty()
    assert isinstance(error.value, HostMemoryError)


# --- threads, finalizers, processes -----------------------------------------------------------------------------------


def test_threads(pool):
    def work(mark):
        rng = np.random.default_rng(mark)
        kept = []
        for step in range(150):
            value = mark * 1000 + step
            kept.append((value, empty(int(rng.integers(1 << 17, 1 << 18))).fill_(value)))
            if len(kept) > 3:
                value, tensor = kept.pop(int(rng.integers(len(kept))))
                assert tensor[:: 1 << 10].eq(value).all()
                del tensor

    concurrently(work, range(6))
    assert pool._leased_bytes == 0


def test_a_tensor_may_die_while_the_pool_is_at_work(pool, monkeypatch):
    """The collector may run inside any line of the pool, on the thread that holds its lock."""
    kept = [empty(), empty()]
    fresh = buffers.anonymous

    def collects(num_bytes):
        kept.clear()
        return fresh(num_bytes)

    monkeypatch.setattr(buffers, "anonymous", collects)
    done = []
    thread = threading.Thread(target=lambda: done.append(empty(LARGE * 3)), daemon=True)
    thread.start()
    thread.join(20)
    assert done, "the pool waits for itself"
    address = done[0].data_ptr()
    done.clear()
    assert pool.free_bytes > 4 * LARGE * 4
    assert empty(LARGE * 3).data_ptr() == address
    assert pool._leased_bytes == 0


@forks
def test_a_process_forked_while_a_thread_holds_the_lock(monkeypatch):
    monkeypatch.undo()  # only the pool of the package is told of forks
    pool = buffers._pool
    held, release = threading.Event(), threading.Event()

    def hold():
        with pool._lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        assert in_child(lambda: len(empty()) == LARGE)
    finally:
        release.set()
        thread.join()
