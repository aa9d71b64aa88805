"""What launchers start: the scripts of docs/processes.md, and the examples of several hosts."""

import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from hosts import CLUSTER, elastic, end, free_port, losses, start, torchrun

import speedtransfer as st
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


# --- the examples of several hosts that need no other package: two processes train to the losses of one, and go on as one --

TRAIN = str(CLUSTER / "train.py")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="clusters of Linux")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return losses(end(torchrun(TRAIN, "run", "--steps", "300", folder=tmp_path_factory.mktemp("alone"))))


def check(printed, alone, last):
    found = losses(printed)
    assert max(found) == last, printed
    assert found == pytest.approx({step: alone[step] for step in found}, rel=1e-4)


@on_linux
@pytest.mark.slow
def test_c10d_and_on_as_one_process(alone, tmp_path):
    check(end(*elastic(TRAIN, "run", "--steps", "40", folder=tmp_path)), alone, 40)
    printed = end(torchrun(TRAIN, "run", "--steps", "60", folder=tmp_path))
    assert "1 processes, from step 40" in printed
    check(printed, alone, 60)


@on_linux
@pytest.mark.slow
def test_a_worker_is_killed(alone, tmp_path):
    """By c10d: static launchers count their restarts apart, and processes of different counts wait for each other."""
    options = ["--max-restarts", "2", TRAIN, "run", "--steps", "300"]
    hosts = elastic(*options, folder=tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    try:
        until = time.monotonic() + 200
        while not (tmp_path / "run" / "manifest.json").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        (worker,) = Path(f"/proc/{hosts[1].pid}/task/{hosts[1].pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
    finally:
        printed = end(*hosts)
    assert printed.count("2 processes, from step 0\n") == 1
    assert printed.count("2 processes, from step") == 2
    check(printed, alone, 300)


# --- Slurm ----------------------------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
[ "$1" == --kill-on-bad-exit=1 ] || exit 9
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NTASKS=2 "${@:2}" & done
wait -n && wait -n
"""
SCONTROL = """#!/bin/bash
echo "$*" >> scontrol.txt
echo 127.0.0.1
"""


def slurm(folder, srun, **env):
    """Run the batch script where `srun` starts two processes here."""
    shutil.copy(TRAIN, folder)
    (folder / "bin").mkdir()
    python = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n'
    for name, text in (("srun", srun), ("scontrol", SCONTROL), ("python", python)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": free_port(), "SLURM_JOB_NODELIST": "node[1-2]", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    return start("bash", str(CLUSTER / "slurm.sh"), folder=folder, **job, **env)


@on_linux
@pytest.mark.slow
def test_slurm(alone, tmp_path):
    check(end(slurm(tmp_path, SRUN)), alone, 100)
    assert (tmp_path / "scontrol.txt").read_text() == "show hostnames node[1-2]\n"


@on_linux
@pytest.mark.parametrize(("restarts", "again"), [("0", True), ("3", False)])
def test_slurm_begins_again(tmp_path, restarts, again):
    job = slurm(tmp_path, "#!/bin/bash\nexit 1\n", SLURM_RESTART_COUNT=restarts)
    with pytest.raises(AssertionError):
        end(job)
    assert ("requeue" in (tmp_path / "scontrol.txt").read_text()) == again


# --- Kubernetes -----------------------------------------------------------------------------------------------------------


@on_linux
@pytest.mark.slow
def test_pytorchjob(alone, tmp_path):
    """Its containers start what they say, with the variables that the operator sets."""
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    roles = job["spec"]["pytorchReplicaSpecs"]
    assert list(roles) == ["Master", "Worker"]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    processes = []
    for rank, role in enumerate(roles.values()):
        assert (role["replicas"], role["restartPolicy"]) == (1, "OnFailure")
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        here = {"python": sys.executable, "/code": str(CLUSTER), "/checkpoints": str(tmp_path)}
        command = container["command"]
        for path, local in here.items():
            command = [word.replace(path, local, 1) if word.startswith(path) else word for word in command]
        processes.append(start(*command, folder=tmp_path, RANK=str(rank), **env))
    check(end(*processes), alone, 100)
