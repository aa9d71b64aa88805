"""Deltas of tables that several processes own: saved by any number of them, applied by any."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from sweeps import few
from test_merge import files_of
from torch import Tensor

import speedtransfer as st
from ranks.checkpoint_job import EXACT, SMALL, Job, Setup
from ranks.pair import told
from ranks.test_checkpoint_ranks import assert_alike, draws
from speedtransfer.checkpoint.delta_file import Delta
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


def optimizer_of(job: Job, with_state: bool) -> Any:
    return job.optimizer if with_state else None


def weights(job: Job, with_state: bool) -> dict[str, Tensor]:
    return {name: v for name, v in job.planes().items() if with_state or name.startswith("dense") or "weight" in name}


def objects_of(job: Job, with_state: bool) -> dict[str, Any]:
    return {"scheduler": job.scheduler, "generator": job.generator} if with_state else {}


def lead(setup: Setup, folder: Path, with_state: bool) -> list[Any]:
    job, found = Job(setup).train(1), list[Any]()
    opt, others = optimizer_of(job, with_state), objects_of(job, with_state)
    st.save_checkpoint(folder / "base", job.net, opt, **others)
    mark = st.mark(job.net, opt)
    for number in range(3):
        job.train(number)
        draws(job)
        mark = st.save_delta(folder / f"{number}.safetensors", job.net, mark, opt, **others)
        found.append(weights(job, with_state))
    st.save_checkpoint(folder / "full", job.net, opt, **others)
    return [found, draws(job)]


def follow(setup: Setup, folder: Path, with_state: bool) -> list[Any]:
    job, known, found = Job(setup, seed=8), None, list[Any]()
    opt, others = optimizer_of(job, with_state), objects_of(job, with_state)
    st.load_checkpoint(folder / "base", job.net, opt, **others)
    for number in range(3):
        path = folder / f"{number}.safetensors"
        known = st.apply_delta(path, job.net, known if number % 2 else None, opt, **others)
        assert known.fingerprints == st.mark(job.net, opt).fingerprints
        found.append(weights(job, with_state))
    drawn = draws(job)
    for number, words in ((2, "has been applied"), (0, "is number 1 of")):
        path = folder / f"{number}.safetensors"
        assert words in told(lambda path=path: st.apply_delta(path, job.net, known, opt, **others))
    assert_alike(weights(job, with_state), found[-1])
    # What `merge` has made of base and deltas.
    other = Job(setup, seed=9)
    st.load_checkpoint(folder / "merged", other.net, optimizer_of(other, with_state), **objects_of(other, with_state))
    assert_alike(weights(other, with_state), found[-1])
    return [found, drawn]


@pytest.mark.parametrize(
    ("case", "with_state"),
    few(
        itertools.product(CASES, [True, False]),
        ("exact sharded 2 > exact sharded 3", True),
        ("exact one 0 > exact sharded 3", False),
        ("int8 shared 2 > int8 sharded 3", True),
    ),
)
def test_saved_by_some_applied_by_others(case: str, with_state: bool, pool: Any, tmp_path: Path) -> None:
    ends = []
    for function, text in zip((lead, follow), case.split(" > "), strict=True):
        name, kind, world = text.split()
        call = pool.of(int(world)) if world != "0" else lambda function, *args: [function(*args)]
        ends.append(call(function, SETUPS[name].of(kind), tmp_path, with_state))
        if function is lead:
            deltas = [tmp_path / f"{number}.safetensors" for number in range(3)]
            st.merge(tmp_path / "base", deltas, tmp_path / "merged")
            assert files_of(tmp_path / "merged") == files_of(tmp_path / "full")
    for saved, _ in ends[0]:
        for applied, _ in ends[1]:
            for ours, wanted in zip(applied, saved, strict=True):
                assert_alike(ours, wanted)
    if with_state:
        # Processes that none was saved of have those of the first.
        drawn = [each for _, each in ends[0]]
        assert [each for _, each in ends[1]] == (drawn + drawn[:1] * 3)[: len(ends[1])]


def go_on(setup: Setup, folder: Path, number: int) -> None:
    job, objects = Job(setup), {}
    if number:
        job.load(folder / f"full{number - 1}")
        objects = {"scheduler": job.scheduler, "generator": job.generator}
        mark = st.mark(job.net, job.optimizer)
        job.train(2)
        extra = {"done": job.done, "note": job.note}
        st.save_delta(folder / f"{number}.safetensors", job.net, mark, job.optimizer, extra=extra, **objects)
    job.train(int(not number)).save(folder / f"full{number}")


def test_merged_at_changing_numbers_of_processes(two: Any, three: Any, tmp_path: Path, monkeypatch: Any) -> None:
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
    (part,) = (tmp_path / "full0").glob("rows-2-*")
    raw = bytearray(part.read_bytes())
    raw[-3] ^= 4
    part.write_bytes(raw)
    assert "does not have the checksum" in told(lambda: st.merge(tmp_path / "full0", paths[0], tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def wrong_use(folder: Path) -> list[str]:
    job, rank = Job(EXACT).train(1), dist.get_rank()
    mark = st.mark(job.net)
    errors = [told(lambda: st.save_delta(folder / f"of-{rank}.safetensors", job.net, mark))]
    job.train(1)
    other = st.mark(job.net)
    errors.append(told(lambda: st.save_delta(folder / "1.safetensors", job.net, other if rank else mark)))
    (folder / "none").mkdir(exist_ok=True)
    errors.append(told(lambda: st.save_delta(folder / "none" / "x" / "1.safetensors", job.net, mark)))
    assert not list(folder.rglob("*.safetensors"))
    mark = st.save_delta(folder / "1.safetensors", job.net, mark)
    errors.append(told(lambda: st.apply_delta(folder / "1.safetensors", job.net, mark if rank else None)))
    return errors


def test_wrong_use(two: Any, tmp_path: Path) -> None:
    for path, since, place, known in two(wrong_use, tmp_path):
        assert "of-" in path
        assert "since a mark" in since
        assert place
        assert "rank 1 failed" in known or "has been applied" in known
    assert Delta(tmp_path / "1.safetensors").place.number == 1
