"""Killed at any moment: the last finished checkpoint loads, and the run that goes on from it ends bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_script
from in_child import skip_where_torch_refuses

# One process imports torch and starts no thread, then forks a child for each life of the training run. A life is ended by
# SIGKILL: at a random line of the code that saves, or at a random time.
SCRIPT = r"""
import os, random, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from checkpoint_cases import Run, seed_all
from killed_children import kill_at_line, run_child
from optimizer_cases import case_named
import speedtransfer as st

EPOCHS = 8
FILES = "checkpoint/folder.py", "checkpoint/tensors.py", "checkpoint/save.py"
folder, log, moments, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def life(line, report):
    run = Run(case_named("adamw"))
    seed_all(5)
    done = 0
    if (folder / "manifest.json").exists():
        done = run.load(folder)["epoch"]
    finished = [int(text) for text in log.read_text().split()]
    assert done >= max(finished, default=0), f"epoch {finished[-1]} was saved but {done} loaded"
    if line:
        kill_at_line(line, FILES)
    saved = done < EPOCHS
    while done < EPOCHS:
        run.epochs(1)
        done += 1
        run.save(folder, extra={"epoch": done})
        with open(log, "a") as file:
            file.write(f"{done}\n")
    sys.settrace(None)
    report.write_text(run.digest())
    # The first save removes what is left of those that were killed.
    assert len(os.listdir(folder)) == 4 or not saved, os.listdir(folder)

def live(line=0, delay=None):
    report = log.with_suffix(".report")
    return report.read_text() if run_child(lambda: life(line, report), delay) else None

def reset():
    for file in folder.glob("*"):
        file.unlink()
    log.write_text("")

Run(case_named("adamw")).epochs(1)  # imports what a first step imports; on one thread, so that children may go on
folder.mkdir()
reset()
start = time.monotonic()
whole = live()
seconds = time.monotonic() - start
reset()
random.seed(seed)
killed = 0
while killed < moments:
    digest = live(line=random.randrange(1, 2500)) if killed % 2 else live(delay=random.uniform(0, 0.8 * seconds))
    killed += digest is None
    if digest is not None:
        assert digest == whole, "a resumed run ended elsewhere"
        reset()
assert live() == whole, "a resumed run ended elsewhere"
print("killed", killed)
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("moments", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_any_moment(moments: int, tmp_path: Path) -> None:
    result = run_script(SCRIPT, str(tmp_path / "point"), str(tmp_path / "log"), str(moments), "1", timeout=900)
    skip_where_torch_refuses(result.stderr)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == f"killed {moments}"
