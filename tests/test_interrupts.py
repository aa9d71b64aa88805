"""An interrupt at any line: for each table what ran happened wholly or not at all, or the next use raises an error of ours."""

import copy
import functools
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import elsewhere, take_step
from interrupt import Interrupt, alone, sweep  # noqa: F401 - a fixture
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import RowIndexError, SpeedtransferError

ROWS, DIM = 40, 4
FACTOR = 7919  # of the ids of a vocabulary


class World:
    """Tables and a dense layer that one optimizer trains, after some steps that leave rows idle."""

    def __init__(self, path, name, tables=1, seed=0, steps=None):
        torch.manual_seed(seed)
        self.path, self.name, self.kind = path, name, KINDS[name]
        self.tables = nn.ModuleList([self.kind.make(path) for _ in range(tables)])
        self.emb = self.tables[0]
        # Where each table counts by itself, nothing else is trained that both depend on.
        dense = nn.Linear(DIM, 2) if tables == 1 else nn.Identity()
        self.model = nn.ModuleDict({"tables": self.tables, "dense": dense})
        self.take_over()
        for number in self.kind.before if steps is None else range(steps):
            self.step(number)

    def take_over(self):
        self.opt = self.kind.optimizer(self.kind.groups(self.model))

    def ids(self, number):
        return self.kind.ids(number)

    def step(self, number):
        self.kind.step(self, number)

    def losses(self, number):
        found = [table(self.ids(number + shift)) for shift, table in enumerate(self.tables)]
        return [self.model["dense"](rows).square().sum() for rows in found]

    def backward(self, number):
        losses = self.losses(number)
        for loss in losses:
            loss.backward()
        return sum(losses).detach()

    # What is compared.

    def rows(self):
        """Return some rows of each table after two steps more."""
        for number in (5, 6):
            self.step(number)
        with torch.no_grad():
            return [torch.cat([table(self.ids(n)).view(-1, DIM) for n in (0, 1, 3, 4)]) for table in self.tables]

    def all(self):
        """Return rows, and the state of the optimizer, after two steps more."""
        found = self.rows()
        if self.kind.vocabulary:
            return [*found, *self.emb.vocabulary.export()]
        state = self.opt.state_dict()["state"] if self.name != "group" else {}
        return found + [v.clone() for key in sorted(state) for _, v in sorted(state[key].items()) if torch.is_tensor(v)]

    def now(self):
        with torch.no_grad():
            tables = self.emb if self.name == "features" else [self.emb]
            return [*(table.weight.detach() + 0 for table in tables), self.model["dense"].weight + 0]

    def admitted(self):
        """Return the rows by id after those of all acts were looked up, which must be those that the vocabulary knows."""
        vocabulary = self.emb.vocabulary
        for number in (5, 6):
            self.step(number)
        with torch.no_grad():
            every = torch.unique(torch.cat([torch.arange(ROWS) * FACTOR, torch.arange(20) * 104729]))
            values = self.emb(every)
        ids, rows = vocabulary.export()
        assert len(vocabulary) == len(ids.unique()) == len(ids), "ids that are there twice, or not"
        assert (vocabulary.rows(ids) >= 0).all(), "an id without a row"
        assert len(vocabulary.rows(ids).unique()) == len(ids), "a row of two ids"
        known = torch.isin(every, ids)
        assert torch.equal(values[known], rows[torch.searchsorted(ids, every[known])])
        # Whose ids stay depends on when they came.
        return [values] if vocabulary.evict is None else []

    def loaded(self):
        """Return what a new process would train on with, and this one."""
        if not (self.path / "saved" / "manifest.json").exists():
            return []
        fresh = World(self.path, self.name, seed=1, steps=0)
        st.load_checkpoint(self.path / "saved", fresh.model, fresh.opt)
        return fresh.all() + self.all()

    def is_free(self):
        lock = self.emb._handle.rows.lock
        return elsewhere(lambda: lock.acquire(timeout=0.2) and (lock.release() or True))


# --- kinds: tables, and how they are trained ------------------------------------------------------------------------------


def plainly(world, number):
    world.opt.zero_grad()
    world.backward(number)
    world.opt.step()


def by_closure(world, number):
    def closure():
        world.opt.zero_grad()
        return world.backward(number)

    world.opt.step(closure)


