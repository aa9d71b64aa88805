"""Checkpoints that are written while training goes on: what was there when they were asked for, to the bit, or an error."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import raising, take_step
from delta_cases import CASES, SGD, VOCABULARIES, World
from in_child import forks, in_child
from sweeps import few

import speedtransfer as st
from speedtransfer import jit
from speedtransfer.checkpoint import background
from speedtransfer.errors import InvalidTypeError, InvalidValueError, StorageError
from speedtransfer.tables import aside, chunks, snapshots

FORMS = [name for name in CASES if name not in VOCABULARIES]


def trained(form, folder):
    one = World(form, folder=folder)
    # All the ids that a vocabulary has room for.
    one.steps(5 if form not in VOCABULARIES else 20, 1)
    return one


full = raising(OSError(28, "No space left on device"))


def checksums(path):
    content = json.loads((path / "manifest.json").read_text())
    rest = {key: content[key] for key in ("model", "optimizers", "objects", "extra")}
    return {role: facts["xxh3_128"] for role, facts in content["files"].items()} | {"rest": json.dumps(rest)}


def when_read(monkeypatch, call):
    """Have the thread that saves call something after it has read rows of a table, and not yet those copied aside."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)

    def copyto(target, values):
        np.copyto(target, values)
        call()

    monkeypatch.setattr(snapshots, "np", SimpleNamespace(**vars(np) | {"copyto": copyto}))


SOME = ("adamw lazy", "adamw exact", "cached", "file", "8 bits exact", "vocabulary exact")


@pytest.mark.parametrize("form", few(CASES, *SOME))
def test_what_is_saved_is_what_there_was(form, tmp_path, monkeypatch):
    one, stopped, never = (trained(form, tmp_path) for _ in range(3))
    stopped.save(tmp_path / "stopped", extra={"epoch": [1]})
    count, extra = [0], {"epoch": [1]}

    @torch.enable_grad()
    def a_step():
        count[0] += 1
        one.steps(1, count[0])

    when_read(monkeypatch, a_step)
    save = one.save(tmp_path / "saved", extra=extra, background=True)
    extra["epoch"].append(2)
    save.wait()
    assert save.done()
    assert save.progress == 1.0
    assert count[0] >= 8  # chunks of the two tables and their state
    # Each vocabulary has an origin of its own.
    assert form in VOCABULARIES or checksums(tmp_path / "saved") == checksums(tmp_path / "stopped")
    monkeypatch.undo()
    for seed in range(count[0]):
        never.steps(1, seed + 1)
    assert one.digest() == never.digest()
    one.load(tmp_path / "saved")
    assert one.digest() == stopped.digest()


def test_threads_are_left_to_those_who_train(tmp_path, monkeypatch):
    emb = st.Embedding(20_000, 64)
    opt, users, pool = torch.optim.AdamW(emb.parameters()), set[str](), jit.workers

    def used(name, threads):
        users.add(threading.current_thread().name.split()[0])
        return pool(name, threads)

    for start in (0, 10_000, 0):
        take_step(opt, emb(torch.arange(start, start + 10_000)).square().sum())
    monkeypatch.setattr(jit, "workers", used)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    take_step(opt, emb(torch.arange(10_000, 20_000)).square().sum())
    assert users == {"MainThread"}
    st.save_checkpoint(tmp_path / "saved", emb, opt, background=True).wait()
    assert users == {"MainThread"}


class Held:
    """A save whose thread waits for `go` before it reads rows."""

    def __init__(self, monkeypatch, path, one):
        self.go = threading.Event()
        when_read(monkeypatch, lambda: self.go.wait(60))
        self.save = one.save(path, background=True)

    def makes_wait(self, call, patience=0.3):
        """Tell whether something waits for the end of the save, and let both end."""
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(patience)
        waits = thread.is_alive()
        self.go.set()
        self.save.wait()
        thread.join(60)
        assert not thread.is_alive()
        return waits


WHOLE = {
    "fill_": lambda one: one.net.emb.table.fill_(2.0),
    "normal_": lambda one: torch.nn.init.normal_(one.net.emb.weight),
    "numpy": lambda one: one.net.emb.table.numpy().fill(3.0),
    "load_state_dict": lambda one: one.net.load_state_dict(World("adamw lazy").net.state_dict()),
    "a new optimizer": lambda one: (setattr(one, "opt", SGD(one.net.parameters())), one.steps(1, 1)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_changes_all_rows_waits(name, tmp_path, monkeypatch):
    one = trained("adamw lazy", tmp_path)
    one.save(tmp_path / "stopped")
    held = Held(monkeypatch, tmp_path / "saved", one)
    assert held.makes_wait(lambda: WHOLE[name](one))
    assert checksums(tmp_path / "saved") == checksums(tmp_path / "stopped")


@pytest.mark.parametrize("why", ["full", "other needs", "no such call"])
def test_steps_wait_where_there_is_no_room_aside(why, tmp_path, monkeypatch):
    one = trained("adamw exact", tmp_path)
    monkeypatch.setattr(background, "_ASIDE_BYTES", 1000)
    if why == "full":
        monkeypatch.setattr(os, "posix_fallocate", full)
    elif why == "no such call":
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(aside, "shutil", SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=0)))
    held = Held(monkeypatch, tmp_path / "saved", one)
    assert held.makes_wait(lambda: one.steps(20, 2))
    one.load(tmp_path / "saved")
    assert one.digest() == trained("adamw exact", tmp_path).digest()


