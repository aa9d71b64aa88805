"""Any sequence of calls on a module whose rows are read ahead gives, to the bit, what it gives on a twin without.

Reads are held back before, in the middle of and after what they read, so that writes come in between.
"""

import copy
import functools
import pickle
import random
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import assert_same_bits
from hypothesis import assume
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import run_machine

import speedtransfer as st
from speedtransfer.errors import InvalidValueError, SpeedtransferError
from speedtransfer.nn import ahead
from speedtransfer.optim.plane_view import PlaneView
from speedtransfer.rows import Rows
from speedtransfer.tables import NOTHING

ROWS, DIM = 12, 4
LIMIT_S = 60  # that nothing here ever takes

# --- reads that are held back -----------------------------------------------------------------------------------------

_here = threading.local()  # of a thread that reads ahead: its gate
_read, _fetch = ahead._read, Rows.fetch


class Gate:
    """Holds one read back at a `moment`, until it is opened."""

    def __init__(self, ids, moment):
        self.ids, self.moment = ids, moment
        self.reached, self.opened = threading.Event(), threading.Event()

    def read(self, *work):
        """Take the place of `_read` in the thread."""
        _here.gate = self
        try:
            return _read(*work)
        finally:
            _here.gate = None
            self.reached.set()

    def hold(self, moment):
        if moment == self.moment:
            self.reached.set()
            assert self.opened.wait(LIMIT_S)


def held_fetch(rows, ids, planes=None, known=NOTHING):
    gate = getattr(_here, "gate", None)
    if gate is None:
        return _fetch(rows, ids, planes, known)
    gate.hold("before")
    middle = len(ids) // 2 if gate.moment == "middle" else 0
    first = _fetch(rows, ids[:middle], planes)
    gate.hold("middle")
    rest = _fetch(rows, ids[middle:], planes)
    gate.hold("after")
    return {name: torch.cat([first[name], part]) for name, part in rest.items()} if middle else rest


KINDS = ("SGD", "AdamW", "Adamax", "Adagrad", "SparseAdam")
OPTIMIZERS = {name: functools.partial(getattr(torch.optim, name), lr=0.1) for name in KINDS}
OPTIMIZERS["momentum"] = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PRECISIONS = [(None, None), (None, torch.bfloat16), (torch.bfloat16, None), (torch.int8, torch.uint8)]
PRECISIONS += [(torch.float8_e4m3fn, torch.uint8), ("split24", torch.uint8)]
CONFIGS = some.fixed_dictionaries(
    {
        "memory": some.sampled_from(["pageable", "mmap"]),
        "precision": some.sampled_from([PRECISIONS[0], *PRECISIONS]),
        "idle": some.sampled_from(["lazy", "exact"]),
        "optimizer": some.sampled_from(sorted(OPTIMIZERS)),
        "padding_idx": some.sampled_from([None, None, 3]),
        "max_norm": some.sampled_from([None, None, 1.0]),
        "layout": some.sampled_from(["planes", "rows"]),
        # How many rows, and whether they are the same for good.
        "cache": some.sampled_from([None, None, (2, False), (7, False), (5, True)]),
        "kind": some.sampled_from([st.Embedding, st.Embedding, st.EmbeddingBag]),
    }
)
IDS = some.lists(some.integers(0, ROWS - 1), max_size=6).map(lambda ids: torch.tensor(ids, dtype=torch.int64)[:, None])
ROW = some.integers(0, ROWS - 1)
MOMENTS, PLACES = some.sampled_from(["free", "before", "middle", "after"]), some.sampled_from([0, 0, -1, 1, 2])


@dataclass
class Side:
    """A module with its optimizer, losses that are not yet backward, and what was saved of both."""

    emb: Any
    optimizer: Any
    losses: list[Any]
    saved: Any = None


# --- writes -----------------------------------------------------------------------------------------------------------

# Of encoded rows `data` is a copy, and so is an array of state of 8 bits.
WRITES = """
emb.table.scatter([row], torch.full((1, DIM), -1.0).to(emb.table.dtype))
emb.weight[row] *= 0.5
emb.weight.data[row].fill_(0.25) if emb._handle.rows.plain else None
emb.table.torch()[row].fill_(1)
emb.table.numpy()[row] = 1
if emb._handle.aliased: emb.weight.detach().numpy()[row] = 2
[values[row].mul_(0.5) for values in state if type(values) is PlaneView]
[values.numpy().__setitem__(row, 0.5) for values in state if getattr(values, "has_memory", 0) and values.dtype.itemsize > 2]
emb.table.fill_(0.5)
torch.manual_seed(row); emb.reset_parameters()
""".strip().splitlines()


