"""Copies that follow a model by files of what has changed: bit for bit, in their order, or refused before anything changes."""

import copy
import functools
import random
import re

import pytest
import torch
from cases import take_step
from delta_cases import DIM, ROWS, World, chain
from in_child import kill_at_line, run_child
from interrupt import Interrupt
from refusals import check_refused, refusals
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sweeps import few
from torch import nn
from typer.testing import CliRunner

import speedtransfer as st
from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.cli import app
from speedtransfer.errors import HostMemoryError, InvalidTypeError, InvalidValueError, SpeedtransferError, StorageError
from speedtransfer.tables import files


def world(name="adamw lazy", saved=None, with_state=False):
    made = World(name, with_state)
    if saved is not None:
        made.load(saved)
    return made


def test_only_rows_that_differ_are_written(tmp_path):
    net = world().net
    mark = st.mark(net)
    with torch.no_grad():
        net.emb.weight[3] += 1.0
        net.emb.weight[4] += 0.0
        net.emb.weight[59, 7] = -net.emb.weight[59, 7]
    mark = st.save_delta(tmp_path / "one.safetensors", net, mark)
    saved = load_file(tmp_path / "one.safetensors")
    assert saved["0.ids"].flatten().tolist() == [3, 59]
    assert torch.equal(saved["model/emb.weight"], net.emb.weight[[3, 59]])
    assert len(saved["1.ids"]) == 0
    st.save_delta(tmp_path / "none.safetensors", net, mark)
    assert len(load_file(tmp_path / "none.safetensors")["0.ids"]) == 0


def test_vocabularies_that_do_not_fit(tmp_path):
    one, path = world("vocabulary"), tmp_path / "delta.safetensors"
    mark = one.mark()
    one.net(torch.arange(20))
    one.save_delta(path, mark)
    small, no_ids, padded = world("vocabulary"), world("vocabulary"), world("vocabulary counts")
    small.net.emb = small.net.again = st.Embedding(
        5, DIM, vocabulary=st.Vocabulary(max_capacity=16, evict="lru", seed=1), idle="lazy"
    )
    no_ids.net.emb = no_ids.net.again = st.Embedding(5, DIM, idle="lazy")
    for other, words in [(no_ids, "has no vocabulary in the model"), (padded, "padding_idx"), (small, "need rows")]:
        before = other.mark().fingerprints
        with pytest.raises((InvalidValueError, HostMemoryError), match=words):
            other.apply(path)
        assert other.mark().fingerprints == before


def refuses(words, path, one, *mark, error=InvalidValueError):
    before = one.digest()
    with pytest.raises(error, match=words or None):
        one.apply(path, *mark)
    assert one.digest() == before


@pytest.mark.parametrize("name", ["adamw lazy", "vocabulary"])
def test_gaps_and_repeats_are_refused(name, tmp_path):
    _, paths = chain(tmp_path, name, with_state=False)
    copy = world(name, tmp_path / "base")
    refuses("begins with other rows of 'emb.weight'.*a delta before it is missing", paths[1], copy)
    known = copy.apply(paths[0])
    refuses("has been applied: the model holds what comes after it", paths[0], copy)
    refuses("is number 3 of .* but the model is at number 1", paths[2], copy, known)
    refuses("mark is a int but must be a mark", paths[1], copy, 0, error=InvalidTypeError)
    refuses("begins with other rows", paths[2], copy)


def test_other_models_are_refused(tmp_path):
    _, paths = chain(tmp_path, with_state=False)
    copy, smaller, wider = world(saved=tmp_path / "base"), world(), world(saved=tmp_path / "base")
    known = copy.apply(paths[0])
    with torch.no_grad():
        copy.net.emb.weight[int(Delta(paths[1]).rows["emb.weight"].ids[0])] += 1.0
    refuses("rows of 'emb.weight' were written after the mark was made", paths[1], copy, known)
    refuses("begins with other rows", paths[1], copy)
    refuses("begins with other rows", paths[0], world())
    refuses("stored as plain.*but as int8", paths[0], world("int8"))
    smaller.net = nn.ModuleDict({"emb": st.Embedding(ROWS, DIM)})
    refuses("has tables that the model has not", paths[0], smaller)
    refuses("mark is of a model with other tables", paths[1], copy, smaller.mark())
    wider.net.head[0] = nn.Linear(DIM, 5)
    refuses("'head.0.weight' is .4, 8.", paths[0], wider)
    refuses("suffix", tmp_path / "delta.npy", copy)
    refuses("cannot read", tmp_path / "none.safetensors", copy, error=StorageError)


