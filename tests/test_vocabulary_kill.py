"""Killed while ids come and go, the table grows, or a checkpoint or a dump is written: the last ones load, whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_script
from in_child import skip_where_torch_refuses

# One process imports torch and starts no thread, then forks a child for each life of the training run, and ends it by
# SIGKILL at a random time.
SCRIPT = r"""
import os, random, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from killed_children import run_child
import speedtransfer as st

folder, memory, moments = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
STEPS = 12
point, dump = folder / "point", folder / "dump.safetensors"

def make(capacity=2, number=0):
    table = {"memory": memory, "path": folder / f"table{number}-{os.getpid()}.npy"} if memory == "mmap" else {}
    vocabulary = st.Vocabulary(capacity, max_capacity=12, evict="lru", seed=1)
    model = torch.nn.Sequential(st.Embedding(capacity, 3, idle="lazy", vocabulary=vocabulary, **table))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), vocabulary

def values(vocabulary):
    return [tensor.tolist() for tensor in vocabulary.export()]

def train(model, optimizer, step):
    ids = torch.randint(0, 40, (4,), generator=torch.Generator().manual_seed(step)) * 2**57
    optimizer.zero_grad()
    model(ids).square().sum().backward()
    optimizer.step()

def life(report):
    model, optimizer, vocabulary = make()
    # Killed in its first save, a life leaves a folder without a manifest.
    done = st.load_checkpoint(point, model, optimizer)["done"] if (point / "manifest.json").exists() else 0
    assert values(vocabulary) == expected[done], f"other rows after {done} steps"
    if dump.exists():
        _, _, copy = make(12, 1)
        changes = st.Changes.load(dump)
        copy.update(changes)
        assert values(copy) == expected[changes.clock], f"another dump of {changes.clock} steps"
    while done < STEPS:
        train(model, optimizer, done)
        done += 1
        vocabulary.changed_since(0).save(dump)
        st.save_checkpoint(point, model, optimizer, extra={"done": done})
    report.write_text("ended")

def live(delay):
    report = folder / "report"
    report.unlink(missing_ok=True)
    run_child(lambda: life(report), delay)
    for table in folder.glob("table*"):
        table.unlink()
    # One that is killed at its very end has ended all the same.
    return report.exists()

model, optimizer, vocabulary = make()
expected = [values(vocabulary)]
for step in range(STEPS):
    train(model, optimizer, step)
    expected.append(values(vocabulary))
assert vocabulary.stats().evicted and vocabulary.capacity == 12
random.seed(3)
start = time.monotonic()
assert live(None)
seconds = time.monotonic() - start
killed = 0
while killed < moments:
    # One that has ended begins anew.
    if live(random.uniform(0, 0.6 * seconds)):
        for path in (*point.glob("*"), dump):
            path.unlink()
        point.rmdir()
    else:
        killed += 1
assert live(None)
print("killed", killed)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moments", [2, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", [pytest.param("pageable", marks=pytest.mark.slow), "mmap"])
def test_killed_at_any_moment(memory: str, moments: int, tmp_path: Path) -> None:
    result = run_script(SCRIPT, str(tmp_path), memory, str(moments), timeout=500)
    skip_where_torch_refuses(result.stderr)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == f"killed {moments}"
