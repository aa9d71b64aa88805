"""Processes that are killed as several save a delta, or apply one: what was whole stays, and the others say what happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import speedtransfer as st
from ranks.pair import told
from ranks.run import DeadRankError
from ranks.test_delta_ids import World
from speedtransfer.checkpoint import apply_deltas, save_deltas
from speedtransfer.checkpoint.delta_file import Delta
from speedtransfer.tables import files

# When a process of two is killed, which one, and whether the delta is there then.
MOMENTS = {
    "it marks what there is now": (1, False),
    "rows go to the first": (1, False),
    "the file is written": (0, False),
    "the file is there": (0, True),
    "rows are applied": (1, True),
}


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_when(moment: str) -> None:
    write = files.write

    def cut(path: Any, tensors: Any, *more: Any) -> None:
        # The first rows are on their way.
        write(path, [*tensors[:1], (*tensors[1][:3], map(kill, "1")), *tensors[2:]], *more)

    def at_its_end(*args: Any) -> None:
        write(*args)
        kill()

    if moment == "it marks what there is now":
        save_deltas.contents_of = kill
    elif moment == "rows go to the first":
        save_deltas.ChangedRows.gather = kill  # type: ignore[method-assign]
    elif moment == "rows are applied":
        apply_deltas._write_rows = kill
    else:
        files.write = cut if moment == "the file is written" else at_its_end


def save_and_die(folder: Path, moment: str) -> str:
    world = World("lazy", True).train(2)
    st.save_checkpoint(folder / "base", world.net)
    mark = st.mark(world.net)
    mark = st.save_delta(folder / "1.safetensors", world.train(1).net, mark)
    copy = World("lazy", True)
    st.load_checkpoint(folder / "base", copy.net)
    known = st.mark(copy.net)
    world.train(1)
    if dist.get_rank() == MOMENTS[moment][0]:
        killed_when(moment)
    if moment == "rows are applied":
        st.save_delta(folder / "2.safetensors", world.net, mark)
        return told(lambda: st.apply_delta(folder / "1.safetensors", copy.net, known))
    return told(lambda: st.save_delta(folder / "2.safetensors", world.net, mark))


def follow_what_is_there(folder: Path) -> list[Any]:
    world, paths = World("lazy", True), sorted(folder.glob("*.safetensors"))
    st.load_checkpoint(folder / "base", world.net)
    for path in paths:
        st.apply_delta(path, world.net)
    st.load_checkpoint(folder / "merged", (merged := World("lazy", True)).net)
    assert merged.look() == world.look()
    return [len(paths), world.look()]


@pytest.mark.parametrize(
    "moment",
    [pytest.param(it, marks=() if it == "the file is written" else pytest.mark.slow) for it in MOMENTS],
)
def test_killed_and_followed_anew(moment: str, two: Any, tmp_path: Path) -> None:
    (rank, is_there), before = MOMENTS[moment], tmp_path / "base" / "manifest.json"
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
