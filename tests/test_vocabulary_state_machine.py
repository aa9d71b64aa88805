"""Any sequence of calls on a module with a vocabulary gives what a table with a row for every id gives, whose rows start anew.

The oracle is a plain module. Each id has two rows there: one for the time that it is known, which is set to its initial
values, without state, whenever the id is admitted; one that it reads while it is unknown, which is set back after every step.
Which ids are admitted is told beforehand; which are evicted is observed, and checked against the rule.
"""

import copy
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import COPIES, assert_same_bits
from hypothesis import HealthCheck
from hypothesis import strategies as some
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machines import run_machine, short_and_long

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidValueError
from speedtransfer.optim import find_handle
from speedtransfer.rows import LAST_STEP

DIM, PADDING, CAPACITY = 3, 5, 6
# Numbers of rows, reserved ones too; the ends; equal to another in the lower 32 bits; of uint64 from 2**63 on; padding.
IDS = [0, 1, 2, 3, 6, -1, 2**63 - 1, -(2**63), 2**32, 2**32 + 1, -(2**32), 2**63 - 2**32, 10**12, PADDING]
# Of the plain table: the row that unknown ids may share, that of padding, and two for each id.
SHARED, PADDED, KNOWN, UNKNOWN = 0, 1, 2, 2 + len(IDS)

evicted = []


def archive(ids, rows):
    evicted.append((ids, rows))


def even_ones(ids, last_use, counts):
    return ids % 2 == 0


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
}
CONFIGS = some.fixed_dictionaries(
    {
        "kind": some.sampled_from(["Embedding", "Embedding", "sum", "mean", "max"]),
        "optimizer": some.sampled_from(sorted(OPTIMIZERS)),
        "admit": some.sampled_from(["always", "always", 2]),
        "evict": some.sampled_from(["lru", "lru", "lfu", 2, even_ones, None]),
        "unseen": some.sampled_from(["initial", "zeros", "row"]),
        "max_capacity": some.sampled_from([None, 9]),
        "padding_idx": some.sampled_from([None, PADDING]),
        "idle": some.sampled_from(["lazy", "exact"]),
        "max_norm": some.sampled_from([None, None, 1.0]),
        "scale_grad_by_freq": some.booleans(),
        "table": some.sampled_from([{}, {}, {"layout": "rows"}, {"cache_rows": 4}, {"memory": "mmap"}]),
        "storage_dtype": some.sampled_from([None, None, None, torch.bfloat16]),
        "hooked": some.sampled_from([False, False, True]),
    }
)
BATCH = some.lists(some.sampled_from(range(len(IDS))), max_size=3).map(
    lambda at: [[one, one] if one % 3 == 0 else [one, at[0]] for one in at]
)
FORMS = some.sampled_from(["tensor", "list", "uint64", "ticket", "earlier ticket", "earlier ticket"])


@dataclass
class Lookup:
    """A lookup whose gradient has not come: the losses of both sides, and the ids that must keep their rows."""

    losses: tuple[torch.Tensor, torch.Tensor]
    ids: set[int]


