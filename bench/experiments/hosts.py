"""A training step of tables that two hosts share out, beside what `speedtransfer plan --hosts` says of it.

The hosts are two network namespaces of this machine, joined by a wire with a delay and a rate (wire.c). Needs Linux, root,
``ip`` and ``gcc``: ``python bench/record.py here --only hosts --limit 1800``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import speedtransfer as st
from speedtransfer.benchmark.measure import Group
from speedtransfer.benchmark.results import CaseResult, GroupResult
from speedtransfer.benchmark.training_step import take_step
from speedtransfer.errors import StorageError
from speedtransfer.planning.footprint import Form
from speedtransfer.planning.hosts import Hosts, Link, shared_by
from speedtransfer.planning.optimizer_name import optimizer_given
from speedtransfer.planning.workload import Load, Workload

NOTE = (
    "Two processes by gloo, each on a core of one machine, which the wire needs too; frames of 1,500 bytes, AdamW, uniform "
    "ids. Times are those of the fastest of 20 steps, as other work ran on the machine. Planned: the step of one process "
    "without a group, measured beside, and the exchange."
)
BY = ("delay_ms", "delay one way, ms")
COLUMNS = {
    "measured (planned), ms": lambda group, case: f"{1e3 * measured(case):.3g} ({1e3 * planned(group, case):.3g})"
}
VALUE = (lambda case: 1e3 * measured(case), "milliseconds, measured")
ALONE = "one process, ms"
ROWS, DIM, RANKS = 10_000, 64, 2
_STEPS, _WARM, _LIMIT_S = 26, 6, 900
_NAMES, _ADDRESSES = ("st-host-a", "st-host-b"), ("10.77.0.1", "10.77.0.2")


class Case(NamedTuple):
    """So many tables, or features of one `MultiEmbedding`, and the ids of a step in each, or `parts` of one tensor."""

    tables: int
    ids: int
    together: bool = False
    parts: bool = False


CASES = {
    "1 table": Case(1, 256),
    "4 tables": Case(4, 256),
    "4 tables, ids in one tensor": Case(4, 256, parts=True),
    "26 tables": Case(26, 256),
    "26 tables, ids in one tensor": Case(26, 256, parts=True),
    "MultiEmbedding of 26": Case(26, 256, True),
    "1 table, 8,192 ids": Case(1, 8192),
}


def series(group: GroupResult) -> str:
    return f"{group.params['gbit']} Gbit/s"


def groups(device: torch.device, quick: bool, seed: int = 0, **others: Any) -> list[Group]:
    delays, rates = ((2.0,), (10,)) if quick else ((0.05, 2.0, 8.0), (10, 1))
    return [
        Group(
            f"two hosts, {rate} Gbit/s, {delay:g} ms",
            functools.partial(_measure, delay, rate, _WARM + 2 if quick else _STEPS),
            {"delay_ms": delay, "gbit": rate},
        )
        for rate in rates
        for delay in delays
    ]


def measured(case: CaseResult) -> float:
    """Return the seconds of the fastest step: what else runs on two cores only adds."""
    return min(case.samples_s)


def planned(group: GroupResult, case: CaseResult) -> float:
    """Return the seconds of a step as they are planned: those of one process, and of the exchange."""
    return 1e-3 * case.figures[ALONE] + exchange(group, CASES[case.name]).seconds


def exchange(group: GroupResult, case: Case) -> Hosts:
    link = Link("wire", 1e9 / 8 * group.params["gbit"], 1e-3 * group.params["delay_ms"], "as set")
    feature = (ROWS, case.ids)
    sizes = [(feature,) * case.tables] if case.together else [(feature,)] * case.tables
    unique = ROWS * (1 - (1 - 1 / ROWS) ** case.ids)
    loads = [Load("", ROWS * len(each), DIM, each, unique * len(each)) for each in sizes]
    return shared_by(Workload(tuple(loads), 1, 0.0, optimizer_given("AdamW")), Form(), RANKS, link, together=case.parts)


# --- two hosts ------------------------------------------------------------------------------------------------------------


def _measure(delay_ms: float, gbit: float, steps: int) -> list[CaseResult]:
    with _wire(delay_ms, gbit):
        processes = []
        for rank, name in enumerate(_NAMES):
            env = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": 29500}
            env |= {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": 1}
            command = ["ip", "netns", "exec", name, sys.executable, __file__, str(steps)]
            known = {**os.environ, **{key: str(value) for key, value in env.items()}}
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=known))
        try:
            found, _ = processes[0].communicate(timeout=_LIMIT_S)
            processes[1].communicate(timeout=_LIMIT_S)
        finally:
            for process in processes:
                process.kill()
    if any(process.returncode for process in processes):
        raise StorageError("a process of the two hosts failed; its message is above")
    return [CaseResult(role="ours", payload_bytes=0, **one) for one in json.loads(found.splitlines()[-1])]


@contextlib.contextmanager
def _wire(delay_ms: float, gbit: float) -> Iterator[None]:
    """Join two network namespaces, which end with this."""
    if os.name != "posix" or os.geteuid() or not all(map(shutil.which, ("ip", "gcc"))):
        raise StorageError("two hosts on one machine need Linux, root, `ip` and `gcc`; run as root where they are")
    run = functools.partial(subprocess.run, check=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        program = f"{folder}/wire"
        run(["gcc", "-O2", "-pthread", "-o", program, str(Path(__file__).with_name("wire.c"))])
        wire = subprocess.Popen([program, *_NAMES, str(delay_ms), str(1e3 * gbit)], stdout=subprocess.PIPE)
        stack.callback(wire.kill)
        assert wire.stdout is not None
        wire.stdout.readline()
        for name, address in zip(_NAMES, _ADDRESSES, strict=True):
            run(["ip", "netns", "add", name])
            stack.callback(run, ["ip", "netns", "del", name])
            run(["ip", "link", "set", name, "netns", name])
            up = f"link set {name} txqueuelen 10000 up"
            for words in ("link set lo up", f"addr add {address}/24 dev {name}", up):
                run(["ip", "-n", name, *words.split()])
        yield


# --- in each of them ------------------------------------------------------------------------------------------------------


def _steps_of(case: Case, steps: int, group: Any) -> list[float]:
    """Return seconds of steps, one by one, by this process of a group or without one."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(0)
    if case.together:
        modules = [st.MultiEmbedding([ROWS] * case.tables, DIM, process_group=group)]
    else:
        modules = [st.Embedding(ROWS, DIM, process_group=group) for _ in range(case.tables)]
    optimizer = torch.optim.AdamW([param for module in modules for param in module.parameters()])
    shape, found = (case.ids, case.tables) if case.together else (case.ids,), list[float]()
    for _ in range(steps):
        ids: Any = [torch.randint(ROWS, shape, generator=draw) for _ in modules]
        if case.parts:
            ids = torch.stack(ids)
        if group is not None:
            dist.barrier()
        start = time.perf_counter()
        take_step(sum(module(each).sum() for module, each in zip(modules, ids, strict=True)), optimizer)
        found.append(time.perf_counter() - start)
    return found[_WARM:]


def main(steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = list[dict[str, Any]]()
    for name, case in CASES.items():
        samples = _steps_of(case, steps, dist.group.WORLD)
        dist.barrier()
        if dist.get_rank() == 0:
            alone = 1e3 * min(_steps_of(case, steps, None))
            found.append({"name": name, "samples_s": samples, "figures": {ALONE: alone}})
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
