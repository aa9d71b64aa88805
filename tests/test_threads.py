"""Threads: what several use first at once, tables that one reads while another trains, and forks beside threads."""

import copy
import functools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import interrupt
import pytest
import torch
import torch.nn.functional as F
from cases import elsewhere, midway, take_step
from forked import run_script
from in_child import forks, in_child, plain
from torch import nn

import speedtransfer as st
from speedtransfer import once, workers
from speedtransfer.errors import OptimizerError
from speedtransfer.nn import weight as weights

ROWS, DIM = 30, 4

# --- first use --------------------------------------------------------------------------------------------------------------

FIRST_USES = r"""
import sys, threading
from concurrent.futures import ThreadPoolExecutor
sys.setswitchinterval(1e-5)
import speedtransfer as st

gate = threading.Barrier(4)

def check(use):
    got = list(ThreadPoolExecutor(4).map(lambda number: gate.wait() * 0 or use(), range(4)))
    assert got == [use()] * 4, got

check(lambda: [id(getattr(st, name)) for name in st.__all__])
import torch

def trained(**options):
    module = st.Embedding(50, 8, _weight=torch.linspace(-1, 1, 400).view(50, 8), **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for ids in torch.arange(40).view(2, 5, 4):
        module(ids).pow(2).sum().backward()
        st.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer

def rows(**options):
    module, optimizer = trained(**options)
    return [module.weight.tolist(), optimizer.state_dict()["state"][0]["exp_avg"].tolist()]

check(rows)
check(lambda: rows(storage_dtype=torch.int8, state_dtype=torch.uint8))
check(lambda: (st.speedtorch.DataGadget.__name__, st.word2vec.train.__name__))
"""


def test_first_use_of_everything_by_four_threads():
    """They get what one thread gets, whichever comes first."""
    ran = run_script(FIRST_USES)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


LAST_USES = """
import atexit, sys, threading, torch, speedtransfer as st
emb = st.Embedding(40_000, 64)
opt = torch.optim.AdamW(emb.parameters())

def train(where):
    for ids in st.prefetch(torch.arange(40_000).view(2, 20_000), lambda ids: {emb: ids}):
        emb(ids).sum().backward()
        opt.step()
        opt.zero_grad()
    st.save_checkpoint(sys.argv[1] + where, emb, opt)
    st.load_checkpoint(sys.argv[1] + where, emb, opt)
    print(where)

def train_late():
    threading.main_thread().join()
    train("thread")

atexit.register(train, "exit")
train("script")
threading.Thread(target=train_late).start()
"""


def test_use_until_python_has_ended(tmp_path):
    """By a thread that the script leaves behind, and by a function that Python calls as it exits."""
    command = [sys.executable, "-c", LAST_USES, f"{tmp_path}/"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.stdout.split(), ran.returncode) == (["script", "thread", "exit"], 0), ran.stderr[-2000:]


def test_an_interrupt_at_any_line_leaves_threads_to_others(monkeypatch):
    monkeypatch.setattr(interrupt, "TRACED", workers.__file__)

    def use(pool):
        return [pool.submit(len, "ab").result() for _ in range(2)][1]

    counting = interrupt.Interrupt()
    counting.during(lambda: use(workers.Workers("test")))
    assert counting.places
    for at in range(1, len(counting.places) + 1):
        pool = workers.Workers("test")
        interrupt.Interrupt(at).during(functools.partial(use, pool))
        assert elsewhere(functools.partial(use, pool)) == 2
        pool.close()


# --- one trains, others read ------------------------------------------------------------------------------------------------


class Half:
    """An engine whose writes come in two halves, between which `meanwhile` is called; a read sets `has_read`."""

    def __init__(self, engine, meanwhile):
        self.engine, self.meanwhile, self.has_read = engine, meanwhile, threading.Event()

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def gather(self, *args, **kwargs):
        self.engine.gather(*args, **kwargs)
        self.has_read.set()

    def scatter(self, planes, ids, rows, *args):
        half = DIM // 2
        self.engine.scatter([plane[:, :half] for plane in planes], ids, [part[:, :half].contiguous() for part in rows])
        self.meanwhile()
        self.engine.scatter(planes, ids, rows, *args)


READS = {
    "lookup": lambda emb, ids: emb(ids),
    "gather": lambda emb, ids: emb.table.gather(ids),
    "few rows": lambda emb, ids: emb.table.look_up(ids),
    "F.embedding": lambda emb, ids: F.embedding(ids, emb.weight),
    "prefetch": lambda emb, ids: emb(emb.prefetch(ids)),
}