@torch.no_grad()
def written(side, statement, row):
    state = list(side.optimizer.state.get(side.emb.weight, {}).values())
    exec(statement, {"emb": side.emb, "state": state, "row": row, "DIM": DIM, "torch": torch, "PlaneView": PlaneView})


class TicketMachine(RuleBasedStateMachine):
    """Two sides: one by ids alone, the other with tickets."""

    @initialize(config=CONFIGS, seed=some.integers(0, 99))
    def start(self, config, seed):
        self.folder, self.sides, self.config = tempfile.TemporaryDirectory(), [], config
        self.waiting = []
        self.gates = []
        sparse = config["optimizer"] == "SparseAdam"
        options = {name: config[name] for name in ("memory", "idle", "padding_idx", "max_norm", "layout")}
        options |= dict(zip(("storage_dtype", "state_dtype"), config["precision"], strict=True))
        if config["cache"] is not None:
            rows, for_good = config["cache"]
            options |= {"cache_rows": rows, "cache_counts": torch.arange(ROWS) % 5 if for_good else None}
        for name in "ab":
            path = Path(self.folder.name, f"{name}.npy") if config["memory"] == "mmap" else None
            torch.manual_seed(seed)
            try:
                emb = config["kind"](ROWS, DIM, sparse=sparse, device="cpu", path=path, **options)
            except SpeedtransferError:
                assume(False)
            self.sides.append(Side(emb, OPTIMIZERS[config["optimizer"]](emb.parameters()), []))

    def teardown(self):
        if not hasattr(self, "sides"):
            return
        for gate in self.gates:
            gate.opened.set()
        if len(self.sides) == 2:
            assert torch.equal(*(side.emb.weight.detach().clone().nan_to_num() for side in self.sides))
        self.sides.clear()
        self.waiting.clear()
        self.folder.cleanup()

    def both(self, call, *others):
        """Do the same on both sides, or `others` on the second; if it raises, it must do so on both."""
        results = []
        for side, done in zip(self.sides, (call, *(others or (call,))), strict=True):
            try:
                results.append(done(side))
            except SpeedtransferError as error:
                results.append(type(error))
        if isinstance(results[0], torch.Tensor) and isinstance(results[1], torch.Tensor):
            assert_same_bits(*results)
        else:
            assert [value for value in results if isinstance(value, type)] in ([], [results[0]] * 2)
        return results[0]

    @invariant()
    def planes_are_the_same_to_the_bit(self):
        if len(getattr(self, "sides", ())) == 2:
            ours, theirs = (side.emb.table for side in self.sides)
            assert ours.planes == theirs.planes
            for name in ours.planes:
                # In a cache there are newer rows than in a plane, which stay there.
                every = [table.gather(range(ROWS), name, catch_up=False) for table in (ours, theirs)]
                assert_same_bits(*every)

    @rule(ids=IDS, moment=MOMENTS, training=some.booleans())
    def ask(self, ids, moment, training):
        if len(self.waiting) == 6:
            self.drop(0)
        gate = Gate(ids, moment)
        with mock.patch.object(ahead, "_read", gate.read), torch.set_grad_enabled(training):
            self.waiting.append((ids, self.sides[1].emb.prefetch(ids)))
        self.gates.append(gate)
        if sum(one.moment != "free" for one in self.gates[:-1]) < ahead.THREADS:
            # Held where it should be, or done: then what comes next comes after it.
            assert gate.reached.wait(LIMIT_S)

    @rule(place=PLACES)
    def drop(self, place):
        if self.waiting:
            self.let_go(self.waiting.pop(place % len(self.waiting))[0])

    @rule(count=some.integers(1, 3))
    def let_some_go(self, count):
        for gate in self.gates[:count]:
            gate.opened.set()
        del self.gates[:count]

    def let_go(self, ids):
        """Open the gates of reads of `ids`, and of those before them, which the threads have begun with."""
        last = max((place for place, gate in enumerate(self.gates) if torch.equal(gate.ids, ids)), default=-1)
        self.let_some_go(last + 1)

    def look_up(self, ids, ticket, training):
        """Look up on both sides; with `training` the losses are kept."""
        self.let_go(ids)
        if ticket is not None and ticket._handle is not self.sides[1].emb._handle:
            with pytest.raises(InvalidValueError, match="made for"):
                self.sides[1].emb(ticket)
            ticket = None

        def found(side, asked):
            with torch.set_grad_enabled(training):
                rows = side.emb(asked)
            if training:
                side.losses.append((rows**2).sum())
            return rows.detach().clone()

        self.both(lambda side: found(side, ids), lambda side: found(side, ids if ticket is None else ticket))

    @rule(batches=some.lists(some.tuples(IDS, MOMENTS), min_size=1, max_size=4), depth=some.integers(0, 3))
    def loop(self, batches, depth):
        for ids, moment in batches:
            self.ask(ids, moment, True)
            if len(self.waiting) > depth:
                self.use(0, True, True)
                self.step_and_begin_anew()

    @rule(place=PLACES, by_ids=some.booleans(), training=some.booleans())
    def use(self, place, by_ids, training):
        if self.waiting:
            ids, ticket = self.waiting.pop(place % len(self.waiting))
            self.look_up(ids, None if by_ids else ticket, training)

    @rule(place=PLACES, training=some.booleans())
    def use_and_keep(self, place, training):
        """A ticket that has served gets another lookup."""
        if self.waiting:
            self.look_up(*self.waiting[place % len(self.waiting)], training)

    @rule(ids=IDS, training=some.booleans())
    def ids_nobody_asked_for(self, ids, training):
        self.look_up(ids, None, training)

    def backward(self):
        def backwards(side):
            losses, side.losses = side.losses, []
            for loss in losses:
                loss.backward()

        self.both(backwards)

    @rule()
    def step(self):
        self.backward()
        self.both(lambda side: side.optimizer.step())

    @rule()
    def step_and_begin_anew(self):
        self.step()
        self.both(lambda side: side.optimizer.zero_grad())

    # --- rows, state and whole modules change while rows are being read

    @rule(write=some.sampled_from([*WRITES[:2], *WRITES]), row=ROW)
    def write(self, write, row):
        self.both(lambda side: written(side, write, row))

    @rule(lr=some.sampled_from([0.01, 0.3]))
    def change_learning_rate(self, lr):
        for side in self.sides:
            side.optimizer.param_groups[0]["lr"] = lr

    @rule(what=some.sampled_from(["state dict", "module alone", "optimizer", "checkpoint", "copy", "pickle"]))
    def put_in_place(self, what):
        """Load what was taken before, or take it; or go on with something new in the place of the old."""
        if what in ("copy", "pickle"):
            # The copies know nothing of losses that the others have looked up.
            self.step_and_begin_anew()
        before = random.getstate()
        for number, side in enumerate(self.sides):
            self._put_in_place(side, what, Path(self.folder.name, f"checkpoint{number}"))
        # Loading a checkpoint sets it; what is drawn for this test must not repeat itself.
        random.setstate(before)

    def _put_in_place(self, side, what, path):
        both = side.emb, side.optimizer
        if what in ("copy", "pickle"):
            side.emb, side.optimizer = copy.deepcopy(both) if what == "copy" else pickle.loads(pickle.dumps(both))
        elif what == "checkpoint":
            (st.load_checkpoint if path.exists() else st.save_checkpoint)(path, *both, progress=False)
        elif what == "optimizer":
            # Its state goes with it, before there is another.
            side.optimizer = both = None
            side.optimizer = OPTIMIZERS[self.config["optimizer"]](side.emb.parameters())
        elif side.saved is None:
            side.saved = copy.deepcopy((side.emb.state_dict(), side.optimizer.state_dict()))
        else:
            side.emb.load_state_dict(side.saved[0])
            if what == "state dict":
                side.optimizer.load_state_dict(copy.deepcopy(side.saved[1]))
            side.saved = None


def run_held(machine, options):
    with mock.patch.object(Rows, "fetch", held_fetch):
        run_machine(machine, stateful_step_count=20, **options)
