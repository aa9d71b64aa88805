"""State dicts and checkpoints of modules with a vocabulary, and changes that copies follow.

That training goes on with the same bits, and that copies read the same, see test_vocabulary_state_machine.py.
"""

import contextlib
import copy
import functools
import threading

import pytest
import torch
from cases import saved, take_step
from optimizer_cases import case_named
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import speedtransfer as st
from speedtransfer.checkpoint import save
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError, OptimizerError, StorageError
from speedtransfer.vocabulary import id_rows

DIM = 3
IDS = torch.arange(30) * 2**59 - 2**62


class Net(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.emb = embedding


class Run:
    """A module with a vocabulary and its optimizer, trained with ids that follow from the number of the step."""

    def __init__(self, optimizer="adamw", idle="lazy", **settings):
        self.vocabulary = st.Vocabulary(**{"capacity": 4, "max_capacity": 14, "evict": "lru", "seed": 3} | settings)
        self.net = Net(st.Embedding(4, DIM, idle=idle, vocabulary=self.vocabulary))
        self.optimizer = case_named(optimizer).make(self.net.parameters())

    def train(self, *steps):
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            ids = IDS[(torch.rand(5, generator=draw) ** 2 * len(IDS)).long()]
            take_step(self.optimizer, (self.net.emb(ids) - torch.randn(5, DIM, generator=draw)).square().sum())

    def step(self, ids):
        take_step(self.optimizer, self.net.emb(ids).square().sum())

    def save(self):
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict()))

    def load(self, saved):
        self.net.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def by_id(self):
        """Return all that belongs to ids, in their order."""
        ids, rows = self.vocabulary.export()
        at = self.vocabulary.rows(ids)
        state = self.optimizer.state_dict()["state"].get(0, {})
        found = {
            name: value[at] if value.dim() else value for name, value in state.items() if isinstance(value, Tensor)
        }
        last_use = self.vocabulary.state_dict()["last_use"][at]
        return {**found, "ids": ids, "rows": rows, "last_use": last_use, "clock": torch.tensor(self.vocabulary.clock)}


WAYS = ["model first", "optimizer first", "checkpoint"]


def carry_over(way, old, new, folder):
    if way == "checkpoint":
        st.save_checkpoint(folder, *old)
        st.load_checkpoint(folder, *new)
        return
    for number in (0, 1) if way == "model first" else (1, 0):
        new[number].load_state_dict(copy.deepcopy(old[number].state_dict()))


def _forgetful():
    """Return a run whose ids have the last ones of many rows."""
    run = Run(capacity=25, max_capacity=None, evict=None)
    run.train(*range(6))
    run.vocabulary.forget(run.vocabulary.ids()[:8])
    return run


