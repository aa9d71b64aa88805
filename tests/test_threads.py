"""Threads: what several use first at once, tables that one reads while another trains, and forks beside threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked import run_script
from in_child import forks, in_child, plain
from midway import elsewhere, midway
from torch import Tensor, nn

import speedtransfer as st
from speedtransfer import once
from speedtransfer.errors import OptimizerError
from speedtransfer.nn import weight as weights

ROWS, DIM = 30, 4

# --- first use --------------------------------------------------------------------------------------------------------------

FIRST_USES = r"""
import sys, tempfile, threading, traceback
sys.setswitchinterval(1e-5)

def at_once(use):
    gate, got = threading.Barrier(8), [None] * 8

    def work(number):
        gate.wait()
        try:
            got[number] = use()
        except BaseException:
            got[number] = traceback.format_exc()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return got

import speedtransfer as st

def names():
    return [id(getattr(st, name)) for name in st.__all__]

found = {"names": (at_once(names), names())}
import torch
from torch import nn

def weight():
    return torch.linspace(-1, 1, 400).view(50, 8)

def trained(module, lookup, *ids):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for each in ids:
        lookup(each).pow(2).sum().backward()
        st.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer

def embedding(**options):
    kind = options.pop("kind", st.Embedding)
    module, optimizer = trained(*[kind(50, 8, _weight=weight(), **options)] * 2, *torch.arange(40).view(2, 5, 4))
    return [module.weight.tolist(), optimizer.state_dict()["state"][0]["exp_avg"].tolist()]

def by_id():
    module = st.Embedding(50, 8, vocabulary=st.Vocabulary(seed=1))
    ids = torch.tensor([1 << 40, 7, -3])
    trained(module, module, ids, ids[1:])
    stats = module.vocabulary.stats()
    return module.vocabulary.rows(ids).tolist(), module.eval()(ids).tolist(), type(stats) is st.VocabularyStats

def several():
    module = st.MultiEmbedding({"a": 10, "b": 20}, 4)
    nn.init.ones_(module.weight)
    trained(module, lambda ids: sum(module({"a": ids, "b": ids + 3}).values()), torch.arange(5))
    return module.weight.tolist()

def ngrams():
    hashing = st.NgramHash(orders=(2, 3), heads=2, rows=100)
    tokens = torch.arange(12).view(2, 6)
    module = st.NgramEmbedding(hashing, 16)
    trained(module, module, tokens)
    return hashing(tokens).tolist(), module(tokens).tolist()

def layers():
    module = st.PerLayerEmbedding(20, 3, 4)
    nn.init.ones_(module.weight)
    return module(torch.arange(6)).tolist()

def replaced():
    model = nn.ModuleDict({"a": nn.Embedding(50, 8, _weight=weight()), "b": nn.Linear(8, 1)})
    st.replace_embeddings(model, min_rows=1)
    loader = [{"ids": torch.arange(4)}] * 3
    rows = [model["a"](batch["ids"]).tolist() for batch in st.prefetch(loader, lambda b: {model["a"]: b["ids"]})]
    dense = st.to_dense(model)
    return rows, len(st.table_parameters(model)), st.full_state_dict(model)["a.weight"].tolist(), str(st.summary(model))

def table():
    made = st.Table.from_array(weight())
    made.scatter([1, 2], torch.zeros(2, 8))
    return made.gather([0, 1, 2]).tolist(), made.stats() == st.TableStats(3, 96, 2, 64)

def files():
    module, optimizer = trained(*[st.Embedding(50, 8, _weight=weight())] * 2, torch.arange(4))
    with tempfile.TemporaryDirectory() as folder:
        st.save_checkpoint(folder + "/saved", module, optimizer, extra=3)
        module.table.save(folder + "/rows.npy")
        nn.init.zeros_(module.weight)
        extra = st.load_checkpoint(folder + "/saved", module, optimizer)
        return extra, module.weight.tolist(), st.Table.load(folder + "/rows.npy").gather([0, 3]).tolist()

def others():
    kinds = st.ActiveRows, st.Changes, st.NgramStatistics
    functions = st.equal_steps, st.load_checkpoint, st.save_checkpoint
    gadget = st.speedtorch.DataGadget
    return len(kinds), len(functions), gadget.__name__, st.errors.OptimizerError.__name__, st.word2vec.train.__name__

def planned():
    return type(st.plan({"a": (1000, 8)}, optimizer="Adam", batch=10, machine="h200")).__name__

