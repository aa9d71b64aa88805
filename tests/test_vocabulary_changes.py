"""What has changed since a time, in memory and in files, and copies that follow."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidValueError, StorageError

DIM = 3
IDS = torch.arange(24) * 2**58 - 2**61
MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
}


def new(capacity: int = 6, **settings: Any) -> st.Embedding:
    options = {name: settings.pop(name) for name in ("padding_idx", "storage_dtype") if name in settings}
    idle = settings.pop("idle", "lazy")
    vocabulary = st.Vocabulary(capacity, **{"max_capacity": 16, **settings})
    return st.Embedding(capacity, DIM, idle=idle, vocabulary=vocabulary, **options)


def read(embedding: st.Embedding, ids: Tensor = IDS) -> Tensor:
    embedding.eval()
    try:
        with torch.no_grad():
            return embedding(ids).clone()
    finally:
        embedding.train()


def check_equal(ours: st.Embedding, theirs: st.Embedding) -> None:
    assert set(ours.vocabulary.ids().tolist()) == set(theirs.vocabulary.ids().tolist())
    assert torch.equal(read(ours), read(theirs))


class Trainer:
    """A table in training, with a copy of another seed and capacity that follows it."""

    def __init__(self, optimizer: str, path: Path, **settings: Any) -> None:
        self.path = path
        self.embedding = new(seed=1, evict="lru", **settings)
        self.optimizer = MAKE[optimizer](self.embedding.parameters())
        alike = {name: settings[name] for name in ("padding_idx", "unseen", "storage_dtype") if name in settings}
        self.copy = new(20, max_capacity=None, seed=5, **alike)
        self.clock, self.num_complete = 0, 0
        self.held: Tensor | None = None
        self.saved: Any = None

    def step(self, at: list[int]) -> None:
        self.optimizer.zero_grad()
        self.accumulate(at)

    def accumulate(self, at: list[int]) -> None:
        """Add to the gradient that there is, and step."""
        self.embedding(IDS[at]).square().sum().backward()
        self.optimizer.step()

    def hold(self, at: list[int]) -> None:
        """Look ids up of which the gradient comes later."""
        if self.held is not None:
            self.held.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.held = self.embedding(IDS[at]).square().sum()

    def forget(self, at: list[int]) -> None:
        self.optimizer.zero_grad()
        self.held = None
        self.embedding.vocabulary.forget(IDS[at])

    def update(self, at: list[int]) -> None:
        ids = IDS[at].unique()
        self.embedding.vocabulary.update(ids, torch.full((len(ids), DIM), float(len(at))))

    def load(self, at: list[int]) -> None:
        """Save, or load what was saved."""
        if self.saved is None:
            self.saved = copy.deepcopy((self.embedding.state_dict(), self.optimizer.state_dict()))
            return
        self.held = None
        self.embedding.load_state_dict(self.saved[0])
        self.optimizer.load_state_dict(self.saved[1])
        self.clock, self.saved = min(self.clock, self.embedding.vocabulary.clock), None

    def initialize(self, at: list[int]) -> None:
        nn.init.uniform_(self.embedding.weight, 0.0, 1.0)

    def dump(self, at: list[int]) -> None:
        changes = self.embedding.vocabulary.changed_since(self.clock)
        changes.save(self.path)
        self.copy.vocabulary.update(st.Changes.load(self.path))
        check_equal(self.copy, self.embedding)
        self.clock, self.num_complete = changes.clock, self.num_complete + changes.complete


# Some come more often.
EVENTS = ["step"] * 3 + ["accumulate", "hold", "forget", "update", "load", "initialize"] + ["dump"] * 4


@pytest.mark.parametrize(
    "about",
    [
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "storage_dtype": torch.int8},
        {"optimizer": "adamw", "idle": "exact", "padding_idx": int(IDS[2])},
        {"optimizer": "sgd", "idle": "exact", "unseen": "row", "admit": 2},
        {"optimizer": "adamw", "unseen": "zeros", "admit": 2},
    ],
    ids=str,
)
def test_copies_that_follow_read_the_same(tmp_path: Path, about: dict[str, Any]) -> None:
    rng, dumps = random.Random(3), 0
    for _ in range(4):
        trainer = Trainer(**about, path=tmp_path / "changes.safetensors")
        for event in [*rng.choices(EVENTS, k=40), "dump"]:
            getattr(trainer, event)(rng.choices(range(24), k=rng.randint(1, 4)))
            dumps += event == "dump"
    assert trainer.num_complete < dumps / 4 / 2 or about.get("idle") == "exact"


def trained(steps: int = 1, **settings: Any) -> tuple[st.Embedding, torch.optim.Optimizer]:
    embedding = new(**{"seed": 1, "evict": "lru", **settings})
    optimizer = MAKE["adamw"](embedding.parameters())
    for step in range(steps):
        train(embedding, optimizer, IDS[step : step + 4])
    return embedding, optimizer


def train(embedding: st.Embedding, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    optimizer.zero_grad()
    embedding(ids).square().sum().backward()
    optimizer.step()


def test_only_what_has_changed() -> None:
    embedding, optimizer = trained(2)
    vocabulary = embedding.vocabulary
    clock = vocabulary.clock
    train(embedding, optimizer, IDS[[1, 7]])
    changes = vocabulary.changed_since(clock)
    assert set(changes.ids.tolist()) == set(IDS[[1, 7]].tolist())
    assert (changes.since, changes.clock, changes.complete) == (clock, clock + 1, False)
    assert torch.equal(changes.rows, read(embedding, changes.ids))
    optimizer.zero_grad()
    vocabulary.forget(IDS[:2])
    train(embedding, optimizer, IDS[:1])
    # It came back.
    assert vocabulary.changed_since(clock).evicted.tolist() == [int(IDS[1])]
    assert vocabulary.changed_since(0).complete
    with pytest.raises(InvalidValueError, match="clock is 99"):
        vocabulary.changed_since(99)


def test_all_rows_when_idle_ones_have_moved() -> None:
    embedding, optimizer = trained(idle="exact")
    clock = embedding.vocabulary.clock
    train(embedding, optimizer, IDS[5:6])
    assert embedding.vocabulary.changed_since(clock).complete
    # A new optimizer moves none, but the one before has.
    train(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), IDS[5:6])
    assert embedding.vocabulary.changed_since(clock).complete


def test_a_dump_that_is_missing_is_told() -> None:
    embedding, optimizer = trained()
    dumps, clock = [embedding.vocabulary.changed_since(0)], embedding.vocabulary.clock
    for step in range(3):
        train(embedding, optimizer, IDS[step : step + 2])
        dumps.append(embedding.vocabulary.changed_since(clock))
        clock = dumps[-1].clock
    follower = new(20, max_capacity=None)
    with pytest.raises(InvalidValueError, match="does not copy"):
        follower.vocabulary.update(dumps[1])
    follower.vocabulary.update(dumps[0])
    before = read(follower)
    with pytest.raises(InvalidValueError, match="since clock 3 but this copy has those up to 1"):
        follower.vocabulary.update(dumps[3])
    assert torch.equal(read(follower), before)
    for dump in (*dumps[1:], dumps[-1]):
        follower.vocabulary.update(dump)
    check_equal(follower, embedding)
    assert follower.vocabulary.clock == embedding.vocabulary.clock
    with pytest.raises(InvalidValueError, match="up to clock 2 but this copy has those up to 4"):
        follower.vocabulary.update(dumps[1])
    # A copy of the copy follows it, and one that was trained follows no more.
    second = copy.deepcopy(follower)
    train(embedding, optimizer, IDS[:3])
    last = embedding.vocabulary.changed_since(clock)
    second.vocabulary.update(last)
    check_equal(second, embedding)
    train(follower, MAKE["sgd"](follower.parameters()), IDS[:1])
    with pytest.raises(InvalidValueError, match="trained"):
        follower.vocabulary.update(last)


def test_a_copy_from_a_checkpoint_follows_until_the_original_goes_back_to_it() -> None:
    embedding, optimizer = trained(3)
    saved = copy.deepcopy((embedding.state_dict(), optimizer.state_dict()))
    clock, follower = embedding.vocabulary.clock, new(20, max_capacity=None)
    follower.load_state_dict(saved[0])
    train(embedding, optimizer, IDS[:2])
    follower.vocabulary.update(embedding.vocabulary.changed_since(clock))
    check_equal(follower, embedding)
    embedding.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(3):
        train(embedding, optimizer, IDS[step : step + 2])
    with pytest.raises(InvalidValueError, match="loaded a state"):
        follower.vocabulary.update(embedding.vocabulary.changed_since(clock + 1))


def test_more_evicted_ids_than_are_remembered() -> None:
    embedding, optimizer = trained(capacity=5, max_capacity=None)
    clock = embedding.vocabulary.clock
    train(embedding, optimizer, IDS[4:9])
    assert not embedding.vocabulary.changed_since(clock).complete
    train(embedding, optimizer, IDS[9:14])
    assert embedding.vocabulary.changed_since(clock).complete


def test_a_file_that_any_program_reads(tmp_path: Path) -> None:
    path = tmp_path / "dump.safetensors"
    embedding, _ = trained(2)
    changes = embedding.vocabulary.changed_since(0)
    changes.save(path)
    tensors = load_file(path)
    again = st.Changes.load(path)
    for name in ("ids", "rows", "evicted", "reserved"):
        assert torch.equal(tensors[name], getattr(changes, name))
        assert torch.equal(getattr(again, name), getattr(changes, name))
    assert again[4:] == changes[4:]
    with pytest.raises(InvalidValueError, match="safetensors"):
        changes.save(tmp_path / "dump.npy")
    with pytest.raises(StorageError):
        st.Changes.load(tmp_path / "none.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(StorageError, match="truncated"):
        st.Changes.load(path)
    for old, made in ((b'"version": "1"', b'"version": "7"'), (b'"clock": "2"', b'"clock": "x"'), (b'"ids"', b'"idx"')):
        assert old in whole
        path.write_bytes(whole.replace(old, made))
        with pytest.raises(StorageError, match=r"Changes\.save"):
            st.Changes.load(path)


def test_what_does_not_fit_changes_nothing() -> None:
    (large, _), (other, _) = trained(8), trained(5)
    changes, fitting = (embedding.vocabulary.changed_since(0) for embedding in (large, other))
    small = new(6, max_capacity=8)
    small.vocabulary.update(IDS[:3], torch.ones(3, DIM))
    before = read(small)
    bad = [
        (changes, HostMemoryError, "new ids need rows"),
        (changes._replace(reserved=changes.reserved[:0]), InvalidValueError, "reserved rows"),
        (changes._replace(padding_idx=4), InvalidValueError, "padding_idx"),
        (changes._replace(ids=changes.ids[1:]), InvalidValueError, "fit together"),
        (changes._replace(clock=-1), InvalidValueError, "fit together"),
        (changes._replace(evicted=[]), InvalidValueError, "must be a tensor"),
        (changes._replace(ids=torch.zeros_like(changes.ids)), InvalidValueError, "twice"),
    ]
    for given, kind, message in bad:
        with pytest.raises(kind, match=message):
            small.vocabulary.update(given)
        assert torch.equal(read(small), before)
        assert set(small.vocabulary.ids().tolist()) == set(IDS[:3].tolist())
    # Rows of ids that go make room.
    assert len(fitting.ids) == 8
    small.vocabulary.update(fitting)
