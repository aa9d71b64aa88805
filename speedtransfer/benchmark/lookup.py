"""Suite `lookup`: frozen lookups of a few ids, as in serving. How much host time does a call take?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speedtransfer.benchmark.measure import Case, Group, cycle
from speedtransfer.errors import check_size
from speedtransfer.nn import Embedding
from speedtransfer.units import format_seconds

NOTE = (
    "Under torch.inference_mode, with ids that are on the compute device. On the CPU `F.embedding` on the same memory is the "
    "floor. On CUDA the rows of speedtransfer are in page-locked memory; `nn.Embedding` has the whole table on the device."
)
OURS, MODULE, FUNCTION, BY_HAND = "speedtransfer", "nn.Embedding", "F.embedding", "index_select on the host and a copy"
DIM, TOKENS = 256, (1, 8, 64)
BY = ("tokens", "ids of a lookup")
COLUMNS = {"time of the host until a lookup returns": lambda group, case: format_seconds(case.median_host_s)}
VALUE = (lambda case: 1e6 * case.median_host_s, "microseconds of the host until a lookup returns")

_ROWS, _QUICK_ROWS = 1 << 18, 1 << 14
_BATCHES = 64


def groups(device: torch.device, quick: bool, rows: int | None = None, seed: int = 0, **others: Any) -> list[Group]:
    """Make a group for each number of ids."""
    rows = check_size(rows or (_QUICK_ROWS if quick else _ROWS), "rows", 1)
    return [
        Group(
            f"frozen lookup of {tokens} ids in {rows:,} x {DIM} float32",
            functools.partial(_cases, device, rows, tokens, seed),
            {"tokens": tokens, "rows": rows, "dim": DIM},
        )
        for tokens in TOKENS
    ]


def case_of(name: str, find: Callable[[Tensor], Tensor], batches: list[tuple[Tensor, Tensor]]) -> Case:
    """Return a case that calls `find` on ids; `batches` are pairs of ids and expected rows, used in turn."""
    turn = cycle(batches)

    @torch.inference_mode()
    def check() -> None:
        ids, expected = turn()
        assert torch.equal(find(ids).cpu(), expected), "the rows found are not those of the ids"

    run = torch.inference_mode()(lambda: find(turn()[0]))
    return Case(name, run, check, role="ours" if name == OURS else "other")


def _cases(device: torch.device, rows: int, tokens: int, seed: int) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    cuda = device.type == "cuda"
    values = torch.randn(rows, DIM, generator=generator)
    drawn = [torch.randint(rows, (tokens,), generator=generator) for _ in range(_BATCHES)]
    batches = [(ids.to(device), values[ids]) for ids in drawn]
    weight: Any = {"_weight": values.to(device), "_freeze": True}
    ours = Embedding(rows, DIM, _weight=values, _freeze=True, device=device, memory="pinned" if cuda else "pageable")
    methods: dict[str, Callable[[Tensor], Tensor]] = {OURS: ours, MODULE: nn.Embedding(rows, DIM, **weight)}
    if cuda:
        room = torch.empty(tokens, DIM, pin_memory=True)

        def by_hand(ids: Tensor) -> Tensor:
            return torch.index_select(values, 0, ids.cpu(), out=room).to(device, non_blocking=True)

        methods[BY_HAND] = by_hand
    else:
        table = ours.table.torch()
        methods[FUNCTION] = lambda ids: F.embedding(ids, table)
    return [case_of(name, find, batches) for name, find in methods.items()]
