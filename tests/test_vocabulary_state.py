"""State dicts and checkpoints of modules with a vocabulary: into another capacity, of plain embeddings, malformed; counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from optimizer_cases import case_named
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer.errors import HostMemoryError, InvalidValueError, OptimizerError
from speedtransfer.vocabulary.id_index import IdIndex

DIM = 3
IDS = torch.arange(30) * 2**59 - 2**62


class Net(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.emb = embedding


class Run:
    """A module with a vocabulary and its optimizer, trained with ids that follow from the number of the step."""

    def __init__(self, optimizer: str = "adamw", padding_idx: int | None = None, **settings: Any) -> None:
        self.vocabulary = st.Vocabulary(**{"capacity": 4, "max_capacity": 14, "evict": "lru", "seed": 3} | settings)
        self.net = Net(st.Embedding(4, DIM, padding_idx=padding_idx, idle="lazy", vocabulary=self.vocabulary))
        self.optimizer = case_named(optimizer).make(self.net.parameters())

    def train(self, *steps: int) -> None:
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            ids = IDS[(torch.rand(5, generator=draw) ** 2 * len(IDS)).long()]
            self.optimizer.zero_grad()
            (self.net.emb(ids) - torch.randn(5, DIM, generator=draw)).square().sum().backward()
            self.optimizer.step()

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]], model_first: bool = True) -> None:
        for way in (0, 1) if model_first else (1, 0):
            (self.net, self.optimizer)[way].load_state_dict(copy.deepcopy(saved[way]))

    def by_id(self) -> dict[str, Tensor]:
        """Return all that belongs to ids, in their order."""
        ids, rows = self.vocabulary.export()
        at = self.vocabulary.rows(ids)
        state = self.optimizer.state_dict()["state"].get(0, {})
        found = {
            name: value[at] if value.dim() else value for name, value in state.items() if isinstance(value, Tensor)
        }
        last_use = self.vocabulary.state_dict()["last_use"][at]
        return {**found, "ids": ids, "rows": rows, "last_use": last_use, "clock": torch.tensor(self.vocabulary.clock)}

    def check_equal(self, other: Run) -> None:
        ours, theirs = self.by_id(), other.by_id()
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    "settings",
    [
        {"evict": "lfu", "half_life": 3.0},
        {"evict": 3, "max_capacity": 40},
        {"admit": 2, "capacity": 14},
        {"evict": lambda ids, last_use, counts: counts, "unseen": "row", "admit": 2},
    ],
    ids=str,
)
def test_admission_and_eviction_go_on(settings: dict[str, Any]) -> None:
    whole = Run(**settings)
    whole.train(*range(12))
    again = Run(**settings, **({} if "capacity" in settings else {"capacity": 9}))
    # What it had before is forgotten.
    again.train(77, 78)
    again.load(whole.save())
    for run in (whole, again):
        run.train(*range(12, 30))
    again.check_equal(whole)


def _forgetful(padding_idx: int | None = None) -> Run:
    """Return a run whose ids have the last ones of many rows."""
    run = Run(capacity=25, max_capacity=None, evict=None, padding_idx=padding_idx)
    run.train(*range(6))
    run.optimizer.zero_grad()
    run.vocabulary.forget(run.vocabulary.ids()[:8])
    return run


@pytest.mark.parametrize("padding_idx", [None, int(IDS[1])])
@pytest.mark.parametrize("way", ["model first", "optimizer first", "checkpoint", "state saved before a step"])
def test_ids_that_do_not_fit_where_they_were_get_other_rows(way: str, padding_idx: int | None, tmp_path: Path) -> None:
    large = _forgetful(padding_idx)
    room = len(large.vocabulary) + 3
    small = Run(capacity=room, max_capacity=None, evict=None, padding_idx=padding_idx)
    small.train(99)
    if way == "checkpoint":
        st.save_checkpoint(tmp_path / "c", large.net, large.optimizer)
        st.load_checkpoint(tmp_path / "c", small.net, small.optimizer)
    else:
        small.load(large.save(), way != "optimizer first")
    if way == "state saved before a step":
        st.save_checkpoint(tmp_path / "c", small.net, small.optimizer)
        small = Run(capacity=40, max_capacity=None, evict=None, padding_idx=padding_idx)
        st.load_checkpoint(tmp_path / "c", small.net, small.optimizer)
    # New ids, and ids that go, before the next step: their rows have no state of others.
    for run in (large, small):
        gone = run.vocabulary.export()[0][:2]
        run.vocabulary.forget(gone)
        run.net.emb(torch.cat([gone, torch.tensor([5, 6])])).square().sum().backward()
        run.optimizer.step()
    small.check_equal(large)
    assert torch.equal(
        small.net.emb.weight[: small.vocabulary.reserved], large.net.emb.weight[: large.vocabulary.reserved]
    )


def test_a_model_loaded_alone_keeps_the_state_of_ids_that_are_in_both() -> None:
    large = _forgetful()
    before = large.by_id()
    weights = large.net.state_dict()
    small = Run(capacity=9, max_capacity=None)
    small.net.emb(large.vocabulary.ids()[-2:]).sum().backward()
    small.optimizer.step()
    small.optimizer.zero_grad()
    known = small.by_id()
    small.net.load_state_dict(weights)
    after = small.by_id()
    assert torch.equal(after["ids"], before["ids"])
    assert torch.equal(after["rows"], before["rows"])
    shared = torch.isin(after["ids"], known["ids"])
    assert torch.equal(after["exp_avg"][shared], known["exp_avg"])
    assert not after["exp_avg"][~shared].any()


@pytest.mark.parametrize(
    "options", [{"storage_dtype": torch.int8}, {"storage_dtype": torch.float8_e4m3fn}, {"memory": "mmap"}]
)
def test_other_storage(options: dict[str, Any], tmp_path: Path) -> None:
    embeddings = []
    for number, capacity in enumerate([24, 9]):
        path = {"path": tmp_path / f"{number}.npy"} if "memory" in options else {}
        vocabulary = st.Vocabulary(seed=1)
        embeddings.append(st.Embedding(capacity, 8, vocabulary=vocabulary, **options, **path))
    large, small = embeddings
    large(IDS[:24])
    large.vocabulary.forget(IDS[:16])
    small.load_state_dict(large.state_dict())
    for ours, theirs in zip(small.vocabulary.export(), large.vocabulary.export(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", ["model first", "optimizer first", "checkpoint"])
@pytest.mark.parametrize("library", [nn, st], ids=["torch", "st"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_plain_embedding_becomes_one_with_ids(
    way: str, library: Any, padding_idx: int | None, tmp_path: Path
) -> None:
    plain = Net(library.Embedding(9, DIM, padding_idx=padding_idx))
    ours = Net(st.Embedding(12, DIM, padding_idx=padding_idx, vocabulary=st.Vocabulary()))
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (plain, ours)]
    ids = torch.arange(9)
    plain.emb(ids).square().sum().backward()
    optimizers[0].step()
    if way == "checkpoint":
        st.save_checkpoint(tmp_path / "c", plain, optimizers[0])
        st.load_checkpoint(tmp_path / "c", ours, optimizers[1])
    else:
        for number in (0, 1) if way == "model first" else (1, 0):
            saved = (plain, optimizers[0])[number].state_dict()
            (ours, optimizers[1])[number].load_state_dict(copy.deepcopy(saved))
    for _ in range(2):
        assert torch.equal(ours.emb(ids), plain.emb(ids))
        for net, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            net.emb(ids).square().sum().backward()
            optimizer.step()
    assert len(ours.emb.vocabulary) == 9 - (padding_idx is not None)


def test_the_other_way_round_is_refused(tmp_path: Path) -> None:
    run = Run()
    run.train(0)
    st.save_checkpoint(tmp_path / "c", run.net)
    for plain in (st.Embedding(5, DIM), nn.Embedding(5, DIM)):
        with pytest.raises(InvalidValueError, match=r"export\(\)"):
            st.load_checkpoint(tmp_path / "c", Net(plain))
    with pytest.raises(InvalidValueError, match=r"export\(\)"):
        st.Embedding(5, DIM).load_state_dict(run.net.emb.state_dict(), strict=False)


def test_too_many_ids_change_nothing(tmp_path: Path) -> None:
    large, small = _forgetful(), Run(capacity=3, max_capacity=5)
    small.train(7)
    before = small.by_id()
    st.save_checkpoint(tmp_path / "c", large.net, large.optimizer)
    for load in (
        lambda: small.net.load_state_dict(large.net.state_dict()),
        lambda: st.load_checkpoint(tmp_path / "c", small.net, small.optimizer),
    ):
        with pytest.raises(HostMemoryError, match="larger capacity"):
            load()
        assert all(torch.equal(value, before[name]) for name, value in small.by_id().items())
    # State of other rows than those of the model: the next step says so.
    small.optimizer.load_state_dict(large.optimizer.state_dict())
    with pytest.raises(OptimizerError, match="shape"):
        small.train(8)


@pytest.mark.parametrize("capacity", [4, 9])
def test_a_checkpoint_makes_one_index(capacity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of millions of ids it takes seconds: the one by which the ids are checked is the one that the module gets."""
    run, other = Run(), Run(capacity=capacity)
    run.train(0, 1, 2)
    st.save_checkpoint(tmp_path, run.net, run.optimizer)
    made: list[int] = []
    insert = IdIndex.insert

    def counted(index: IdIndex, ids: np.ndarray, rows: np.ndarray) -> None:
        made.append(len(ids))
        insert(index, ids, rows)

    monkeypatch.setattr(IdIndex, "insert", counted)
    st.load_checkpoint(tmp_path, other.net, other.optimizer)
    assert made == [len(run.vocabulary)]
    run.check_equal(other)


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update({f"vocabulary.{name}": value(state[f"vocabulary.{name}"])})


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no ids": (lambda state: state.pop("vocabulary.ids"), "no 'vocabulary.ids'"),
    "no rows": (lambda state: state.pop("weight"), "not their rows"),
    "no numbers": (lambda state: state.pop("vocabulary.numbers"), "no 'vocabulary.numbers'"),
    "other dtype": (_set("ids", Tensor.float), "torch.int64"),
    "other shape": (_set("last_use", lambda value: value[None]), "1 dimensions"),
    "no tensor": (_set("initial", Tensor.tolist), "list"),
    "fewer": (_set("last_use", lambda value: value[1:]), "different lengths"),
    "fewer rows": (lambda state: state.update(weight=state["weight"][1:]), "rows"),
    "twice": (_set("ids", torch.zeros_like), "twice"),
    "last use": (_set("last_use", lambda value: value - 5), "impossible times of last use"),
    "initial": (_set("initial", lambda value: value + 7), "initial"),
    "format": (_set("numbers", lambda value: value + 1), "update speedtransfer"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_states(name: str) -> None:
    damage, message = MALFORMED[name]
    run = Run()
    run.train(0, 1)
    before, state = run.by_id(), copy.deepcopy(dict(run.net.emb.state_dict()))
    damage(state)
    with pytest.raises(InvalidValueError, match=message):
        run.net.emb.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in run.by_id().items())