@pytest.mark.parametrize("name", READS)
def test_a_row_that_is_being_written_is_read_whole(name):
    emb = st.Embedding(ROWS, DIM, idle="lazy")
    nn.init.zeros_(emb.weight)
    table, ids = emb.table, torch.arange(ROWS)
    with ThreadPoolExecutor(1) as pool:
        found = []

        def meanwhile():
            found.append(pool.submit(torch.no_grad()(lambda: READS[name](emb, ids).clone())))
            # It has read half of each row, or waits.
            table._engine.has_read.wait(0.5)

        table._engine = Half(table._engine, meanwhile)
        table.scatter(ids, torch.ones(ROWS, DIM))
        assert torch.equal(found[0].result(60), torch.ones(ROWS, DIM))


def training(**options):
    emb = st.Embedding(ROWS, DIM, _weight=torch.arange(ROWS * DIM).view(ROWS, DIM).float(), **options)
    optimizer = torch.optim.Adam(emb.parameters(), lr=0.1)
    take_step(optimizer, emb(torch.arange(ROWS)).sum())
    emb(torch.tensor([3, 4])).sum().backward()
    return emb, optimizer


OVERTAKEN = {
    "a row": lambda emb: emb.weight[29],
    "whole": lambda emb: emb.weight + 0,
    "F.embedding": lambda emb: F.embedding(torch.tensor([2, 29]), emb.weight),
    "detach": lambda emb: emb.weight.detach(),
}


@pytest.mark.parametrize("options", [{}, {"idle": "lazy"}, {"cache_rows": 5}], ids=["exact", "lazy", "cache"])
@pytest.mark.parametrize("name", OVERTAKEN)
def test_a_step_that_begins_while_another_thread_reads_the_weight(name, options, monkeypatch):
    """The parameter is lent to it; what is read are rows of the table, and those that a gradient belongs to."""
    emb, optimizer = training(**options)
    want = OVERTAKEN[name](emb).detach().clone()
    arrived, lent, reader = threading.Event(), threading.Event(), list[int]()

    def holding(function):
        def hold(*args, **kwargs):
            if threading.get_ident() in reader and not arrived.is_set():
                arrived.set()
                assert lent.wait(60)
            return function(*args, **kwargs)

        return hold

    monkeypatch.setattr(weights, "_call", holding(weights._call))

    def read():
        reader.append(threading.get_ident())
        found = OVERTAKEN[name](emb)
        return found.requires_grad, found.detach().clone()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read)
        assert arrived.wait(60)

        def meanwhile():
            lent.set()
            return found.result(60)

        trains, values = midway(optimizer, meanwhile)
    assert torch.equal(values, want)
    assert trains == (name != "detach")


def test_what_is_done_elsewhere_in_the_middle_of_a_step_is_refused():
    """And the step is made as without."""

    def end(disturbed):
        emb, optimizer = training()
        other = torch.optim.Adam(emb.parameters(), lr=1.0)
        loss = emb(torch.tensor([5])).sum()
        uses = [optimizer.step, other.step, loss.backward, lambda: emb.activate([1]).add_grad(torch.ones(1, DIM))]

        def disturb():
            for use in uses if disturbed else ():
                with pytest.raises(OptimizerError, match=r"for weight in the middle of a step of another thread"):
                    elsewhere(use)

        midway(optimizer, disturb)
        found = emb.weight.detach().clone(), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        take_step(optimizer, emb(torch.tensor([1])).sum())
        assert emb.weight.isfinite().all()
        return found

    torch.testing.assert_close(end(True), end(False), rtol=0, atol=0)


def test_features_that_step_apart_elsewhere_are_not_saved(tmp_path):
    """The optimizer has a parameter for each."""
    emb = st.MultiEmbedding({"item": ROWS, "user": ROWS}, DIM, idle="lazy")
    optimizer = torch.optim.Adam(emb.parameters(), lr=0.1)
    emb({"item": torch.tensor([1]), "user": torch.tensor([2])})["user"].sum().backward()

    def save():
        with pytest.raises(
            OptimizerError, match=r"a checkpoint is saved for .+ in the middle of a step of another thread"
        ):
            elsewhere(lambda: st.save_checkpoint(tmp_path / "run", emb, optimizer))

    midway(optimizer, save)
    assert not (tmp_path / "run").exists()


# --- another thread saves or reads a model that is training: it sees whole tables, and changes none -------------------------


class Noting(st.Embedding):
    """Looks a row up in another thread while torch saves or loads this module."""

    def get_extra_state(self):
        assert elsewhere(lambda: self(torch.tensor([2])).requires_grad)
        return float(self.weight.detach().sum())

    def set_extra_state(self, state):
        self.extra = self.get_extra_state()


@pytest.mark.parametrize("options", [{}, {"cache_rows": 4}, {"vocabulary": st.Vocabulary()}], ids=str)
def test_the_weight_stays_while_a_state_dict_is_made_and_loaded(options):
    module = Noting(ROWS, DIM, **copy.deepcopy(options))
    module(torch.arange(ROWS))
    weight = module.weight
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert module.extra == float(weight.detach().sum()) != 0
    assert module.weight is weight


