"""The bytes of a plan against what a process really takes: its own memory, and the files of its tables."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import speedtransfer as st
from speedtransfer.planning.machine import Machine

MACHINE = Machine("any", host_bytes=1e12, disk_bytes=1e12)
CHILD = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
import speedtransfer as st
from speedtransfer.planning.optimizer_name import optimizer_given

rows, dim, name, given, folder = json.loads(sys.argv[1])
dtypes = {key: getattr(torch, given.pop(key)) for key in ("storage_dtype", "state_dtype") if key in given}

def private():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the compiler had and has freed is nobody's, and may go at any time
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    # Not the private pages of files: those of torch are shared as soon as another process imports it.
    return 1024 * int(fields["Anonymous"].split()[0])

def made(rows):
    path = {"path": Path(folder, f"{rows}.safetensors")} if given["memory"] == "mmap" else {}
    zeros = torch.zeros(1, 1).expand(rows, dim)
    table = st.Embedding(rows, dim, _weight=zeros, device="cpu", **given, **dtypes, **path)
    optimizer = optimizer_given(name).make(list(table.parameters()))
    for ids in torch.arange(rows).split(2048):
        table(ids).backward(torch.ones(len(ids), dim))
        optimizer.step()
        optimizer.zero_grad()
    return table, optimizer

first = made(65536)  # compiles, and fills pools of buffers, which are the same for tables of any size
before = private()
table, optimizer = made(rows)
path = Path(folder, f"{rows}.safetensors")
print(json.dumps([private() - before, path.stat().st_size if path.exists() else 0]))
"""
FORMS = {
    "AdamW, exact": ("AdamW", {"idle": "exact"}),
    "AdamW, lazy": ("AdamW", {"idle": "lazy"}),
    "SGD": ("SGD", {}),
    "int8 rows": ("AdamW", {"storage_dtype": "int8"}),
    "8-bit state": ("AdamW", {"state_dtype": "uint8", "idle": "lazy"}),
}
ROWS, DIM = 600_000, 64


def child(name, given, folder):
    argument = json.dumps([ROWS, DIM, name, given, str(folder)])
    result = subprocess.run([sys.executable, "-c", CHILD, argument], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def option(name, given, memory):
    plan = st.plan((ROWS, DIM), name, machine=MACHINE, zipf=0.0, **given)
    (found,) = [each for each in plan.options if each.memory == memory]
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps_rollup")
@pytest.mark.parametrize("form", FORMS)
def test_memory_of_a_process(form, tmp_path):
    name, given = FORMS[form]
    given = {"storage_dtype": "float32", **given}
    taken, _ = child(name, {**given, "memory": "pageable"}, tmp_path)
    need = option(name, given, "pageable").need.host
    assert taken == pytest.approx(need, rel=0.02)


def test_file_of_a_table(tmp_path):
    given = {"storage_dtype": "float32", "idle": "lazy"}
    _, size = child("SGD", {**given, "memory": "mmap"}, tmp_path)
    assert size == pytest.approx(option("SGD", given, "mmap").need.disk, rel=0.02)