def scaled(world, number):
    # A new one: torch's own takes no second step after an interrupt in the first.
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    world.opt.zero_grad()
    for loss in world.losses(number):
        scaler.scale(loss).backward()
    scaler.step(world.opt)
    scaler.update()


def loaded(world, number):
    """Load the state of the optimizer before the step."""
    if number == 3:
        world.opt.load_state_dict(copy.deepcopy(world.opt.state_dict()))
    plainly(world, number)


def apart(world, number):
    world.opt.zero_grad()
    for shift, table in enumerate(world.tables):
        table[(number + shift) % 2](rows_of(number) % 10).square().sum().backward()
    world.opt.step()


def looked_up(world):
    world.backward(3)
    world.opt.zero_grad()


def rows_of(number):
    return (torch.arange(6) * 3 + 2 * number) % ROWS


def features_of(number):
    return torch.stack([rows_of(number) % 10, rows_of(number + 1) % 30], dim=1)


def embedding(kind=st.Embedding, size=ROWS, **options):
    return lambda path: kind(size, DIM, **options)


def in_file(path):
    return st.Embedding(ROWS, DIM, memory="mmap", path=tempfile.mktemp(dir=path, suffix=".npy"))


def by_id(rows=ROWS, *args, **options):
    return lambda path: st.Embedding(rows, DIM, vocabulary=st.Vocabulary(*args, **options))


def of_a_group(**options):
    return lambda path: st.Embedding(ROWS, DIM, process_group=dist.group.WORLD, **options)


def growing(memory="pageable", cache_rows=0):
    def make(path):
        file = tempfile.mktemp(dir=path, suffix=".npy") if memory == "mmap" else None
        table = st.Table(ROWS, DIM, memory=memory, path=file, max_rows=100, cache_rows=cache_rows).normal_()
        return st.Embedding.from_pretrained(table, freeze=False)

    return make


def optimizer(kind, **options):
    return functools.partial(kind, lr=0.05, **options)


USES = (
    lambda world: None,
    lambda world: world.opt.state_dict(),
    lambda world: world.tables.state_dict(),
    lambda world: [table.weight.sum() for table in world.tables],
)


class Kind(NamedTuple):
    """Tables, and how they are trained.

    `before`: the steps before what is interrupted. `others`: what a step may have come to besides nothing and all of it.
    `uses`: what the next use may be. `like`: a kind whose rows those may be too, each for itself: with which none are evicted.
    `bound`: how far rows may be from others.
    """

    make: Callable[[Path], nn.Module] = embedding()
    optimizer: Any = optimizer(torch.optim.AdamW, weight_decay=0.1)
    ids: Callable[[int], Any] = rows_of
    step: Callable[[World, int], None] = plainly
    groups: Callable[[nn.Module], Any] = nn.Module.parameters
    before: tuple[int, ...] = (0, 1, 2)
    others: tuple[Callable[[World], object], ...] = ()
    like: str = ""
    uses: tuple[Callable[[World], object], ...] = USES
    bound: float = 1e-5

    @property
    def vocabulary(self):
        return looked_up in self.others