def save(path, model, optimizer):
    st.save_checkpoint(path, model, optimizer)
    again = nn.ModuleList([st.Embedding(ROWS, DIM)])
    other = type(optimizer)(again.parameters())
    st.load_checkpoint(path, again, other)
    return again.state_dict()["0.weight"], [state["exp_avg"] for state in other.state_dict()["state"].values()]


USES = {
    "state_dict": lambda model, optimizer, path: model.state_dict()["0.weight"].clone(),
    "detach": lambda model, optimizer, path: model[0].weight.detach().clone(),
    "data": lambda model, optimizer, path: model[0].weight.data[:].clone(),
    "F.embedding": lambda model, optimizer, path: F.embedding(torch.arange(ROWS), model[0].weight).detach(),
    "full_state_dict": lambda model, optimizer, path: st.full_state_dict(model)["0.weight"].clone(),
    "deepcopy": lambda model, optimizer, path: copy.deepcopy(model)[0].weight.detach(),
    "to_dense": lambda model, optimizer, path: st.to_dense(model)[0].weight.detach(),
    "state": lambda model, optimizer, path: [it["exp_avg"].shape for it in optimizer.state_dict()["state"].values()],
    "checkpoint": lambda model, optimizer, path: save(path, model, optimizer),
}


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"cache_rows": 4}, {"idle": "lazy"}], ids=["exact", "cache", "lazy"])
@pytest.mark.parametrize("name", USES)
def test_in_the_middle_of_a_step(name, options, tmp_path):
    """What is seen is what was there before it; and the step is made as without."""
    ends = []
    for use in (lambda *_: None, USES[name]):
        torch.manual_seed(0)
        model = nn.ModuleList([st.Embedding(ROWS, DIM, **options)])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(3):
            model[0](torch.arange(number, number + 5)).pow(2).sum().backward()
            want = USES[name](model, optimizer, tmp_path / "before")
            seen = midway(optimizer, lambda: elsewhere(lambda: use(model, optimizer, tmp_path / "saved")))  # noqa: B023
            optimizer.zero_grad()
            if use is USES[name]:
                torch.testing.assert_close(seen, want, rtol=0, atol=0)
        ends.append(model.state_dict()["0.weight"].clone())
    assert torch.equal(*ends)


# --- forks ------------------------------------------------------------------------------------------------------------------


@forks
@pytest.mark.parametrize("layout", ["planes", "rows"])
def test_a_checkpoint_that_is_saved_while_another_thread_trains(layout, tmp_path):
    """Its checksums are of what was written, and each row is one of some step."""
    model = nn.ModuleDict({"emb": st.Embedding(60_000, 16, idle="lazy", layout=layout), "dense": nn.Linear(1000, 1000)})
    nn.init.zeros_(model["emb"].weight)
    opt, ended = torch.optim.Adagrad(model.parameters(), lr=0.1), threading.Event()

    def step():
        ids = torch.randint(60_000, (4096,))
        # All values of a row change alike.
        take_step(opt, model["emb"](ids).sum() + model["dense"].weight.sum())

    def train():
        while not ended.is_set():
            step()

    step()
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        try:
            for number in range(4):
                st.save_checkpoint(tmp_path / str(number), model, opt)
        finally:
            ended.set()
        training.result()
    for number in range(4):
        st.load_checkpoint(tmp_path / str(number), model, opt)
        rows = model["emb"].weight.detach()
        assert torch.equal(rows, rows[:, :1].expand_as(rows))


def test_a_fork_while_another_thread_has_the_rows(monkeypatch):
    """It waits for a while; then the child finds them free."""
    monkeypatch.setattr(once, "_PATIENCE_S", 0.05)
    emb, optimizer = training()
    optimizer.step()
    want, has, done = plain(emb(torch.arange(ROWS))), threading.Event(), threading.Event()

    def hold():
        with emb._handle.rows.lock, emb.table._turn:
            has.set()
            done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(hold)
        assert has.wait(60)
        try:
            got = in_child(lambda: plain([emb(torch.arange(ROWS)), emb.table.stats().gathered_rows]))
        finally:
            done.set()
    assert (got[0] == want).all()
    # Of its own thread too.
    with emb._handle.rows.lock:
        assert (in_child(lambda: plain(emb(torch.arange(ROWS)))) == want).all()
    assert (plain(emb(torch.arange(ROWS))) == want).all()


@forks
def test_a_fork_waits_for_a_write(tmp_path):
    emb = st.Embedding(ROWS, DIM)
    nn.init.zeros_(emb.weight)
    table, begun = emb.table, threading.Event()

    def meanwhile():
        begun.set()
        # The fork is waiting by then, or finds all rows written.
        threading.Event().wait(0.1)

    table._engine = Half(table._engine, meanwhile)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(lambda: table.scatter(torch.arange(ROWS), torch.ones(ROWS, DIM)))
        assert begun.wait(60)
        assert (in_child(lambda: plain(table.torch())) == 1).all()
        written.result(60)