def test_a_delta_without_rows_is_missed_too(tmp_path):
    one, copy, again, paths = world(), world(), world(), [tmp_path / f"{n}.safetensors" for n in range(5)]
    net, mark = one.net, one.mark()
    assert mark.number == 0
    for path in paths:
        with torch.no_grad():
            net.head[0].bias += 1.0
        mark = one.save_delta(path, mark)
    assert (mark.number, Delta(paths[2]).place.number, Delta(paths[2]).follows) == (5, 3, Delta(paths[1]).place.name)
    known = copy.apply(paths[1], copy.apply(paths[0], copy.mark()))
    assert known.number == 2
    refuses("is number 4.* but the model is at number 2", paths[3], copy, known)
    refuses("has been applied", paths[1], copy, known)
    refuses("is number 1 .* but the model is at number 2", paths[0], copy, known)
    # Of another run, whose rows are the same.
    with torch.no_grad():
        net.head[0].bias += 1.0
    other = one.save_delta(tmp_path / "other.safetensors", one.mark())
    one.save_delta(tmp_path / "other.safetensors", other)
    refuses("is number 2.* but the model is at number 2", tmp_path / "other.safetensors", copy, known)
    one.save(tmp_path / "base")
    for some in ([0, 2], [0, 1, 1], [1, 0]):
        with pytest.raises(InvalidValueError, match="does not begin where"):
            st.merge(tmp_path / "base", [paths[n] for n in some], tmp_path / "out")
    st.merge(tmp_path / "base", paths[:3], tmp_path / "out")
    # A trainer that begins again from what it had saved is followed on.
    again.load(tmp_path / "out")
    again.save_delta(paths[3], again.mark())
    known = copy.apply(paths[3], known)
    assert known.number == 1
    assert copy.digest() == again.digest()


def test_a_folder_is_listed(tmp_path):
    def listed(*args):
        result = CliRunner().invoke(app, ["follow", *args], env={"COLUMNS": "200"})
        return result.exit_code, " ".join(result.output.split())

    _, paths = chain(tmp_path, with_state=False)
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
    for args, words in [([tmp_path / "none"], "not a folder"), ([tmp_path, "--pattern", "a**b"], "holds no 'a**b'")]:
        result = CliRunner().invoke(app, ["follow", *map(str, args)])
        assert words in str(result.exception or result.output)


# `emb`: a table that cannot grow, `larger`: a mark of one with more rows, `new`: of rows that another has trained.
UNMARKED = r"""
st.mark(trained, new) -> InvalidValueError: weight has state of another optimizer until this Adam makes a step
st.mark(nn.Linear(2, 2)) -> InvalidValueError: model has no table
st.mark(torch.zeros(3)) -> InvalidTypeError: must be a torch.nn.Module
st.save_delta(out, odd, st.mark(odd)) -> InvalidTypeError: odd is a torch.sparse_coo tensor
st.save_delta(out, emb, 0) -> InvalidTypeError: since is a int but must be a mark
st.save_delta(out, nn.Sequential(emb), st.mark(emb)) -> InvalidValueError: since is a mark of the tables
st.save_delta(out, emb, larger) -> InvalidValueError: since has 30 rows of .* but the table has 10
"""