def test_a_model_loaded_alone_keeps_the_state_of_ids_that_are_in_both():
    large = _forgetful()
    before = large.by_id()
    weights = large.net.state_dict()
    small = Run(capacity=9, max_capacity=None)
    take_step(small.optimizer, small.net.emb(large.vocabulary.ids()[-2:]).sum())
    known = small.by_id()
    small.net.load_state_dict(weights)
    after = small.by_id()
    assert torch.equal(after["ids"], before["ids"])
    assert torch.equal(after["rows"], before["rows"])
    shared = torch.isin(after["ids"], known["ids"])
    assert torch.equal(after["exp_avg"][shared], known["exp_avg"])
    assert not after["exp_avg"][~shared].any()


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("library", [nn, st], ids=["torch", "st"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_plain_embedding_becomes_one_with_ids(way, library, padding_idx, tmp_path):
    plain = Net(library.Embedding(9, DIM, padding_idx=padding_idx))
    ours = Net(st.Embedding(12, DIM, padding_idx=padding_idx, vocabulary=st.Vocabulary()))
    if library is nn:
        plain.emb.weight.data[3] = 7
    optimizers = [torch.optim.AdamW(net.parameters()) for net in (plain, ours)]
    ids = torch.arange(9)
    take_step(optimizers[0], plain.emb(ids).square().sum())
    carry_over(way, (plain, optimizers[0]), (ours, optimizers[1]), tmp_path)
    for _ in range(2):
        assert torch.equal(ours.emb(ids), plain.emb(ids))
        for net, optimizer in zip((plain, ours), optimizers, strict=True):
            take_step(optimizer, net.emb(ids).square().sum())
    assert len(ours.emb.vocabulary) == 9 - (padding_idx is not None)


def test_rows_that_are_given_are_those_of_the_ids_from_0_on():
    weight, ids = torch.randn(6, DIM), torch.arange(6)
    made = st.Embedding.from_pretrained(weight, padding_idx=2, vocabulary=st.Vocabulary(capacity=8))
    assigned = st.Embedding(9, DIM, padding_idx=2, device="meta", vocabulary=st.Vocabulary())
    assigned.weight = nn.Parameter(weight)
    for emb in (made, assigned):
        assert torch.equal(emb(ids), weight)
        assert emb.vocabulary.ids().tolist() == [0, 1, 3, 4, 5]


def test_a_state_that_was_loaded_is_saved_again(monkeypatch):
    monkeypatch.setattr(id_rows, "_LEAST_WINDOW", 1)
    monkeypatch.setattr(id_rows, "_WINDOW", 1)
    run = Run(admit=2, evict="lfu", seed=2**64 - 3)
    run.train(*range(12))
    state = run.save()[0]
    # Where the search for rows that may go begins, and how many ids came lately.
    assert state["emb.vocabulary.numbers"][[8, 11]].all()
    other = Run(admit=2, evict="lfu")
    other.net.load_state_dict(state)
    again = other.net.state_dict()
    for name in ("last_use", "sightings", "released", "numbers", "initial"):
        assert torch.equal(again[f"emb.vocabulary.{name}"], state[f"emb.vocabulary.{name}"]), name
    # Of one that admits all there are no sightings.
    other.net.load_state_dict(Run(evict="lfu").save()[0])
    sightings = other.net.state_dict()["emb.vocabulary.sightings"]
    assert sightings.shape == state["emb.vocabulary.sightings"].shape
    assert not sightings.any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["adagrad-initial", "adamw"])
def test_ids_that_came_before_the_first_step(optimizer, way, tmp_path):
    """Adagrad has made its state by then, of the rows that there were; tables grow after it was loaded, too."""
    run, loaded = (Run(optimizer, max_capacity=40) for _ in "12")
    run.net.emb(IDS[:12])
    carry_over(way, (run.net, run.optimizer), (loaded.net, loaded.optimizer), tmp_path)
    before = len(loaded.net.emb.table)
    for each in (run, loaded):
        each.train(*range(9))
    assert len(loaded.net.emb.table) > before
    assert torch.equal(run.net.emb(IDS[:12]), loaded.net.emb(IDS[:12]))


def test_too_many_ids_change_nothing(tmp_path):
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


def _set(name, value):
    return lambda state: state.update({f"vocabulary.{name}": value(state[f"vocabulary.{name}"])})


MALFORMED = {
    "no ids": (lambda state: state.pop("vocabulary.ids"), "no 'vocabulary.ids'"),
    "no rows": (lambda state: state.pop("weight"), "not their rows"),
    "no numbers": (lambda state: state.pop("vocabulary.numbers"), "no 'vocabulary.numbers'"),
    "other dtype": (_set("ids", Tensor.float), "torch.int64"),
    "other shape": (_set("last_use", lambda value: value[None]), "1 dimensions"),
    "on no device": (_set("ids", lambda value: value.to("meta")), "on the meta device"),
    "sparse": (_set("last_use", Tensor.to_sparse), "sparse_coo"),
    "rows on no device": (lambda state: state.update(weight=state["weight"].to("meta")), "on the meta device"),
    "sparse rows": (lambda state: state.update(weight=state["weight"].to_sparse()), "sparse_coo"),
    "no tensor": (_set("initial", Tensor.tolist), "list"),
    "fewer": (_set("last_use", lambda value: value[1:]), "different lengths"),
    "fewer rows": (lambda state: state.update(weight=state["weight"][1:]), "rows"),
    "twice": (_set("ids", torch.zeros_like), "twice"),
    "last use": (_set("last_use", lambda value: value - 5), "impossible times of last use"),
    "initial": (_set("initial", lambda value: value + 7), "initial"),
    "format": (_set("numbers", lambda value: value + 1), "update speedtransfer"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_states(name):
    damage, message = MALFORMED[name]
    run = Run()
    run.train(0, 1)
    before, state = run.by_id(), copy.deepcopy(dict(run.net.emb.state_dict()))
    damage(state)
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        run.net.emb.load_state_dict(state, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in run.by_id().items())
    run.train(2)


def test_state_that_was_loaded_before_other_ids_is_refused():
    """Whose state it is can be told neither by what came last nor by what came first: it might be that of either."""
    one, other, run = Run(), Run(), Run()
    one.train(0, 1)
    other.train(2, 3, 4)
    run.load(one.save())
    run.net.load_state_dict(other.net.state_dict())
    before = run.net.emb.weight.detach().clone()
    with pytest.raises(OptimizerError, match=r"load the optimizer's state again, after the module's"):
        run.step(run.vocabulary.ids()[:2])
    assert torch.equal(run.net.emb.weight, before)
    # Other weights of the same ids, as of an average.
    run.load(one.save())
    averaged = one.net.state_dict()
    averaged["emb.weight"] = averaged["emb.weight"] * 0.5
    run.net.load_state_dict(averaged)
    run.load(other.save())
    for each in (run, other):
        each.train(5)
    assert all(torch.equal(value, run.by_id()[name]) for name, value in other.by_id().items())


def test_modules_that_do_not_fit_are_refused(tmp_path):
    """Those without a vocabulary, or of another width or padding."""
    run = Run()
    run.train(0)
    state = run.net.emb.state_dict()
    st.save_checkpoint(tmp_path / "c", run.net)
    for plain in (st.Embedding(5, DIM), nn.Embedding(5, DIM)):
        with pytest.raises(InvalidValueError, match=r"export\(\)"):
            st.load_checkpoint(tmp_path / "c", Net(plain))
    with pytest.raises(InvalidValueError, match=r"export\(\)"):
        st.Embedding(5, DIM).load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        st.Embedding(20, DIM + 1, vocabulary=st.Vocabulary()).load_state_dict(state)
    with pytest.raises(InvalidValueError, match="padding_idx"):
        st.Embedding(20, DIM, padding_idx=3, vocabulary=st.Vocabulary()).load_state_dict(state)
    other = st.Embedding(20, DIM, vocabulary=st.Vocabulary())
    assert other.load_state_dict({}, strict=False).missing_keys == ["weight"]


def test_a_state_with_a_clock_in_microseconds():
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


def test_a_pending_gradient_of_ids_that_are_still_there_stays():
    run = Run("sgd")
    run.net.emb(IDS[:3]).sum().backward()
    saved = run.save()
    run.load(saved)
    assert run.net.emb.weight.grad is not None
    run.net.load_state_dict(Run("sgd").net.state_dict())
    assert run.net.emb.weight.grad is None
    assert len(run.vocabulary) == 0


# --- what a vocabulary counts, and the curves that are made of it ------------------------------------------------------


def test_counts_of_training_and_evaluation():
    vocabulary = st.Vocabulary(admit=2, evict="lru", seed=0)
    module = st.Embedding(3, 2, vocabulary=vocabulary, idle="lazy")
    assert (vocabulary.stats().load, vocabulary.stats().unseen_rate) == (0.0, 0.0)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for ids in ([1, 1, 2], [2, 3, 3, 4, 4], [5, 5]):
        take_step(optimizer, module(torch.tensor(ids)).sum())
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


# --- on the meta device: settings and no ids, until rows are given ----------------------------------------------------

SEEN = torch.tensor([[7, -1, 2**60], [3, 7, 5]])


def model(device="cpu"):
    vocabulary = st.Vocabulary(seed=2, max_capacity=100, unseen="zeros")
    emb = st.Embedding(4, 2, padding_idx=3, device=device, vocabulary=vocabulary)
    return nn.Sequential(emb, nn.Linear(2, 2, device=device))


def train(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(3):
        take_step(optimizer, net(SEEN + step).square().sum())
    return net


def assert_same(net, other):
    pairs = [
        (*each[0].vocabulary.export(), *(param.detach() for param in each[1].parameters())) for each in (net, other)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def checkpoint(net, other, folder):
    st.save_checkpoint(folder, net)
    with pytest.raises(InvalidValueError, match=r"meta device, .*to_empty"):
        st.load_checkpoint(folder, other)
    st.load_checkpoint(folder, other.to_empty(device="cpu"))


LOADS = {
    "checkpoint": checkpoint,
    "assign": lambda net, other, _: other.load_state_dict(copy.deepcopy(net.state_dict()), assign=True),
    "to_empty": lambda net, other, _: other.to_empty(device="cpu").load_state_dict(net.state_dict()),
}
BORN = {
    "made there": lambda: model("meta"),
    "moved there": lambda: train(model()).to("meta"),
    "copied there": lambda: copy.deepcopy(model("meta")),
}


@pytest.mark.sweep
@pytest.mark.parametrize("born", BORN)
@pytest.mark.parametrize("load", LOADS)
def test_what_is_loaded_gives_it_rows(load, born, tmp_path):
    net, other = train(model()), BORN[born]()
    assert other[0].weight.is_meta
    assert other[0].vocabulary.max_capacity == 100
    LOADS[load](net, other, tmp_path / "saved")
    assert type(other[0].weight) is type(net[0].weight)
    assert_same(net, other)
    assert_same(train(net), train(other))
    assert not other[0](torch.tensor([3])).any()


# --- what has changed since a time, in memory and in files, and copies that follow -------------------------------------


def trained(steps=1, **settings):
    run = Run(**{"capacity": 6, "max_capacity": 16, **settings})
    for step in range(steps):
        run.step(IDS[step : step + 4])
    return run


def follower():
    return Run(capacity=20, max_capacity=None, evict=None, seed=5)


def check_equal(ours, theirs):
    known = ours.ids().sort().values
    assert torch.equal(known, theirs.ids().sort().values)
    assert torch.equal(*(one.weights_of(one.rows(known).numpy()) for one in (ours, theirs)))


def test_only_what_has_changed():
    run = trained(2)
    vocabulary = run.vocabulary
    clock, row = vocabulary.clock, vocabulary.rows(IDS[3:4]).numpy()
    assert vocabulary.weights_of(row).any()
    vocabulary.forget(IDS[3:4])
    # Its weights are erased.
    assert not vocabulary.weights_of(row).any()
    run.step(IDS[[1, 7]])
    changes = vocabulary.changed_since(clock)
    assert set(changes.ids.tolist()) == set(IDS[[1, 7]].tolist())
    assert changes.evicted.tolist() == IDS[3:4].tolist()
    assert (changes.since, changes.clock, changes.complete) == (clock, clock + 1, False)
    assert torch.equal(changes.rows, vocabulary.weights_of(vocabulary.rows(changes.ids).numpy()))
    vocabulary.forget(IDS[:2])
    run.step(IDS[:1])
    # It came back.
    assert vocabulary.changed_since(clock).evicted.tolist() == IDS[[1, 3]].tolist()
    assert vocabulary.changed_since(0).complete
    nn.init.uniform_(run.net.emb.weight, 0.0, 1.0)
    assert vocabulary.changed_since(clock).ids.tolist() == vocabulary.ids().tolist()
    with pytest.raises(InvalidValueError, match="clock is 99"):
        vocabulary.changed_since(99)


MOVES = {
    "in evaluation mode": lambda emb, ids: emb.eval()(ids).sum().backward(),
    "read ahead": lambda emb, ids: emb.eval()(emb.prefetch(ids)).sum().backward(),
    "activate": lambda emb, ids: emb.activate(ids).add_grad(torch.ones(len(ids), emb.embedding_dim)),
    "twice": lambda emb, ids: (emb(ids[:1]).sum().backward(), emb.eval()(ids).sum().backward()),
}


@pytest.mark.parametrize("way", MOVES)
def test_rows_that_a_step_moves_have_changed(way):
    run = trained(idle="lazy")
    clock, ids = run.vocabulary.clock, run.vocabulary.ids()[:2]
    assert run.vocabulary.changed_since(clock).ids.tolist() == []
    MOVES[way](run.net.emb, ids)
    run.optimizer.step()
    assert sorted(run.vocabulary.changed_since(clock).ids.tolist()) == sorted(ids.tolist())


@pytest.mark.parametrize("way", ["eval", "no_grad"])
def test_rows_that_a_lookup_rescales_have_changed(way):
    """Without a use: then all are told."""
    emb = st.Embedding(8, 4, vocabulary=st.Vocabulary(), max_norm=1.0, idle="lazy")
    vocabulary = emb.vocabulary
    emb(torch.tensor([7, 3, 5])).pow(3).sum().backward()
    torch.optim.SGD(emb.parameters(), 5.0).step()
    clock, used = vocabulary.clock, vocabulary.state_dict()["last_use"].clone()
    assert not vocabulary.changed_since(clock).complete
    emb.train(way != "eval")
    with torch.no_grad():
        emb(torch.tensor([3, 7]))
    assert vocabulary.changed_since(clock).complete
    assert torch.equal(vocabulary.state_dict()["last_use"], used)
    torch.optim.SGD(emb.parameters(), 0.0).step()
    assert not vocabulary.changed_since(clock + 1).complete


def test_rows_of_deferred_lookups_that_a_step_has_not_settled_change_later():
    """The step of both tables was made, but the first is full."""
    full, emb = (
        st.Embedding(rows, 4, vocabulary=st.Vocabulary(deferred=True, seed=1), idle="lazy") for rows in (1, 20)
    )
    copied = st.Embedding(20, 4, vocabulary=st.Vocabulary(), idle="lazy")
    optimizer = torch.optim.SGD([full.weight, emb.weight], lr=0.1)
    clock = 0
    for ids in ([1], [1, 2], [1], [3]):
        (full(torch.tensor(ids)).sum() + emb(torch.tensor(ids)).sum()).backward()
        with contextlib.suppress(HostMemoryError):
            optimizer.step()
        changes = emb.vocabulary.changed_since(clock)
        copied.vocabulary.update(changes)
        clock = changes.clock
        optimizer.zero_grad()
    take_step(optimizer, emb(torch.tensor([1])).sum())
    copied.vocabulary.update(emb.vocabulary.changed_since(clock))
    for found, wanted in zip(copied.vocabulary.export(), emb.vocabulary.export(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_as_another_thread_gives_rows_to_other_ids(background, tmp_path, monkeypatch):
    emb, loaded = (st.Embedding(4, DIM, vocabulary=st.Vocabulary(seed=1)) for _ in range(2))
    emb.vocabulary.update(IDS[:4], torch.ones(4, DIM))

    def change():
        emb.vocabulary.forget(IDS[:4])
        emb.vocabulary.update(IDS[4:8], torch.full((4, DIM), 2.0))

    thread, count = threading.Thread(target=change), save.bytes_of

    def bytes_of(*args):
        thread.start()
        thread.join(0.3)
        return count(*args)

    monkeypatch.setattr(save, "bytes_of", bytes_of)
    saving = st.save_checkpoint(tmp_path, emb, background=background)
    thread.join()
    if background:
        saving.wait()
    st.load_checkpoint(tmp_path, loaded)
    ids, rows = loaded.vocabulary.export()
    assert torch.equal(ids, IDS[:4])
    assert (rows == 1).all()
    assert (emb.vocabulary.export()[1] == 2).all()


def test_all_rows_when_idle_ones_have_moved():
    run = trained(idle="exact")
    clock = run.vocabulary.clock
    run.step(IDS[5:6])
    assert run.vocabulary.changed_since(clock).complete
    # A new optimizer moves none, but the one before has.
    run.optimizer = torch.optim.SGD(run.net.parameters(), lr=0.1)
    run.step(IDS[5:6])
    assert run.vocabulary.changed_since(clock).complete


def test_a_dump_that_is_missing_is_told():
    run = trained()
    dumps, clock = [run.vocabulary.changed_since(0)], run.vocabulary.clock
    for step in range(3):
        run.step(IDS[step : step + 2])
        dumps.append(run.vocabulary.changed_since(clock))
        clock = dumps[-1].clock
    copied = follower()
    with pytest.raises(InvalidValueError, match="does not copy"):
        copied.vocabulary.update(dumps[1])
    copied.vocabulary.update(dumps[0])
    before = copied.by_id()
    with pytest.raises(InvalidValueError, match="since clock 3 but this copy has those up to 1"):
        copied.vocabulary.update(dumps[3])
    assert torch.equal(copied.by_id()["rows"], before["rows"])
    for dump in (*dumps[1:], dumps[-1]):
        copied.vocabulary.update(dump)
    check_equal(copied.vocabulary, run.vocabulary)
    assert copied.vocabulary.clock == run.vocabulary.clock
    with pytest.raises(InvalidValueError, match="up to clock 2 but this copy has those up to 4"):
        copied.vocabulary.update(dumps[1])
    # A copy of the copy follows it, and one that was trained follows no more.
    second = copy.deepcopy(copied.net.emb)
    run.step(IDS[:3])
    last = run.vocabulary.changed_since(clock)
    second.vocabulary.update(last)
    check_equal(second.vocabulary, run.vocabulary)
    copied.step(IDS[:1])
    with pytest.raises(InvalidValueError, match="trained"):
        copied.vocabulary.update(last)


def test_a_copy_from_a_checkpoint_follows_until_the_original_goes_back_to_it():
    run = trained(3)
    saved, clock, copied = run.save(), run.vocabulary.clock, follower()
    copied.net.load_state_dict(saved[0])
    run.step(IDS[:2])
    copied.vocabulary.update(run.vocabulary.changed_since(clock))
    check_equal(copied.vocabulary, run.vocabulary)
    run.load(saved)
    for step in range(3):
        run.step(IDS[step : step + 2])
    with pytest.raises(InvalidValueError, match="loaded a state"):
        copied.vocabulary.update(run.vocabulary.changed_since(clock + 1))


def test_more_evicted_ids_than_are_remembered():
    run, copied = trained(capacity=5, max_capacity=None), follower()
    copied.vocabulary.update(run.vocabulary.changed_since(0))
    clock = run.vocabulary.clock
    run.step(IDS[4:9])
    assert not run.vocabulary.changed_since(clock).complete
    run.step(IDS[9:14])
    changes = run.vocabulary.changed_since(clock)
    assert changes.complete
    copied.vocabulary.update(changes)
    check_equal(copied.vocabulary, run.vocabulary)


def test_a_file_that_any_program_reads(tmp_path):
    path = tmp_path / "dump.safetensors"
    run = trained(2)
    changes = run.vocabulary.changed_since(0)
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
        with pytest.raises(StorageError, match="is not a file of changes of a vocabulary"):
            st.Changes.load(path)


def test_what_does_not_fit_changes_nothing():
    runs = trained(8), trained(5)
    changes, fitting = (run.vocabulary.changed_since(0) for run in runs)
    small = Run(capacity=6, max_capacity=8, evict=None)
    small.vocabulary.update(IDS[:3], torch.ones(3, DIM))
    before = small.by_id()["rows"]
    bad = [
        (changes, HostMemoryError, "new ids need rows"),
        (changes._replace(reserved=changes.reserved[:0]), InvalidValueError, "reserved rows"),
        (changes._replace(padding_idx=4), InvalidValueError, "padding_idx"),
        (changes._replace(ids=changes.ids[1:]), InvalidValueError, "fit together"),
        (changes._replace(clock=-1), InvalidValueError, "fit together"),
        (changes._replace(evicted=[]), InvalidValueError, "do not fit together"),
        (changes._replace(ids=torch.zeros_like(changes.ids)), InvalidValueError, "twice"),
    ]
    for given, kind, message in bad:
        with pytest.raises(kind, match=message):
            small.vocabulary.update(given)
        assert torch.equal(small.by_id()["rows"], before)
        assert set(small.vocabulary.ids().tolist()) == set(IDS[:3].tolist())
    # Rows of ids that go make room.
    assert len(fitting.ids) == 8
    small.vocabulary.update(fitting)


@pytest.mark.parametrize("way", ["model", "vocabulary", "assign"])
def test_a_state_dict_that_is_no_copy_loads_into_its_own_module(way):
    """As where a part of it was put in: ``state = model.state_dict(); state.update(part); model.load_state_dict(state)``."""
    run, other = (Run(evict="lfu", half_life=2.0) for _ in "12")
    for each in (run, other):
        each.train(0, 1)
    if way == "vocabulary":
        run.vocabulary.load_state_dict(run.vocabulary.state_dict())
    else:
        run.net.load_state_dict(run.net.state_dict(), assign=way == "assign")
    assert torch.equal(run.vocabulary.state_dict()["counts"], other.vocabulary.state_dict()["counts"])
    for each in (run, other):
        each.train(2)
    assert all(torch.equal(value, run.by_id()[name]) for name, value in other.by_id().items())


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage is deprecated")
def test_a_distributed_checkpoint(tmp_path):
    modules = [st.Embedding(5, 2, vocabulary=st.Vocabulary(seed=1, admit=2, evict="lfu")) for _ in range(2)]
    take_step(torch.optim.AdamW(modules[0].parameters()), modules[0](torch.tensor([7, 7, -1])).sum())
    dcp.save(get_model_state_dict(modules[0]), checkpoint_id=tmp_path)
    found = copy.deepcopy(get_model_state_dict(modules[1]))
    dcp.load(found, checkpoint_id=tmp_path)
    set_model_state_dict(modules[1], found)
    for one, other in zip(modules[0].vocabulary.export(), modules[1].vocabulary.export(), strict=True):
        assert torch.equal(one, other)


def test_averages_by_state_dicts_are_refused():
    """Two modules have their ids in another order, so that the rows of both are no pairs."""
    model = st.Embedding(8, 3, vocabulary=st.Vocabulary(seed=1))
    model(torch.tensor([3, 4]))
    average = copy.deepcopy(model)
    entries = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
    for ours, theirs in entries:
        before = ours.clone()
        assert type(before) is type(copy.deepcopy(ours)) is Tensor
        for write in (ours.copy_, ours.detach().copy_, ours.view(-1)[:1].copy_, functools.partial(ours.__setitem__, 0)):
            with pytest.raises(InvalidTypeError, match=r"a module with a vocabulary, .* use vocabulary.update"):
                write(theirs[:1])
        assert torch.equal(ours, before)
    assert all(type(value) is Tensor for value in saved(model.state_dict(), weights_only=True).values())
