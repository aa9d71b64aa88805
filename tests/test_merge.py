"""A copy that applies deltas goes on as the trainer does, and a base and deltas make the full checkpoint, or are refused."""

import shutil
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import take_step
from checkpoint_cases import digest, flip
from delta_cases import ADAMW, CASES, DIM, VOCABULARIES, World, chain, files_of, known_by_id
from in_child import kill_at_line, run_child
from refusals import check_refused, refusals
from sweeps import few
from torch import nn

import speedtransfer as st
from speedtransfer.errors import SpeedtransferError
from speedtransfer.tables import chunks


@torch.no_grad()
def write_by_hand(net, how):
    """Change rows as no step does: one, some, all of a table, or what no clock tells."""
    table = net.emb.table
    if how == 0:
        net.emb.weight[3] = 2.0
        net.many.table.fill_(0.5)
    elif how == 1:
        table[torch.tensor([5, 7])] = table[torch.tensor([7, 5])]
    elif table.cache_rows is None:
        table.numpy()[7, 2] = np.float32(4.0)


RUNS = [(name, with_state, steps) for name in CASES for with_state, steps in ((True, 0), (True, 2), (False, 2))]
KEPT = [("adamw exact", True, 0), ("vocabulary counts", True, 0)]
KEPT += [(name, True, 2) for name in ("8-bit state", "vocabulary exact", "sgd exact", "split24", "8 bits exact")]