def test_what_cannot_be_marked(tmp_path):
    odd = nn.Sequential(st.Embedding(4, 2), nn.BatchNorm1d(2))
    odd[1].register_buffer("odd", torch.eye(2).to_sparse())
    names = {"st": st, "nn": nn, "torch": torch, "odd": odd, "emb": st.Embedding(10, 2)}
    names |= {"larger": st.mark(st.Embedding(30, 2)), "out": tmp_path / "1.safetensors"}
    names["trained"] = trained = st.Embedding(4, 2)
    take_step(torch.optim.AdamW(trained.parameters()), trained(torch.tensor([1])).sum())
    names["new"] = torch.optim.Adam(trained.parameters())
    for refusal in refusals(UNMARKED):
        check_refused(refusal, **names)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "with_state"), [("adamw lazy", False), ("adamw lazy", True), ("vocabulary", False)], ids=str
)
@pytest.mark.parametrize("step", few([131, 1], 131))
def test_damaged_files_are_refused(step, name, with_state, tmp_path):
    _, paths = chain(tmp_path, name, with_state)
    copied = functools.partial(world, name, tmp_path / "full0", with_state)
    raw, copy, wanted, damaged = paths[1].read_bytes(), copied(), copied(), tmp_path / "damaged.safetensors"
    before = copy.digest()
    wanted.apply(paths[1])
    draw, applied = random.Random(1), 0
    places = [(at, draw.randrange(8)) for at in range(0, len(raw), step)]
    # Another digit in the shape of a tensor without values leaves all bytes that are read as they are.
    empty = [(at.start(1), 0) for at in re.finditer(rb'"shape": \[(\d+), 0\]', raw)]
    assert empty or name == "vocabulary"
    for at, bit in places + empty:
        changed = bytearray(raw)
        changed[at] ^= 1 << bit
        damaged.write_bytes(changed)
        try:
            copy.apply(damaged)
        except SpeedtransferError:
            assert copy.digest() == before
            with pytest.raises(SpeedtransferError):
                st.merge(tmp_path / "full0", damaged, tmp_path / "out")
            assert not (tmp_path / "out").exists()
        else:
            # Blanks at the end of the header.
            assert copy.digest() == wanted.digest()
            applied, copy = applied + 1, copied()
    assert applied < 0.1 * len(raw) / step
    for length in (0, 7, 100, len(raw) // 2, len(raw) - 1):
        damaged.write_bytes(raw[:length])
        with pytest.raises(StorageError, match="safetensors"):
            copy.apply(damaged)
        assert copy.digest() == before


FORGED = {
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
def test_forged_files_are_refused(name, number, tmp_path):
    _, paths = chain(tmp_path, with_state=False)
    tensors = load_file(paths[0])
    tensors[name] = FORGED[name][number](tensors[name]).contiguous()
    with safe_open(paths[0], "pt") as opened:
        save_file(tensors, paths[0], opened.metadata())
    refuses("", paths[0], world(saved=tmp_path / "base"), error=SpeedtransferError)


SOME = [("adamw lazy", False, 97), ("vocabulary", True, 499)]
MORE = [("adamw lazy", False, 1), ("adamw lazy", True, 19), ("8-bit state exact", True, 19), ("vocabulary", True, 19)]


@pytest.mark.filterwarnings("ignore:Exception ignored in. <_io:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "with_state", "every"), few(SOME + MORE, *SOME))
def test_an_apply_that_is_interrupted_is_made_again(name, with_state, every, tmp_path):
    _, (_, path, _) = chain(tmp_path, name, with_state)
    copied = functools.partial(world, name, tmp_path / "full0", with_state)
    wanted, counted, before = copied(), Interrupt(), copied().digest()
    copied().apply(path)
    assert not counted.during(lambda: wanted.apply(path))
    tried = torn = 0
    # The first visits of each line, and the last, which not every apply comes to.
    for at in counted.visits(2)[::every]:
        copy, interrupt = copied(), Interrupt(at)
        tried += interrupt.during(lambda copy=copy: copy.apply(path))
        # With state it may be refused until it is made again.
        torn += with_state or copy.digest() not in (before, wanted.digest())
        try:
            copy.apply(path)
        except SpeedtransferError as error:
            if "has been applied" not in str(error):
                # Rows whose ids have changed in part.
                if name != "vocabulary":
                    raise
                copy.load(tmp_path / "full0")
                copy.apply(path)
        assert copy.digest() == wanted.digest(), interrupt.place
    assert torn
    assert tried > 1500 / every


def test_killed_as_it_saves(tmp_path):
    one = world()
    mark = one.mark()
    one.steps(1, 1)
    path, line, there = tmp_path / "delta.safetensors", 1, set()
    files = ("checkpoint/save_deltas.py", "tables/files.py", "speedtransfer/system.py")
    while not run_child(lambda line=line: (kill_at_line(line, files), one.save_delta(path, mark))):
        there.add(path.exists())
        if path.exists():
            world().apply(path)
            path.unlink()
        line += 23
    assert line > 80
    assert False in there
    copy = world()
    copy.apply(path)
    assert copy.digest() == one.digest()


@pytest.mark.parametrize("before", ["nothing", "a copy", "a state dict", "a checkpoint of before the first step"])
def test_deltas_follow_a_checkpoint_of_state_that_no_step_has_taken(before, tmp_path):
    def make():
        emb = st.Embedding(40, 4, state_dtype=torch.uint8, idle="lazy")
        return emb, torch.optim.AdamW(emb.parameters(), lr=0.05)

    (emb, optimizer), other, merged = make(), make(), make()
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
    st.load_checkpoint(tmp_path / "base", *other)
    st.apply_delta(tmp_path / "delta.safetensors", other[0], None, other[1])
    st.merge(tmp_path / "base", [tmp_path / "delta.safetensors"], tmp_path / "merged")
    st.load_checkpoint(tmp_path / "merged", *merged)
    assert torch.equal(other[0].weight, emb.weight)
    assert torch.equal(merged[0].weight, emb.weight)


def test_lookups_that_wait_for_a_step_wait_on_where_rows_are_marked(tmp_path):
    """As in a checkpoint, which has nothing of them either."""
    embs = [st.Embedding(10, 4, vocabulary=st.Vocabulary(seed=1, deferred=True), idle="lazy") for _ in range(2)]
    optimizers = [torch.optim.SGD(emb.parameters(), lr=0.1) for emb in embs]
    embs[0](torch.tensor([1, 2]))
    st.save_checkpoint(tmp_path / "base", embs[0], optimizers[0])
    mark = st.mark(embs[0], optimizers[0])
    assert not len(embs[0].vocabulary)
    take_step(optimizers[0], embs[0](torch.tensor([2, 3])).sum())
    st.save_delta(tmp_path / "delta.safetensors", embs[0], mark, optimizers[0])
    st.load_checkpoint(tmp_path / "base", embs[1], optimizers[1])
    st.apply_delta(tmp_path / "delta.safetensors", embs[1], None, optimizers[1])
    assert torch.equal(embs[0].vocabulary.ids(), embs[1].vocabulary.ids())
    assert torch.equal(embs[0].weight, embs[1].weight)


def test_what_was_applied_in_inference_mode_can_be_trained(tmp_path):
    _, (path, *_) = chain(tmp_path)
    standby, copied = world(saved=tmp_path / "base", with_state=True), world(saved=tmp_path / "base", with_state=True)
    with torch.inference_mode():
        standby.apply(path)
    copied.apply(path)
    for each in (standby, copied):
        each.steps(2, 7)
    assert standby.digest() == copied.digest()


def test_a_dense_step_of_another_thread_as_a_delta_is_written(tmp_path, monkeypatch):
    one, path, write = world(), tmp_path / "delta.safetensors", files.write
    one.save(tmp_path / "base")
    copied = world(saved=tmp_path / "base")
    mark, bias = one.mark(), one.net.head[0].bias.detach().clone()

    def write_later(*args):
        with torch.no_grad():
            one.net.head[0].bias += 1.0
        write(*args)

    monkeypatch.setattr(files, "write", write_later)
    one.save_delta(path, mark)
    copied.apply(path)
    assert torch.equal(copied.net.head[0].bias, bias)


def test_new_ids_begin_with_the_state_of_the_first_learning_rate(tmp_path):
    """That of Rprop has it, and so has each row that a dense optimizer began with."""
    embs = [st.Embedding(10, 4, vocabulary=st.Vocabulary(seed=1), idle="lazy") for _ in range(2)]
    optimizers = [torch.optim.Rprop(emb.parameters(), lr=0.05) for emb in embs]
    take_step(optimizers[0], embs[0](torch.tensor([1, 2])).sum())
    for number in range(3):
        optimizers[0].param_groups[0]["lr"] *= 0.5
        if not number:
            st.save_checkpoint(tmp_path / "base", embs[0], optimizers[0])
            st.load_checkpoint(tmp_path / "base", embs[1], optimizers[1])
            mark, known = st.mark(embs[0], optimizers[0]), None
        take_step(optimizers[0], embs[0](torch.tensor([1, 3 + number])).sum())
        mark = st.save_delta(tmp_path / "delta.safetensors", embs[0], mark, optimizers[0])
        known = st.apply_delta(tmp_path / "delta.safetensors", embs[1], known, optimizers[1])
    for emb, optimizer in zip(embs, optimizers, strict=True):
        take_step(optimizer, emb(torch.tensor([1, 9])).sum())
    assert torch.equal(embs[0].weight, embs[1].weight)


@pytest.mark.parametrize("background", [False, True])
def test_a_save_of_ids_that_were_loaded_before_the_first_step_of_adagrad(background, tmp_path):
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