def test_rows_of_another_width_and_padding_are_refused() -> None:
    run = Run()
    run.train(0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        st.Embedding(20, DIM + 1, vocabulary=st.Vocabulary()).load_state_dict(run.net.emb.state_dict())
    with pytest.raises(InvalidValueError, match="padding_idx"):
        st.Embedding(20, DIM, padding_idx=3, vocabulary=st.Vocabulary()).load_state_dict(run.net.emb.state_dict())
    other = st.Embedding(20, DIM, vocabulary=st.Vocabulary())
    assert other.load_state_dict({}, strict=False).missing_keys == ["weight"]


def test_a_state_with_a_clock_in_microseconds() -> None:
    """As vocabularies saved it that evicted by wall time: its ids count as used now."""
    run = Run()
    run.train(0, 1)
    before, state = run.by_id(), run.save()[0]
    state["emb.vocabulary.last_use"][run.vocabulary.rows(before["ids"])] = 10**15
    # The clock, and that it is one of time.
    state["emb.vocabulary.numbers"][1:3] = torch.tensor([10**15, 1])
    run.net.load_state_dict(state)
    assert run.vocabulary.clock == 2
    assert (run.by_id()["last_use"] == 2).all()
    assert torch.equal(run.by_id()["rows"], before["rows"])


def test_a_pending_gradient_of_ids_that_are_still_there_stays() -> None:
    run = Run("sgd")
    run.train(0)
    saved = run.save()
    assert run.net.emb.weight.grad is not None
    run.load(saved)
    assert run.net.emb.weight.grad is not None
    run.net.load_state_dict(Run("sgd").net.state_dict())
    assert run.net.emb.weight.grad is None
    assert len(run.vocabulary) == 0


# --- what a vocabulary counts, and the curves that are made of it ------------------------------------------------------


def test_counts_of_training_and_evaluation() -> None:
    vocabulary = st.Vocabulary(admit=2, evict="lru", seed=0)
    module = st.Embedding(3, 2, vocabulary=vocabulary, idle="lazy")
    assert (vocabulary.stats().load, vocabulary.stats().unseen_rate) == (0.0, 0.0)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for ids in ([1, 1, 2], [2, 3, 3, 4, 4], [5, 5]):
        module(torch.tensor(ids)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = vocabulary.stats()
    # 2 was seen once in the first batch; in the second 2, 3 and 4 need rows, of which there are two without that of 1.
    assert (stats.capacity, stats.max_capacity, stats.clock) == (3, 3, 3)
    assert (stats.admitted, stats.lookups, stats.unseen) == (5, 10, 1)
    # Steps take rows for the ids that may come next.
    assert stats.evicted >= 2
    assert len(vocabulary) == stats.size == stats.admitted - stats.evicted
    assert stats.scalars("items") == {
        "items/size": stats.size,
        "items/load": stats.size / 3,
        "items/admitted": 5.0,
        "items/evicted": stats.evicted,
        "items/unseen_rate": pytest.approx(0.1),
    }
    vocabulary.reset_stats()
    module.eval()(torch.tensor([5, 77]))
    assert vocabulary.stats().scalars()["vocabulary/unseen_rate"] == 0.5
    assert vocabulary.stats().admitted == 0
