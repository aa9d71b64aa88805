"""Copies that follow a model by files of what has changed: bit for bit, in their order, or refused before anything changes."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import take_step
from in_child import kill_at_line, run_child
from interrupt import Interrupt
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sweeps import few
from torch import nn
from typer.testing import CliRunner

import speedtransfer as st
from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.cli import app
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError

ROWS = 60
FORMS: dict[str, dict[str, Any]] = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"storage_dtype": torch.int8, "idle": "lazy"},
    "float8": {"storage_dtype": torch.float8_e4m3fn, "scale_block": 3, "idle": "lazy"},
    "split24": {"storage_dtype": "split24", "idle": "lazy"},
    "bfloat16": {"dtype": torch.bfloat16, "idle": "lazy"},
    "records": {"layout": "rows", "idle": "lazy"},
    "cache": {"cache_rows": 8, "idle": "lazy"},
    "file": {"memory": "mmap", "idle": "lazy"},
}


class Net(nn.Module):
    """Tables, one of them in two places, a dense part and a buffer."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.emb = st.Embedding(ROWS, 9, **options)
        self.again = self.emb
        self.many = st.MultiEmbedding([20, 10], 4, idle="lazy")
        self.head = nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids).to(torch.float32)) + self.many(torch.stack([ids % 20, ids % 10], 1)).sum(1)


def optimizer(net: Net) -> Any:
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def step(net: Net, opt: Any) -> None:
    opt.zero_grad()
    net(torch.randint(0, ROWS, (4,))).square().sum().backward()
    opt.step()


def contents(net: nn.Module) -> list[bytes]:
    return [value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for value in net.state_dict().values()]


@torch.no_grad()
def write_by_hand(net: Net, how: int) -> None:
    emb = net.emb
    if how == 0:
        emb.weight[3] = 2.0
    elif how == 1 and emb.table.dtype == torch.float32:
        emb.table[torch.tensor([5, 7])] = torch.ones(2, 9)
    elif how == 2:
        net.many.table.fill_(0.5)
    elif emb.table.dtype == torch.float32 and emb.table.cache_rows is None:
        emb.table.numpy()[11, 2] = np.float32(4.0)


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_follows(form: str, tmp_path: Path) -> None:
    given = [FORMS[form] | ({"path": tmp_path / f"{n}.npy"} if form == "file" else {}) for n in range(2)]
    net, copy = Net(**given[0]), Net(**given[1])
    opt, mark, known = optimizer(net), st.mark(net), None
    draw = random.Random(5)
    for number in range(6):
        for _ in range(draw.randrange(3)):
            step(net, opt)
        write_by_hand(net, number % 5)
        path = tmp_path / f"{number}.safetensors"
        mark = st.save_delta(path, net, mark)
        # By what the copy knows of itself, or by reading it all.
        known = st.apply_delta(path, copy, known if number % 2 else None)
        assert contents(copy) == contents(net)
        assert known.fingerprints == mark.fingerprints == st.mark(copy).fingerprints
    # It may be trained on, and be followed itself.
    step(copy, optimizer(copy))
    assert st.mark(copy).fingerprints != mark.fingerprints


def test_only_rows_that_differ_are_written(tmp_path: Path) -> None:
    net = Net(idle="lazy")
    mark = st.mark(net)
    with torch.no_grad():
        net.emb.weight[3] += 1.0
        net.emb.weight[4] += 0.0
        net.emb.weight[59, 8] = -net.emb.weight[59, 8]
    mark = st.save_delta(tmp_path / "one.safetensors", net, mark)
    saved = load_file(tmp_path / "one.safetensors")
    assert saved["0.ids"].flatten().tolist() == [3, 59]
    assert torch.equal(saved["model/emb.weight"], net.emb.weight[[3, 59]])
    assert len(saved["1.ids"]) == 0
    st.save_delta(tmp_path / "none.safetensors", net, mark)
    assert len(load_file(tmp_path / "none.safetensors")["0.ids"]) == 0