@pytest.mark.parametrize(("name", "with_state", "steps"), few(RUNS, *KEPT, *(it for it in RUNS if not it[1])))
def test_a_copy_goes_on_and_base_and_deltas_are_the_checkpoint(name, with_state, steps, tmp_path, monkeypatch):
    """With idle="exact" too: who saves takes the steps that rows have missed, and so does who loads."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "_BLOCK_ROWS", 7)
    one, copy, merged = (World(name, with_state, tmp_path) for _ in range(3))
    one.steps(steps, 1)
    if name in VOCABULARIES:
        one.forget(slice(-4, None))
    one.save(tmp_path / "base")
    mark, known, deltas = one.mark(), None, list[Path]()
    copy.load(tmp_path / "base")
    assert copy.mark().fingerprints == mark.fingerprints
    for number in range(3):
        one.steps(2, 2 + number, 10 * number)
        if CASES[name][0]().keys() <= {"idle", "layout", "cache_rows", "memory"}:
            write_by_hand(one.net, number)
        elif name == "vocabulary" and not with_state:
            one.net.emb.table.torch()[-3:] += 1.0  # a write that no clock tells
        if number == 1:
            one.net.more.table.grow(25)
            if name in VOCABULARIES:
                one.forget(slice(-4, None))
        deltas.append(tmp_path / f"{number}.safetensors")
        mark = one.save_delta(deltas[-1], mark)
        # By what the copy knows of itself, or by reading it all.
        known = copy.apply(deltas[-1], known if number % 2 else None)
        assert known.fingerprints == mark.fingerprints == copy.mark().fingerprints
        assert copy.digest() == one.digest()
    one.save(tmp_path / "full")
    st.merge(tmp_path / "base", deltas, tmp_path / "merged")
    assert one.by_id or files_of(tmp_path / "merged") == files_of(tmp_path / "full")
    merged.net.more.table.grow(25)
    merged.load(tmp_path / "merged")
    if name in VOCABULARIES:
        assert known_by_id(merged.net) == known_by_id(copy.net)
    for each in (one, copy, merged) if with_state else ():
        each.steps(3, 9, 20)
    assert copy.digest() == merged.digest() == one.digest()
    if not with_state:
        # It may be trained on, and be followed itself.
        copy.steps(1, 9)
        assert copy.mark().fingerprints != mark.fingerprints


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    chain(folder)
    return folder


@pytest.fixture
def saved(made, tmp_path):
    return shutil.copytree(made, tmp_path / "saved")


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other_base(folder, name="adamw lazy"):
    world = World(name)
    world.steps(1, 77)
    world.save(folder / "base")


def wide_base(folder):
    world = World("adamw lazy")
    world.net.more = st.Embedding(10, DIM, storage_dtype=torch.int8)
    world.state["optimizer"] = ADAMW(world.net.parameters())
    world.save(folder / "base")


def without_state(folder):
    world = World("adamw lazy")
    world.load(folder / "full0")
    st.save_delta(folder / "1.safetensors", world.net, st.mark(world.net))


# What is done to base and deltas, which of these are merged, and words of the refusal.
REFUSED = [
    (lambda f: None, [], "deltas is empty"),
    (lambda f: None, [0, 2], r"2.safetensors' .number 3. does not begin where .*in between is missing"),
    (lambda f: None, [0, 1, 1], "there twice"),
    (lambda f: None, [1, 0], "the order is another"),
    (lambda f: None, [1, 2], "1.safetensors' begins with other rows .*base' has"),
    (lambda f: (f / "1.safetensors").unlink(), [0, 1], "cannot read"),
    (lambda f: shutil.rmtree(f / "base"), [0], "no checkpoint folder"),
    (other_base, [0], "begins with other rows of 'emb.weight'"),
    (lambda f: other_base(f, "sgd"), [0], "begins with other rows|has the state"),
    (wide_base, [0], "is .10, 8. torch.int8 in .*base' but the deltas begin with 10 rows of 8 torch.float32"),
    (without_state, [0, 1], "merge deltas of one kind"),
    (without_state, [1], r"base' has \['optimizer', 'scheduler'\] but .*the model alone"),
    (lambda f: flip(f, "base/model-*"), [0], "checksum"),
    (lambda f: flip(f, "base/manifest.json"), [0], "damaged"),
    (lambda f: flip(f, "1.safetensors"), [0, 1], "use another copy of it"),
]


@pytest.mark.parametrize(("change", "deltas", "words"), REFUSED)
def test_what_is_not_merged(change, deltas, words, saved):
    change(saved)
    before = tree(saved)
    with pytest.raises(SpeedtransferError, match=words) as caught:
        st.merge(saved / "base", [saved / f"{n}.safetensors" for n in deltas], saved / "out")
    assert "\n" not in str(caught.value)
    assert tree(saved) == before
    assert not (saved / "out").exists()


def test_ids_that_are_not_merged(tmp_path):
    v, p, n = (tmp_path / name for name in "vpn")
    for folder, name in ((v, "vocabulary"), (p, "vocabulary counts"), (n, "adamw lazy")):
        chain(folder, name, with_state=False)
    for base, deltas, out, words in (
        (n / "base", v, tmp_path / "out", "has no ids of 'emb.weight'|the deltas begin with|tables"),
        (v / "base", [v / "1.safetensors"], tmp_path / "out", "begins with other rows of 'emb.weight'.*base' has"),
        (v / "base", p, tmp_path / "out", "begins with other rows|padding_idx=None"),
        (v / "base", [v / "0.safetensors", n / "1.safetensors"], tmp_path / "out", "by id and by place"),
        (v / "base", v, v / ".." / "v" / "base", "out is the base"),
        (v / "base", v / "0.safetensors", tmp_path, "holds 'n' and no checkpoint|holds 'p' and|holds 'v' and"),
    ):
        with pytest.raises(SpeedtransferError, match=words):
            st.merge(base, deltas, out)
        assert not (tmp_path / "out").exists()


# A base and deltas with state: `copy` is at the base, `one` at the end; `out` is the path of a new delta.
OTHER_KINDS = r"""
one.save_delta(out, plain) -> InvalidValueError: since was made without an optimizer but this delta is with
st.save_delta(out, one.net, one.mark()) -> InvalidValueError: since was made with an optimizer
copy.apply(path, st.mark(copy.net)) -> InvalidValueError: mark was made without an optimizer
st.apply_delta(path, copy.net) -> InvalidValueError: has the state of \['optimizer'\] but none was given
st.apply_delta(path, copy.net, None, copy.opt) -> InvalidValueError: holds 'scheduler', which was not given
st.merge("base", "", out) -> InvalidValueError: path is '', not a path; pass the path of a file
st.merge("base", "a" * 300, out) -> InvalidValueError: is too long for the file system
World("sgd").apply(path) -> InvalidValueError: optimizer is SGD but the checkpoint|begins with
World("8-bit state").apply(path) -> InvalidValueError: begins with other rows|stored as
st.save_delta(out, one.net.head, plain) -> InvalidValueError: no table
st.save_delta(out, one.net, one.mark(), None, more=World("sgd").opt)
-> InvalidValueError: that the model does not have|of another optimizer
"""


def test_marks_and_deltas_of_another_kind(tmp_path):
    (one, (path, *_)), copy, out = chain(tmp_path), World("adamw lazy"), tmp_path / "3.safetensors"
    copy.load(tmp_path / "base")
    before = copy.digest(), one.digest()
    for refusal in refusals(OTHER_KINDS):
        check_refused(refusal, one=one, copy=copy, path=path, out=out, plain=st.mark(one.net), st=st, World=World)
        assert (copy.digest(), one.digest()) == before
        assert not out.exists()


@pytest.mark.parametrize("step", [331, pytest.param(19, marks=pytest.mark.slow)])
def test_killed_as_it_merges(step, saved):
    before, out, line, seen = tree(saved), saved / "out", 1, set()
    files = ("checkpoint/merge_deltas.py", "checkpoint/save.py", "checkpoint/folder.py")
    while not run_child(lambda line=line: (kill_at_line(line, files), st.merge(saved / "base", saved, out))):
        there = (out / "manifest.json").exists()
        seen.add(there)
        if there:
            assert files_of(out) == files_of(saved / "full2")
            shutil.rmtree(out)
        line += step
    assert line > 600
    assert False in seen
    assert files_of(out) == files_of(saved / "full2")
    # What those that were killed have left goes with the next.
    assert len(list(out.iterdir())) == 4
    assert {name: raw for name, raw in tree(saved).items() if not name.startswith("out")} == before


def test_state_alone_changes_and_a_copy_has_its_generators(tmp_path):
    net = nn.Sequential(st.Embedding(10, 4, idle="lazy"))
    opt = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
    # What an optimizer has been given to load counts, before a step.
    mark, (copy, its_opt) = st.mark(net, opt), deepcopy((net, opt))
    for number in range(2):
        take_step(opt, net(torch.tensor([1, 2 + number]))[:, 0].sum())
        mark = st.save_delta(tmp_path / "delta.safetensors", net, mark, opt)
        drawn = torch.get_rng_state()
        torch.manual_seed(7)
        copy, its_opt = deepcopy((copy, its_opt))
        st.apply_delta(tmp_path / "delta.safetensors", copy, None, its_opt)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert digest([copy.state_dict(), its_opt.state_dict()]) == digest([net.state_dict(), opt.state_dict()])
