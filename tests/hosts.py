"""Start the examples of several hosts as two hosts would: two launchers, of a process each."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples" / "cluster"


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def start(*command, folder, **env):
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **env}
    out = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=settings, stdout=out, stderr=subprocess.STDOUT, text=True)


def end(*processes, timeout=300):
    """Wait for processes, and return what they printed; AssertionError: one of them failed."""
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        # A launcher of torchrun ends its workers, which have sessions of their own.
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    assert not any(process.returncode for process in processes), "\n---\n".join(printed)
    return "".join(printed)


def torchrun(*args, folder, processes=1, **env):
    """Start a launcher; `args`: options of torchrun, the script, its arguments."""
    launch = sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)
    return start(*launch, *args, folder=folder, **env)


def two_nodes(*args, folder, **env):
    """Start two launchers of torchrun, which know the address of the first; `args`: options, the script, its arguments."""
    static = "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()
    return [torchrun(*static, "--node-rank", str(rank), *args, folder=folder, **env) for rank in range(2)]


def elastic(*args, folder, **env):
    """Start two launchers of torchrun, the first of which has the rendezvous."""
    where = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    # The name of a machine need not resolve to an address that it has; and here both would have the rendezvous.
    where += ["--rdzv-id", "tables", "--local-addr", "127.0.0.1", "--rdzv-conf"]
    return [torchrun(*where, f"is_host={host}", *args, folder=folder, **env) for host in ("true", "false")]


def losses(printed):
    """Return the losses that were printed, by step or epoch."""
    return {int(at): float(loss) for at, loss in re.findall(r"(?:step|epoch) (\d+): loss (\S+)", printed)}