VOCABULARIES: dict[str, dict[str, Any]] = {
    "lazy": {"idle": "lazy"},
    "exact": {"idle": "exact"},
    "int8": {"storage_dtype": torch.int8, "idle": "lazy"},
    "float8": {"storage_dtype": torch.float8_e4m3fn, "idle": "lazy"},
    "split24": {"storage_dtype": "split24", "idle": "exact"},
    "bfloat16": {"storage_dtype": torch.bfloat16, "idle": "lazy"},
    "padding": {"padding_idx": 7, "idle": "lazy"},
}


class Ids(nn.Module):
    """Rows of ids, some of which go, of one feature and of two."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.emb = st.Embedding(5, 6, vocabulary=st.Vocabulary(max_capacity=24, evict="lru", seed=seed), **options)
        self.many = st.MultiEmbedding({"a": 4, "b": 4}, 6, vocabulary=st.Vocabulary(max_capacity=200), idle="lazy")
        self.head = nn.Linear(6, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pairs = self.many({"a": ids, "b": ids % 5})
        return self.head(self.emb(ids).to(torch.float32) + pairs["a"] + pairs["b"])


def by_id(net: Any) -> list[Any]:
    """Return what is known of ids, whatever rows they have."""
    found: list[Any] = [value.tolist() for value in net.head.state_dict().values()]
    for vocabulary in (net.emb.vocabulary, net.many.vocabulary):
        ids, rows = vocabulary.export()
        order = ids.argsort()
        found += [ids[order].tolist(), rows[order].tolist(), vocabulary.clock]
    unseen = torch.tensor([-1, -2, 7])
    with torch.no_grad():
        return [*found, net.eval().emb(unseen).tolist()]


@pytest.mark.parametrize("form", VOCABULARIES)
def test_ids_come_and_go(form: str, tmp_path: Path) -> None:
    net, copy = Ids(**VOCABULARIES[form]), Ids(**VOCABULARIES[form])
    opt, mark, known, draw = optimizer(net), st.mark(net), None, random.Random(5)
    for number in range(8):
        for _ in range(1 + draw.randrange(3)):
            net.train()
            opt.zero_grad()
            net(torch.randint(10 * number, 10 * number + 30, (12,))).square().sum().backward()
            opt.step()
        if number == 3:
            opt.zero_grad()
            net.emb.vocabulary.forget(net.emb.vocabulary.ids()[:5])
        if number == 4 and form == "lazy":
            net.emb.table.torch()[-3:] += 1.0  # a write that no clock tells
        path = tmp_path / f"{number}.safetensors"
        mark = st.save_delta(path, net, mark)
        if number == 6:
            copy = pickle.loads(pickle.dumps(copy))
        known = st.apply_delta(path, copy, known if number % 2 else None)
        assert by_id(copy) == by_id(net)
        assert known.fingerprints == mark.fingerprints == st.mark(copy).fingerprints
    assert sum(len(load_file(each)["0.gone"]) for each in tmp_path.iterdir()) > 10
    before = by_id(copy)
    for wrong in (tmp_path / "0.safetensors", path):
        with pytest.raises(InvalidValueError, match=r"begins with other rows|has been applied"):
            st.apply_delta(wrong, copy)
    assert by_id(copy) == before


def test_vocabularies_that_do_not_fit(tmp_path: Path) -> None:
    net, path = Ids(idle="lazy"), tmp_path / "delta.safetensors"
    mark = st.mark(net)
    net(torch.arange(20))
    st.save_delta(path, net, mark)
    small = Ids(idle="lazy")
    small.emb = st.Embedding(5, 6, vocabulary=st.Vocabulary(max_capacity=16, evict="lru", seed=0), idle="lazy")
    no_ids = Ids(idle="lazy")
    no_ids.emb = st.Embedding(5, 6, idle="lazy")
    padded = Ids(idle="lazy", padding_idx=3)
    for other, words in [(no_ids, "has no vocabulary in the model"), (padded, "padding_idx"), (small, "need rows")]:
        before = st.mark(other).fingerprints
        with pytest.raises((InvalidValueError, HostMemoryError), match=words):
            st.apply_delta(path, other)
        assert st.mark(other).fingerprints == before


def test_tables_that_grow(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        table = st.Table(10, 4, memory="pageable", max_rows=50).normal_()
        return nn.ModuleDict({"emb": st.Embedding.from_pretrained(table, freeze=False)})

    net, copy = make(), make()
    mark = st.mark(net)
    net["emb"].table.grow(30)
    with torch.no_grad():
        net["emb"].weight[25] = 1.0
    larger = st.save_delta(tmp_path / "1.safetensors", net, mark)
    st.apply_delta(tmp_path / "1.safetensors", copy, st.mark(copy))
    assert contents(copy) == contents(net)
    with pytest.raises(InvalidValueError, match=r"since has 30 rows of .* but the table has 10"):
        st.save_delta(tmp_path / "2.safetensors", make(), larger)


def chain(folder: Path, make: Any = Net) -> tuple[Any, list[Path]]:
    net = make(idle="lazy")
    opt, mark, paths = optimizer(net), st.mark(net), []
    for number in range(3):
        step(net, opt)
        paths.append(folder / f"{number}.safetensors")
        mark = st.save_delta(paths[-1], net, mark)
    return net, paths


def refuses(words: str, path: Any, net: nn.Module, *mark: Any, error: type[Exception] = InvalidValueError) -> None:
    before = contents(net)
    with pytest.raises(error, match=words or None):
        st.apply_delta(path, net, *mark)
    assert contents(net) == before


def test_gaps_and_repeats_are_refused(tmp_path: Path) -> None:
    _, paths = chain(tmp_path)
    copy = Net(idle="lazy")
    refuses("begins with other rows of 'emb.weight'.*a delta before it is missing", paths[1], copy)
    known = st.apply_delta(paths[0], copy)
    refuses("has been applied: the model holds what comes after it", paths[0], copy)
    refuses("is number 3 of .* but the model is at number 1", paths[2], copy, known)
    refuses("mark is a int but must be a mark", paths[1], copy, 0, error=InvalidTypeError)
    refuses("begins with other rows", paths[2], copy)
    with torch.no_grad():
        copy.emb.weight[int(Delta(paths[1]).rows["emb.weight"].ids[0])] += 1.0
    refuses("rows of 'emb.weight' were written after the mark was made", paths[1], copy, known)
    refuses("begins with other rows", paths[1], copy)
    refuses("begins with other rows", paths[0], Net(seed=1, idle="lazy"))
    refuses("stored as plain.*but as int8", paths[0], Net(storage_dtype=torch.int8))
    smaller = nn.ModuleDict({"emb": st.Embedding(ROWS, 9)})
    refuses("has tables that the model has not", paths[0], smaller)
    refuses("mark is of a model with other tables", paths[1], copy, st.mark(smaller))
    wider = Net(idle="lazy")
    wider.head[0] = nn.Linear(9, 5)
    refuses("'head.0.weight' is .4, 9.", paths[0], wider)
    refuses("suffix", tmp_path / "delta.npy", copy)
    refuses("cannot read", tmp_path / "none.safetensors", copy, error=StorageError)


def test_a_delta_without_rows_is_missed_too(tmp_path: Path) -> None:
    net, copy, paths = Net(idle="lazy"), Net(idle="lazy"), [tmp_path / f"{n}.safetensors" for n in range(5)]
    mark = st.mark(net)
    assert mark.number == 0
    for path in paths:
        with torch.no_grad():
            net.head[0].bias += 1.0
        mark = st.save_delta(path, net, mark)
    assert (mark.number, Delta(paths[2]).place.number, Delta(paths[2]).follows) == (5, 3, Delta(paths[1]).place.name)
    known = st.apply_delta(paths[1], copy, st.apply_delta(paths[0], copy, st.mark(copy)))
    assert known.number == 2
    refuses("is number 4.* but the model is at number 2", paths[3], copy, known)
    refuses("has been applied", paths[1], copy, known)
    refuses("is number 1 .* but the model is at number 2", paths[0], copy, known)
    # Of another run, whose rows are the same.
    with torch.no_grad():
        net.head[0].bias += 1.0
    other = st.save_delta(tmp_path / "other.safetensors", net, st.mark(net))
    st.save_delta(tmp_path / "other.safetensors", net, other)
    refuses("is number 2.* but the model is at number 2", tmp_path / "other.safetensors", copy, known)
    st.save_checkpoint(tmp_path / "base", net)
    for some in ([0, 2], [0, 1, 1], [1, 0]):
        with pytest.raises(InvalidValueError, match="does not begin where"):
            st.merge(tmp_path / "base", [paths[n] for n in some], tmp_path / "out")
    st.merge(tmp_path / "base", paths[:3], tmp_path / "out")
    # A trainer that begins again from what it had saved is followed on.
    again = Net(idle="lazy")
    st.load_checkpoint(tmp_path / "out", again)
    st.save_delta(paths[3], again, st.mark(again))
    known = st.apply_delta(paths[3], copy, known)
    assert known.number == 1
    assert contents(copy) == contents(again)


def test_a_folder_is_listed(tmp_path: Path) -> None:
    def listed(*args: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["follow", *args], env={"COLUMNS": "200"})
        return result.exit_code, " ".join(result.output.split())

    _, paths = chain(tmp_path)
    code, text = listed(str(tmp_path))
    assert code == 0
    assert text.count("where the one before ends") == 2
    rows = sum(len(found.ids) for found in Delta(paths[1]).rows.values())
    assert f"│ {rows:,} │ 0 │" in text
    raw = paths[1].read_bytes()
    paths[1].unlink()
    assert (listed(str(tmp_path))[0], "elsewhere: one is missing" in listed(str(tmp_path))[1]) == (1, True)
    paths[1].write_bytes(raw[:-9])
    code, text = listed(str(tmp_path))
    assert code == 1
    assert "safetensors" in text
    for args, words in [
        ([str(tmp_path / "none")], "not a folder"),
        ([str(tmp_path), "--pattern", "*.npy"], "holds no"),
    ]:
        result = CliRunner().invoke(app, ["follow", *args])
        assert words in str(result.exception or result.output)


def test_what_cannot_be_marked(tmp_path: Path) -> None:
    emb = st.Embedding(4, 2)
    odd = nn.Sequential(st.Embedding(4, 2), nn.BatchNorm1d(2))
    odd[1].register_buffer("odd", torch.eye(2).to_sparse())
    for model, words in [
        (nn.Linear(2, 2), "model has no table"),
    ]:
        with pytest.raises(InvalidValueError, match=words):
            st.mark(model)
    for call, words in [
        (lambda: st.mark(torch.zeros(3)), "must be a torch.nn.Module"),
        (lambda: st.save_delta(tmp_path / "1.safetensors", odd, st.mark(odd)), "odd is a torch.sparse_coo tensor"),
        (lambda: st.save_delta(tmp_path / "1.safetensors", emb, 0), "since is a int but must be a mark"),
    ]:
        with pytest.raises(InvalidTypeError, match=words):
            call()
    with pytest.raises(InvalidValueError, match="since is a mark of the tables"):
        st.save_delta(tmp_path / "1.safetensors", nn.Sequential(emb), st.mark(emb))
    assert not list(tmp_path.iterdir())


def of_ids(net: Any) -> Any:
    """Return what a delta brings, whichever rows the ids have."""
    return st.mark(net).fingerprints, contents(net.head)


@pytest.mark.parametrize(("make", "what"), [(Net, contents), (Ids, of_ids)])
@pytest.mark.parametrize("step", [131, pytest.param(1, marks=pytest.mark.slow)])
def test_damaged_files_are_refused(step: int, make: Any, what: Any, tmp_path: Path) -> None:
    _, paths = chain(tmp_path, make)
    raw = paths[0].read_bytes()
    copy, damaged = make(idle="lazy"), tmp_path / "damaged.safetensors"
    before, wanted = what(copy), make(idle="lazy")
    st.apply_delta(paths[0], wanted)
    draw, applied = random.Random(1), 0
    for at in range(0, len(raw), step):
        changed = bytearray(raw)
        changed[at] ^= 1 << draw.randrange(8)
        damaged.write_bytes(changed)
        try:
            st.apply_delta(damaged, copy)
        except SpeedtransferError:
            assert what(copy) == before
        else:
            # Blanks at the end of the header.
            assert what(copy) == what(wanted)
            applied, copy = applied + 1, make(idle="lazy")
    assert applied < 0.1 * len(raw) / step
    for length in (0, 7, 100, len(raw) // 2, len(raw) - 1):
        damaged.write_bytes(raw[:length])
        with pytest.raises(StorageError, match="safetensors"):
            st.apply_delta(damaged, copy)
        assert what(copy) == before


FORGED: dict[str, Any] = {
    "0.ids": [
        lambda ids: ids.flip(0),
        lambda ids: ids.clone().index_fill_(0, torch.tensor([1]), int(ids[0])),
        lambda ids: ids - ids[0] - 1,
        lambda ids: ids + ROWS,
        lambda ids: ids[1:],
        lambda ids: ids.float(),
    ],
    "0.before": [lambda was: was[1:], lambda was: was + 1, lambda was: was.double()],
    "model/emb.weight": [
        lambda rows: rows[:, 0],
        lambda rows: rows[1:],
        lambda rows: rows[:, 1:],
        lambda rows: rows.double(),
        lambda rows: rows + 1,
    ],
    "model/head.0.weight": [lambda values: values.T, lambda values: values + 1],
}


@pytest.mark.parametrize(("name", "number"), [(name, n) for name, some in FORGED.items() for n in range(len(some))])
def test_forged_files_are_refused(name: str, number: int, tmp_path: Path) -> None:
    _, paths = chain(tmp_path)
    tensors = load_file(paths[0])
    tensors[name] = FORGED[name][number](tensors[name]).contiguous()
    with safe_open(paths[0], "pt") as opened:
        save_file(tensors, paths[0], opened.metadata())
    refuses("", paths[0], Net(idle="lazy"), error=SpeedtransferError)


@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("every", few([97, 1], 97))
def test_an_apply_that_is_interrupted_is_made_again(every: int, tmp_path: Path) -> None:
    _, paths = chain(tmp_path)
    wanted, counted = Net(idle="lazy"), Interrupt()
    assert not counted.during(lambda: st.apply_delta(paths[0], wanted))
    tried = torn = 0
    # The first visits of each line, and the last, which not every apply comes to.
    for at in counted.visits(2)[::every]:
        copy, interrupt = Net(idle="lazy"), Interrupt(at)
        tried += interrupt.during(lambda copy=copy: st.apply_delta(paths[0], copy))
        whole = contents(copy) == contents(wanted)
        torn += not whole and contents(copy) != contents(Net(idle="lazy"))
        if whole:
            refuses("has been applied", paths[0], copy)
        else:
            st.apply_delta(paths[0], copy)
        assert contents(copy) == contents(wanted)
    assert torn
    assert tried > 1500 / every


def test_killed_as_it_saves(tmp_path: Path) -> None:
    net = Net(idle="lazy")
    mark = st.mark(net)
    step(net, optimizer(net))
    path, line, there = tmp_path / "delta.safetensors", 1, set()
    files = ("checkpoint/save_deltas.py", "tables/files.py", "speedtransfer/system.py")
    while not run_child(lambda line=line: (kill_at_line(line, files), st.save_delta(path, net, mark))):
        there.add(path.exists())
        if path.exists():
            st.apply_delta(path, Net(idle="lazy"))
            path.unlink()
        line += 23
    assert line > 80
    assert False in there
    copy = Net(idle="lazy")
    st.apply_delta(path, copy)
    assert contents(copy) == contents(net)


def test_lookups_meanwhile_see_whole_rows(tmp_path: Path) -> None:
    def make() -> Any:
        return st.Embedding(4000, 64, _weight=torch.zeros(4000, 64))

    net, copy = make(), make()
    mark, paths = st.mark(net), []
    for number in range(1, 6):
        net.table.fill_(float(number))
        paths.append(tmp_path / f"{number}.safetensors")
        mark = st.save_delta(paths[-1], net, mark)
    torn, stop = [], threading.Event()

    def look() -> None:
        ids = torch.randint(0, 4000, (500,))
        while not stop.is_set():
            with torch.no_grad():
                rows = copy(ids)
            torn.append(bool((rows != rows[:, :1]).any()))

    thread = threading.Thread(target=look)
    thread.start()
    for path in paths:
        st.apply_delta(path, copy)
    stop.set()
    thread.join()
    assert torn
    assert not any(torn)


@pytest.mark.parametrize("before", ["nothing", "a copy", "a state dict", "a checkpoint of before the first step"])
def test_deltas_follow_a_checkpoint_of_state_that_no_step_has_taken(before: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    emb = st.Embedding(40, 4, state_dtype=torch.uint8, idle="lazy")
    optimizer = torch.optim.AdamW(emb.parameters(), lr=0.05)
    st.save_checkpoint(tmp_path / "first", emb, optimizer)
    take_step(optimizer, emb(torch.tensor([1, 2])).sin().sum())
    if before == "a copy":
        emb, optimizer = copy.deepcopy((emb, optimizer))
    elif before == "a state dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif before != "nothing":
        st.load_checkpoint(tmp_path / "first", emb, optimizer)
    st.save_checkpoint(tmp_path / "base", emb, optimizer)
    mark = st.mark(emb, optimizer)
    take_step(optimizer, emb(torch.tensor([1, 3])).sin().sum())
    st.save_delta(tmp_path / "delta.safetensors", emb, mark, optimizer)
    other = st.Embedding(40, 4, state_dtype=torch.uint8, idle="lazy")
    follower = torch.optim.AdamW(other.parameters(), lr=0.05)
    st.load_checkpoint(tmp_path / "base", other, follower)
    st.apply_delta(tmp_path / "delta.safetensors", other, None, follower)
    st.merge(tmp_path / "base", [tmp_path / "delta.safetensors"], tmp_path / "merged")
    merged = st.Embedding(40, 4, state_dtype=torch.uint8, idle="lazy")
    st.load_checkpoint(tmp_path / "merged", merged, torch.optim.AdamW(merged.parameters(), lr=0.05))
    assert torch.equal(other.weight, emb.weight)
    assert torch.equal(merged.weight, emb.weight)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_ids_that_were_loaded_before_the_first_step_of_adagrad(background: bool, tmp_path: Path) -> None:
    embs = [st.Embedding(10, 4, vocabulary=st.Vocabulary(seed=1)) for _ in range(3)]
    optimizer = torch.optim.Adagrad(embs[0].parameters(), lr=0.1)
    embs[0].load_state_dict(copy.deepcopy(embs[1].state_dict()))
    save = st.save_checkpoint(tmp_path, embs[0], optimizer, background=background)
    if save is not None:
        save.wait()
    loaded = torch.optim.Adagrad(embs[2].parameters(), lr=0.1)
    st.load_checkpoint(tmp_path, embs[2], loaded)
    for module, opt in ((embs[0], optimizer), (embs[2], loaded)):
        take_step(opt, module(torch.tensor([5, 900])).sum())
    assert torch.equal(embs[0].weight, embs[2].weight)
