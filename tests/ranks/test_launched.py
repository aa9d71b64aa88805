"""What launchers start: the scripts of docs/processes.md."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hosts import end, torchrun

import speedtransfer as st
from ranks.run import DeadRankError
from speedtransfer.errors import ProcessGroupError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "processes.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"^```\{code-block\} python\n:caption: (\S+)\n\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
PRINTED = {
    "train.py": ["rank 0 has 50,000 of 100,000 rows", "rank 1 has 50,000 of 100,000 rows"],
    "fsdp.py": ["rank 0: norm", "rank 1: norm"],
    "evaluate.py": ["rank 0 has all rows"],
    "ids.py": ["rank 0 has ", "rank 1 has "],
}


def test_every_script_is_run_by_a_command():
    assert SCRIPTS.keys() == PRINTED.keys()
    assert len(SCRIPTS) == PAGE.count("{code-block} python")
    for name in SCRIPTS:
        assert re.search(rf"^torchrun --nproc-per-node 2 {name}$", PAGE, re.MULTILINE)


# Each starts three processes that import torch.
@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_script(name, tmp_path):
    script = tmp_path / name
    script.write_text(SCRIPTS[name])
    printed = end(torchrun("--standalone", str(script), processes=2, folder=tmp_path))
    assert all(line in printed for line in PRINTED[name])
    assert len(set(re.findall(r"norm (\d+\.\d{6})", printed))) <= 1, "the same in all processes"


# --- groups that there are not yet, or of one process ------------------------------------------------------------------


def test_a_group_that_there_is_not_yet_is_told(monkeypatch):
    for given in (None, "world"):
        assert type(st.Embedding(10, 2, process_group=given).table) is st.Table
    with pytest.raises(ProcessGroupError, match="no process groups"):
        st.Embedding(10, 2, process_group="word")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for given in (None, "world"):
        with pytest.raises(ProcessGroupError, match="make the module after init_process_group"):
            st.Embedding(10, 2, process_group=given)
    # Left out: what DistributedDataParallel is to wrap.
    assert st.Embedding(10, 2).table.num_rows == 10


def look_up_alone() -> None:
    emb = st.Embedding(10, 2, process_group="world")
    dist.barrier()
    if dist.get_rank() == 1:
        # When the other one has left the barrier.
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    emb(torch.arange(4))


def test_who_cannot_reach_the_others_says_so(two):
    error, died = two.fails(look_up_alone, timeout=10)
    assert isinstance(died, DeadRankError)
    assert isinstance(error, ProcessGroupError)
    words = r"rank 0 of 2, process \d+ on \S+, could not reach the others where it looks up rows \("
    assert re.search(words, str(error))
