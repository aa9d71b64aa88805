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
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import speedtransfer as st
from ranks.checkpoint_job import EXACT, FLOAT8, ROWS, SMALL, Job, Net, Setup, run
from ranks.run import DeadRankError, torchrun
from ranks.small import told
from speedtransfer.checkpoint import load, together
from speedtransfer.errors import InvalidValueError, ProcessGroupError, StorageError
from speedtransfer.nn.fused_lookup import read_ahead_of


def with_options(**options) -> Setup:
    return dataclasses.replace(EXACT, options=(*EXACT.options, *options.items()))


SETUPS = {
    "exact": EXACT,
    "int8": SMALL,
    "float8": FLOAT8,
    "few": dataclasses.replace(EXACT, rows=1),
    "layout": with_options(layout="rows"),
    "cache": with_options(cache_rows=20),
    "mmap": with_options(memory="mmap"),
    **{
        name: dataclasses.replace(EXACT, optimizer=name)
        for name in ("adagrad", "rmsprop-centered", "sgd", "sgd-momentum")
    },
}
# How rows are stored or stepped, whose they are, in how many processes (0: in one without a group) they are saved and loaded.
CASES = """
exact sharded 2 > exact sharded 3
exact sharded 2 > exact sharded 2
int8 sharded 3 > int8 sharded 2
int8 sharded 1 > int8 sharded 2
float8 sharded 2 > float8 sharded 1
exact shared 2 > exact sharded 3
int8 sharded 2 > int8 shared 2
float8 shared 2 > float8 shared 3
exact shared 2 > exact shared 2
int8 mixed 2 > int8 mixed 2
exact mixed 2 > exact mixed 3
exact sharded 2 > exact one 0
exact one 0 > exact sharded 2
exact sharded 2 > exact torch 0
exact torch 0 > exact sharded 2
cache sharded 2 > exact sharded 3
exact sharded 2 > cache sharded 3
mmap sharded 2 > exact sharded 3
exact sharded 2 > mmap sharded 3
adagrad sharded 2 > adagrad sharded 3
rmsprop-centered sharded 2 > rmsprop-centered sharded 3
few sharded 3 > few sharded 2
""".strip().splitlines()
MORE = [
    f"{name} {saved} > {name} {loaded}"
    for name in ("exact", "int8", "float8")
    for saved, loaded in [
        *itertools.product(*[[f"sharded {world}" for world in (1, 2, 3)]] * 2),
        *itertools.product(("shared 2", "sharded 2"), ("shared 2", "shared 3", "sharded 3")),
        *(("mixed 2", "mixed 2"), ("mixed 2", "mixed 3"), ("sharded 2", "one 0"), ("one 0", "sharded 2")),
    ]
]
MORE += ["layout sharded 2 > exact sharded 3", "exact sharded 2 > layout sharded 3"]
MORE += [f"{name} sharded 2 > {name} sharded 3" for name in ("sgd", "sgd-momentum")]


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


def save_and_go_on(setup: Setup, path: Path, steps: int = 4) -> list:
    # The learning rate changes at the third step and at the sixth.
    job = Job(setup).train(steps).save(path)
    return [job.planes(), job.train(3).planes()]


def load_and_go_on(setup: Setup, path: Path, steps: int = 4) -> list:
    job = Job(setup, seed=8).load(path)
    assert job.done == steps
    assert job.scheduler.last_epoch == steps
    return [job.planes(), job.train(3).planes()]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(it, marks=pytest.mark.slow) for it in MORE if it not in CASES)]
)
def test_saved_by_some_loaded_by_others(case, pool, tmp_path):
    ends, before = [], ""
    for function, text in zip((save_and_go_on, load_and_go_on), case.split(" > "), strict=True):
        name, kind, world = text.split()
        setup = SETUPS[name].of(kind)
        if name == "mmap":
            setup = dataclasses.replace(setup, options=(*setup.options, ("path", tmp_path / "rows.safetensors")))
        call = pool.of(int(world)) if world != "0" else lambda function, *args: [function(*args)]
        ends.append(call(function, setup, tmp_path / "point"))
        is_same, before = text == before, text
    (saved, later), *_ = ends[0]
    for planes, went_on in ends[1]:
        assert_alike(planes, saved)
        if is_same:
            assert_alike(went_on, later)
        elif setup.dtype == torch.float64:
            assert_alike(went_on, later, saved)


@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_before_the_first_step(optimizer, two, tmp_path):
    setup = dataclasses.replace(EXACT, optimizer=optimizer)
    saved, later = two(save_and_go_on, setup, tmp_path, 0)[0]
    loaded, went_on = two(load_and_go_on, setup, tmp_path, 0)[0]
    # The state that the constructor of Adagrad makes is in no plane until it is loaded.
    assert_alike({name: loaded[name] for name in saved}, saved)
    assert_alike(went_on, later)


