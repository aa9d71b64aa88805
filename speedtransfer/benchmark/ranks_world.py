"""Start the processes of suite `ranks`, tell them what to do, and end them."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
import weakref
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from speedtransfer.benchmark.ranks_worker import TIMEOUT_S, serve
from speedtransfer.errors import SpeedtransferError


class WorldError(SpeedtransferError, RuntimeError):
    """A process failed, ended, or did not answer."""


class World:
    """`ranks` processes of this machine with a gloo group, started at the first call; the threads are divided among them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # Empty where none have been started.
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folders: list[str] = []
        weakref.finalize(self, _end, self.processes, self._pipes, self._folders)

    def call(self, command: str, *arguments: Any) -> list[Any]:
        """Have all processes do `command` and return what they answer, by rank.

        Raises
        ------
        WorldError
            One of them could not; all are ended, and the next call starts new ones.
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
        # Each is a fork of one process that has imported what takes seconds, where the system can do that.
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch", "torch.distributed", "speedtransfer.benchmark.ranks_worker"])
        self._folders.append(tempfile.mkdtemp(prefix="speedtransfer-bench-"))
        store = str(Path(self._folders[0], "store"))
        threads = max(1, torch.get_num_threads() // self.ranks)
        for rank in range(self.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, rank, self.ranks, store, threads), daemon=True)
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
