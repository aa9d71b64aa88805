"""The methods of bench/experiments/exchange.py: what they send is what the sockets say, and they train as they should."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys

import pytest
import torch
import torch.distributed as dist

from bench.experiments.exchange import (
    ALL_REDUCE,
    BLOCK_MOMENTUM,
    COMM_DTYPES,
    EIGHT_BITS,
    FP16,
    LOCAL_SGD,
    NO_ERRORS,
    ONE_BIT,
    POWER_SGD,
    Sent,
    Sizes,
    Training,
)

SIZES = Sizes(width=64, rows=1000, dim=64, examples=48, lr=0.1, table_lr=0.03, seed=0)
METHODS = (ALL_REDUCE, FP16, EIGHT_BITS, POWER_SGD, ONE_BIT, NO_ERRORS, LOCAL_SGD, BLOCK_MOMENTUM, *COMM_DTYPES)
STEPS = 8
# Of struct tcp_info of Linux; what was sent holds what was sent once more.
BYTES_SENT, BYTES_AGAIN = 200, 208


def bytes_on_sockets() -> int:
    """Return the bytes that the TCP sockets of this process have sent."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        sent, again = (struct.unpack_from("Q", info, at)[0] for at in (BYTES_SENT, BYTES_AGAIN))
                        total += sent - again
    return total


def counted_and_sent() -> dict[str, tuple[float, int]]:
    found = {}
    for method in METHODS:
        training = Training(method, SIZES._replace(width=256), dist.get_rank(), dist.get_world_size())
        training.steps(8)
        dist.barrier()
        counted, sent = training.sent(), bytes_on_sockets()
        training.steps(STEPS)
        dist.barrier()
        found[method] = training.sent() - counted, bytes_on_sockets() - sent
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells what a socket has sent")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_counted_bytes_are_those_of_the_sockets(pool, world):
    answers = pool.of(world)(counted_and_sent)
    if not any(sent for _, sent in answers[0].values()):
        pytest.skip("the sockets do not say what they have sent")
    for method in METHODS:
        counted, sent = (sum(answer[method][i] for answer in answers) / len(answers) for i in (0, 1))
        # Each call has headers of some hundred bytes for each other process.
        headers = STEPS * 2000 * (len(answers) - 1)
        assert counted <= sent <= counted + headers, method
        assert counted > 2 * headers, method


def calls_are_given_back() -> None:
    before = dist.all_reduce, dist.all_gather
    counting = Sent(nested=False)
    with contextlib.suppress(KeyError), counting:
        dist.all_reduce(torch.zeros(6, dtype=torch.float64))
        raise KeyError
    assert (dist.all_reduce, dist.all_gather) == before
    dist.all_reduce(torch.zeros(6))
    assert counting.bytes == 48


def test_the_calls_are_given_back(two):
    two(calls_are_given_back)
