"""An interrupt at any line: for each table a step happened wholly or not at all, or the next use raises an error of ours."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from interrupt import Interrupt, alone, sweep  # noqa: F401 - a fixture
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import SpeedtransferError

ROWS, DIM = 40, 4
FOLDER = tempfile.TemporaryDirectory(prefix="speedtransfer-interrupts-")
FILES = itertools.count()


class Run:
    """Two tables that one optimizer trains."""

    def __init__(self, kind: Kind) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.tables = nn.ModuleList([kind.make(), kind.make()])
        self.opt = kind.optimizer(kind.groups(self.tables), lr=0.05)
        for number in kind.before:
            kind.step(self, number)

    def take_over(self) -> None:
        self.opt = self.kind.optimizer(self.kind.groups(self.tables), lr=0.05)

    def backward(self, number: int) -> Tensor:
        losses = [table(self.kind.ids(number + shift)).square().sum() for shift, table in enumerate(self.tables)]
        for loss in losses:
            loss.backward()
        return sum(losses).detach()

    def end(self) -> list[Tensor]:
        """Make two steps more, and return some rows of each table."""
        for number in (5, 6):
            self.kind.step(self, number)
        with torch.no_grad():
            return [torch.cat([table(self.kind.ids(n)).view(-1, DIM) for n in (0, 1, 3, 4)]) for table in self.tables]


def plainly(run: Run, number: int) -> None:
    run.opt.zero_grad()
    run.backward(number)
    run.opt.step()


def by_closure(run: Run, number: int) -> None:
    def closure() -> Tensor:
        run.opt.zero_grad()
        return run.backward(number)

    run.opt.step(closure)


def scheduled(run: Run, number: int) -> None:
    for group in run.opt.param_groups:
        group["lr"] = 0.05 / (1 + number)
    plainly(run, number)


def scaled(run: Run, number: int) -> None:
    # A new one: torch's own takes no second step after an interrupt in the first.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    run.opt.zero_grad()
    for shift, table in enumerate(run.tables):
        scaler.scale(table(run.kind.ids(number + shift)).square().sum()).backward()
    scaler.step(run.opt)
    scaler.update()


def with_zeros(run: Run, number: int) -> None:
    run.opt.zero_grad(set_to_none=False)
    run.backward(number)
    nn.utils.clip_grad_norm_(run.tables.parameters(), 5.0)
    run.opt.step()


def taken_over(run: Run, number: int) -> None:
    run.take_over()
    plainly(run, number)


def loaded(run: Run, number: int) -> None:
    """Load the state of the optimizer before the step."""
    if number == 3:
        run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))
    plainly(run, number)


def switched_on(run: Run, number: int) -> None:
    """Have state from the fourth step on."""
    for group in run.opt.param_groups:
        group["momentum"] = 0.9 if number > 2 else 0
    plainly(run, number)


def twice_backward(run: Run, number: int) -> None:
    run.backward(number)
    run.backward(number + 7)


def looked_up(run: Run) -> None:
    run.backward(3)
    run.opt.zero_grad()


def reading_ahead(run: Run, number: int) -> None:
    plainly(run, number)
    for shift, table in enumerate(run.tables):
        table.prefetch(run.kind.ids(number + 1 + shift))


def apart(run: Run, number: int) -> None:
    """Leave a feature of each table out."""
    run.opt.zero_grad()
    for shift, table in enumerate(run.tables):
        table[(number + shift) % 2](rows_of(number) % 10).square().sum().backward()
    run.opt.step()


def nothing(run: Run) -> None:
    """Do nothing."""


def rows_of(number: int) -> Tensor:
    return (torch.arange(6) * 3 + 2 * number) % ROWS


def later_new(number: int) -> Tensor:
    """Return ids the last of which come in the step that is interrupted."""
    return torch.arange(6) * 7919 + min((number + 1) // 2, 2)


def features_of(number: int) -> Tensor:
    return torch.stack([rows_of(number) % 10, rows_of(number + 1) % 30], dim=1)


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: st.Embedding(ROWS, DIM, **options)


def in_a_file() -> nn.Module:
    return st.Embedding(ROWS, DIM, memory="mmap", path=Path(FOLDER.name) / f"{next(FILES)}.npy")


def with_vocabulary(rows: int = ROWS, **options: Any) -> Callable[[], nn.Module]:
    return lambda: st.Embedding(rows, DIM, vocabulary=st.Vocabulary(**options))


def of_a_group(**options: Any) -> Callable[[], nn.Module]:
    return lambda: st.Embedding(ROWS, DIM, process_group=dist.group.WORLD, **options)


def optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    return lambda params, lr: kind(params, lr=lr, **options)


def two_groups(tables: nn.ModuleList) -> list[dict[str, Any]]:
    return [{"params": list(table.parameters()), "weight_decay": 0.1 * n} for n, table in enumerate(tables)]


adamw = optimizer(torch.optim.AdamW, weight_decay=0.1)


USES: tuple[Callable[[Run], object], ...] = (
    nothing,
    lambda run: run.opt.state_dict(),
    lambda run: run.tables.state_dict(),
    lambda run: [table.weight.sum() for table in run.tables],
)


class Kind(NamedTuple):
    """Tables, and how they are trained.

    `before`: the steps before the one that is interrupted, `step(run, 3)` unless there is another `part`. `then` comes after
    this. `others`: what it may have come to besides nothing and all of it. `uses`: what the next use
    may be. `like`: a kind whose rows those may be too, each for itself: with which none are evicted.
    """

    make: Callable[[], nn.Module] = embedding()
    optimizer: Any = adamw
    ids: Callable[[int], Any] = rows_of
    step: Callable[[Run, int], None] = plainly
    groups: Callable[[nn.ModuleList], Any] = nn.Module.parameters
    before: tuple[int, ...] = (0, 1, 2)
    part: Callable[[Run, int], None] | None = None
    then: Callable[[Run], object] = nothing
    others: tuple[Callable[[Run], object], ...] = ()
    like: str = ""
    uses: tuple[Callable[[Run], object], ...] = USES

    def interrupted_part(self, run: Run) -> None:
        (self.part or self.step)(run, 3)


KINDS = {
    "exact": Kind(),
    "first": Kind(before=()),
    "coupled": Kind(optimizer=optimizer(torch.optim.Adam, weight_decay=0.1)),
    "momentum": Kind(optimizer=optimizer(torch.optim.SGD, momentum=0.9)),
    "rmsprop": Kind(optimizer=optimizer(torch.optim.RMSprop, momentum=0.9)),
    "adagrad": Kind(optimizer=optimizer(torch.optim.Adagrad)),
    "rprop": Kind(optimizer=optimizer(torch.optim.Rprop)),
    "nadam": Kind(optimizer=optimizer(torch.optim.NAdam)),
    "lazy": Kind(embedding(idle="lazy")),
    "sparse": Kind(embedding(sparse=True), optimizer(torch.optim.SparseAdam)),
    "closure": Kind(step=by_closure),
    "schedule": Kind(step=scheduled),
    "scaler": Kind(step=scaled),
    "zeros": Kind(step=with_zeros),
    "two groups": Kind(groups=two_groups),
    "every row": Kind(ids=lambda number: torch.arange(ROWS) - 0 * number),
    "cache": Kind(embedding(cache_rows=8)),
    "rows": Kind(embedding(layout="rows")),
    "int8": Kind(embedding(storage_dtype=torch.int8, idle="lazy")),
    "8-bit state": Kind(embedding(state_dtype=torch.uint8, idle="lazy")),
    "bfloat16": Kind(embedding(storage_dtype=torch.bfloat16, state_dtype=torch.bfloat16, idle="lazy")),
    "mmap": Kind(in_a_file),
    "shared": Kind(of_a_group(memory="shared"), uses=(nothing,)),
    "bag": Kind(lambda: st.EmbeddingBag(ROWS, DIM), ids=lambda number: rows_of(number).view(2, 3)),
    "features": Kind(lambda: st.MultiEmbedding([10, 30], DIM), ids=features_of),
    "apart": Kind(lambda: st.MultiEmbedding([10, 30], DIM), ids=features_of, step=apart),
    "vocabulary": Kind(with_vocabulary(), ids=lambda number: rows_of(number) * 7919, others=(looked_up,)),
    "evicting": Kind(
        with_vocabulary(14, max_capacity=14, evict="lru"),
        ids=later_new,
        others=(looked_up,),
        like="growing",
    ),
    "group": Kind(of_a_group(), uses=(nothing,)),
    "taken over": Kind(part=taken_over, others=(lambda run: run.take_over(),)),
    "loaded": Kind(step=loaded),
    "switched on": Kind(optimizer=optimizer(torch.optim.SGD), step=switched_on),
    "growing": Kind(with_vocabulary(12, max_capacity=40), ids=later_new, others=(looked_up,)),
    "prefetch": Kind(step=reading_ahead),
    "two backwards": Kind(part=twice_backward, then=lambda run: run.opt.step(), others=(lambda run: run.backward(3),)),
}


# One of so many points is tried always.
STRIDE = 599
# Kinds, functions, and how many points of these come to one that is tried.
WITHIN = [
    ("first", "add_together", 5),
    ("first", "add", 3),
    ("first", "enable_catch_up", 2),
    ("apart", "lend", 7),
    ("apart", "take_back", 7),
    ("loaded", "put_rows", 1),
    ("loaded", "__setstate__", 5),
    ("8-bit state", "_leave", 4),
    ("group", "exchange_gradients", 1),
    ("evicting", "release", 1),
    ("evicting", "_begin", 1),
    ("growing", "follow", 1),
]


def ends_of(kind: Kind) -> list[list[Tensor]]:
    """Return what the rows may be at the end."""
    found = []
    for part in (nothing, kind.interrupted_part, *kind.others):
        run = Run(kind)
        part(run)
        kind.then(run)
        found.append(run.end())
    return found + (ends_of(KINDS[kind.like]) if kind.like else [])


def outcome(kind: Kind, interrupt: Interrupt, ends: list[list[Tensor]]) -> str:
    """Interrupt a run, and tell what has become of it."""
    run = Run(kind)
    if not interrupt.during(lambda: kind.interrupted_part(run)):
        return "not reached"
    try:
        kind.uses[interrupt.at % len(kind.uses)](run)
        kind.then(run)
        found = run.end()
    except SpeedtransferError as error:
        return f"refused: {error}" if "load" in str(error) else f"torn: refused: {error}"
    # Each table for itself.
    for table, rows in enumerate(found):
        alike = torch.stack([torch.isclose(rows, end[table], rtol=1e-5, atol=1e-6).all(1) for end in ends])
        if not (alike.any(0).all() if kind.like else alike.all(1).any()):
            return "torn"
    return "whole"


def sweep_of(kind: Kind, points: Any, *how: Any) -> Counter[str]:
    ends, run = ends_of(kind), Run(kind)
    return sweep(lambda: kind.interrupted_part(run), lambda interrupt: outcome(kind, interrupt, ends), points, *how)


@pytest.mark.parametrize("name", KINDS)
def test_some_lines(name: str, alone: Any) -> None:
    first = list(KINDS).index(name) * 89
    found = sweep_of(KINDS[name], lambda points: points[first % STRIDE :: STRIDE])
    assert found["whole"] > 1


@pytest.mark.parametrize(("name", "within", "every"), WITHIN)
def test_functions_that_have_torn(name: str, within: str, every: int, alone: Any) -> None:
    assert sweep_of(KINDS[name], lambda points: points[::every], KeyboardInterrupt, within)["whole"] > 3


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_lack_of_memory_within_the_optimizer(error: type[BaseException], alone: Any) -> None:
    # AdamW of torch 2.6 is not yet an Adam.
    within = "_single_tensor_adam" if issubclass(torch.optim.AdamW, torch.optim.Adam) else "_single_tensor_adamw"
    assert sweep_of(KINDS["exact"], lambda points: points[::9], error, within)["whole"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("name", KINDS)
def test_every_line(name: str, error: type[BaseException], alone: Any) -> None:
    found = sweep_of(KINDS[name], lambda points: points, error)
    print(name, error.__name__, dict(found))
