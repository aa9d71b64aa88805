"""Deltas of tables that several processes own: saved by any number of them, applied by any."""

import functools
import itertools
from typing import Any

import pytest
from checkpoint_cases import flip
from sweeps import few
from test_merge import files_of

import speedtransfer as st
from ranks.checkpoint_job import EXACT, SMALL, Job
from ranks.pair import told
from ranks.test_checkpoint_ranks import draws
from speedtransfer.tables import chunks

SETUPS = {"exact": EXACT.of("sharded", multi=True), "int8": SMALL}
CASES = """
exact sharded 2 > exact sharded 3
int8 sharded 3 > int8 sharded 2
exact sharded 2 > exact one 0
exact one 0 > exact sharded 3
int8 shared 2 > int8 sharded 3
int8 sharded 2 > int8 shared 2
""".strip().splitlines()


class Leader(Job):
    """A job whose rows are followed, or with state all that it has."""

    by_places = False

    def __init__(self, setup, with_state, seed=7):
        super().__init__(setup, seed)
        self.opt = self.optimizer if with_state else None
        self.objects = self.objects if with_state else {}

    def change(self, number):
        draws(self)

    def look(self):
        planes = self.planes().items()
        return [
            [name, v.dtype, v.tolist()]
            for name, v in planes
            if self.opt or name.startswith("dense") or "weight" in name
        ]

    def drawn(self):
        return draws(self) if self.opt else []


DELTAS = (0, 1, 2, 1)


def lead(make, folder):
    """Save a base and deltas of a training; return what there is after each, and after more steps."""
    one, found = make().train(2), list[Any]()
    st.save_checkpoint(folder / "base", one.net, one.opt, **one.objects)
    mark = st.mark(one.net, one.opt)
    for number, steps in enumerate(DELTAS):
        one.train(steps).change(number)
        mark = st.save_delta(folder / f"{number}.safetensors", one.net, mark, one.opt, **one.objects)
        if number == 2:
            st.save_checkpoint(folder / "full", one.net, one.opt, **one.objects)
        found.append([mark.fingerprints, one.look()])
    drawn = one.drawn()
    return [*found, one.train(2).look(), drawn]


def follow(make, folder):
    """Apply what `lead` has saved; return the same of it."""
    one, other, known, found = make(seed=8), make(seed=9), None, list[Any]()

    def apply(to, number, known=None):
        return st.apply_delta(folder / f"{number}.safetensors", to.net, known, to.opt, **to.objects)

    st.load_checkpoint(folder / "base", one.net, one.opt, **one.objects)
    for number in range(len(DELTAS)):
        if number == 2:
            assert "in between" in told(lambda: apply(one, 3))
        known = apply(one, number, known if number % 2 else None)
        assert known.fingerprints == st.mark(one.net, one.opt).fingerprints or one.by_places
        found.append([known.fingerprints, one.look()])
    drawn = one.drawn()
    # What `merge` has made of base and deltas is followed on.
    st.load_checkpoint(folder / "merged", other.net, other.opt, **other.objects)
    assert other.look() == found[2][1]
    assert apply(other, 3).fingerprints == known.fingerprints
    assert other.look() == found[3][1]
    for number, mark, words in (
        (3, known, "has been applied"),
        (0, known, "is number 1 of"),
        (0, None, "with other rows"),
    ):
        assert words in told(lambda number=number, mark=mark: apply(one, number, mark))
    assert one.look() == found[3][1]
    one.done = 2 + sum(DELTAS)
    return [*found, one.train(2).look(), drawn]


def check_followed(pool, folder, *ends):
    """Have one of `ends`, of so many processes, followed by the other; return what each process of both has."""
    found = []
    for function, (world, make) in zip((lead, follow), ends, strict=True):
        call = pool.of(world) if world else lambda function, *args: [function(*args)]
        found.append(call(function, make, folder))
        if function is lead:
            deltas = [folder / f"{number}.safetensors" for number in range(3)]
            st.merge(folder / "base", deltas[:2], folder / "half")
            st.merge(folder / "half", deltas[2], folder / "merged")
            st.merge(folder / "base", deltas, folder / "again")
            assert files_of(folder / "merged") == files_of(folder / "again")
    for each in (*found[0], *found[1]):
        assert each[:4] == found[0][0][:4]
    return found[0], found[1]


@pytest.mark.parametrize(
    ("case", "with_state"),
    few(
        itertools.product(CASES, [True, False]),
        ("exact sharded 2 > exact sharded 3", True),
        ("exact one 0 > exact sharded 3", False),
        ("int8 shared 2 > int8 sharded 3", True),
    ),
)
def test_saved_by_some_applied_by_others(case, with_state, pool, tmp_path):
    forms = [text.split() for text in case.split(" > ")]
    makes = [functools.partial(Leader, SETUPS[name].of(kind), with_state) for name, kind, _ in forms]
    worlds = [int(world) for _, _, world in forms]
    first, second = check_followed(pool, tmp_path, *zip(worlds, makes, strict=True))
    assert files_of(tmp_path / "merged") == files_of(tmp_path / "full")
    # Processes that none was saved of have those of the first.
    drawn = [each[-1] for each in first]
    assert [each[-1] for each in second] == (drawn + drawn[:1] * 3)[: len(second)]


def go_on(setup, folder, number):
    job = Job(setup)
    if number:
        job.load(folder / f"full{number - 1}")
        mark = st.mark(job.net, job.optimizer)
        job.train(2)
        extra = {"done": job.done, "note": job.note}
        st.save_delta(folder / f"{number}.safetensors", job.net, mark, job.optimizer, extra=extra, **job.objects)
    job.train(int(not number)).save(folder / f"full{number}")


def test_merged_at_changing_numbers_of_processes(two, three, tmp_path, monkeypatch):
    three(go_on, SETUPS["exact"], tmp_path, 0)
    two(go_on, SETUPS["exact"], tmp_path, 1)
    go_on(SETUPS["exact"].of("one"), tmp_path, 2)
    three(go_on, SETUPS["exact"], tmp_path, 3)
    # Rows in many chunks.
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    paths = [tmp_path / f"{number}.safetensors" for number in range(1, 4)]
    for first in range(3):
        for last in range(first + 1, 4):
            st.merge(tmp_path / f"full{first}", paths[first:last], tmp_path / "merged")
            assert files_of(tmp_path / "merged") == files_of(tmp_path / f"full{last}")
    st.merge(f"local://{tmp_path}/full0", paths[0], f"local://{tmp_path}/stored")
    assert files_of(tmp_path / "stored") == files_of(tmp_path / "full1")
    assert "copy it to a disk first" in told(lambda: st.merge(f"local://{tmp_path}/full2", paths[2], tmp_path / "none"))
    # A file of one process that was damaged.
    flip(tmp_path, "full0/rows-2-*")
    assert "does not have the checksum" in told(lambda: st.merge(tmp_path / "full0", paths[0], tmp_path / "none"))
    assert not (tmp_path / "none").exists()
