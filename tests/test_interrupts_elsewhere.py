"""An interrupt outside of a step: what was read, written, saved or loaded is as before or after it, or the next use raises."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_child import REFUSAL, forks, is_refusal_of_torch
from interrupt import Interrupt, alone, sweep  # noqa: F401 - a fixture
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import SpeedtransferError

ROWS, DIM = 40, 4


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, weight_decay=0.1)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def rows_of(number: int) -> Tensor:
    return (torch.arange(6) * 3 + 2 * number) % ROWS


class World:
    """A table, a dense layer and an optimizer, after three steps that leave rows idle."""

    def __init__(self, path: Path, name: str, seed: int = 0, steps: int = 3) -> None:
        torch.manual_seed(seed)
        self.path, self.name = path, name
        make, optimizer = KINDS[name]
        self.emb = make(path)
        self.model = nn.ModuleDict({"emb": self.emb, "dense": nn.Linear(DIM, 2)})
        self.opt = optimizer(self.model.parameters())
        self.factor = 7919 if name in ("vocabulary", "evicting") else 1
        for number in range(steps):
            self.step(number)

    def ids(self, number: int) -> Tensor:
        if self.name == "features":
            return torch.stack([rows_of(number) % 10, rows_of(number + 1) % 30], dim=1)
        if self.name == "bag":
            return rows_of(number).view(2, 3)
        return rows_of(number) * self.factor

    def step(self, number: int, ids: Any = None) -> None:
        self.opt.zero_grad()
        found = self.emb(self.ids(number) if ids is None else ids)
        self.model["dense"](found).square().sum().backward()
        self.opt.step()

    def rows(self) -> list[Tensor]:
        """Return all weights, and the state of the optimizer, after two steps more."""
        for number in (5, 6):
            self.step(number)
        with torch.no_grad():
            if self.factor > 1:
                return list(self.emb.vocabulary.export())
            if self.name == "group":
                return [self.emb(torch.arange(ROWS))]
            every = torch.arange(ROWS)
            shown = {"bag": every[:, None], "features": torch.stack([every % 10, every % 30], dim=1)}
            found = [self.emb(shown.get(self.name, every)).clone()]
        state = self.opt.state_dict()["state"]
        for key in sorted(state):
            found += [value.clone() for name, value in sorted(state[key].items()) if isinstance(value, Tensor)]
        return found

    def now(self) -> list[Tensor]:
        """Return the weights as they are."""
        with torch.no_grad():
            tables = self.emb if self.name == "features" else [self.emb]
            return [*(table.weight.detach() + 0 for table in tables), self.model["dense"].weight + 0]

    def admitted(self) -> list[Tensor]:
        """Return the rows by id after those of all acts were looked up, which must be those that the vocabulary knows."""
        vocabulary = self.emb.vocabulary
        for number in (5, 6):
            self.step(number, rows_of(number) * 7919)
        with torch.no_grad():
            every = torch.unique(torch.cat([torch.arange(ROWS) * 7919, torch.arange(20) * 104729]))
            values = self.emb(every)
        ids, rows = vocabulary.export()
        assert len(vocabulary) == len(ids.unique()) == len(ids), "ids that are there twice, or not"
        assert (vocabulary.rows(ids) >= 0).all(), "an id without a row"
        assert len(vocabulary.rows(ids).unique()) == len(ids), "a row of two ids"
        known = torch.isin(every, ids)
        assert torch.equal(values[known], rows[torch.searchsorted(ids, every[known])])
        # Whose ids stay depends on when they came.
        return [values] if vocabulary.evict is None else []

    def is_free(self) -> bool:
        """Tell whether another thread gets the lock of the rows."""
        got = []
        lock = self.emb._handle.rows.lock
        thread = threading.Thread(target=lambda: got.append(lock.acquire(timeout=0.2) and (lock.release() or True)))
        thread.start()
        thread.join()
        return got == [True]


def embedding(**options: Any) -> Callable[[Path], nn.Module]:
    return lambda path: st.Embedding(ROWS, DIM, **options)


def in_file(path: Path, **options: Any) -> nn.Module:
    return st.Embedding(ROWS, DIM, memory="mmap", path=tempfile.mktemp(dir=path, suffix=".npy"), **options)


def growing(memory: str = "pageable", cache_rows: int = 0) -> Callable[[Path], nn.Module]:
    def make(path: Path) -> nn.Module:
        file = tempfile.mktemp(dir=path, suffix=".npy") if memory == "mmap" else None
        table = st.Table(ROWS, DIM, memory=memory, path=file, max_rows=100, cache_rows=cache_rows).normal_()
        return st.Embedding.from_pretrained(table, freeze=False)

    return make


KINDS: dict[str, tuple[Callable[[Path], nn.Module], Any]] = {
    "exact": (embedding(), adamw),
    "coupled": (embedding(), adam),
    "momentum": (embedding(), momentum),
    "lazy": (embedding(idle="lazy"), adamw),
    "int8": (embedding(storage_dtype=torch.int8), adamw),
    "state8": (embedding(state_dtype=torch.uint8), adamw),
    "cache": (embedding(cache_rows=8), adamw),
    "rows": (embedding(layout="rows"), adamw),
    "file": (in_file, adamw),
    "bag": (lambda path: st.EmbeddingBag(ROWS, DIM), adamw),
    "features": (lambda path: st.MultiEmbedding([10, 30], DIM), adamw),
    "vocabulary": (lambda path: st.Embedding(ROWS, DIM, vocabulary=st.Vocabulary(max_capacity=200)), adamw),
    "evicting": (lambda path: st.Embedding(20, DIM, vocabulary=st.Vocabulary(20, max_capacity=32, evict="lru")), adamw),
    "growing": (growing(), adamw),
    "growing file": (growing(memory="mmap"), adamw),
    "growing cache": (growing(cache_rows=8), adamw),
    "group": (lambda path: st.Embedding(ROWS, DIM, process_group=dist.group.WORLD), adamw),
}


class Act(NamedTuple):
    """Something that is interrupted: what it does, what follows it, and what is done again where that raises."""

    do: Callable[[World], object]
    kinds: tuple[str, ...]
    end: Callable[[World], list[Tensor]] = World.rows
    again: Callable[[World], object] | None = None
    # Whether each tensor counts by itself, as in torch.
    each: bool = False


def saved(world: World) -> None:
    st.save_checkpoint(world.path / "saved", world.model, world.opt, extra={"epoch": 1})


def load(world: World) -> None:
    st.load_checkpoint(world.path / "given", world.model, world.opt)


def loaded(world: World) -> list[Tensor]:
    """Return what a new process would train on with."""
    if not (world.path / "saved" / "manifest.json").exists():
        return []
    fresh = World(world.path, world.name, seed=1, steps=0)
    st.load_checkpoint(world.path / "saved", fresh.model, fresh.opt)
    return fresh.rows() + world.rows()


def set_rows(world: World) -> None:
    with torch.no_grad():
        world.emb.weight[3] = 2.0


def copy_rows(world: World) -> None:
    with torch.no_grad():
        world.emb.weight.copy_(torch.arange(float(ROWS * DIM)).view(ROWS, DIM))


def scatter(world: World) -> None:
    world.emb.table[torch.tensor([1, 2, 3])] = torch.ones(3, DIM)


def reset(world: World) -> None:
    torch.manual_seed(7)
    world.emb.reset_parameters()


def prefetched(world: World) -> None:
    world.emb(world.emb.prefetch(world.ids(3))).square().sum().backward()


def update(world: World) -> None:
    world.emb.vocabulary.update(torch.arange(5) * 7919, torch.ones(5, DIM))


def looped(world: World) -> None:
    for number in st.prefetch(range(3, 7), lambda number: {world.emb: world.ids(number)}):
        world.emb(world.ids(number)).sum()


def loaded_dict(world: World) -> None:
    other = torch.load(world.path / "given.pt")
    world.model.load_state_dict(other[0])


def loaded_state(world: World) -> None:
    other = torch.load(world.path / "given.pt")
    world.opt.load_state_dict(other[1])


EXACT = ("exact", "coupled", "momentum", "int8", "state8", "cache", "rows", "file")
PLAIN = (*EXACT, "lazy", "bag", "features")
ALL = (*PLAIN, "vocabulary", "group")
IN_PLACE = (*EXACT, "lazy", "bag")

ACTS: dict[str, Act] = {
    "weight.detach": Act(lambda world: world.emb.weight.detach() + 0, (*EXACT, "vocabulary")),
    "weight[i]": Act(lambda world: world.emb.weight.detach()[4] + 0, ("exact", "int8", "cache")),
    "state_dict": Act(lambda world: (world.model.state_dict(), world.opt.state_dict()), (*PLAIN, "vocabulary")),
    "gather": Act(lambda world: world.emb.table[torch.arange(ROWS)], EXACT),
    "wait": Act(lambda world: world.emb.table.wait(), ("cache",)),
    "flush": Act(lambda world: world.emb.table.flush(), ("file", "cache")),
    "export": Act(lambda world: world.emb.vocabulary.export(), ("vocabulary",)),
    "prefetch": Act(prefetched, ("exact", "int8", "cache", "file", "vocabulary")),
    "loader": Act(looped, ("exact", "cache")),
    "save": Act(saved, ALL, loaded),
    "load": Act(load, ALL),
    "load_state_dict": Act(loaded_dict, (*PLAIN, "vocabulary"), World.now, each=True),
    "opt.load_state_dict": Act(loaded_state, (*PLAIN, "vocabulary")),
    "weight[i] =": Act(set_rows, IN_PLACE),
    "weight.copy_": Act(copy_rows, IN_PLACE),
    "table[ids] =": Act(scatter, tuple(name for name in PLAIN if name != "int8")),
    "reset_parameters": Act(reset, (*IN_PLACE, "vocabulary")),
    "reset_parameters of features": Act(reset, ("features",), World.now, each=True),
    "to": Act(lambda world: world.model.to(torch.bfloat16).to(torch.float32), ("lazy",)),
    "admit": Act(lambda world: world.emb(torch.arange(20) * 104729), ("vocabulary", "evicting"), World.admitted),
    "forget": Act(lambda world: world.emb.vocabulary.forget(rows_of(1) * 7919), ("vocabulary",), World.admitted),
    "update": Act(update, ("vocabulary",), World.admitted),
    "grow": Act(lambda world: world.emb.table.grow(90), ("growing", "growing file", "growing cache"), World.now),
}


def alike(one: list[Tensor], other: list[Tensor], coarse: bool) -> bool:
    if [part.shape for part in one] != [part.shape for part in other]:
        return False
    # Of stored numbers of 8 bits another rounding.
    bound = 0.2 if coarse else 1e-5
    return all(torch.allclose(*pair, rtol=bound, atol=bound) for pair in zip(one, other, strict=True))


def outcome(found: list[Tensor], before: list[Tensor], after: list[Tensor], coarse: bool, each: bool) -> str:
    if alike(found, before, coarse):
        return "before"
    if alike(found, after, coarse):
        return "after"
    parts = zip(found, before, after, strict=False)
    whole = each and all(alike([own], [old], coarse) or alike([own], [new], coarse) for own, old, new in parts)
    return "each" if whole else "torn"


def result(act: Act, world: World) -> Any:
    """Return what follows, and what it would be after the act was done again where it was refused."""
    try:
        return act.end(world), None
    except SpeedtransferError as error:
        (act.again or act.do)(world)
        return act.end(world), str(error)


def prepare(path: Path, name: str) -> None:
    other = World(path, name, seed=3, steps=5)
    st.save_checkpoint(path / "given", other.model, other.opt)
    if name in PLAIN or name == "vocabulary":
        torch.save((other.model.state_dict(), other.opt.state_dict()), path / "given.pt")


def sweep_of(path: Path, of: str, name: str, points: Any, kind: type[BaseException]) -> Counter[str]:
    act = ACTS[of]
    coarse = name in ("int8", "state8")

    def world(number: int) -> World:
        folder = path / str(number)
        folder.mkdir()
        for given in path.glob("given*"):
            (folder / given.name).symlink_to(given)
        return World(folder, name)

    def attempt(interrupt: Interrupt) -> str:
        tried = world(interrupt.at + 2)
        if not interrupt.during(lambda: act.do(tried)):
            return "not reached"
        try:
            ended, refusal = result(act, tried)
        except Exception as error:
            return f"torn: {type(error).__name__}: {str(error)[:150]}"
        if not tried.is_free():
            return "torn: locked"
        if refusal is not None:
            return "refused" if alike(ended, after, coarse) else f"torn: refused: {refusal}"
        return outcome(ended, before, after, coarse, act.each)

    prepare(path, name)
    before, done, counted = act.end(world(0)), world(1), world(2)
    act.do(done)
    after = act.end(done)
    return sweep(lambda: act.do(counted), attempt, points, kind)


CASES = [(of, name) for of, act in ACTS.items() for name in act.kinds]


# About as many points of each.
SOME = 6
FEW = [
    ("weight.detach", "exact"),
    ("weight.detach", "int8"),
    ("gather", "cache"),
    ("load", "exact"),
    ("load", "vocabulary"),
    ("opt.load_state_dict", "exact"),
    ("weight.copy_", "int8"),
    ("admit", "vocabulary"),
    ("admit", "evicting"),
    ("update", "vocabulary"),
    ("forget", "vocabulary"),
    ("grow", "growing"),
]


@pytest.mark.parametrize(("of", "name"), FEW)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # interrupted as it was opened
def test_some_lines(of: str, name: str, alone: Any, tmp_path: Path) -> None:
    first = FEW.index((of, name))
    found = sweep_of(tmp_path, of, name, lambda lines: lines[first :: len(lines) // SOME + 1], KeyboardInterrupt)
    assert found.total() - found["not reached"] >= SOME // 2


# A file that was opened where nobody has it yet is closed with its object.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize(("of", "name"), CASES)
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # interrupted as it was opened
def test_every_line(of: str, name: str, kind: type[BaseException], alone: Any, tmp_path: Path) -> None:
    found = sweep_of(tmp_path, of, name, lambda lines: lines, kind)
    print(of, name, kind.__name__, dict(found))


# --- SIGTERM at any point -------------------------------------------------------------------------------------------------

STEPS = 12


def train(folder: Path, name: str) -> None:
    """Train from the last checkpoint on, or from the beginning, to the end."""
    world, first = World(folder, name, steps=0), 0
    if (folder / "saved" / "manifest.json").exists():
        first = st.load_checkpoint(folder / "saved", world.model, world.opt)
    for number in range(first, STEPS):
        world.step(number)
        if number % 3 == 2:
            st.save_checkpoint(folder / "saved", world.model, world.opt, extra=number + 1)


class Calls:
    """Counts the points of a call at which Python looks for signals, about; at the n-th, if there is one, comes SIGTERM.

    Not a clock: how far a process gets by a time depends on what else the machine does.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.count = at, 0

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_return"):
            self.count += 1
            if self.count == self.at:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGTERM)

    def during(self, call: Callable[[], object]) -> None:
        try:
            sys.setprofile(self._profile)
            call()
        finally:
            sys.setprofile(None)


