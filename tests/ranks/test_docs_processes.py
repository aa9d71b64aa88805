"""docs/processes.md: its scripts run by torchrun, its messages are those of the code, and what it promises holds."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks.run import torchrun
from ranks.training import ROWS, Run, train

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
    result = torchrun(str(script), world=2, timeout=100, env={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"})
    assert result.returncode == 0, result.stdout
    for line in PRINTED[name]:
        assert line in result.stdout
    norms = set(re.findall(r"norm (\d+\.\d{6})", result.stdout))
    assert len(norms) <= 1, "the same in all processes"


def test_messages_are_those_of_the_code():
    texts = []
    for path in (ROOT / "speedtransfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    (table,) = re.findall(r"^## Errors.*?^(\| what.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    quoted = [text for row in table.splitlines()[2:] for text in re.findall(r"`([^`]*[a-z] [^`]*)`", row.split("|")[2])]
    assert len(quoted) == 10
    for message in quoted:
        # What stands between are names and numbers, or what a process does.
        names = r"\.\.\.|rank \d+: |\(meeting \d+\)|\d+(?= lookups)|looks up rows|makes a table|begins to train"
        for part in re.split(names, message):
            part = part.strip(" ;:")
            assert any(part in text for text in texts), part


# --- promises that no other test holds to all kinds -------------------------------------------------------------------


def rows_by_kind(run: Run) -> list[torch.Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    found = []
    for kind in ("sharded", "shared", "replicas", "sharded"):
        net, *_ = train(dataclasses.replace(run, kind=kind), world, [rank], alone=False)
        # One process alone reads a shared table.
        for reads in (rank == 0, rank > 0) if kind == "shared" else (True,):
            if reads:
                with torch.no_grad():
                    found.append(net.emb(torch.arange(ROWS)).clone())
            dist.barrier()
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("idle", ["lazy", "exact"])
@pytest.mark.parametrize("small", [False, True])
def test_all_kinds_have_the_same_bits(three, idle, small):
    options = {"storage_dtype": torch.int8, "state_dtype": torch.uint8} if small else {}
    run = Run(dtype=torch.float32, idle=idle, sizes=(6, 2, 9), clip=0.05, options=options)
    ranks = three(rows_by_kind, run)
    for rows in ranks:
        for each in rows:
            if idle == "lazy":
                assert torch.equal(each, ranks[0][0])
            else:
                # Rows catch up in groups of other sizes, and some CPUs (AMD EPYC) round the last values of a tensor otherwise.
                torch.testing.assert_close(each, ranks[0][0], rtol=0, atol=1e-6)