@pytest.mark.parametrize("form", few(FORMS, "adamw exact", "cached", "8 bits exact"))
def test_rows_go_to_the_disk_where_memory_is_used_up(form, tmp_path, monkeypatch):
    one = trained(form, tmp_path)
    trained(form, tmp_path).save(tmp_path / "stopped")
    monkeypatch.setattr(background, "_ASIDE_BYTES", 1000)
    monkeypatch.setattr(aside, "_PIECE_BYTES", 1000)
    held, asked = Held(monkeypatch, tmp_path / "saved", one), list[int]()
    reserve = aside._File.reserve
    monkeypatch.setattr(aside._File, "reserve", lambda self, *rows: (asked.append(rows[1]), reserve(self, *rows))[1])
    assert not held.makes_wait(lambda: one.steps(20, 2), 20)
    assert len(asked) > 1
    assert checksums(tmp_path / "saved") == checksums(tmp_path / "stopped")
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} <= {"saved", "stopped", "net"}


@forks
def test_a_fork_knows_nothing_of_it(tmp_path, monkeypatch):
    one = trained("adamw lazy", tmp_path)
    trained("adamw lazy", tmp_path).save(tmp_path / "stopped")
    monkeypatch.setattr(background, "_ASIDE_BYTES", 1000)
    held = Held(monkeypatch, tmp_path / "saved", one)
    one.steps(1, 2)

    def child():
        one.steps(20, 3)
        WHOLE["load_state_dict"](one)
        for use in (held.save.wait, held.save.done):
            with pytest.raises(InvalidValueError, match="of which a fork cannot know how far"):
                use()
        return repr(held.save)

    assert f"of process {os.getpid()}" in in_child(child)
    held.go.set()
    held.save.wait()
    assert checksums(tmp_path / "saved") == checksums(tmp_path / "stopped")


def test_a_write_that_nobody_sees_ends_the_save(tmp_path, monkeypatch):
    one = trained("adamw lazy", tmp_path)
    one.save(tmp_path / "saved")
    before = checksums(tmp_path / "saved")
    held = Held(monkeypatch, tmp_path / "saved", one)
    one.net.emb.table.torch()[3] = 1.0
    one.steps(1, 2)
    held.go.set()
    with pytest.raises(StorageError, match="by other means"):
        held.save.wait()
    monkeypatch.undo()
    assert checksums(tmp_path / "saved") == before
    assert len(list((tmp_path / "saved").iterdir())) == 4
    one.steps(1, 3)
    one.save(tmp_path / "saved", background=True).wait()
    assert checksums(tmp_path / "saved") != before


def test_a_step_may_begin_as_the_end_is_checked(monkeypatch):
    table = st.Table(4, 2)
    versions = itertools.chain([table.version], itertools.repeat(-1))
    snapshot = table.snapshot(100, {})
    monkeypatch.setattr(st.Table, "version", property(lambda table: next(versions)))
    snapshot.check()


def test_errors_are_told_once(tmp_path, monkeypatch):
    one = trained("adamw lazy", tmp_path)

    def failed(path):
        with monkeypatch.context() as patch:
            patch.setattr("speedtransfer.checkpoint.folder.os.fsync", full)
            save = one.save(path, background=True)
            while not save.done():
                time.sleep(0.001)
        assert "failed" in repr(save)
        return save

    save = failed(tmp_path / "a")
    with pytest.raises(StorageError, match="No space left"):
        save.wait()
    assert not (tmp_path / "a").exists()
    one.save(tmp_path / "a")
    failed(tmp_path / "b")
    with pytest.raises(StorageError, match="No space left"):
        one.save(tmp_path / "b")
    one.save(tmp_path / "b")
    save = failed(tmp_path / "c")
    background._running.clear()
    with pytest.warns(RuntimeWarning, match="was not saved: .*No space left"):
        del save
    one.steps(1, 2)


def test_it_is_found_by_who_reads_there_whatever_the_current_folder(tmp_path, monkeypatch):
    one, other = World("sgd"), World("sgd")
    monkeypatch.chdir(tmp_path)
    one.save(Path("saved"), extra="before")
    when_read(monkeypatch, lambda: time.sleep(0.01))
    one.save(Path("saved"), extra="after", background=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert other.load(Path("../saved")) == "after"
    assert os.listdir() == []


def test_what_cannot_be_saved_so(tmp_path, monkeypatch):
    one = trained("adamw lazy", tmp_path)
    with pytest.raises(InvalidTypeError, match="extra"):
        one.save(tmp_path / "saved", extra=object(), background=True)
    one.steps(1, 2)  # nobody copies rows aside
    assert not one.net.emb.table.has_snapshot
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            one.save(tmp_path / "saved", background=True)
    assert not one.net.emb.table.has_snapshot
    held = Held(monkeypatch, tmp_path / "saved", one)
    with pytest.raises(TimeoutError, match="is not saved after"):
        held.save.wait(0.01)
    held.go.set()
    held.save.wait()
    one.net.emb.table.numpy()
    with pytest.raises(InvalidValueError, match="an array shares"):
        one.save(tmp_path / "saved", background=True)


ENDS = """
import sys, torch
import speedtransfer as st
emb = st.Embedding(40, 8)
st.save_checkpoint(sys.argv[1], emb, extra="saved", background=True)
"""


def test_a_process_that_ends_waits(tmp_path):
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path / "saved")], check=True)
    assert st.load_checkpoint(tmp_path / "saved", st.Embedding(40, 8)) == "saved"