class VocabularyMachine(RuleBasedStateMachine):
    """A module with a vocabulary beside a plain one."""

    @initialize(config=CONFIGS, seed=some.integers(0, 99))
    def start(self, config, seed):
        self.folder, self.config = tempfile.TemporaryDirectory(), config
        self.files, self.asked = 0, list[tuple[list[list[int]], Any]]()
        self.make(CAPACITY, seed)
        # Idle rows that have missed steps read as what fewer bits cannot hold.
        stored = None if config["idle"] == "exact" else config["storage_dtype"]
        alike = {"padding_idx": config["padding_idx"], "storage_dtype": stored}
        self.follower = st.Embedding(20, DIM, vocabulary=st.Vocabulary(unseen=config["unseen"], seed=5), **alike)
        self.dumped = 0
        self.set_plain(range(2 + 2 * len(IDS)), torch.zeros(2 + 2 * len(IDS), DIM))
        self.known = set()
        # By id: sightings while it was unknown, and uses: the clock of the last one, and how many since it got its row.
        self.seen, self.last_use, self.uses = dict[int, int](), dict[int, int](), dict[int, int]()
        self.held = []
        # Ids of the pending gradient; whether it is zero.
        self.pending, self.zeroed = set[int](), False
        self.clock = 0
        evicted.clear()
        self.begin_to_train()
        self.forget_unknown()

    def make(self, capacity, seed):
        config, self.files = self.config, self.files + 1
        names = ("admit", "evict", "unseen", "max_capacity")
        self.vocabulary = st.Vocabulary(
            capacity, **{n: config[n] for n in names}, initial=("uniform", -1, 1), seed=seed, on_evict=archive
        )
        about = {n: config[n] for n in ("idle", "max_norm", "scale_grad_by_freq", "storage_dtype")}
        kind = st.EmbeddingBag if config["kind"] != "Embedding" else st.Embedding
        about |= {"mode": config["kind"]} if kind is st.EmbeddingBag else {}
        # What torch does with it in bags depends on the numbers of the rows.
        about["scale_grad_by_freq"] &= kind is st.Embedding
        about["sparse"] = config["optimizer"] == "SparseAdam"
        own = dict(config["table"])
        if "memory" in own:
            own["path"] = Path(self.folder.name, f"table{self.files}.safetensors")
        padded = None if config["padding_idx"] is None else PADDED
        self.ours = kind(9, DIM, padding_idx=config["padding_idx"], vocabulary=self.vocabulary, **about, **own)
        self.plain = kind(2 + 2 * len(IDS), DIM, padding_idx=padded, **about)

    def begin_to_train(self):
        make = OPTIMIZERS[self.config["optimizer"]]
        self.optimizers = make(self.ours.parameters()), make(self.plain.parameters())
        if self.config["hooked"]:
            for module in (self.ours, self.plain):
                module.weight.register_hook(lambda grad: None)

    def teardown(self):
        if hasattr(self, "folder"):
            self.held = []
            self.folder.cleanup()

    # --- the oracle ---------------------------------------------------------------------------------------------------

    @property
    def padding(self):
        return set() if self.config["padding_idx"] is None else {PADDING}

    def set_plain(self, rows, values):
        at = torch.as_tensor(list(rows), dtype=torch.int64)
        find_handle(self.plain.weight).rows.reset(at, values)
        # That of a copied optimizer is not in the table before its first step.
        for state in (
            self.optimizers[1].state.get(self.plain.weight, {}).values() if hasattr(self, "optimizers") else ()
        ):
            if type(state) is torch.Tensor and state.dim():
                state[at] = 0

    def first_values(self, ids):
        return self.vocabulary.initial_values(np.array(ids, dtype=np.int64), DIM, torch.float32)

    def forget_unknown(self):
        """Set what unknown ids read back."""
        values = self.first_values(IDS) if self.config["unseen"] == "initial" else torch.zeros(len(IDS), DIM)
        if self.config["unseen"] != "row":
            self.set_plain(range(UNKNOWN, UNKNOWN + len(IDS)), values)

    def row(self, id):
        if id in self.padding:
            return PADDED
        if id in self.known:
            return KNOWN + IDS.index(id)
        return SHARED if self.config["unseen"] == "row" else UNKNOWN + IDS.index(id)

    def begin(self, ids, values=None):
        if ids:
            self.set_plain([KNOWN + IDS.index(id) for id in ids], self.first_values(ids) if values is None else values)
        self.known |= set(ids)
        for id in ids:
            self.last_use[id], self.uses[id] = self.clock, 0

    def kept(self):
        """Return the ids whose rows must not be taken."""
        return set().union(*(one.ids for one in self.held)) | (set() if self.zeroed else self.pending)

    def check_evicted(self, kept, new):
        """Check those that were evicted, to make room for `new` ids (None: by a step), and forget them."""
        gone = [int(id) for ids, _ in evicted for id in ids]
        for ids, rows in evicted:
            at = torch.tensor([KNOWN + IDS.index(int(id)) for id in ids])
            values = find_handle(self.plain.weight).rows.read(at)["weight"]
            self.compare(rows, values)
        evicted.clear()
        assert len(set(gone)) == len(gone)
        assert set(gone) <= self.known - kept
        stay, rule = self.known - kept - set(gone), self.config["evict"]
        assert rule is not None or not gone
        if rule == "lru" and gone and stay:
            assert max(self.last_use[id] for id in gone) <= min(self.last_use[id] for id in stay)
        if rule == "lfu" and gone and stay:
            assert max(self.uses[id] for id in gone) <= min(self.uses[id] for id in stay)
        if rule == 2:
            assert all(self.clock - self.last_use[id] > 2 for id in gone)
        if rule is even_ones:
            assert all(id % 2 == 0 for id in gone)
        if new is not None:
            most = self.config["max_capacity"] or CAPACITY
            assert len(gone) == max(len(self.known) + new - most, 0)
        self.known -= set(gone)

    def may_go(self, kept):
        ids, rule = self.known - kept, self.config["evict"]
        if rule is even_ones:
            return {id for id in ids if id % 2 == 0}
        if rule == 2:
            return {id for id in ids if self.clock - self.last_use[id] > 2}
        return set() if rule is None else ids

    def admitted(self, ids):
        """Return the ids that a lookup in training admits, of those that are unknown."""
        new = [id for id in dict.fromkeys(ids) if id not in self.known | self.padding]
        for id in new:
            self.seen[id] = self.seen.get(id, 0) + ids.count(id)
        return [id for id in new if self.config["admit"] == "always" or self.seen[id] >= self.config["admit"]]

    # --- comparing ----------------------------------------------------------------------------------------------------

    def compare(self, ours, plain):
        if self.config["storage_dtype"] is None:
            assert_same_bits(ours.detach(), plain.detach())
        else:
            # Rounded at random, by row.
            torch.testing.assert_close(ours.detach(), plain.detach(), rtol=0.1, atol=0.3)

    @invariant()
    def known_ids_have_the_rows_and_the_state_of_the_oracle(self):
        if not hasattr(self, "known"):
            return
        assert set(self.vocabulary.ids().tolist()) == self.known
        assert self.vocabulary.stats().size == len(self.vocabulary) == len(self.known)
        assert self.vocabulary.clock == self.clock
        ids = sorted(self.known)
        at = self.vocabulary.rows(ids), torch.tensor([self.row(id) for id in ids], dtype=torch.int64)
        tables = self.ours.table, self.plain.table
        planes = [name for name in tables[0].planes if not name.startswith("vocabulary.")]
        # With layout="rows" it is there before rows have missed steps.
        both = [name for name in planes if name != LAST_STEP or name in tables[1].planes]
        assert both == list(tables[1].planes)
        for name in both if self.config["storage_dtype"] is None else ():
            assert_same_bits(
                *(table.gather(rows, name, catch_up=False) for table, rows in zip(tables, at, strict=True))
            )

    # --- lookups ------------------------------------------------------------------------------------------------------

    def as_form(self, ids, form):
        if form == "list" and ids:
            return ids
        if form == "uint64":
            return np.array(ids, dtype=np.int64).reshape(-1, 2).view(np.uint64)
        tensor = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
        return self.ours.prefetch(tensor) if form == "ticket" and self.config["kind"] == "Embedding" else tensor

    def asked_earlier(self, at, form):
        """Return ids and what to look up: for some forms a ticket that was made a while ago, of other ids."""
        if form == "earlier ticket" and self.asked:
            return self.asked.pop(0)
        ids = [[IDS[one] for one in pair] for pair in at]
        return ids, self.as_form(ids, form)

    @rule(batches=some.lists(BATCH, min_size=1, max_size=3))
    def ask(self, batches):
        if self.config["kind"] == "Embedding" and not self.asked:
            for at in batches:
                ids = [[IDS[one] for one in pair] for pair in at]
                self.asked.append((ids, self.as_form(ids, "ticket")))

    def rows_of(self, ids):
        return torch.tensor([[self.row(id) for id in pair] for pair in ids], dtype=torch.int64).view(-1, 2)

    def keep(self, outs, ids):
        self.compare(*outs)
        weight = torch.linspace(-1, 1, outs[0].numel()).view(outs[0].shape)
        losses = tuple((out * out * weight).sum() for out in outs)
        self.held.append(Lookup(losses, {id for pair in ids for id in pair} & self.known))

    @rule(at=BATCH, form=FORMS)
    def train(self, at, form):
        ids, given = self.asked_earlier(at, form)
        flat = [id for pair in ids for id in pair]
        kept = self.kept() | set(flat)
        before = self.vocabulary.ids(), self.vocabulary.capacity
        try:
            out = self.ours(given)
        except HostMemoryError:
            new = self.admitted(flat)
            assert not evicted
            assert torch.equal(self.vocabulary.ids(), before[0])
            most = self.config["max_capacity"] or CAPACITY
            assert len(self.known) + len(new) - len(self.may_go(kept)) > most
            return
        new = self.admitted(flat)
        self.check_evicted(kept, len(new))
        self.begin(new)
        for id in flat:
            if id in self.known:
                self.last_use[id], self.uses[id] = self.clock, self.uses[id] + 1
        self.keep((out, self.plain(self.rows_of(ids))), ids)

    @rule(at=BATCH, form=FORMS, way=some.sampled_from(["eval", "no_grad", "eval with gradients", "frozen"]))
    def evaluate(self, at, form, way):
        ids, given = self.asked_earlier(at, form)
        before = self.vocabulary.generation, self.vocabulary.state_dict()["last_use"].clone()
        self.ours.train("eval" not in way)
        for module in (self.ours, self.plain):
            module.requires_grad_(way != "frozen")
        with torch.set_grad_enabled(way in ("eval with gradients", "frozen")):
            outs = self.ours(given), self.plain(self.rows_of(ids))
        for module in (self.ours, self.plain):
            module.requires_grad_(True)
        self.ours.train()
        self.compare(*outs)
        assert self.vocabulary.generation == before[0]
        assert torch.equal(self.vocabulary.state_dict()["last_use"], before[1])
        if way == "eval with gradients":
            self.keep(outs, ids)

    # --- gradients and steps ------------------------------------------------------------------------------------------

    @rule(first=some.booleans())
    def backward(self, first):
        """Let gradients come: of the lookup made last, or of all."""
        for _ in range(1 if first else len(self.held)):
            if self.held:
                lookup = self.held.pop()
                self.pending = lookup.ids | (set() if self.zeroed else self.pending)
                self.zeroed = False
                for loss in lookup.losses:
                    loss.backward()

    @rule()
    def step(self):
        if self.zeroed:
            return
        if self.ours.weight.grad is not None:
            # Also those of a gradient that an earlier step had, too.
            for id in self.pending & self.known:
                self.last_use[id] = self.clock
            self.clock += 1
        for optimizer in self.optimizers:
            optimizer.step()
        self.forget_unknown()
        self.check_evicted(self.kept(), None)

    @rule(set_to_none=some.booleans())
    def zero_grad(self, set_to_none):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        self.zeroed = not set_to_none and self.ours.weight.grad is not None
        self.pending = self.pending if self.zeroed else set()

    @rule(at=BATCH, form=FORMS)
    def whole_step(self, at, form):
        self.zero_grad(True)
        self.train(at, form)
        self.backward(False)
        self.step()

    # --- changes by hand ----------------------------------------------------------------------------------------------

    @rule(at=BATCH)
    def forget(self, at):
        ids = {IDS[one] for pair in at for one in pair}
        if ids & self.known & self.kept():
            with pytest.raises(InvalidValueError, match="to be forgotten"):
                self.vocabulary.forget(list(ids))
            return
        assert self.vocabulary.forget(list(ids)) == len(ids & self.known)
        self.known -= ids

    @rule(
        at=some.lists(some.sampled_from(range(len(IDS))), max_size=3, unique=True),
        value=some.floats(-0.5, 0.5, width=16),
    )
    def update(self, at, value):
        ids = [IDS[one] for one in at if IDS[one] != PADDING]
        new, old = [id for id in ids if id not in self.known], [id for id in ids if id in self.known]
        kept, values = self.kept() | set(ids), torch.full((len(ids), DIM), value)
        try:
            self.vocabulary.update(ids, values)
        except HostMemoryError:
            assert not evicted
            return
        self.check_evicted(kept, len(new))
        self.begin(new, values[: len(new)])
        rows = torch.tensor([self.row(id) for id in old], dtype=torch.int64)
        if old:
            stored = find_handle(self.plain.weight).rows
            stored.catch_up(rows)
            stored.put("weight", rows, values[: len(old)])
        for id in old:
            self.last_use[id] = self.clock

    @rule()
    def dump(self):
        """Let a copy of another seed and capacity follow, by a file of what has changed."""
        changes, path = self.vocabulary.changed_since(self.dumped), Path(self.folder.name, "changes.safetensors")
        changes.save(path)
        self.follower.vocabulary.update(st.Changes.load(path))
        self.dumped = changes.clock
        reserved = np.arange(self.vocabulary.reserved)
        both = self.vocabulary, self.follower.vocabulary
        ours, theirs = (dict(zip(ids.tolist(), rows, strict=True)) for ids, rows in (one.export() for one in both))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(row, theirs[id]) for id, row in ours.items())
        assert torch.equal(*(one.weights_of(reserved) for one in both))

    # --- others take the place of both --------------------------------------------------------------------------------

    def drop_gradients(self):
        self.held, self.asked, self.dumped = [], [], 0
        self.zero_grad(True)

    @rule(
        way=some.sampled_from(["model first", "optimizer first", "checkpoint"]), capacity=some.sampled_from([4, 6, 9])
    )
    def load(self, way, capacity):
        """Go on with modules made anew, with another capacity, that load what these have saved."""
        self.drop_gradients()
        pairs = (self.ours, self.optimizers[0]), (self.plain, self.optimizers[1])
        self.make(capacity if self.config["max_capacity"] else CAPACITY, 100)
        self.begin_to_train()
        for number, (module, optimizer) in enumerate(pairs):
            made = (self.ours, self.plain)[number], self.optimizers[number]
            if way == "checkpoint":
                path, before = Path(self.folder.name, f"point{number}"), random.getstate()
                st.save_checkpoint(path, module, optimizer, progress=False)
                st.load_checkpoint(path, *made, progress=False)
                # Loading sets it; what is drawn for this test must not repeat itself.
                random.setstate(before)
                continue
            for old, new in list(zip((module, optimizer), made, strict=True))[:: 1 if way == "model first" else -1]:
                new.load_state_dict(copy.deepcopy(old.state_dict()))

    @rule(way=some.sampled_from(list(COPIES)))
    def copies(self, way):
        self.drop_gradients()
        both = [(self.vocabulary, self.ours, self.optimizers[0]), (None, self.plain, self.optimizers[1])]
        (self.vocabulary, self.ours, ours), (_, self.plain, plain) = map(COPIES[way], both)
        self.optimizers = ours, plain
        assert self.vocabulary is self.ours.vocabulary is not both[0][0]
        # The copies of rows that no id has are as these are, and no state of optimizers is there before the next step.
        if way != "deepcopy" and "memory" in self.config["table"]:
            assert self.ours.table.memory == "pageable"

    @rule()
    def convert(self):
        """Go to float64 or back: a conversion drops the state of the rows, so that there are new optimizers."""
        if self.config["storage_dtype"] is not None or "memory" in self.config["table"]:
            return
        self.drop_gradients()
        for module in (self.ours, self.plain):
            module.to(torch.float64)
            module.to(torch.float32)
        self.begin_to_train()


@pytest.mark.filterwarnings("ignore:a step of:UserWarning")
@short_and_long({"max_examples": 12, "stateful_step_count": 20}, {"max_examples": 1000, "stateful_step_count": 30})
def test_any_sequence_of_calls(options):
    run_machine(VocabularyMachine, suppress_health_check=list(HealthCheck), **options)