def beside_fsdp(path: Path, saves: bool) -> list[torch.Tensor]:
    """Train a table beside a dense part that ``fully_shard`` has shared out, from a checkpoint on."""
    # Takes half a second of every process.
    from torch.distributed.fsdp import fully_shard

    for is_new in (True, False) if saves else (False,):
        net = Net(EXACT)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(net, mesh=mesh, ignored_params=set(st.table_parameters(net)))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
        if not is_new:
            st.load_checkpoint(path, net, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            net(torch.arange(8).view(4, 2) + step).sum().backward()
            optimizer.step()
        if is_new:
            st.save_checkpoint(path, net, optimizer)
    params = list(net.dense.parameters())
    moments = [optimizer.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq")]
    return [net.emb.table.gather(torch.arange(ROWS)), *(each.detach().full_tensor() for each in (*params, *moments))]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="fully_shard takes no ignored_params")
def test_beside_a_dense_part_of_fsdp(two, three, tmp_path):
    again = two(beside_fsdp, tmp_path, True)[0]
    for ours in three(beside_fsdp, tmp_path, False):
        for value, wanted in zip(ours, again, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)


def load_in_another_form(path: Path) -> list:
    job = Job(Setup(dtype=torch.float32, options=(("idle", "lazy"),)), seed=8).load(path)
    saved = Job(SMALL).load(path)
    ids = torch.arange(saved.setup.rows)
    return [torch.equal(job.net.emb.table.gather(ids), saved.net.emb.table.gather(ids)), job.train(2).done]


def test_rows_stored_otherwise_are_decoded(two, three, tmp_path):
    two(save_and_go_on, SMALL, tmp_path)
    assert three(load_in_another_form, tmp_path) == [[True, 6]] * 3


def load_with_ids_ahead(path: Path) -> bool:
    net = Job(EXACT, seed=8).net
    ids, few = torch.arange(6).view(3, 2), torch.tensor([[0, 1], [1, 1]])
    tickets = read_ahead_of([(net.emb, ids), (net.bag, few)])
    # The rows of both come.
    net.emb(ids)
    st.load_checkpoint(path, net)
    found = torch.equal(net.bag(few), net.bag.table.gather(few).sum(1))
    return found and len(tickets) == 2


def test_rows_read_ahead_are_read_again(two, tmp_path):
    two(save_and_go_on, EXACT, tmp_path)
    assert all(two(load_with_ids_ahead, tmp_path))


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


def test_files_of_format_2(two, three, tmp_path):
    three(save_then_draw, tmp_path)
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
    Job(EXACT.of("one")).save(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["format_version"] == 1
    assert set(os.listdir(tmp_path)) == {"manifest.json", *(facts["name"] for facts in content["files"].values())}


# --- what fails in one process fails in all, and changes nothing ------------------------------------------------------------


def listing(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in os.listdir(path)} if path.exists() else {}


def save_where_one_cannot(path: Path, old: bool, rank: int, size: int) -> list:
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
@pytest.mark.parametrize(("rank", "size"), [(1, 4096), (0, 50_000), pytest.param(0, 4096, marks=pytest.mark.slow)])
def test_a_disk_that_is_full_in_one_process(old, rank, size, two, tmp_path):
    """50 kB: all files are written, but not the manifest."""
    found = two(save_where_one_cannot, tmp_path / "point", old, rank, size)
    for each, (unchanged, there, words, done) in enumerate(found):
        assert unchanged
        assert there == old
        assert done == 4
        assert ("cannot save to" if each == rank else f"rank {rank} failed where it saves") in words


def state_of(job: Job) -> list:
    return [{k: v.tolist() for k, v in job.planes().items()}, torch.get_rng_state().tolist(), job.scheduler.last_epoch]


def refuse(setup: Setup, path: Path, folders: list[str]) -> tuple[str, bool]:
    job = Job(setup, seed=8).train(2)
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


def load_while_saved(path: Path) -> list:
    """Rank 1 still opens the checkpoint before."""
    found, opened = [], load.open_checkpoint

    def slow(point, stack):
        found.append(point)
        return opened(path / "before" if len(found) == 1 and dist.get_rank() == 1 else point, stack)

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


def load_a_copy(path: Path) -> int:
    return load_done(path / str(dist.get_rank()))


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


def test_what_does_not_fit(two, three, tmp_path):
    three(save_then_draw, tmp_path / "point")
    more = dataclasses.replace(EXACT, rows=301)
    assert_refused(two(refuse, more, tmp_path, ["point"] * 2), [r"'emb.weight' is \(300, 8\).* but \(301, 8\)"] * 2)


def load_other_optimizer(job: Job, path: Path) -> None:
    kind = (torch.optim.AdamW, torch.optim.Adagrad)[job.rank]
    st.load_checkpoint(path, job.net, kind(job.net.parameters()), scheduler=None, generator=None)


def only_first_saves(job: Job, path: Path) -> None:
    # DistributedDataParallel has messages of its own in the second step.
    job.train(2)
    job.save(path / "new") if job.rank == 0 else job.train(1)


OWNED = "are owned by 2 processes; call st.save_checkpoint\\(path, model, optimizer\\)"
NOT_SAVED = r"^ProcessGroupError: rank {} failed where it saves \(its own message says why\), so no other went on"
# What is done with a checkpoint, and what each rank says.
REFUSED = {
    "another optimizer": (
        load_other_optimizer,
        "rank 1 failed where it loads",
        "^InvalidValueError.*optimizer is Adagrad but the checkpoint holds that of AdamW",
    ),
    "wrapped": (
        lambda job, path: st.load_checkpoint(path, job.model),
        *["the checkpoint has 'bag.weight' and the model 'module.bag.weight': one is wrapped"] * 2,
    ),
    "different folders": (
        lambda job, path: job.save(path / f"of rank {job.rank}"),
        NOT_SAVED.format(1),
        "give all processes the same path, on a file system that they share",
    ),
    "only rank 0 saves": (only_first_saves, *[r"out of step: rank 0: saves .*; rank 1: looks up rows"] * 2),
    "extra": (
        lambda job, path: st.save_checkpoint(path / "new", job.net, extra=object() if job.rank == 0 else None),
        "^InvalidTypeError: extra is a builtins.object",
        NOT_SAVED.format(0),
    ),
    "scaler": (
        lambda job, path: st.save_checkpoint(path / "new", job.net, scaler=3 if job.rank == 0 else None),
        "^InvalidTypeError: scaler is a int without",
        NOT_SAVED.format(0),
    ),
    "state_dict": (lambda job, path: job.optimizer.state_dict(), *[OWNED] * 2),
    "load_state_dict": (
        lambda job, path: job.optimizer.load_state_dict({"state": {}, "param_groups": []}),
        *[OWNED] * 2,
    ),
}


def refused(path: Path, what: str) -> tuple[str, list[str]]:
    job = Job(EXACT).train(1)
    said = told(lambda: REFUSED[what][0](job, path))
    dist.barrier()
    left = [name for name in os.listdir(path) if "new" in name or "of rank" in name]
    if what != "only rank 0 saves":
        job.train(1).save(path)
    return said, left


@pytest.mark.parametrize("what", REFUSED)
def test_refused_in_all(what, two, tmp_path):
    two(save_then_draw, tmp_path)
    for (said, left), words in zip(two(refused, tmp_path, what), REFUSED[what][1:], strict=True):
        assert re.search(words, said), said
        assert left == []


def interrupted(path: Path) -> None:
    """Rank 1 is interrupted when it has told what is in its file."""
    job = Job(EXACT).train(1).save(path).train(1)
    if job.rank == 1:
        texts = together.Processes.texts

        def interrupt(self, text):
            texts(self, text)
            raise KeyboardInterrupt

        together.Processes.texts = interrupt
    try:
        job.save(path)
    finally:
        if job.rank == 1:
            together.Processes.texts = texts


def test_an_interrupt_in_the_last_moment_leaves_a_whole_checkpoint(two, tmp_path):
    first, second = two.fails(interrupted, tmp_path, timeout=3)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, KeyboardInterrupt)
    assert two(load_done, tmp_path) == [2, 2]


def load_done(path: Path) -> int:
    return Job(EXACT).load(path).done


# --- killed -----------------------------------------------------------------------------------------------------------------

JOB = Path(__file__).with_name("checkpoint_job.py")


def run_job(path: Path, *kills: str) -> tuple[dict, str]:
    tests = JOB.parent.parent
    env = {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    options = ["--max-restarts", str(len(kills)), str(JOB), str(path), "6", *kills]
    result = torchrun(*options, world=2, env=env, timeout=60 + 30 * len(kills))
    assert result.returncode == 0, result.stdout
    return torch.load(path.with_suffix(".pt")), result.stdout


LIVES = {
    "in backward, in a save": ["0 backward 3", "1 save 400"],
    "in forward, in a step": ["0 step 3", "1 forward 5"],
    # A save takes about 1200 lines in rank 0 and 600 in others; the first one here ends.
    "in saves": ["0 save 1700", "1 save 150", "0 save 900", "1 save 500", "0 commit 0", "0 commit 1"],
}


def run_life(path: Path, life: int, *kills: str) -> dict:
    return run(path, 6, *kills, life=life)


def test_killed_in_a_save_and_started_anew(two, tmp_path):
    kills = ["1 save 900"]
    whole = two(run, tmp_path / "whole", 6)[0]
    other, killed = two.fails(run_life, tmp_path / "point", 0, *kills, timeout=3)
    assert isinstance(other, RuntimeError)
    assert isinstance(killed, DeadRankError)
    assert (tmp_path / "point" / "manifest.json").exists()
    assert_alike(two(run_life, tmp_path / "point", 1, *kills)[0], whole)
    assert len(os.listdir(tmp_path / "point")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("lives", LIVES)
def test_killed_and_restarted_by_torchrun(lives, two, tmp_path):
    whole = two(run, tmp_path / "whole", 6)[0]
    planes, output = run_job(tmp_path / "point", *LIVES[lives])
    assert output.count("rank 0 goes on at step") == len(LIVES[lives])
    assert_alike(planes, whole)
    assert len(os.listdir(tmp_path / "point")) == 6
