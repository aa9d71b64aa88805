"""An interrupt at any line: for each table a step happened wholly or not at all, or the next use raises an error of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interrupt import Interrupt
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import SpeedtransferError

ROWS, DIM = 40, 4


class Run:
    """Two tables that one optimizer trains, and a dense layer."""

    def __init__(self, make: Callable[[], nn.Module], kind: Any, ids: Callable[[int], Any]) -> None:
        torch.manual_seed(0)
        self.tables = nn.ModuleList([make(), make()])
        self.opt = kind(self.tables.parameters(), lr=0.05)
        self.ids = ids

    def step(self, number: int) -> None:
        self.opt.zero_grad()
        for shift, table in enumerate(self.tables):
            table(self.ids(number + shift)).square().sum().backward()
        self.opt.step()

    def rows(self) -> list[Tensor]:
        with torch.no_grad():
            return [table(self.ids(0)).clone() for table in self.tables] + [
                table(self.ids(1)).clone() for table in self.tables
            ]


def adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1)


def adam(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr, weight_decay=0.1)


def momentum(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


def rows_of(number: int) -> Tensor:
    return (torch.arange(6) * 3 + 2 * number) % ROWS


def features_of(number: int) -> Tensor:
    return torch.stack([rows_of(number) % 10, rows_of(number + 1) % 30], dim=1)


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: st.Embedding(ROWS, DIM, **options)


KINDS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[int], Any]]] = {
    "exact": (embedding(), adamw, rows_of),
    "coupled": (embedding(), adam, rows_of),
    "momentum": (embedding(), momentum, rows_of),
    "lazy": (embedding(idle="lazy"), adamw, rows_of),
    "cache": (embedding(cache_rows=8), adamw, rows_of),
    "rows": (embedding(layout="rows"), adamw, rows_of),
    "bag": (lambda: st.EmbeddingBag(ROWS, DIM), adamw, lambda number: rows_of(number).view(2, 3)),
    "features": (lambda: st.MultiEmbedding([10, 30], DIM), adamw, features_of),
    "vocabulary": (
        lambda: st.Embedding(ROWS, DIM, vocabulary=st.Vocabulary()),
        adamw,
        lambda number: rows_of(number) * 7919,
    ),
    "group": (lambda: st.Embedding(ROWS, DIM, process_group=dist.group.WORLD), adamw, rows_of),
}
BEFORE, AFTER = (0, 1, 2), (5, 6)


def end_of(name: str, steps: tuple[int, ...]) -> list[Tensor]:
    run = Run(*KINDS[name])
    for number in steps:
        run.step(number)
    return run.rows()


def interrupted(name: str, interrupt: Interrupt) -> list[Tensor] | str | None:
    """Return the rows of a run in which step 3 is interrupted, or the error that it then raises; None: it was not."""
    run = Run(*KINDS[name])
    for number in BEFORE:
        run.step(number)
    try:
        if not interrupt.during(lambda: run.step(3)):
            return None
        for number in AFTER:
            run.step(number)
        return run.rows()
    except SpeedtransferError as error:
        return str(error)


def outcome(name: str, found: list[Tensor] | str, without: list[Tensor], made: list[Tensor]) -> str:
    if isinstance(found, str):
        return "refused"
    # Two tables: each for itself.
    for table in range(2):
        own = [found[table], found[table + 2]]
        alike = [
            all(
                torch.allclose(*pair, rtol=1e-5, atol=1e-6)
                for pair in zip(own, (ends[table], ends[table + 2]), strict=True)
            )
            for ends in (without, made)
        ]
        if not any(alike):
            return "torn"
    return "whole"


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sweep(name: str, points: Callable[[int], range], kind: type[BaseException] = KeyboardInterrupt) -> Counter[str]:
    without, made = end_of(name, (*BEFORE, *AFTER)), end_of(name, (*BEFORE, 3, *AFTER))
    counting = Interrupt()
    run = Run(*KINDS[name])
    for number in BEFORE:
        run.step(number)
    counting.during(lambda: run.step(3))
    found: Counter[str] = Counter()
    torn = []
    for at in points(counting.lines):
        interrupt = Interrupt(at, kind)
        result = interrupted(name, interrupt)
        if result is not None:
            found[outcome(name, result, without, made)] += 1
            if outcome(name, result, without, made) == "torn":
                torn.append(interrupt.place)
    assert not torn, f"{name}: {len(torn)} of {sum(found.values())} points: {Counter(torn).most_common(12)}"
    return found


@pytest.mark.parametrize("name", KINDS)
def test_some_lines(name: str, alone: Any) -> None:
    first = list(KINDS).index(name) * 5 + 1
    found = sweep(name, lambda lines: range(first, lines + 1, 97))
    assert found["whole"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", KINDS)
def test_every_line(name: str, kind: type[BaseException], alone: Any) -> None:
    found = sweep(name, lambda lines: range(1, lines + 1), kind)
    print(name, kind.__name__, dict(found))
