"""Run functions of test modules on several ranks: processes with a gloo group, started once and used by many tests."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import uuid
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from forked import fork_server

from ranks.worker import Reply, serve

# Seconds that the other ranks have left when one has failed: they may wait for it until the group's timeout.
GRACE = 2.0


class RankError(AssertionError):
    """What went wrong on each rank, the first failure first, with tracebacks and what the rank printed."""


class DeadRankError(RuntimeError):
    """The process of a rank ended within the function."""


def on(world, **limits):
    """Have each of `world` ranks make a test, in processes of its own; `limits` are those of `Ranks`."""

    def marked(test):
        test.ranks = world, limits
        return pytest.mark.usefixtures("pool")(test)

    return marked


class Pool:
    """The ranks' processes, started when first needed; every group of W ranks uses the first W."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="speedtransfer-ranks-")
        self.folder = Path(self._folder.name)
        self.workers = []
        self.port = 0

    def of(self, world):
        return Ranks(self, world)

    def take(self, world):
        started = len(self.workers)
        while len(self.workers) < world:
            self.workers.append(Worker(len(self.workers), self.folder))
        if not started:
            self.port = self.workers[0].pipe.recv()
        return self.workers[:world]

    def stop(self):
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def close(self):
        self.stop()
        self._folder.cleanup()


class Ranks:
    """Call a function on `world` ranks: ``two(function, *args)`` returns what each rank returned, in the order of ranks.

    `function` is one of a module, for the processes import it. It runs with the default process group initialized (a new one
    in each call), seed 0, one thread and warnings as errors. `limit`: seconds until a rank counts as hanging. `timeout`:
    seconds that a collective waits for the other ranks.
    """

    def __init__(self, pool, world):
        self.pool, self.world = pool, world

    def __call__(self, function, *args, limit=60, timeout=20):
        """Raise :class:`RankError` if a rank raises, hangs or dies; the processes are then replaced."""
        replies = self._run(function, args, limit, timeout, together=True)
        if any(reply.failed for reply in replies):
            self.pool.stop()
            raise _error_of(replies)
        return [reply.value() for reply in replies]

    def fails(self, function, *args, limit=60, timeout=20, fresh=True):
        """Return what each rank returned or the exception it raised (:class:`DeadRankError` if its process ended).

        `fresh`: replace the processes afterwards if a rank raised. A rank that hangs is a :class:`RankError` here too.
        """
        replies = self._run(function, args, limit, timeout, together=False)
        if not all(reply.answered for reply in replies):
            self.pool.stop()
            raise _error_of(replies)
        values = [reply.value() for reply in replies]
        if any(reply.failed and (fresh or isinstance(reply.value(), DeadRankError)) for reply in replies):
            self.pool.stop()
        return values

    def _run(self, function, args, limit, timeout, together):
        call = pickle.dumps((function, args))
        workers = self.pool.take(self.world)
        name = uuid.uuid4().hex
        for worker in workers:
            worker.send((self.world, self.pool.port, name, timeout, together, call))
        waiting = {worker.pipe: worker for worker in workers}
        replies = {}
        deadline = time.monotonic() + limit
        while waiting and (ready := wait(list(waiting), max(deadline - time.monotonic(), 0))):
            for pipe in ready:
                worker = waiting.pop(pipe)
                reply = replies[worker.rank] = worker.receive()
                if reply.failed and together:
                    deadline = min(deadline, time.monotonic() + GRACE)
        for worker in waiting.values():
            worker.print_stacks()
        time.sleep(0.5 if waiting else 0)
        for worker in waiting.values():
            error = TimeoutError(f"no answer in {limit:g} s, or {GRACE:g} s after another rank failed")
            replies[worker.rank] = Reply(worker.rank, pickle.dumps(error), worker.output(), failed=True, answered=False)
        return [replies[worker.rank] for worker in workers]


def _error_of(replies):
    failed = sorted((reply for reply in replies if reply.failed), key=lambda reply: reply.time)
    parts = [f"--- rank {reply.rank}: {type(e := reply.value()).__name__}: {e}\n{reply.details}" for reply in failed]
    return RankError("\n\n".join(parts))


class Worker:
    """The process of a rank, as the tests see it."""

    def __init__(self, rank, folder):
        self.rank, self._log, self._printed = rank, folder / uuid.uuid4().hex, 0
        self._log.touch()
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = fork_server().Process(target=serve, args=(theirs, rank, str(self._log)))
        self._process.start()
        theirs.close()

    def send(self, call):
        self._printed = self._log.stat().st_size
        # If it has died, receive() tells.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(call)

    def receive(self):
        try:
            reply = self.pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            code = self._process.exitcode or 0
            cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            error = DeadRankError(f"rank {self.rank} ended by {cause}")
            # Shown first: when it died is not known, and others fail by it.
            reply = Reply(self.rank, pickle.dumps(error), failed=True, time=0.0)
        reply.details += self.output()
        return reply

    def print_stacks(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def output(self):
        """Return what the process printed since the call began."""
        return self._log.read_bytes()[self._printed :].decode(errors="replace")

    def kill(self):
        self._process.kill()
        self._process.join()
        self.pipe.close()
