"""Deltas of tables that several processes own: saved by any number of them, applied by any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

import speedtransfer as st
from ranks.checkpoint_job import EXACT, SMALL, Job, Setup
from ranks.pair import told
from ranks.test_checkpoint_ranks import assert_alike
from speedtransfer.checkpoint.delta_file import Delta

SETUPS = {"exact": EXACT, "int8": SMALL}
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


def lead(setup: Setup, folder: Path, with_state: bool) -> list[dict[str, Tensor]]:
    job, found = Job(setup).train(1), []
    st.save_checkpoint(folder / "base", job.net, job.optimizer)
    mark = st.mark(job.net, optimizer_of(job, with_state))
    for number in range(3):
        job.train(number)
        mark = st.save_delta(folder / f"{number}.safetensors", job.net, mark, optimizer_of(job, with_state))
        found.append(weights(job, with_state))
    return found


def follow(setup: Setup, folder: Path, with_state: bool) -> list[dict[str, Tensor]]:
    job, known, found = Job(setup, seed=8), None, []
    st.load_checkpoint(folder / "base", job.net, job.optimizer)
    opt = optimizer_of(job, with_state)
    for number in range(3):
        known = st.apply_delta(folder / f"{number}.safetensors", job.net, known if number % 2 else None, opt)
        assert known.fingerprints == st.mark(job.net, opt).fingerprints
        found.append(weights(job, with_state))
    for number, words in ((2, "has been applied"), (0, "is number 1 of")):
        path = folder / f"{number}.safetensors"
        assert words in told(lambda path=path: st.apply_delta(path, job.net, known, opt))
    assert_alike(weights(job, with_state), found[-1])
    return found


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_saved_by_some_applied_by_others(case: str, with_state: bool, pool: Any, tmp_path: Path) -> None:
    ends = []
    for function, text in zip((lead, follow), case.split(" > "), strict=True):
        name, kind, world = text.split()
        call = pool.of(int(world)) if world != "0" else lambda function, *args: [function(*args)]
        ends.append(call(function, SETUPS[name].of(kind), tmp_path, with_state))
    for saved in ends[0]:
        for applied in ends[1]:
            for ours, wanted in zip(applied, saved, strict=True):
                assert_alike(ours, wanted)


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
