"""Deltas of vocabularies that several processes share out: saved by any number, applied by any, by id; if one is killed."""

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sweeps import few
from torch import nn

import speedtransfer as st
from ranks.pair import told
from ranks.run import DeadRankError, on
from ranks.test_deltas_ranks import check_followed, lead
from speedtransfer.checkpoint import apply_deltas, save_deltas
from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.tables import files
from speedtransfer.vocabulary import owners_of

# Options of the module, and of its vocabulary.
FORMS = {
    "lazy": ({"idle": "lazy"}, {"evict": "lru", "max_capacity": 60}),
    "exact": ({"idle": "exact", "padding_idx": 7}, {"unseen": "row", "admit": 2, "max_capacity": 400}),
    "int8": ({"storage_dtype": torch.int8, "idle": "lazy"}, {"max_capacity": 400}),
}


class Ids(nn.Module):
    """Rows of ids, some of which go, of one feature and of two; and what is the same in all processes."""

    def __init__(self, form, group, seed, **settings):
        torch.manual_seed(seed)
        super().__init__()
        options = {"process_group": dist.group.WORLD} if group else {}
        vocabulary = st.Vocabulary(seed=0, **FORMS[form][1] | settings)
        self.emb = st.Embedding(6, 5, vocabulary=vocabulary, **FORMS[form][0], **options)
        features = {"a": 4, "b": 4}
        self.many = st.MultiEmbedding(
            features, 5, vocabulary=st.Vocabulary(seed=1, max_capacity=900), idle="lazy", **options
        )
        # Ids that are the numbers of rows.
        self.plain = st.MultiEmbedding([30, 10], 5, idle="lazy", **options)
        self.head = nn.Linear(5, 1)


class World:
    """A model in training by the processes of a group, or by one."""

    objects: dict[str, Any] = {}

    def __init__(self, form, group, with_state=True, seed=0, **settings):
        self.group, self.by_places = group, with_state and not group
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        self.net = Ids(form, group, seed, **settings)
        tables = (self.net.emb, self.net.many, self.net.plain)
        self.optimizer = torch.optim.AdamW([param for table in tables for param in table.parameters()], lr=0.1)
        self.opt, self.done = self.optimizer if with_state else None, 0

    def train(self, steps):
        for _ in range(steps):
            draw = torch.Generator().manual_seed(self.done)
            ids = (torch.randint(0, 30, (24,), generator=draw) + 10 * self.done)[self.rank :: self.ranks]
            self.optimizer.zero_grad()
            both = self.net.many({"a": ids, "b": ids % 5})
            rows = self.net.plain(torch.stack([ids % 30, ids % 10], 1)).sum(1)
            (self.net.emb(ids).float() + both["a"] + both["b"] + rows).square().sum().backward()
            self.optimizer.step()
            self.done += 1
        with torch.no_grad():
            self.net.head.bias += 1.0
        return self

    def change(self, number=2):
        """Later forget some ids, and set the rows of others; of these some are new."""
        if number < 2:
            return
        self.optimizer.zero_grad()
        self.net.many.vocabulary.forget(self.net.many.vocabulary_ids("a", torch.arange(self.done, 200, 7)))
        if self.rank == 0:
            self.net.emb.vocabulary.update([3, 10**12 + self.done], torch.full((2, 5), float(self.done)))
        else:
            self.net.emb.vocabulary.update([], torch.empty(0, 5))

    def look(self):
        """Return what is known of ids, whatever rows they have; the same in all processes."""
        found = [value.tolist() for value in self.net.head.state_dict().values()]
        for vocabulary in (self.net.emb.vocabulary, self.net.many.vocabulary):
            parts = [vocabulary.export()]
            if self.group:
                parts *= self.ranks
                dist.all_gather_object(parts, parts[0])
            ids, order = torch.cat([ids for ids, _ in parts]).sort()
            found += [ids.tolist(), torch.cat([rows for _, rows in parts])[order].tolist(), vocabulary.clock]
        unseen = torch.tensor([-1, -2, 7])
        with torch.no_grad():
            found.append(self.net.eval().emb(unseen).tolist())
            found.append(self.net.plain.table.gather(torch.arange(40)).tolist())
        self.net.train()
        return found

    def drawn(self):
        return []


# "state": with the optimizer.
CASES = """
lazy 2 > 3
int8 2 > 0
lazy 0 > 2
exact 2 > 2 state
exact 3 > 2
int8 3 > 2 state
lazy 2 > 0 state
exact 2 > 2
lazy 3 > 1
lazy 2 > 3 state
""".strip().splitlines()


@pytest.mark.parametrize("case", few(CASES, *CASES[:4]))
def test_ids_saved_by_some_followed_by_others(case, pool, tmp_path):
    form, before, _, after, *more = case.split()
    ends = [(int(world), functools.partial(World, form, world != "0", bool(more))) for world in (before, after)]
    if before != after:
        # Each process has room for its share and more, and fewer have less room together.
        ends[1][1].keywords["max_capacity"] = 400
    first, second = check_followed(pool, tmp_path, *ends)
    # Bit for bit at the same number of processes.
    assert not more or before != after or first == second
    assert len(first[0][3][1][2]) > 10


def of_one_process(folder):
    """Rows with their state by places, which several processes do not have."""
    world = World("lazy", True)
    before = world.look()
    said = told(lambda: st.apply_delta(folder / "0.safetensors", world.net, None, world.opt))
    assert world.look() == before
    return said


