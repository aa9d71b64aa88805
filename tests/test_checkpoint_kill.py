"""Killed at any moment: the last finished checkpoint and dump load, and the run that goes on from there ends bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_script
from in_child import skip_where_torch_refuses

# One process imports torch and starts no thread, then forks a child for each life of the training run. A life is ended by
# SIGKILL: at a random line of the code that saves, or at a random time. Its table is in a file, grows, and evicts ids.
SCRIPT = r"""
import os, random, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import checkpoint_cases
from killed_children import kill_at_line, run_child
from optimizer_cases import case_named
import speedtransfer as st

EPOCHS = 8
FILES = "checkpoint/folder.py", "checkpoint/tensors.py", "checkpoint/save.py", "tables/files.py"
folder, moments = Path(sys.argv[1]), int(sys.argv[2])
point, log, dump = folder / "point", folder / "log", folder / "dump.safetensors"

def make(capacity=2, number=0):
    vocabulary = st.Vocabulary(capacity, max_capacity=30, evict="lru", seed=1)
    table = folder / f"table{number}-{os.getpid()}.npy"
    run = checkpoint_cases.Run(case_named("adamw"), vocabulary=vocabulary, memory="mmap", path=table)
    return run, vocabulary

def values(vocabulary):
    return [tensor.tolist() for tensor in vocabulary.export()]

def digest(run):
    state = run.model.state_dict()
    # A number of this vocabulary.
    del state["words.vocabulary.origin"]
    return checkpoint_cases.digest([state, run.optimizer.state_dict(), run.losses[-1], torch.get_rng_state()])

def life(line, report):
    # First, as it seeds the generators.
    if dump.exists():
        _, copy = make(30, 1)
        changes = st.Changes.load(dump)
        copy.update(changes)
        assert values(copy) == expected[clocks.index(changes.clock)], "another dump"
    run, vocabulary = make()
    checkpoint_cases.seed_all(5)
    done = 0
    if (point / "manifest.json").exists():
        done = run.load(point)["epoch"]
    finished = [int(text) for text in log.read_text().split()]
    assert done >= max(finished, default=0), f"epoch {finished[-1]} was saved but {done} loaded"
    assert values(vocabulary) == expected[done], f"other rows after {done} epochs"
    if line:
        kill_at_line(line, FILES)
    saved = done < EPOCHS
    while done < EPOCHS:
        run.epochs(1)
        done += 1
        vocabulary.changed_since(0).save(dump)
        run.save(point, extra={"epoch": done})
        with open(log, "a") as file:
            file.write(f"{done}\n")
    sys.settrace(None)
    report.write_text(digest(run))
    # The first save removes what is left of those that were killed.
    assert len(os.listdir(point)) == 4 or not saved, os.listdir(point)

def live(line=0, delay=None):
    report = folder / "report"
    report.unlink(missing_ok=True)
    run_child(lambda: life(line, report), delay)
    for table in folder.glob("table*"):
        table.unlink()
    # One that is killed at its very end has ended all the same.
    return report.read_text() if report.exists() else None

def reset():
    for file in [*point.glob("*"), dump]:
        file.unlink(missing_ok=True)
    log.write_text("")

point.mkdir()
reset()
run, vocabulary = make()
checkpoint_cases.seed_all(5)
expected, clocks = [values(vocabulary)], [0]
for _ in range(EPOCHS):
    run.epochs(1)
    expected.append(values(vocabulary))
    clocks.append(vocabulary.clock)
assert vocabulary.stats().evicted and vocabulary.capacity == 30
start = time.monotonic()
whole = live()
seconds = time.monotonic() - start
reset()
random.seed(3)
killed = 0
while killed < moments:
    found = live(line=random.randrange(1, 2500)) if killed % 2 else live(delay=random.uniform(0, 0.8 * seconds))
    killed += found is None
    if found is not None:
        assert found == whole, "a resumed run ended elsewhere"
        reset()
assert live() == whole, "a resumed run ended elsewhere"
print("killed", killed)
"""


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("moments", [4, pytest.param(80, marks=pytest.mark.slow)])
def test_killed_at_any_moment(moments: int, tmp_path: Path) -> None:
    result = run_script(SCRIPT, str(tmp_path), str(moments), timeout=900)
    skip_where_torch_refuses(result.stderr)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == f"killed {moments}"
