"""A child of fork reads the rows that it shares with its parent as they were, and changes none: to write raises."""

import contextlib
import copy
import functools
import os
import pickle
import time

import pytest
import torch
import torch.nn.functional as F  # noqa: F401 - statements use it
from cases import take_step
from in_child import FORKS, in_child, plain
from torch import nn

import speedtransfer as st
from speedtransfer.errors import DeviceError, SpeedtransferError
from speedtransfer.rows import LAST_STEP
from speedtransfer.tables import forks

pytestmark = FORKS
ROWS, DIM = 60, 4
EVERY = torch.arange(ROWS)
KINDS = {
    "plain": {},
    "cached": {"cache_rows": 10, "layout": "rows"},
    "int8": {"storage_dtype": torch.int8},
    "split24": {"storage_dtype": "split24"},
    "small state": {"state_dtype": torch.uint8},
}


class Training:
    """A model that trains, most of whose rows have missed steps."""

    def __init__(self, memory, folder, **options):
        torch.manual_seed(0)
        self.path = folder / f"{memory}.safetensors"
        path = self.path if memory == "mmap" else None
        self.emb = st.Embedding(ROWS, DIM, memory=memory, path=path, **options)
        self.model = nn.ModuleDict({"emb": self.emb})
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step(EVERY)
        for number in range(5):
            self.step(torch.arange(number, ROWS, 9))
        # Names the weight.
        self.model.state_dict(keep_vars=True)

    def step(self, ids):
        take_step(self.opt, self.emb(ids).sin().sum())

    def stored(self):
        table = self.emb.table
        table.wait()
        return [table.stored(name).clone().view(torch.uint8) for name in table.planes]


def checkpoint(run):
    model = nn.ModuleDict({"emb": nn.Embedding(ROWS, DIM)})
    path, opt = run.path.with_name("checkpoint"), torch.optim.AdamW(model.parameters())
    st.save_checkpoint(path, run.model, run.opt)
    st.load_checkpoint(path, model, opt)
    return model["emb"].weight.detach(), opt.state_dict()["state"]


def saved(run):
    path = run.path.with_name("saved.safetensors")
    run.emb.table.save(path)
    return st.Table.load(path, memory="pageable").torch()


def trained_copy(run):
    twin = copy.deepcopy(run.emb)
    with torch.enable_grad():
        twin(torch.tensor([1, 2])).sum().backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    return twin.weight.detach()


@torch.no_grad()
def done(statement, run):
    parts = {"run": run, "model": run.model, "emb": run.emb, "weight": run.emb.weight, "table": run.emb.table}
    return eval(statement, globals() | parts)


READS = """
model.state_dict()["emb.weight"]
run.opt.state_dict()["state"]
weight.norm()
weight[50]
weight[40:].clone()
weight.data + 0
torch.enable_grad()(emb)(EVERY)
F.embedding(EVERY, weight)
emb(emb.prefetch(EVERY))
table.gather([55, 3, 55], ["weight", "exp_avg"])
torch.tensor(table.numpy())
checkpoint(run)
saved(run)
copy.deepcopy(model)["emb"].weight
copy.deepcopy(table).torch()
pickle.loads(pickle.dumps(emb)).weight
st.to_dense(model)["emb"].weight
trained_copy(run)
""".strip().splitlines()
# A row alone, and a lookup, are read without being rounded anew, and a copy rounds with other numbers.
ROUNDED = ("weight[50]", "torch.enable_grad", "F.embedding", "emb(emb", "trained_copy")


@pytest.mark.parametrize("kind", KINDS)
def test_a_child_reads_what_it_would_of_its_own_copy(tmp_path, kind):
    def read(run):
        # NumPy has no bfloat16.
        reads = [statement for statement in READS if kind != "split24" or "numpy" not in statement]
        return {statement: plain(done(statement, run)) for statement in reads}

    run, twin = (Training(memory, tmp_path, **KINDS[kind]) for memory in ("mmap", "pageable"))
    before = run.stored()
    got, want = in_child(lambda: read(run)), in_child(lambda: read(twin))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.stored(), before, strict=True))
    for name, values in got.items():
        margin = {"int8": 0.05, "split24": 2e-4}.get(kind, 0) if name.startswith(ROUNDED) else 0
        torch.testing.assert_close(values, want[name], rtol=0, atol=margin, msg=lambda m, n=name: f"{n}: {m}")


def backward(run):
    with torch.enable_grad():
        run.emb(EVERY[:2]).sum().backward()


WRITES = """
torch.enable_grad()(run.step)(torch.tensor([1, 2]))
torch.enable_grad()(run.step)(EVERY)
weight.data.zero_()
run.opt.state[weight]["exp_avg"].zero_()
weight.data.__setitem__((3, 0), 1.0)
weight[3].zero_()
weight.detach()[2:5].fill_(0)
F.relu(weight, inplace=True)
setattr(weight, "data", torch.ones(ROWS, DIM))
setattr(emb, "weight", nn.Parameter(torch.ones(ROWS, DIM)))
nn.init.normal_(weight)
emb.reset_parameters()
model.load_state_dict({"emb.weight": torch.ones(ROWS, DIM)})
(checkpoint(run), st.load_checkpoint(run.path.with_name("checkpoint"), model))
table.scatter([1], torch.ones(1, DIM))
table.__setitem__(slice(2), torch.ones(2, DIM))
table.scatter(torch.tensor([1]), torch.ones(1, DIM), check=False)
table.zero_()
table.add_plane("more")
table.grow(ROWS + 1)
F.embedding(EVERY, weight, max_norm=0.01)
(backward(run), torch.optim.SGD(model.parameters(), lr=1.0).step())
""".strip().splitlines()