# The code of a child that torch refuses to go backward in.
REFUSED = 5


def ended_by_sigterm(call: Callable[[], object], at: int) -> bool:
    """Run a call in a child that gets SIGTERM at a point, and raises SystemExit then; tell whether it came so far."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
            Calls(at).during(call)
            code = 0
        except SystemExit:
            code = 9
        except BaseException as error:
            code = REFUSED if is_refusal_of_torch(error) else 1
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == REFUSED:
        pytest.skip(REFUSAL)
    assert code in (0, 9), "the child failed; its traceback is above"
    return code == 9


def check_sigterm(path: Path, name: str, runs: int) -> None:
    for folder in (path / "first", path / "whole"):
        # The first one also compiles.
        calls = Calls()
        folder.mkdir()
        calls.during(lambda: train(folder, name))  # noqa: B023 - called now
    wanted = loaded(World(path / "whole", name, steps=0))
    draws, ended = random.Random(5), 0
    for run in range(runs):
        folder = path / str(run)
        folder.mkdir()
        # Twice: the second goes on from where the first was ended, if that was not before.
        for _ in range(2):
            at = draws.randrange(1, calls.count)
            ended += ended_by_sigterm(lambda: train(folder, name), at)  # noqa: B023 - called now
        train(folder, name)
        found = loaded(World(folder, name, steps=0))
        assert alike(found[: len(found) // 2], wanted[: len(wanted) // 2], False), f"{name}, run {run}"
    # The first of each run, and some of the others.
    assert ended > runs


@forks
@pytest.mark.parametrize("name", ["exact", "vocabulary"])
def test_sigterm(name: str, tmp_path: Path) -> None:
    check_sigterm(tmp_path, name, 3)


@pytest.mark.slow
@forks
@pytest.mark.parametrize("name", ["exact", "coupled", "cache", "file", "vocabulary"])
def test_sigterm_many(name: str, tmp_path: Path) -> None:
    check_sigterm(tmp_path, name, 30)
