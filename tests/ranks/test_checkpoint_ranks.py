"""Checkpoints of tables that several processes own: saved by any number of them, loaded by any, whole or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lazy_oracle import one_thread  # noqa: F401 - a fixture
from safetensors.torch import load_file

import speedtransfer as st
from ranks.checkpoint_job import EXACT, SMALL, Job, Setup
from ranks.run import torchrun
from speedtransfer.errors import InvalidTypeError, InvalidValueError, OptimizerError, ProcessGroupError, StorageError

SETUPS = {"exact": EXACT, "int8": SMALL}
SOME = [("exact", 2, 3), ("exact", 3, 1), ("int8", 3, 2), ("int8", 2, 2), ("exact", 2, 2), ("int8", 1, 2)]
EVERY = [
    pytest.param(*case, marks=() if case in SOME else pytest.mark.slow)
    for case in itertools.product(SETUPS, (1, 2, 3), (1, 2, 3))
]


def assert_alike(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], start: dict | None = None) -> None:
    """Bit for bit; or, with the values at the start, to rounding of how far they have moved."""
    assert ours.keys() == wanted.keys()
    for name, value in ours.items():
        assert value.dtype == wanted[name].dtype
        assert value.shape == wanted[name].shape
        if start is None:
            assert torch.equal(value, wanted[name]), name
        else:
            moved = max(float((wanted[name] - start[name]).abs().max()), 1e-3)
            assert float((value - wanted[name]).abs().max()) <= 1e-10 * moved, name


def save_and_go_on(setup: Setup, path: Path) -> list:
    job = Job(setup).train(5).save(path)
    return [job.planes(), job.train(5).planes()]


def load_and_go_on(setup: Setup, path: Path) -> list:
    job = Job(setup, seed=8).load(path)
    assert job.done == 5
    assert job.scheduler.last_epoch == 5
    return [job.planes(), job.train(5).planes()]


@pytest.mark.parametrize(("name", "saved_by", "loaded_by"), EVERY)
def test_saved_by_some_loaded_by_others(name, saved_by, loaded_by, pool, tmp_path):
    setup = SETUPS[name]
    saved, later = pool.of(saved_by)(save_and_go_on, setup, tmp_path / "point")[0]
    for planes, went_on in pool.of(loaded_by)(load_and_go_on, setup, tmp_path / "point"):
        assert_alike(planes, saved)
        if saved_by == loaded_by:
            assert_alike(went_on, later)
        elif name == "exact":
            assert_alike(went_on, later, saved)


# --- other kinds of table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", ["shared sharded", "sharded shared", "shared shared", "mixed mixed"])
@pytest.mark.parametrize("name", SETUPS)
def test_shared_tables_and_replicas(kinds, name, two, three, tmp_path):
    before, after = (SETUPS[name].of(kind) for kind in kinds.split())
    saved, later = two(save_and_go_on, before, tmp_path / "point")[0]
    for ranks in (two, three):
        for planes, went_on in ranks(load_and_go_on, after, tmp_path / "point"):
            assert_alike(planes, saved)
            if ranks is two and before == after:
                assert_alike(went_on, later)
            elif name == "exact":
                assert_alike(went_on, later, saved)


@pytest.mark.parametrize(("kind", "name"), [("one", "exact"), ("one", "int8"), ("torch", "exact")])
def test_into_one_process_and_out_of_it(kind, name, two, tmp_path):
    """Format 2 into an ordinary table and ``nn.Embedding``, and format 1 into shards."""
    setup = SETUPS[name]
    saved, later = two(save_and_go_on, setup, tmp_path / "of two")[0]
    ours, went_on = load_and_go_on(setup.of(kind), tmp_path / "of two")
    assert_alike(ours, saved)
    if name == "exact":
        assert_alike(went_on, later, saved)
    saved, later = save_and_go_on(setup.of(kind), tmp_path / "of one")
    content = json.loads((tmp_path / "of one" / "manifest.json").read_text())
    assert content["format_version"] == 1
    for planes, went_on in two(load_and_go_on, setup, tmp_path / "of one"):
        assert_alike(planes, saved)
        if name == "exact":
            assert_alike(went_on, later, saved)


def load_in_another_form(path: Path) -> list:
    job = Job(Setup(dtype=torch.float32, options=(("idle", "lazy"),)), seed=8).load(path)
    saved = Job(SMALL).load(path)
    ids = torch.arange(saved.setup.rows)
    return [torch.equal(job.net.emb.table.gather(ids), saved.net.emb.table.gather(ids)), job.train(2).done]


def test_rows_stored_otherwise_are_decoded(two, three, tmp_path):
    two(save_and_go_on, SMALL, tmp_path)
    assert three(load_in_another_form, tmp_path) == [[True, 7]] * 3


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd-momentum", "sgd", "rmsprop-centered"])
def test_other_optimizers(optimizer, two, three, tmp_path):
    setup = dataclasses.replace(EXACT, optimizer=optimizer)
    saved, later = two(save_and_go_on, setup, tmp_path)[0]
    for planes, went_on in three(load_and_go_on, setup, tmp_path):
        assert_alike(planes, saved)
        assert_alike(went_on, later, saved)


def save_before_a_step(setup: Setup, path: Path) -> list:
    job = Job(setup).save(path)
    return [job.planes(), job.train(3).planes()]


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_before_the_first_step(optimizer, two, tmp_path):
    setup = dataclasses.replace(EXACT, optimizer=optimizer)
    saved, later = two(save_before_a_step, setup, tmp_path)[0]
    loaded, went_on = two(load_before_a_step, setup, tmp_path)[0]
    # The state that the constructor of Adagrad makes is in no plane until it is loaded.
    assert_alike({name: loaded[name] for name in saved}, saved)
    assert_alike(went_on, later)


def load_before_a_step(setup: Setup, path: Path) -> list:
    job = Job(setup, seed=8).load(path)
    return [job.planes(), job.train(3).planes()]


def test_a_table_with_few_rows(two, three, tmp_path):
    setup = dataclasses.replace(EXACT, rows=1)
    saved, later = three(save_and_go_on, setup, tmp_path)[0]
    for planes, went_on in two(load_and_go_on, setup, tmp_path):
        assert_alike(planes, saved)
        assert_alike(went_on, later, saved)


# --- generators, and what is saved of which process -----------------------------------------------------------------------


def draws(job: Job) -> list[float]:
    return [random.random(), np.random.rand(), float(torch.rand(1)), float(torch.rand(1, generator=job.generator))]


def save_then_draw(path: Path) -> list[float]:
    return draws(Job(EXACT).train(1).save(path))


def load_then_draw(path: Path) -> list[float]:
    return draws(Job(EXACT, seed=8).load(path))


def test_generators_of_all_processes(two, three, tmp_path):
    first, second = two(save_then_draw, tmp_path)
    assert first != second
    assert two(load_then_draw, tmp_path) == [first, second]
    # A process that none was saved of gets those of the first.
    assert three(load_then_draw, tmp_path) == [first, second, first]
    assert draws(Job(EXACT.of("one"), seed=8).load(tmp_path)) == first


def test_manifest_of_format_2(two, tmp_path):
    two(save_then_draw, tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["format_version"] == 2
    assert content["model"]["entries"]["emb.weight"]["layout"] == {"kind": "interleaved", "buckets": 4093}
    assert list(content["files"]) == ["model", "optimizer", "objects", "rows-0", "rows-1"]
    assert content["files"]["rows-1"]["rows"]["emb.weight"] == [150, 300]
    assert content["files"]["rows-1"]["rows"]["bag.weight"] == [1, 2]
    assert set(os.listdir(tmp_path)) == {"manifest.json", *(facts["name"] for facts in content["files"].values())}
    for facts in content["files"].values():
        load_file(tmp_path / facts["name"])


# --- what fails in one process fails in all, and changes nothing ------------------------------------------------------------


def listing(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in os.listdir(path)} if path.exists() else {}


def save_where_one_cannot(path: Path, old: bool, rank: int, size: int) -> list:
    job = Job(EXACT).train(2)
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
            job.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    unchanged, there = listing(path) == before, path.exists()
    # And all may go on.
    dist.barrier()
    job.train(1).save(path)
    return [unchanged, there, str(raised.value), Job(EXACT).load(path).done]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("rank", "size"), [(1, 4096), (0, 22_000), pytest.param(0, 4096, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_in_one_process(old, rank, size, two, tmp_path):
    """22 kB: the files of rows are written, the manifest is not."""
    found = two(save_where_one_cannot, tmp_path / "point", old, rank, size)
    for each, (unchanged, there, words, done) in enumerate(found):
        assert unchanged
        assert there == old
        assert done == 4
        assert ("cannot save to" if each == rank else f"rank {rank} failed where it saves") in words


def state_of(job: Job) -> list:
    return [{k: v.tolist() for k, v in job.planes().items()}, torch.get_rng_state().tolist(), job.scheduler.last_epoch]


def refuse(setup: Setup, path: Path, folders: list[str]) -> tuple[str, bool]:
    job = Job(setup, seed=8).train(3)
    before = state_of(job)
    with pytest.raises((StorageError, ProcessGroupError, InvalidValueError)) as raised:
        job.load(path / folders[job.rank])
    unchanged = state_of(job) == before
    job.train(1)
    return str(raised.value), unchanged


def assert_refused(found: list[tuple[str, bool]], words: list[str]) -> None:
    for (message, unchanged), word in zip(found, words, strict=True):
        assert re.search(word, message), message
        assert unchanged


DAMAGED = ["flip rows-1", "cut rows-2", "remove rows-0", "remove model", "flip objects"]


@pytest.mark.parametrize(
    ("damage", "role"),
    [
        pytest.param(damage, role, marks=() if f"{damage} {role}" in DAMAGED else pytest.mark.slow)
        for damage in ("flip", "cut", "remove")
        for role in ("rows-0", "rows-1", "rows-2", "model", "optimizer", "objects")
    ],
)
def test_damage_is_refused_by_all(role, damage, two, three, tmp_path):
    three(save_then_draw, tmp_path / "point")
    facts = json.loads((tmp_path / "point" / "manifest.json").read_text())["files"][role]
    file = tmp_path / "point" / facts["name"]
    raw = bytearray(file.read_bytes())
    if damage == "flip":
        raw[-5] ^= 1
    file.write_bytes(raw[:-1] if damage == "cut" else raw)
    if damage == "remove":
        file.unlink()
    found = two(refuse, EXACT, tmp_path, ["point"] * 2)
    if damage == "flip":
        # One checks the bytes of each file.
        finder = list(json.loads((tmp_path / "point" / "manifest.json").read_text())["files"]).index(role) % 2
        words = [f"rank {finder} failed where it loads"] * 2
        words[finder] = "does not have the checksum"
    else:
        words = ["cannot open" if damage == "remove" else r"has \d+ bytes but"] * 2
    assert_refused(found, words)


def test_other_folders(two, tmp_path):
    two(save_then_draw, tmp_path / "a")
    two(save_and_go_on, EXACT, tmp_path / "b")
    words = ["the processes differ where one loads: rank 0: .*a' of SHA-256 .*; rank 1: .*b' of SHA-256"] * 2
    assert_refused(two(refuse, EXACT, tmp_path, ["a", "b"]), words)
    assert_refused(
        two(refuse, EXACT, tmp_path, ["a", "none"]), ["rank 1 failed where it loads", "no checkpoint folder"]
    )


def load_a_copy(path: Path) -> int:
    return Job(EXACT).load(path / str(dist.get_rank())).done


def test_copies_are_checked_by_each(two, tmp_path):
    """Processes with copies of the checkpoint on disks of their own."""
    two(save_then_draw, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    assert two(load_a_copy, tmp_path) == [1, 1]
    for file in (tmp_path / "1").glob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-5] ^= 1
        file.write_bytes(raw)
        words = ["rank 1 failed where it loads", "does not have the checksum"]
        assert_refused(two(refuse, EXACT, tmp_path, ["0", "1"]), words)
        raw[-5] ^= 1
        file.write_bytes(raw)


def refuse_other_optimizer(path: Path) -> str:
    job = Job(EXACT)
    kind = (torch.optim.AdamW, torch.optim.Adagrad)[job.rank]
    with pytest.raises((InvalidValueError, ProcessGroupError)) as raised:
        st.load_checkpoint(path, job.net, kind(job.net.parameters()), scheduler=None, generator=None)
    return str(raised.value)


def test_what_does_not_fit(two, three, tmp_path):
    three(save_then_draw, tmp_path / "point")
    more = dataclasses.replace(EXACT, rows=301)
    assert_refused(two(refuse, more, tmp_path, ["point"] * 2), [r"'emb.weight' is \(300, 8\).* but \(301, 8\)"] * 2)
    first, second = two(refuse_other_optimizer, tmp_path / "point")
    assert "rank 1 failed where it loads" in first
    assert "optimizer is Adagrad but the checkpoint holds that of AdamW" in second


def save_elsewhere(path: Path) -> str:
    job = Job(EXACT).train(1)
    with pytest.raises((StorageError, ProcessGroupError)) as raised:
        job.save(path / f"of rank {job.rank}")
    dist.barrier()
    return f"{raised.value} {os.listdir(path)}"


def test_processes_that_save_to_different_folders(two, tmp_path):
    first, second = two(save_elsewhere, tmp_path)
    assert first == "rank 1 failed where it saves (its own message says why), so no other went on []"
    assert "give all processes the same path, on a file system that they share []" in second


def only_first_saves(path: Path) -> str:
    # DistributedDataParallel has messages of its own in the second step.
    job = Job(EXACT).train(3)
    with pytest.raises(ProcessGroupError) as raised:
        job.save(path) if job.rank == 0 else job.train(1)
    assert not path.exists()
    return str(raised.value)


def test_rank_0_alone_saves(two, tmp_path):
    for message in two(only_first_saves, tmp_path / "point"):
        assert re.search(r"out of step: rank 0: saves .*; rank 1: looks up rows", message)


def wrong_in_one(path: Path) -> list[str]:
    job, messages = Job(EXACT).train(1), []
    for more in ({"extra": object()}, {"scaler": 3}, {"more": torch.optim.SGD(job.net.parameters(), lr=1)}):
        kind = (InvalidTypeError, ProcessGroupError)
        wrong = more if job.rank == 0 else {}
        with pytest.raises(kind) as raised:
            st.save_checkpoint(path, job.net, job.optimizer, **wrong)
        messages.append(str(raised.value))
    with pytest.raises(InvalidTypeError) as raised:
        st.save_checkpoint(path, job.net, job.optimizer, extra=object())
    assert not path.exists()
    return messages


def optimizer_state(path: Path) -> list[str]:
    job, messages = Job(EXACT).train(1).save(path), []
    for call in (job.optimizer.state_dict, lambda: job.optimizer.load_state_dict({"state": {}, "param_groups": []})):
        with pytest.raises(OptimizerError) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def test_state_dicts_of_optimizers_are_refused(two, tmp_path):
    for messages in two(optimizer_state, tmp_path):
        for message in messages:
            assert "are owned by 2 processes; call st.save_checkpoint(path, model, optimizer)" in message


# --- killed -----------------------------------------------------------------------------------------------------------------

JOB = Path(__file__).with_name("checkpoint_job.py")


def run_job(path: Path, *args: str, restarts: int = 1) -> tuple[dict, str]:
    tests = JOB.parent.parent
    env = {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    result = torchrun("--max-restarts", str(restarts), str(JOB), str(path), "6", *args, world=2, env=env, timeout=120)
    assert result.returncode == 0, result.stdout
    return torch.load(path.with_suffix(".pt")), result.stdout


@pytest.fixture(scope="module")
def never_killed(tmp_path_factory) -> dict:
    planes, output = run_job(tmp_path_factory.mktemp("whole") / "point")
    assert "goes on" not in output
    return planes


MOMENTS = ["1 5 forward", "0 3 backward", "1 4 step", "1 3 save 900", "0 3 save 1000"]


@pytest.mark.parametrize(
    "moment", [MOMENTS[1], MOMENTS[3], *(pytest.param(m, marks=pytest.mark.slow) for m in MOMENTS[::2])]
)
def test_killed_and_restarted(moment, never_killed, tmp_path):
    rank, step, where = moment.split(" ", 2)
    planes, output = run_job(tmp_path / "point", rank, step, where)
    assert "goes on at step" in output
    assert_alike(planes, never_killed)
    assert len(os.listdir(tmp_path / "point")) == 6
