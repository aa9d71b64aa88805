"""The examples for several hosts, by two processes of this one: the losses of one process, and those of one that goes on."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"


class Launch:
    """A script in `world` processes that a launcher started, each with the variables that it sets."""

    def __init__(self, script: str, *args: object, world: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        known = {"WORLD_SIZE": world, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(EXAMPLES / script), *map(str, args)],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    **{k: str(v) for k, v in known.items()},
                    "RANK": str(rank),
                    "NODE_RANK": str(rank),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]

    def end(self) -> str:
        """Wait, and return what the first process printed."""
        outputs = [process.communicate(timeout=240)[0] for process in self.processes]
        assert not any(process.returncode for process in self.processes), "\n".join(outputs)
        return outputs[0]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "length", "per_world"),
    [
        ("train.py", "torch", ("--steps", 60), ()),
        ("accelerate_train.py", "accelerate", ("--epochs", 3), ()),
        ("lightning_train.py", "lightning", ("--epochs", 3), ("--nodes",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_losses_of_one_process(script, needs, length, per_world, tmp_path):
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: make projects")

    def run(folder: str, world: int, *length: object) -> list[float]:
        more = [each for option in per_world for each in (option, world)]
        output = Launch(script, tmp_path / folder, *length, *more, world=world).end()
        assert f"{world} processes, from " in output
        return losses(output)

    name, number = length
    alone = run("one", 1, name, number)
    begun = run("two", 2, name, number * 2 // 3)
    gone_on = run("two", 1, name, number)
    assert gone_on[-1] == pytest.approx(alone[-1], abs=2e-6)
    assert begun[0] == pytest.approx(alone[0] if len(begun) > 1 else begun[0], abs=2e-6)


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path):
    alone = losses(Launch("train.py", tmp_path / "one", "--steps", 60, world=1).end())
    killed = Launch("train.py", tmp_path / "two", "--steps", 1_000_000, world=2)
    while not (tmp_path / "two" / "manifest.json").exists():
        time.sleep(0.05)
    killed.processes[1].send_signal(signal.SIGKILL)
    outputs = [process.communicate(timeout=60)[0] for process in killed.processes]
    assert killed.processes[0].returncode == 1
    assert "could not reach the others" in outputs[0] or "Connection" in outputs[0]
    begun = Launch("train.py", tmp_path / "two", "--steps", 60, world=2).end()
    step = int(re.search(r"from step (\d+)", begun)[1])
    assert step >= 20
    assert step > 60 or losses(begun)[-1] == pytest.approx(alone[-1], abs=2e-6)


def test_scripts_of_clusters():
    """They run `train.py`, and say nothing that their readers refuse."""
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)
    assert "exec python train.py run" in (EXAMPLES / "slurm.sh").read_text()
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["command"][:2] == ["python", "/code/train.py"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
