"""The examples of several hosts under Lightning, Accelerate and Ray: two processes train to the loss of one."""

import os
import sys

import pytest
from hosts import CLUSTER, end, losses, start, torchrun, two_nodes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("package", "nodes"), [("lightning", ["--nodes", "2"]), ("accelerate", [])])
def test_two_hosts_and_on_as_one(package, nodes, tmp_path):
    pytest.importorskip(package, reason="make projects")
    script = str(CLUSTER / f"{package}_train.py")
    alone = losses(end(torchrun(script, "alone", folder=tmp_path)))
    two = losses(end(*two_nodes(script, "run", "--epochs", "2", *nodes, folder=tmp_path)))
    printed = end(torchrun(script, "run", folder=tmp_path))
    assert "1 processes, from step 20" in printed or "1 processes, from epoch 2" in printed
    found = two | losses(printed)
    assert max(found) == max(alone) == 4
    for epoch in found.keys() & alone.keys():
        assert found[epoch] == pytest.approx(alone[epoch], rel=1e-4)


# Ray starts a process for each core, and tasks of data need a core beside those of the workers.
RAY = """
import os, sys, threading, time
from pathlib import Path
import ray, ray_train

def kill(folder):
    while not Path(folder, "checkpoint", "manifest.json").exists():
        time.sleep(0.05)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name, env = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if name.startswith(b"ray::RayTrainWorker") and f"RAY_TEST={folder}".encode() in env:
            return os.kill(int(path.name), 9)

ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200_000_000)
if "2" in sys.argv:
    threading.Thread(target=kill, args=sys.argv[1:2], daemon=True).start()
ray_train.main()
"""


def test_ray_replaces_a_worker_that_was_killed(tmp_path):
    """With all examples in a batch, so that the steps of two workers are those of one whoever has which."""
    pytest.importorskip("ray.train.torch", reason='pip install "ray[train,data]"')
    found = []
    for workers in ("1", "2"):
        run = str(tmp_path / workers)
        options = [run, "--workers", workers, "--batch", "2560", "--epochs", "20"]
        path = os.pathsep.join([str(CLUSTER.parents[1]), str(CLUSTER)])
        job = start(sys.executable, "-c", RAY, *options, folder=tmp_path, PYTHONPATH=path, RAY_TEST=run)
        found.append(end(job, timeout=540))
    assert "1 workers, from epoch 0" in found[0]
    begun = [epoch for epoch in range(20) if f"2 workers, from epoch {epoch}\n" in found[1]]
    assert len(begun) == 2
    assert begun[0] == 0
    one, two = map(losses, found)
    assert max(one) == max(two) == 20
    assert two == pytest.approx({epoch: one[epoch] for epoch in two}, rel=1e-4)
