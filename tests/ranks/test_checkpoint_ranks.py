"""Checkpoints of tables that several processes own: saved by any number of them, loaded by any."""

import dataclasses
import functools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import take_step
from safetensors.torch import load_file
from sweeps import few
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import speedtransfer as st
from ranks.checkpoint_job import EXACT, FLOAT8, ROWS, SMALL, SPLIT24, Job, Net
from ranks.pair import DIM, Pair, told
from ranks.run import on
from ranks.test_vocabulary_ranks import Parts, batch, compared, embedding, evaluate, loss
from speedtransfer.vocabulary.contents import rows_here


def with_options(**options):
    return dataclasses.replace(EXACT, options=(*EXACT.options, *options.items()))


SETUPS = {
    "exact": EXACT,
    "int8": SMALL,
    "float8": FLOAT8,
    "split24": SPLIT24,
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
int8 sharded 3 > int8 sharded 2 in a store
exact shared 2 > exact sharded 3
int8 sharded 2 > int8 shared 2
split24 shared 2 meanwhile > split24 one 0
exact sharded 2 > exact one 0
exact sharded 2 meanwhile > exact sharded 3
split24 sharded 2 meanwhile > split24 sharded 2
exact one 0 > exact sharded 2
cache sharded 2 > exact sharded 3
exact shared 2 meanwhile > exact shared 2
rmsprop-centered sharded 2 > rmsprop-centered sharded 3
split24 sharded 2 > split24 sharded 3
exact sharded 2 > exact torch 0
few sharded 3 > few sharded 2
int8 sharded 1 > int8 sharded 2
mmap sharded 2 > exact sharded 3
adagrad sharded 2 > adagrad sharded 3
int8 mixed 2 > int8 mixed 3
float8 sharded 2 > float8 sharded 3
split24 one 0 > split24 sharded 2
exact sharded 2 > layout sharded 3
sgd sharded 2 > sgd sharded 3
sgd-momentum sharded 2 > sgd-momentum sharded 3
exact sharded 2 > mmap sharded 3
exact torch 0 > exact sharded 2
exact sharded 2 > cache sharded 3
""".strip().splitlines()


def assert_alike(ours, wanted, start=None):
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


def save_and_go_on(setup, path, steps=4, background=False):
    job = (
        Job(setup).train(steps).save(path, background=background)
    )  # the learning rate changes at the third step and the sixth
    ends = [job.planes(), job.train(3).planes()]
    job.wait()
    return ends


def load_and_go_on(setup, path, steps=4):
    job = Job(setup, seed=8).load(path)
    assert job.done == steps
    assert job.scheduler.last_epoch == steps
    return [job.planes(), job.train(3).planes()]


@pytest.mark.parametrize("case", few(CASES, *CASES[:11]))
def test_saved_by_some_loaded_by_others(case, pool, tmp_path):
    ends, before = [], ""
    place = f"local://{tmp_path}/point" if " in a store" in case else tmp_path / "point"
    forms = case.removesuffix(" in a store").split(" > ")
    for function, text in zip((save_and_go_on, load_and_go_on), forms, strict=True):
        name, kind, world, *meanwhile = text.split()
        setup = SETUPS[name].of(kind)
        if name == "mmap":
            setup = dataclasses.replace(setup, options=(*setup.options, ("path", tmp_path / "rows.safetensors")))
        call = pool.of(int(world)) if world != "0" else lambda function, *args: [function(*args)]
        ends.append(call(functools.partial(function, **({"background": True} if meanwhile else {})), setup, place))
        is_same, before = text == before, text.removesuffix(" meanwhile")
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


def beside_fsdp(path, saves):
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
            take_step(optimizer, net(torch.arange(8).view(4, 2) + step).sum())
        if is_new:
            st.save_checkpoint(path, net, optimizer)
    params = list(net.dense.parameters())
    moments = [optimizer.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq")]
    return [net.emb.table.gather(torch.arange(ROWS)), *(each.detach().full_tensor() for each in (*params, *moments))]


@pytest.mark.skipif(torch.__version__ < "2.7", reason="fully_shard takes no ignored_params")
def test_beside_a_dense_part_of_fsdp(two, three, tmp_path):
    again = two(beside_fsdp, tmp_path, True)[0]
    for ours in three(beside_fsdp, tmp_path, False):
        torch.testing.assert_close(ours, again, rtol=1e-10, atol=1e-12)


# --- generators, and what is saved of which process -----------------------------------------------------------------------


def draws(job):
    return [random.random(), np.random.rand(), float(torch.rand(1)), float(torch.rand(1, generator=job.generator))]


def save_then_draw(path):
    return draws(Job(EXACT).train(1).save(path))


def load_then_draw(path):
    return draws(Job(EXACT, seed=8).load(path))


def test_generators_of_all_processes(two, three, tmp_path):
    first, second = two(save_then_draw, tmp_path)
    assert first != second
    assert two(load_then_draw, tmp_path) == [first, second]
    # A process that none was saved of gets those of the first.
    assert three(load_then_draw, tmp_path) == [first, second, first]
    assert draws(Job(EXACT.of("one"), seed=8).load(tmp_path)) == first


def test_files_of_several_processes(two, three, tmp_path):
    three(save_then_draw, tmp_path)
    two(save_then_draw, tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert content["format_version"] == 3
    assert content["model"]["entries"]["emb.weight"]["layout"] == {"kind": "interleaved", "buckets": 4093}
    assert list(content["files"]) == ["model", "optimizer", "objects", "rows-0", "rows-1"]
    assert content["files"]["rows-1"]["rows"]["emb.weight"] == [150, 300]
    assert content["files"]["rows-1"]["rows"]["bag.weight"] == [1, 2]
    assert set(os.listdir(tmp_path)) == {"manifest.json", *(facts["name"] for facts in content["files"].values())}
    for facts in content["files"].values():
        load_file(tmp_path / facts["name"])
    Job(EXACT.of("one")).save(tmp_path)
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert set(os.listdir(tmp_path)) == {"manifest.json", *(facts["name"] for facts in content["files"].values())}


# --- vocabularies ------------------------------------------------------------------------------------------------------------

SAVED, STEPS, SHARES = 5, 9, 6
# A table that grows, more on one rank than on another, with ids that are admitted at their second or third sighting.
GROWS = {"max_capacity": 400, "unseen": "row", "capacity": 6}
SAVES = {
    "exact": {**GROWS, "admit": 2, "idle": "exact"},
    "lazy": {**GROWS, "admit": 3, "evict": "lfu"},
    # Ids go, in each process apart.
    "lru": {"evict": "lru", "capacity": 90, "admit": 2, "parts": True},
    "lfu": {"evict": "lfu", "capacity": 6, "max_capacity": 120, "idle": "exact", "parts": True, "background": True},
    "by age": {"evict": 3, "capacity": 400, "parts": True},
}


def share(step, rank):
    """Return a batch of which any number of processes have shares."""
    world = dist.get_world_size()
    parts = [batch(step, part, 300) for part in range(rank * SHARES // world, (rank + 1) * SHARES // world)]
    ids, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids, weights * world


def resumed(folder, save_as, parts=False, background=False, **options):
    """Train, from a checkpoint on if one is given, and return how far that is from one process that trains on."""
    one = Parts(dist.get_world_size(), **options) if parts else embedding(shared=False, **options)
    pair = Pair(embedding(**options), one, torch.optim.AdamW, loss=loss, batch=share, at_once=True)
    for step in range(STEPS):
        if step == SAVED and folder:
            # Where the ids of another batch are.
            take_step(pair.opt, loss(pair.ours, share(50, dist.get_rank())))
            assert st.load_checkpoint(folder, pair.ours, pair.opt) == 7
            assert pair.ours.vocabulary.clock == SAVED
        if step == SAVED and save_as:
            saving = st.save_checkpoint(save_as, pair.ours, pair.opt, extra=7, background=background)
        if step < SAVED and folder:
            pair.one_backward(step)
            pair.one_opt.step()
            pair.one_opt.zero_grad()
        else:
            pair.backward(step)
            pair.end()
    saving.wait() if save_as and background else None
    if parts:
        # As without the break, in the same rows.
        vocabularies = pair.ours.vocabulary, one.parts[dist.get_rank()].vocabulary
        rows = [rows_here(each, vocabularies[1].ids().numpy()) for each in vocabularies]
        assert np.array_equal(*rows)
    return max(compared(pair), evaluate(pair, STEPS))


@pytest.mark.parametrize(
    ("name", "worlds"),
    few(
        [("exact", ((1, 2), (2, 1), (2, 2))), ("lazy", ((2, 1), (2, 3))), *((it, ((2, 2),)) for it in [*SAVES][2:])],
        ("lazy", ((2, 1), (2, 3))),
        *((it, ((2, 2),)) for it in [*SAVES][2:]),
    ),
)
def test_saved_by_any_number_and_loaded_by_any(pool, tmp_path, name, worlds):
    for saved, loaded in worlds:
        folder = str(tmp_path / str(saved))
        if not Path(folder).exists():
            assert max(pool.of(saved)(functools.partial(resumed, None, folder, **SAVES[name]))) < 1e-10
        assert max(pool.of(loaded)(functools.partial(resumed, folder, None, **SAVES[name]))) < 1e-10


@on(2)
def test_what_does_not_fit_changes_nothing(tmp_path):
    """Into a vocabulary without room for so many ids, which stays as it was; into one with another padding, or none."""
    folder = str(tmp_path / "run")
    resumed(None, folder, capacity=60, max_capacity=400, idle="exact")
    small, plain = embedding(6), nn.Embedding(60, DIM, dtype=torch.float64)
    assert "make the module with a larger capacity" in told(lambda: st.load_checkpoint(folder, small))
    assert len(small.vocabulary) == 0
    assert "padding_idx" in told(lambda: st.load_checkpoint(folder, embedding(padding_idx=None)))
    assert "make the module with vocabulary=st.Vocabulary()" in told(lambda: st.load_checkpoint(folder, plain))


def from_plain(folder):
    emb, every = embedding(40, dtype=torch.float32, padding_idx=None), np.arange(40)
    st.load_checkpoint(folder, emb)
    assert np.array_equal(emb.vocabulary.rows(every).numpy() >= 0, emb._handle.id_space.owners.owns(every))
    return emb.eval()(torch.arange(40)).detach()


def test_a_plain_embedding_becomes_one_with_ids(two, tmp_path):
    folder, plain = str(tmp_path / "plain"), nn.Embedding(40, DIM)
    st.save_checkpoint(folder, plain)
    for rows in two(from_plain, folder):
        assert torch.equal(rows, plain.weight.detach())
