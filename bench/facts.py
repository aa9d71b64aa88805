"""Prints what this machine is: GPU and link (under load), memory and its pages, IOMMU, limits, versions. No GPU is needed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from store import ROOT

LOAD_S = 30.0  # at most
UNDER_LOAD = (
    "nvidia-smi -q",
    "nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max --format=csv",
)
COMMANDS = (
    "nvidia-smi",
    "nvidia-smi topo -m",
    "lscpu",
    "numactl --hardware",
    "free -m",
    "df -h / /tmp /dev/shm",
    "uname -a",
)
FILES = (
    "/proc/cmdline",
    "/proc/meminfo",
    "/proc/self/limits",
    "/proc/sys/vm/nr_hugepages",
    "/proc/sys/vm/overcommit_memory",
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/mm/transparent_hugepage/defrag",
    "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "/sys/fs/cgroup/memory.max",
)


def main(arguments: list[str] | None = None) -> int:
    """Print every fact; report what this machine does not have and go on."""
    parser = argparse.ArgumentParser(prog="bench/facts.py", description=__doc__)
    parser.parse_args(arguments)
    for command in COMMANDS:
        show(command)
    for path in map(Path, FILES):
        text = path.read_text(errors="replace").strip() if path.exists() else "not here"
        print(f"\n--- {path}\n{text}", flush=True)
    groups = Path("/sys/kernel/iommu_groups")
    print(f"\n--- {groups}\n{len(list(groups.iterdir())) if groups.exists() else 'not here'}", flush=True)
    begun, done = threading.Event(), threading.Event()
    loader = threading.Thread(target=load, args=(begun, done), daemon=True)
    loader.start()
    begun.wait(LOAD_S)
    done.wait(2)  # the link leaves its idle state
    for command in UNDER_LOAD:
        show(command)
    done.set()
    loader.join(LOAD_S)
    print("\n--- speedtransfer info", flush=True)
    try:
        from speedtransfer.cli import app

        app(["info"], standalone_mode=False)
    except Exception as error:  # of the packages that draw it: the rest is worth having
        print(f"not here: {type(error).__name__}: {error}", flush=True)
    return 0


def show(command: str) -> None:
    """Print a command and its output."""
    words = command.split()
    print(f"\n--- {command}", flush=True)
    if shutil.which(words[0]) is None:
        print("not here", flush=True)
        return
    try:
        subprocess.run(words, stderr=subprocess.STDOUT, cwd=ROOT, timeout=LOAD_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"no answer in {LOAD_S:.0f} s", flush=True)


def load(begun: threading.Event, done: threading.Event) -> None:
    """Set `begun`, and copy to the device and back until `done`."""
    import torch

    from speedtransfer.cuda import cuda_status, pinned_empty

    if reason := cuda_status().reason:
        print(f"\nno load on a link: {reason}", flush=True)
        begun.set()
        done.set()
        return
    host = pinned_empty(256 << 20)
    device = torch.empty_like(host, device="cuda")
    begun.set()
    while not done.is_set():
        device.copy_(host, non_blocking=True)
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
