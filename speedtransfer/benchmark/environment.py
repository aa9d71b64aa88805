"""The machine and versions of a result, and how much memory a comparison may take."""

from __future__ import annotations

import datetime
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from speedtransfer.cuda import cuda_status, resolve_device
from speedtransfer.system import cpu_model, physical_bytes
from speedtransfer.version import __version__, version_of

ROOT = Path(__file__).resolve().parents[2]
HOST_SHARE = 0.6  # share of the host's memory for the tables of a comparison


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return device (by default that of tables), versions, commit and date as plain data."""
    status = cuda_status()
    device = resolve_device(device)
    commit, dirty = commit_of(ROOT)
    return {
        "device": status.devices[device.index] if device.type == "cuda" else cpu_name(),
        "cuda": device.type == "cuda",
        "driver": status.driver,
        "cpu": cpu_name(),
        "host_bytes": physical_bytes(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch_cuda": status.torch_cuda,
            "cupy": status.cupy,
            "numpy": version_of("numpy"),
            "numba": version_of("numba"),
            "speedtransfer": __version__,
        },
        "commit": commit,
        "dirty": dirty,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit_of(root: Path) -> tuple[str, bool | None]:
    """Return the commit of a working tree and whether it has changes; ("unknown", None) if `root` is none.

    Results and the README, which benchmarks write, do not count as changes.
    """
    git = ["git", "-C", str(root)]
    # For an installed package git would find a repository around it.
    if not (root / ".git").exists():
        return "unknown", None
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        paths = ["--", ".", ":!bench/results", ":!README.md"]
        changes = subprocess.run([*git, "status", "--porcelain", *paths], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", None
    return head.stdout.strip(), bool(changes.stdout.strip())


def cpu_name() -> str:
    """Return the name of the processor and the number of torch's threads."""
    return f"CPU {cpu_model()}, {torch.get_num_threads()} threads"


def host_room(share: float = HOST_SHARE) -> float:
    """Return a share of the host's memory in bytes; of 8 GB if that is unknown."""
    return share * (physical_bytes() or 8e9)