def go_on_from_one(folder):
    world = World("lazy", True)
    st.load_checkpoint(folder / "base", world.net, world.opt)
    mark, world.done = st.mark(world.net, world.opt), 2
    world.train(2).change()
    mark = st.save_delta(folder / "more.safetensors", world.net, mark, world.opt)
    return [mark.fingerprints, world.look()]


def as_merged(folder):
    world = World("lazy", True)
    st.load_checkpoint(folder / "merged", world.net, world.opt)
    return [st.mark(world.net, world.opt).fingerprints, world.look()]


def test_state_of_one_process_is_refused_by_several(two, tmp_path):
    lead(functools.partial(World, "lazy", False), tmp_path)
    for said in two(of_one_process, tmp_path):
        assert "by the places that they have in one process, but several share them out here" in said
    two(lead, functools.partial(World, "lazy", True), (by_two := tmp_path / "two"))
    deltas = [tmp_path / "0.safetensors", by_two / "1.safetensors"]
    assert "by id and by place" in told(lambda: st.merge(tmp_path / "base", deltas, tmp_path / "none"))
    # Those that go on from what one has saved have rows by id.
    saved = two(go_on_from_one, tmp_path)
    st.merge(tmp_path / "base", tmp_path / "more.safetensors", tmp_path / "merged")
    assert two(as_merged, tmp_path) == saved


@on(2)
def test_a_process_without_room(tmp_path):
    """One process has no room for the ids that come; nothing changes in any."""
    world = World("lazy", True, max_capacity=60, evict="lru")
    ids = np.arange(10_000)
    ids = ids[owners_of(ids, 2) == 1][:40]
    mark = st.mark(world.net)
    world.net.emb.vocabulary.update(torch.from_numpy(ids[world.rank :: 2]), torch.ones(20, 5))
    assert len(world.net.emb.vocabulary) == (0, 40)[world.rank]
    st.save_delta(tmp_path / "1.safetensors", world.net, mark)
    small = World("lazy", True, max_capacity=20, evict="lru")
    before = small.look()
    said = told(lambda: st.apply_delta(tmp_path / "1.safetensors", small.net))
    assert ("rank 1 failed where it loads", "40 new ids need rows")[world.rank] in said
    assert not world.rank or "make the module with a larger capacity" in said
    assert small.look() == before
    # Grown without a lookup, which the others are told.
    st.save_checkpoint(tmp_path / "base", world.net)
    st.load_checkpoint(tmp_path / "base", World("lazy", True).net)


# --- a process is killed as several save a delta, or apply one: what was whole stays, and others say what happened ----------

# When a process of two is killed: which one, whether the delta is there then, and what it does not do, or last of all.
MOMENTS = {
    "it marks what there is now": (1, False, save_deltas, "contents_of"),
    "rows go to the first": (1, False, save_deltas.ChangedRows, "gather"),
    "the file is written": (0, False, os, "replace"),
    "the file is there": (0, True, files, "write"),
    "rows are applied": (1, True, apply_deltas, "_write_rows"),
}


def save_and_die(folder, moment):
    world = World("lazy", True).train(2)
    st.save_checkpoint(folder / "base", world.net)
    mark = st.mark(world.net)
    mark = st.save_delta(folder / "1.safetensors", world.train(1).net, mark)
    copy = World("lazy", True)
    st.load_checkpoint(folder / "base", copy.net)
    known = st.mark(copy.net)
    world.train(1)
    rank, is_there, owner, name = MOMENTS[moment]
    if dist.get_rank() == rank:
        done = getattr(owner, name)
        setattr(owner, name, lambda *given: (is_there and done(*given), os.kill(os.getpid(), signal.SIGKILL)))
    if moment == "rows are applied":
        st.save_delta(folder / "2.safetensors", world.net, mark)
        return told(lambda: st.apply_delta(folder / "1.safetensors", copy.net, known))
    return told(lambda: st.save_delta(folder / "2.safetensors", world.net, mark))


def follow_what_is_there(folder):
    world, paths = World("lazy", True), sorted(folder.glob("*.safetensors"))
    st.load_checkpoint(folder / "base", world.net)
    for path in paths:
        st.apply_delta(path, world.net)
    st.load_checkpoint(folder / "merged", (merged := World("lazy", True)).net)
    assert merged.look() == world.look()
    return [len(paths), world.look()]


@pytest.mark.parametrize(
    "moment", [pytest.param(it, marks=() if it == "the file is written" else pytest.mark.slow) for it in MOMENTS]
)
def test_killed_and_followed_anew(moment, two, tmp_path):
    (rank, is_there, *_), before = MOMENTS[moment], tmp_path / "base" / "manifest.json"
    ends = two.fails(save_and_die, tmp_path, moment, timeout=6)
    assert isinstance(ends[rank], DeadRankError)
    assert "could not reach the others" in ends[1 - rank]
    assert "\n" not in ends[1 - rank]
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in paths] == ["1.safetensors", "2.safetensors"][: 1 + is_there]
    assert [Delta(path).place.number for path in paths] == [1, 2][: 1 + is_there]
    raw = before.read_bytes()
    st.merge(tmp_path / "base", tmp_path, tmp_path / "merged")
    first, second = two(follow_what_is_there, tmp_path)
    assert first == second
    assert first[0] == 1 + is_there
    assert before.read_bytes() == raw
