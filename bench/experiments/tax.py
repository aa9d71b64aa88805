"""Compute against transfer: the device is fast, but is it worth the way there and back?

A matrix product in NumPy, on the device, and on the device with copies both ways each time.
``python bench/record.py here --only tax``.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speedtransfer.benchmark.measure import Case, Group
from speedtransfer.benchmark.results import GroupResult

NOTE = (
    "Copies go from and to page-locked memory. Without CUDA the CPU is the device as well: what is copied then is memory to "
    "memory, and the lines show what copies and the overhead of torch cost, not what a device gains."
)
BY = ("size", "n")
HOST, RESIDENT, COPIES = "NumPy", "on the device", "device, copies both ways"

_SIZES = (50, 100, 200, 400, 800, 1600, 4000)  # 200 is the classic one
_CPU_LIMIT, _QUICK_LIMIT = 1600, 400  # larger sizes take seconds, and the lines have met
_SPIN_S = 0.15  # threads of OpenBLAS spin for 0.1 s after a product, and would disturb torch


def series(group: GroupResult) -> str:
    """Return what is computed; earlier results have a network as well."""
    return {"matmul": "matrix product, n x n", "mlp": "training step of an MLP, width n"}[group.params["experiment"]]


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    cuda = device.type == "cuda"
    limit = _QUICK_LIMIT if quick else math.inf if cuda else _CPU_LIMIT
    return [
        Group(
            f"product of two {size:,} x {size:,} matrices",
            functools.partial(_cases, size, device, seed),
            {"experiment": "matmul", "size": size, "cuda": cuda},
        )
        for size in _SIZES
        if size <= limit
    ]


def _cases(size: int, device: torch.device, seed: int) -> list[Case]:
    """Return the ways to multiply, of which those of torch wait, untimed, for NumPy's threads to sleep."""
    draw = torch.Generator().manual_seed(seed)
    # Page-locked for CUDA, so that copies are as fast as possible.
    a, b, fetched = (torch.randn(size, size, generator=draw, pin_memory=device.type == "cuda") for _ in range(3))
    there, room = [t.to(device, copy=True) for t in (a, b)], [torch.zeros(size, size, device=device) for _ in range(2)]
    products = [torch.zeros(size, size, device=device) for _ in range(2)]
    in_numpy = np.zeros((size, size), dtype=np.float32)
    expected = a.double().numpy() @ b.double().numpy()

    def copies() -> None:
        for here, host in zip(room, (a, b), strict=True):
            here.copy_(host, non_blocking=True)
        # Blocks, since the host wants the result.
        fetched.copy_(torch.mm(*room, out=products[1]))

    def case(name: str, run: Callable[[], Any], found: np.ndarray | Tensor) -> Case:
        def check() -> None:
            got = torch.as_tensor(found).cpu().double().numpy()
            off = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert off < 1e-5, f"the product is {off:.1e} of its norm off"

        return Case(name, run, check, warm=None if name == HOST else lambda: time.sleep(_SPIN_S))

    return [
        case(HOST, lambda: np.matmul(a.numpy(), b.numpy(), out=in_numpy), in_numpy),
        case(RESIDENT, lambda: torch.mm(*there, out=products[0]), products[0]),
        case(COPIES, copies, fetched),
    ]
