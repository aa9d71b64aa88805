"""The bytes of a plan against what a process really takes: its own memory, and the files of its tables."""

from __future__ import annotations

import json
import sys

import pytest
from forked import run_script

import speedtransfer as st
from speedtransfer.planning.machine import Machine

MACHINE = Machine("any", host_bytes=1e12, disk_bytes=1e12)
CHILD = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
import speedtransfer as st
from speedtransfer.planning.optimizer_name import optimizer_given

rows, dim, forms, folder = json.loads(sys.argv[1])

def private():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the compiler had and has freed is nobody's, and may go at any time
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    # Not the private pages of files: those of torch are shared as soon as another process imports it.
    return 1024 * int(fields["Anonymous"].split()[0])

def made(rows, name, given):
    path = {"path": Path(folder, f"{rows}.safetensors")} if given["memory"] == "mmap" else {}
    dtypes = {key: getattr(torch, given[key]) for key in ("storage_dtype", "state_dtype") if key in given}
    zeros = torch.zeros(1, 1).expand(rows, dim)
    table = st.Embedding(rows, dim, _weight=zeros, device="cpu", **{**given, **dtypes, **path})
    optimizer = optimizer_given(name).make(list(table.parameters()))
    for ids in torch.arange(rows).split(2048):
        table(ids).backward(torch.ones(len(ids), dim))
        optimizer.step()
        optimizer.zero_grad()
    return table, optimizer

def taken(name, given):
    first = made(16384, name, given)  # compiles, and fills pools of buffers, which are the same for tables of any size
    before = private()
    table, optimizer = made(rows, name, given)
    path = Path(folder, f"{rows}.safetensors")
    return private() - before, path.stat().st_size if path.exists() else 0

print(json.dumps([taken(*form) for form in forms]))
"""
FORMS = {
    "AdamW, exact": ("AdamW", {"idle": "exact"}),
    "AdamW, lazy": ("AdamW", {"idle": "lazy"}),
    "SGD": ("SGD", {}),
    "int8 rows": ("AdamW", {"storage_dtype": "int8"}),
    "8-bit state": ("AdamW", {"state_dtype": "uint8", "idle": "lazy"}),
}
ROWS, DIM = 200_000, 64


def taken_by(forms, folder):
    """Bytes of memory, and of a file, that tables of `forms` take in another process: pairs of an optimizer and options."""
    argument = json.dumps([ROWS, DIM, forms, str(folder)])
    result = run_script(CHILD, argument)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def option(name, given, memory):
    plan = st.plan((ROWS, DIM), name, machine=MACHINE, zipf=0.0, **given)
    (found,) = [each for each in plan.options if each.memory == memory]
    return found


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps_rollup")
def test_memory_of_a_process(tmp_path):
    forms = [(name, {"storage_dtype": "float32", **given}) for name, given in FORMS.values()]
    found = taken_by([(name, {**given, "memory": "pageable"}) for name, given in forms], tmp_path)
    wrong = []
    for form, (name, given), (taken, _) in zip(FORMS, forms, found, strict=True):
        need = option(name, given, "pageable").need.host
        if taken != pytest.approx(need, rel=0.02):
            wrong.append(f"{form}: {taken:,} bytes, {need:,} planned")
    assert not wrong


def test_file_of_a_table(tmp_path):
    given = {"storage_dtype": "float32", "idle": "lazy"}
    ((_, size),) = taken_by([("SGD", {**given, "memory": "mmap"})], tmp_path)
    assert size == pytest.approx(option("SGD", given, "mmap").need.disk, rel=0.02)
