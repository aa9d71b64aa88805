"""Compiled functions: what a process says while it compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import torch, speedtransfer as st
emb = st.Embedding(10_000, 64)
opt = torch.optim.AdamW(emb.parameters())
for start in range(3):
    emb(torch.arange(start, start + 2000)).sum().backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.mark.slow
def test_compiling_is_announced_once_and_only_where_it_takes_long(tmp_path: Path) -> None:
    """The second process finds what the first has compiled."""
    said = []
    for _ in range(2):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        ran = subprocess.run(
            [sys.executable, "-c", TRAINING], capture_output=True, text=True, env=environment, check=True
        )
        assert not ran.stdout
        said.append(ran.stderr.count("numba compiles functions"))
        assert len(ran.stderr.splitlines()) == said[-1]
    assert said == [1, 0]
