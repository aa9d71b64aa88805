"""Checkpoints of several processes: what fails in one fails in all and changes nothing, or leaves a whole checkpoint."""

import functools
import json
import os
import re
import resource
import shutil
import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import flip

from ranks.checkpoint_job import EXACT, Job, run
from ranks.run import DeadRankError
from ranks.test_checkpoint_ranks import assert_alike, save_and_go_on, save_then_draw
from speedtransfer.checkpoint import load
from speedtransfer.checkpoint.background import SnapshotRows
from speedtransfer.checkpoint.folder import Folder
from speedtransfer.errors import ProcessGroupError, StorageError


def listing(path):
    return {name: (path / name).read_bytes() for name in os.listdir(path)} if path.exists() else {}


def save_where_one_cannot(path, old, rank, size, background):
    job = Job(EXACT).train(2)
    job.note = "x" * 40_000
    if old:
        job.save(path)
    dist.barrier()
    before = listing(path)
    dist.barrier()
    job.train(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if job.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises((StorageError, ProcessGroupError)) as raised:
            job.save(path, background=background).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    unchanged, there = listing(path) == before, path.exists()
    # And all may go on.
    dist.barrier()
    job.train(1).save(path)
    return [unchanged, there, str(raised.value), Job(EXACT).load(path).done]


@pytest.mark.parametrize("how", [(False, 1, 4096, False), (True, 0, 50_000, False), (True, 1, 4096, True)])
def test_a_disk_that_is_full_in_one_process(how, two, tmp_path):
    """50 kB: all files are written, but not the manifest."""
    found, (old, rank, *_) = two(save_where_one_cannot, tmp_path / "point", *how), how
    for each, (unchanged, there, words, done) in enumerate(found):
        assert unchanged
        assert there == old
        assert done == 4
        assert ("cannot save to" if each == rank else f"rank {rank} failed where it saves") in words


def write_rows_of_all(path):
    job, go = Job(EXACT.of("shared")).train(2), threading.Event()
    with patch.object(SnapshotRows, "settle", lambda rows: go.wait()):
        job.save(path, background=True)
        if job.rank == 0:
            job.net.emb.table.local.scatter(torch.arange(300), torch.ones(300, 8, dtype=torch.float64))
        go.set()
        with pytest.raises((StorageError, ProcessGroupError)) as raised:
            job.wait()
    return [str(raised.value), path.exists()]


def test_rows_of_another_process_that_are_written_meanwhile(two, tmp_path):
    (first, *there), (second, *_) = two(write_rows_of_all, tmp_path / "point")
    assert "changed by other means" in first
    assert "rank 0 failed where it saves" in second
    assert there == [False]


def state_of(job):
    return [{k: v.tolist() for k, v in job.planes().items()}, torch.get_rng_state().tolist(), job.scheduler.last_epoch]


def refuse(path, folders):
    job = Job(EXACT, seed=8).train(2)
    before = state_of(job)
    with pytest.raises((StorageError, ProcessGroupError)) as raised:
        job.load(path / folders[job.rank])
    assert state_of(job) == before
    job.train(1)
    return str(raised.value)


# At the end of processes with copies of the checkpoint on disks of their own.
DAMAGES = (
    "flip rows-1 00, flip objects 00, cut rows-2 00, remove rows-0 00, remove model 00, flip model 01, flip rows-0 01"
)


@pytest.mark.parametrize("case", DAMAGES.split(", "))
def test_damage_is_refused_by_all(case, two, three, tmp_path):
    damage, role, folders = case.split()
    three(save_then_draw, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    files = json.loads((tmp_path / "0" / "manifest.json").read_text())["files"]
    file = tmp_path / folders[1] / files[role]["name"]
    words = ["cannot open" if damage == "remove" else r"has \d+ bytes but"] * 2
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "remove":
        file.unlink()
    else:
        flip(tmp_path, f"{folders[1]}/{file.name}")
        # One checks the bytes of each file, or each those of its copy.
        finder = list(files).index(role) % 2 if folders == "00" else 1
        words = [f"rank {finder} failed where it loads"] * 2
        words[finder] = "does not have the checksum"
    for said, word in zip(two(refuse, tmp_path, list(folders)), words, strict=True):
        assert re.search(word, said), said


def load_while_saved(path):
    """Rank 1 still opens the checkpoint before."""
    found, opened = [], load.open_checkpoint

    def slow(point, stack):
        found.append(point)
        return opened(Folder(path / "before") if len(found) == 1 and dist.get_rank() == 1 else point, stack)

    load.open_checkpoint = slow
    try:
        return [Job(EXACT).load(path / "after").planes(), len(found)]
    finally:
        load.open_checkpoint = opened


def test_loaded_while_another_saves(two, tmp_path):
    two(save_then_draw, tmp_path / "before")
    saved, _ = two(save_and_go_on, EXACT, tmp_path / "after")[0]
    for planes, opened in two(load_while_saved, tmp_path):
        assert_alike(planes, saved)
        assert opened == 2


LIVES = {
    "in a save": ["1 save 1200"],
    "in backward, in a save": ["0 backward 3", "1 save 400"],
    "in forward, in a step": ["0 step 3", "1 forward 5"],
    # A save takes less than 2000 lines in rank 0 and about 950 in others; the first one here ends.
    "in saves": ["0 save 2500", "1 save 150", "0 save 900", "1 save 500"],
}


@pytest.mark.parametrize("lives", ["in a save", *(pytest.param(it, marks=pytest.mark.slow) for it in [*LIVES][1:])])
def test_killed_and_started_anew(lives, two, tmp_path):
    kills = LIVES[lives]
    whole = two(run, tmp_path / "whole", 6)[0]
    for life, kill in enumerate(kills):
        ends = two.fails(functools.partial(run, tmp_path / "point", 6, *kills, life=life), timeout=6)
        killed = int(kill[0])
        assert isinstance(ends[killed], DeadRankError)
        assert isinstance(ends[1 - killed], RuntimeError)
    assert (tmp_path / "point" / "manifest.json").exists()
    assert_alike(two(run, tmp_path / "point", 6)[0], whole)
    assert len(os.listdir(tmp_path / "point")) == 6