def test_a_child_writes_to_nothing(tmp_path):
    run = Training("mmap", tmp_path)
    before = run.stored()

    def refusals():
        found = {}
        for statement in WRITES:
            try:
                done(statement, run)
                found[statement] = "not refused"
            except DeviceError as error:
                found[statement] = str(error)
        return found

    for name, said in in_child(refusals).items():
        assert "rows of emb.weight are memory='mmap' of the process that this one was forked" in said, (name, said)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run.stored(), before, strict=True))


later = []


@contextlib.contextmanager
def reading_later(read):
    """Fork a child, and yield what has it read; what it has read is then in `later`."""
    (go, tell), (reading, writing) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        with torch.no_grad(), os.fdopen(writing, "wb") as file:
            pickle.dump(plain(read()), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        yield functools.partial(os.write, tell, b"x")
        later.append(pickle.load(file))
    os.waitpid(child, 0)


def test_rows_that_the_parent_has_written_since(tmp_path):
    """They are newer than the clock of the child, which gives them no steps; others are as of the fork."""
    run = Training("mmap", tmp_path)
    weight, written = run.emb.weight, torch.tensor([7, 50])
    want = in_child(lambda: plain(run.emb(EVERY)))
    with reading_later(lambda: [run.emb(EVERY), weight.data + 0, torch.stack([weight[i] for i in range(ROWS)])]) as go:
        for _ in range(3):
            run.step(written)
        want[written] = plain(run.emb(written))
        go()
    for got in later.pop():
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_row_that_the_parent_is_writing(tmp_path):
    """Its new weight must not be given the steps that the row had missed until then."""
    run = Training("mmap", tmp_path)
    table, row, new = run.emb.table, torch.tensor([50]), torch.full((1, DIM), 2.0)
    with reading_later(lambda: run.emb(row)) as go:
        assert forks.turns is not None
        forks.turns.begin()
        table.write(row, {"weight": new})
        go()
        time.sleep(0.1)
        table.write(row, {LAST_STEP: torch.full((1, 1), 6, dtype=torch.int32)})
        forks.turns.end()
    assert (later.pop() == 2).all()


def test_a_child_does_not_wait_for_ever(tmp_path, monkeypatch):
    """Its parent may have been killed while it wrote."""
    run = Training("mmap", tmp_path)
    monkeypatch.setattr(forks, "_PATIENCE_S", 0.01)
    in_child(lambda: None)
    assert forks.turns is not None
    forks.turns.begin()
    try:
        assert in_child(lambda: plain(run.emb(EVERY))).shape == (ROWS, DIM)
    finally:
        forks.turns.end()


def test_what_a_child_makes_is_its_own(tmp_path):
    def train():
        run = Training("mmap", tmp_path)
        run.emb.table[[1]] = torch.ones(1, DIM)
        # A child of the child shares it.
        with pytest.raises(DeviceError):
            in_child(lambda: run.emb.table.zero_())
        return plain(run.emb.weight)

    assert (in_child(train)[1] == 1).all()


@pytest.mark.parametrize("taken", [False, True])
def test_a_weight_in_shared_memory(taken):
    """torch shares it, whatever the memory of the table is called."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, DIM).share_memory_()
    emb = st.Embedding.from_pretrained(weight.clone() if taken else weight, freeze=False, memory="pageable")
    if taken:
        emb.weight.data = weight
    opt = torch.optim.AdamW(emb.parameters(), lr=0.05)
    for ids in (EVERY, EVERY[:5]):
        take_step(opt, emb(ids).sum())
    before = weight.clone()
    got = in_child(lambda: plain(emb.weight + 0))
    assert torch.equal(weight, before)
    torch.testing.assert_close(got, plain(emb.weight), rtol=0, atol=0)
    with pytest.raises(DeviceError, match="forked"):
        in_child(lambda: emb.weight.data.zero_())


def test_ids_that_the_parent_forgets(tmp_path):
    """Their rows may be those of other ids by now."""
    words, ids = st.Vocabulary(max_capacity=8, evict="lru"), torch.arange(100, 106)
    emb = st.Embedding(8, DIM, memory="mmap", path=tmp_path / "t.npy", vocabulary=words)
    opt = torch.optim.AdamW(emb.parameters(), lr=0.1)
    for some in (ids, ids[:2]):
        take_step(opt, emb(some).sum())
    emb.eval()
    got = in_child(lambda: plain([emb(ids), emb.state_dict()]))
    torch.testing.assert_close(got, plain([emb(ids), emb.state_dict()]), rtol=0, atol=0)
    emb.train()
    for change in (lambda: emb(ids[:1]), lambda: words.forget([100]), lambda: words.update([7], torch.ones(1, DIM))):
        with pytest.raises(SpeedtransferError, match="forked"):
            in_child(lambda change=change: plain(change()))
    assert emb.vocabulary.rows([100, 101]).min() >= 0