def dim_of_kinds(**options):
    return lambda: embedding(**options)

uses = {
    "embedding": embedding,
    "bag": dim_of_kinds(kind=st.EmbeddingBag),
    "int8": dim_of_kinds(storage_dtype=torch.int8),
    "float8": dim_of_kinds(storage_dtype=torch.float8_e4m3fn),
    "8-bit state": dim_of_kinds(state_dtype=torch.uint8),
    "cache": dim_of_kinds(cache_rows=9),
    "records": dim_of_kinds(layout="rows"),
    "lazy": dim_of_kinds(idle="lazy"),
    "vocabulary": by_id,
    "MultiEmbedding": several,
    "n-grams": ngrams,
    "PerLayerEmbedding": layers,
    "replace_embeddings": replaced,
    "Table": table,
    "hash_ids": lambda: st.hash_ids(["a", "b"]).tolist(),
    "plan": planned,
    "files": files,
    "others": others,
}
found.update({name: (at_once(use), use()) for name, use in uses.items()})
for name, (got, want) in found.items():
    for each in got:
        if each != want:
            print(name, each if isinstance(each, str) else f"{each} is not {want}", sep=": ")
            raise SystemExit(1)
"""


def test_first_use_of_everything_by_eight_threads() -> None:
    """They get what one thread gets, whichever comes first."""
    ran = run_script(FIRST_USES)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]


# --- one trains, others read ------------------------------------------------------------------------------------------------


class Half:
    """An engine whose writes come in two halves, between which `meanwhile` is called; a read sets `has_read`."""

    def __init__(self, engine: Any, meanwhile: Callable[[], None]) -> None:
        self.engine, self.meanwhile, self.has_read = engine, meanwhile, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def gather(self, *args: Any, **kwargs: Any) -> None:
        self.engine.gather(*args, **kwargs)
        self.has_read.set()

    def scatter(self, planes: list[Tensor], ids: Tensor, rows: list[Tensor], *args: Any) -> None:
        half = DIM // 2
        self.engine.scatter([plane[:, :half] for plane in planes], ids, [part[:, :half].contiguous() for part in rows])
        self.meanwhile()
        self.engine.scatter(planes, ids, rows, *args)


@pytest.mark.parametrize(
    "read",
    [
        lambda emb, ids: emb(ids),
        lambda emb, ids: emb.table.gather(ids),
        lambda emb, ids: emb.table.look_up(ids),
        lambda emb, ids: F.embedding(ids, emb.weight),
        lambda emb, ids: emb(emb.prefetch(ids)),
    ],
    ids=["lookup", "gather", "few rows", "F.embedding", "prefetch"],
)
def test_a_row_that_is_being_written_is_read_whole(read: Callable[[Any, Tensor], Tensor]) -> None:
    emb = st.Embedding(ROWS, DIM, idle="lazy")
    nn.init.zeros_(emb.weight)
    table, ids = emb.table, torch.arange(ROWS)
    with ThreadPoolExecutor(1) as pool:
        found: list[Any] = []

        def meanwhile() -> None:
            found.append(pool.submit(torch.no_grad()(lambda: read(emb, ids).clone())))
            # It has read half of each row, or waits.
            table._engine.has_read.wait(0.5)

        table._engine = Half(table._engine, meanwhile)
        table.scatter(ids, torch.ones(ROWS, DIM))
        assert torch.equal(found[0].result(60), torch.ones(ROWS, DIM))


def training(**options: Any) -> tuple[Any, Any]:
    emb = st.Embedding(ROWS, DIM, _weight=torch.arange(ROWS * DIM).view(ROWS, DIM).float(), **options)
    optimizer = torch.optim.Adam(emb.parameters(), lr=0.1)
    for ids in (torch.arange(ROWS), torch.tensor([3, 4])):
        optimizer.zero_grad()
        emb(ids).sum().backward()
        if len(ids) == ROWS:
            optimizer.step()
    return emb, optimizer


OVERTAKEN: dict[str, Callable[[Any], Any]] = {
    "a row": lambda emb: emb.weight[29],
    "whole": lambda emb: emb.weight + 0,
    "F.embedding": lambda emb: F.embedding(torch.tensor([2, 29]), emb.weight),
    "detach": lambda emb: emb.weight.detach(),
}


@pytest.mark.parametrize("options", [{}, {"idle": "lazy"}, {"cache_rows": 5}], ids=["exact", "lazy", "cache"])
@pytest.mark.parametrize("held", ["attribute", "function"])
@pytest.mark.parametrize("name", OVERTAKEN)
def test_a_step_that_begins_while_another_thread_reads_the_weight(
    name: str, held: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameter is lent to it; what is read are rows of the table, and those that a gradient belongs to."""
    emb, optimizer = training(**options)
    want = OVERTAKEN[name](emb).detach().clone()
    arrived, lent, reader = threading.Event(), threading.Event(), list[int]()

    def holding(function: Callable[..., Any]) -> Callable[..., Any]:
        def hold(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() in reader and not arrived.is_set() and (held == "function" or "weight" in args):
                arrived.set()
                assert lent.wait(60)
            return function(*args, **kwargs)

        return hold

    if held == "function":
        monkeypatch.setattr(weights, "_call", holding(weights._call))
    else:
        monkeypatch.setattr(nn.Module, "__getattr__", holding(nn.Module.__getattr__))

    def read() -> Any:
        reader.append(threading.get_ident())
        found = OVERTAKEN[name](emb)
        return found.requires_grad, found.detach().clone()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(read)
        assert arrived.wait(60)

        def meanwhile() -> Any:
            lent.set()
            return found.result(60)

        trains, values = midway(optimizer, meanwhile)
    assert torch.equal(values, want)
    if held == "function":
        assert trains == (name != "detach")


def test_what_is_done_elsewhere_in_the_middle_of_a_step_is_refused() -> None:
    """And the step is made as without."""

    def end(disturbed: bool) -> tuple[Tensor, Tensor]:
        emb, optimizer = training()
        other = torch.optim.Adam(emb.parameters(), lr=1.0)
        loss = emb(torch.tensor([5])).sum()
        uses = [optimizer.step, other.step, loss.backward, lambda: emb.activate([1]).add_grad(torch.ones(1, DIM))]

        def disturb() -> None:
            for use in uses if disturbed else ():
                with pytest.raises(OptimizerError, match=r"for weight in the middle of a step of another thread"):
                    elsewhere(use)

        midway(optimizer, disturb)
        found = emb.weight.detach().clone(), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        optimizer.zero_grad()
        emb(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert emb.weight.isfinite().all()
        return found

    torch.testing.assert_close(end(True), end(False), rtol=0, atol=0)


def test_threads_that_train_models_of_their_own() -> None:
    def train(seed: int) -> Tensor:
        emb = st.Embedding(ROWS, DIM, _weight=torch.full((ROWS, DIM), float(seed)))
        optimizer = torch.optim.AdamW(emb.parameters(), lr=0.1)
        for number in range(15):
            emb(torch.arange(number, number + 9)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return emb.weight.detach().clone()

    want = [train(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(*pair) for pair in zip(pool.map(train, range(4)), want, strict=True))


def test_planes_that_are_added_and_dropped_while_another_thread_goes_through_them() -> None:
    emb = st.Embedding(ROWS, DIM, storage_dtype=torch.bfloat16)
    table, rows = emb.table, emb._handle.rows
    going = [iter(table._planes.values()), iter(rows._codecs.items())]
    optimizer = torch.optim.Adam(emb.parameters())
    emb(torch.tensor([1])).sum().backward()
    optimizer.step()
    going.append(iter(table._planes.values()))
    table.add_plane("more")
    table.drop_plane("more")
    assert [len(list(each)) for each in going] == [1, 1, len(table.planes)]


# --- forks ------------------------------------------------------------------------------------------------------------------


@forks
def test_a_fork_while_another_thread_has_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a while; then the child finds them free."""
    monkeypatch.setattr(once, "_PATIENCE_S", 0.05)
    emb, optimizer = training()
    optimizer.step()
    want, has, done = plain(emb(torch.arange(ROWS))), threading.Event(), threading.Event()

    def hold() -> None:
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
def test_a_fork_waits_for_a_write(tmp_path: Path) -> None:
    emb = st.Embedding(ROWS, DIM)
    nn.init.zeros_(emb.weight)
    table, begun = emb.table, threading.Event()

    def meanwhile() -> None:
        begun.set()
        # The fork is waiting by then, or finds all rows written.
        threading.Event().wait(0.1)

    table._engine = Half(table._engine, meanwhile)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(lambda: table.scatter(torch.arange(ROWS), torch.ones(ROWS, DIM)))
        assert begun.wait(60)
        assert (in_child(lambda: plain(table.torch())) == 1).all()
        written.result(60)