ADAM, SGD = torch.optim.Adam, torch.optim.SGD
IDS = {"ids": lambda number: rows_of(number) * FACTOR, "others": (looked_up,)}
# The last of these ids come in the step that is interrupted.
NEW = {**IDS, "ids": lambda number: torch.arange(6) * FACTOR + min((number + 1) // 2, 2)}
KINDS = {
    "exact": Kind(),
    "coupled": Kind(optimizer=optimizer(ADAM, weight_decay=0.1)),
    "momentum": Kind(optimizer=optimizer(SGD, momentum=0.9)),
    "lazy": Kind(embedding(idle="lazy")),
    "int8": Kind(embedding(storage_dtype=torch.int8), bound=0.2),
    "state8": Kind(embedding(state_dtype=torch.uint8), bound=0.2),
    "cache": Kind(embedding(cache_rows=8)),
    "file": Kind(in_file),
    "bag": Kind(embedding(st.EmbeddingBag), ids=lambda number: rows_of(number).view(2, 3)),
    "features": Kind(embedding(st.MultiEmbedding, [10, 30]), ids=features_of),
    "vocabulary": Kind(by_id(max_capacity=200), **IDS),
    "group": Kind(of_a_group(), uses=USES[:1]),
    "first": Kind(before=()),
    "adagrad": Kind(optimizer=optimizer(torch.optim.Adagrad)),
    "sparse": Kind(
        embedding(sparse=True), optimizer(torch.optim.SparseAdam), groups=lambda m: m["tables"].parameters()
    ),
    "closure": Kind(step=by_closure),
    "scaler": Kind(step=scaled),
    "state8 lazy": Kind(embedding(state_dtype=torch.uint8, idle="lazy")),
    "shared": Kind(of_a_group(memory="shared"), uses=USES[:1]),
    "apart": Kind(embedding(st.MultiEmbedding, [10, 30]), ids=features_of, step=apart),
    "full": Kind(by_id(14, max_capacity=14, evict="lru"), **NEW, like="growing ids"),
    "growing ids": Kind(by_id(12, max_capacity=40), **NEW),
    "loaded": Kind(step=loaded),
}
STEPPING = tuple(name for name, kind in KINDS.items() if kind.bound < 0.1)
KINDS["evicting"] = Kind(by_id(20, 20, max_capacity=32, evict="lru"), **IDS)
KINDS |= {
    "growing": Kind(growing()),
    "growing file": Kind(growing("mmap")),
    "growing cache": Kind(growing(cache_rows=8)),
}

# --- acts: what is interrupted --------------------------------------------------------------------------------------------


class Act(NamedTuple):
    """Code that is interrupted, the kinds that it is done to, and what follows it.

    `each`: whether each tensor counts by itself, as in torch. `others`: what it may have come to besides nothing and all.
    """

    code: str
    kinds: tuple[str, ...]
    end: Callable[[World], list[Tensor]] = World.all
    each: bool = False
    others: tuple[Callable[[World], object], ...] = ()
    tables: int = 1

    def do(self, world):
        names = {"world": world, "emb": world.emb, "model": world.model, "opt": world.opt, "st": st, "torch": torch}
        names |= {"path": world.path, "ROWS": ROWS, "DIM": DIM, "FACTOR": FACTOR, "rows_of": rows_of}
        if "given[" in self.code:
            names["given"] = torch.load(world.path / "given.pt")
        exec(self.code, names)

    def ends(self, path, name):
        """Return what may be seen at the end: without it, after it, or after others."""
        found, kind = [], KINDS[name]
        for part in (lambda world: None, self.do, *self.others, *(kind.others if self.tables == 2 else ())):
            part(world := World(path, name, self.tables))
            found.append(self.end(world))
        return found + (self.ends(path, kind.like) if kind.like else [])


def stepped(world):
    world.opt.step()
    return world.rows()


EXACT = ("exact", "coupled", "momentum", "int8", "state8", "cache", "file")
IN_PLACE = (*EXACT, "lazy", "bag")
PLAIN = (*IN_PLACE, "features")
SAVED = ("exact", "state8", "cache", "features", "vocabulary", "group")
IN_PAIRS = {"each": True, "tables": 2}
ACTS = {
    "step": Act("world.step(3)", STEPPING, World.rows, **IN_PAIRS),
    "another optimizer": Act(
        "world.take_over(); world.step(3)", ("exact",), World.rows, others=(World.take_over,), **IN_PAIRS
    ),
    "two backwards": Act(
        "world.backward(3); world.backward(10)", ("exact",), stepped, others=(lambda w: w.backward(3),), **IN_PAIRS
    ),
    "weight.detach": Act("emb.weight.detach() + 0", (*EXACT, "vocabulary")),
    "state_dict": Act("model.state_dict(), opt.state_dict()", (*PLAIN, "vocabulary")),
    "gather": Act("emb.table[torch.arange(ROWS)]", EXACT),
    "flush": Act("emb.table.flush()", ("file", "cache")),
    "prefetch": Act(
        "emb(emb.prefetch(world.ids(3))).square().sum().backward()", ("exact", "int8", "cache", "file", "vocabulary")
    ),
    "save": Act("st.save_checkpoint(path / 'saved', model, opt, extra={'epoch': 1})", SAVED, World.loaded),
    "load": Act("st.load_checkpoint(path / 'given', model, opt)", SAVED),
    "load_state_dict": Act("model.load_state_dict(given[0])", (*PLAIN, "vocabulary"), World.now, each=True),
    "opt.load_state_dict": Act("opt.load_state_dict(given[1])", (*PLAIN, "vocabulary")),
    "weight[i] =": Act("with torch.no_grad(): emb.weight[3] = 2.0", IN_PLACE),
    "weight.copy_": Act(
        "with torch.no_grad(): emb.weight.copy_(torch.arange(float(ROWS * DIM)).view(ROWS, DIM))", IN_PLACE
    ),
    "table[ids] =": Act(
        "emb.table[torch.tensor([1, 2, 3])] = torch.ones(3, DIM)", tuple(name for name in PLAIN if name != "int8")
    ),
    "reset_parameters": Act("torch.manual_seed(7); emb.reset_parameters()", (*IN_PLACE, "vocabulary")),
    "to": Act("model.to(torch.bfloat16)", ("lazy",), World.now, each=True),
    "admit": Act("emb(torch.arange(20) * 104729)", ("vocabulary", "evicting"), World.admitted),
    "forget": Act("emb.vocabulary.forget(rows_of(1) * FACTOR)", ("vocabulary",), World.admitted),
    "update": Act(
        "emb.vocabulary.update(torch.arange(5) * FACTOR, torch.ones(5, DIM))", ("vocabulary",), World.admitted
    ),
    "grow": Act("emb.table.grow(90)", ("growing", "growing file", "growing cache"), World.now),
}

# --- sweeps ---------------------------------------------------------------------------------------------------------------


def is_close(found, end, bound):
    """Tell of each value whether it is that of the end, whose dtype may be another."""
    return torch.isclose(found, end.to(found.dtype), rtol=bound, atol=bound) & (found.dtype == end.dtype)


def is_one_of(found, ends, act, kind):
    """Tell whether what is found is one of the ends, each tensor for itself if the act says so."""
    ends = [end for end in ends if [part.shape for part in end] == [part.shape for part in found]]
    if not found or not ends:
        return bool(ends)
    close = [[is_close(*pair, kind.bound) for pair in zip(found, end, strict=True)] for end in ends]
    if kind.like:
        return all(torch.stack([part.all(1) for part in parts]).any(0).all() for parts in zip(*close, strict=True))
    alike = torch.tensor([[bool(part.all()) for part in parts] for parts in close])
    return bool(alike.any(0).all() if act.each else alike.all(1).any())


def sweep_of(path, of, name, points, *how):
    act, kind = ACTS[of], KINDS[name]
    other = World(path, name, seed=3, steps=5)
    if "load" in of:
        st.save_checkpoint(path / "given", other.model, other.opt)
    if "load_state_dict" in of:
        torch.save((other.model.state_dict(), other.opt.state_dict()), path / "given.pt")

    def world(number):
        folder = path / str(number)
        folder.mkdir(exist_ok=True)
        for each in path.glob("given*"):
            if not (folder / each.name).exists():
                (folder / each.name).symlink_to(each)
        return World(folder, name, act.tables)

    ends = act.ends(world(0).path, name)

    def attempt(interrupt):
        tried = world(interrupt.at + 1)
        if not interrupt.during(lambda: act.do(tried)):
            return "not reached"
        try:
            if act.tables == 2:
                kind.uses[interrupt.at % len(kind.uses)](tried)
            ended = act.end(tried)
        except SpeedtransferError as error:
            if act.tables == 2:
                return f"refused: {error}" if "load" in str(error) else f"torn: refused: {error}"
            act.do(tried)
            return "refused" if is_one_of(act.end(tried), ends[1:2], act, kind) else f"torn: refused: {error}"
        if not tried.is_free():
            return "torn: locked"
        return "whole" if is_one_of(ended, ends, act, kind) else "torn"

    counted = World(world(0).path, name, act.tables)
    return sweep(lambda: act.do(counted), attempt, points, *how)


CASES = [(of, name) for of, act in ACTS.items() for name in act.kinds]
# About as many points of each.
SOME = 2
FEW = [case for case in CASES if ACTS[case[0]].tables == 2]
SOME_KINDS = {"weight.detach": ["exact", "int8"], "gather": ["cache"], "load": ["exact", "vocabulary"]}
SOME_KINDS |= {"opt.load_state_dict": ["exact"], "weight.copy_": ["int8"], "admit": ["vocabulary", "evicting"]}
SOME_KINDS |= {"update": ["vocabulary"], "forget": ["vocabulary"], "grow": ["growing"]}
FEW += [(of, name) for of, names in SOME_KINDS.items() for name in names]
# Kinds whose steps have torn, functions, and how many points of these come to one that is tried.
WITHIN = [
    ("first", "add_together", 9),
    ("first", "add", 5),
    ("first", "enable_catch_up", 3),
    ("apart", "lend", 11),
    ("apart", "take_back", 11),
    ("loaded", "put_rows", 1),
    ("loaded", "__setstate__", 8),
    ("state8 lazy", "_leave", 6),
    ("group", "exchange_gradients", 2),
    ("full", "release", 1),
    ("full", "_begin", 1),
    ("growing ids", "follow", 1),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # interrupted as it was opened
    # A file that was opened where nobody has it yet is closed with its object.
    pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize(("of", "name"), FEW)
def test_some_lines(of, name, alone, tmp_path):
    first = FEW.index((of, name))
    found = sweep_of(tmp_path, of, name, lambda points: points[first % 7 :: len(points) // SOME + 1])
    assert found.total() - found["not reached"] >= SOME // 2


@pytest.mark.parametrize(("name", "within", "every"), WITHIN)
def test_functions_that_have_torn(name, within, every, alone, tmp_path):
    found = sweep_of(tmp_path, "step", name, lambda points: points[::every], KeyboardInterrupt, within)
    assert found["whole"] > 3


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_lack_of_memory_within_the_optimizer(error, alone, tmp_path):
    # AdamW of torch 2.6 is not yet an Adam.
    within = "_single_tensor_adam" if issubclass(torch.optim.AdamW, ADAM) else "_single_tensor_adamw"
    assert sweep_of(tmp_path, "step", "exact", lambda points: points[::14], error, within)["whole"] > 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "every"), [(KeyboardInterrupt, 5), (MemoryError, 15)])
@pytest.mark.parametrize(("of", "name"), CASES)
def test_many_lines(of, name, kind, every, alone, tmp_path):
    # Kinds take other lines than those before: what an act does with most of them is met at every line by some.
    first = CASES.index((of, name)) % every
    sweep_of(tmp_path, of, name, lambda points: points[first::every], kind)


def test_a_step_of_rows_that_a_device_did_not_find_is_not_made(monkeypatch):
    """A device tells of a lookup later, once, before it writes."""
    emb = st.Embedding(9, 4, idle="lazy")
    opt, before = torch.optim.AdamW(emb.parameters(), lr=0.1), emb.table.torch().clone()
    engine = type(emb.table._engine)
    told, scatter = [], engine.scatter

    def late(self, *args):
        if not told:
            told.append(True)
            raise RowIndexError("index[3] of an earlier gather")
        scatter(self, *args)

    emb(torch.tensor([1, 2])).sum().backward()
    monkeypatch.setattr(engine, "scatter", late)
    with pytest.raises(RowIndexError):
        opt.step()
    assert torch.equal(emb.table.torch(), before)
    opt.zero_grad()
    take_step(opt, emb(torch.tensor([3])).sum())
    assert (emb.table.torch() != before).any(1).nonzero().flatten().tolist() == [3]


def test_a_cache_that_is_entered_as_an_interrupt_comes_is_free():
    """While its traceback still keeps the frames: the write is made again then."""
    slots = st.Table(9, 4, memory="pageable", cache_rows=3)._engine.slots

    def enters(frame, event, arg):
        code = frame.f_code
        if event == "return" and code.co_name in ("__enter__", "turn") and not code.co_flags & inspect.CO_GENERATOR:
            raise KeyboardInterrupt
        return enters

    before = sys.gettrace()
    try:
        sys.settrace(enters)
        slots.turn().__enter__()
    except KeyboardInterrupt:
        sys.settrace(before)
        assert elsewhere(lambda: slots._lock.acquire(timeout=0.2) and (slots._lock.release() or True))
    else:
        raise AssertionError("not reached")
    finally:
        sys.settrace(before)
