"""Worker processes in one torch.distributed group, which are given commands."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from speedtransfer.errors import SpeedtransferError

TIMEOUT_S = 300


class WorldError(SpeedtransferError, RuntimeError):
    """A worker process failed, ended, or did not answer."""


def process_context(module: str) -> Any:
    """Return a multiprocessing context for processes that use `module`, preloaded if the system has a fork server."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context: Any = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch._dynamo, which takes more than a second.
    context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", __name__, module])
    return context


class World:
    """Processes of this machine in one group, started at the first call; the threads of torch are divided among them.

    Each calls `worker`, a class of an importable module, with its rank and the number of ranks; methods of the object are
    the commands. With `cuda` each process has a GPU, and they use NCCL; else gloo.
    """

    def __init__(self, ranks: int, worker: Callable[[int, int], Any], cuda: bool = False) -> None:
        self.ranks, self._worker, self._cuda = ranks, worker, cuda
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folders: list[str] = []
        weakref.finalize(self, _end, self.processes, self._pipes, self._folders)

    def call(self, command: str, *arguments: Any) -> list[Any]:
        """Run a command in all processes and return the results by rank.

        Raises
        ------
        WorldError
            A process failed; all are ended, and the next call starts new ones.
        """
        try:
            if not self._pipes:
                self._start()
            for pipe in self._pipes:
                pipe.send((command, *arguments))
            return self._answers()
        except BaseException as error:
            self.end()
            if isinstance(error, OSError | EOFError):
                raise WorldError(f"a process ended: {error}") from error
            raise

    def end(self) -> None:
        """End the processes."""
        _end(self.processes, self._pipes, self._folders)

    def _answers(self) -> list[Any]:
        found: dict[int, Any] = {}
        ranks = {id(pipe): rank for rank, pipe in enumerate(self._pipes)}
        waiting, deadline = list(self._pipes), time.monotonic() + TIMEOUT_S
        while waiting:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorldError(f"processes did not answer in {TIMEOUT_S} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = ranks[id(pipe)]
                try:
                    succeeded, answer = pipe.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    raise WorldError(f"process {rank} ended with code {self.processes[rank].exitcode}") from None
                if not succeeded:
                    raise WorldError(f"process {rank}: {answer}")
                found[rank] = answer
                waiting.remove(pipe)
        return [found[rank] for rank in range(self.ranks)]

    def _start(self) -> None:
        context = process_context(self._worker.__module__)
        self._folders.append(tempfile.mkdtemp(prefix="speedtransfer-parallel-"))
        store = str(Path(self._folders[0], "store"))
        threads = max(1, torch.get_num_threads() // self.ranks)
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            about = theirs, rank, self.ranks, store, threads, self._worker, self._cuda
            process = context.Process(target=serve, args=about, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)


def _end(processes: list[Any], pipes: list[Connection], folders: list[str]) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for some in (processes, pipes, folders):
        some.clear()


# --- the process ------------------------------------------------------------------------------------------------------


def serve(
    pipe: Connection, rank: int, ranks: int, store: str, threads: int, make: Callable[[int, int], Any], cuda: bool
) -> None:
    """Run commands until the pipe is closed."""
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        # The host name may not resolve to an address of this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if cuda:
        torch.cuda.set_device(rank)
    # The parent process handles Ctrl-C and ends this one.
    with contextlib.suppress(KeyboardInterrupt, EOFError, ConnectionError):
        limit, backend = datetime.timedelta(seconds=TIMEOUT_S), "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
        worker = make(rank, ranks)
        while True:
            command, *arguments = pipe.recv()
            do: Callable[..., Any] = getattr(worker, command)
            try:
                answer = True, do(*arguments)
            except Exception as error:
                answer = False, f"{type(error).__name__}: {' '.join(str(error).split())}"
            pipe.send(answer)
