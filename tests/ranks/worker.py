"""The process of a rank, which run.py starts: answers calls until nobody is there to send more."""

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import warnings

import compiled_once
import torch
import torch.distributed as dist


@dataclasses.dataclass
class Reply:
    """How a function ended on a rank: `data` is what it returned or raised, pickled."""

    rank: int
    data: bytes
    details: str = ""
    failed: bool = False
    answered: bool = True
    time: float = dataclasses.field(default_factory=time.monotonic)

    def value(self):
        return pickle.loads(self.data)


# Where the processes meet: that of rank 0, as this process sees it.
stores = []


def serve(pipe, rank, log):
    # Ctrl-C is for pytest, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    compiled_once.install()
    if sys.platform == "linux":
        # The name of a machine need not resolve to an address that it has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    calls = queue.SimpleQueue()

    def receive():
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                calls.put(pipe.recv())
        # The tests have ended, by SIGKILL perhaps; what hangs here must not outlive them.
        os._exit(0)

    if rank == 0:
        # Kept for all calls, and asked by name: processes meet in a millisecond, in a file in 30.
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        pipe.send(stores[0].port)
    threading.Thread(target=receive, daemon=True).start()
    while True:
        pipe.send(_answer(rank, *calls.get()))


def _answer(rank, world, port, name, timeout, together, call):
    ignored = []
    sys.unraisablehook = lambda args: ignored.append(args.exc_value)
    try:
        _destroy_group()
        limit = datetime.timedelta(seconds=timeout)
        if not stores:
            stores.append(dist.TCPStore("127.0.0.1", port, is_master=False))
        store = dist.PrefixStore(name, stores[0])
        store.set_timeout(limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function, args = pickle.loads(call)
            torch.manual_seed(0)
            result = function(*args)
            if together:
                # Fails where a rank left out a collective of the others.
                dist.barrier()
        if ignored:
            raise RuntimeError("Python ignored an exception, in a __del__ or a generator's close") from ignored[0]
        # Not the pickle of multiprocessing: it sends tensors in shared memory, which ends with the process.
        return Reply(rank, pickle.dumps(result))
    # All: pytest's own, such as that of pytest.raises, are no Exceptions.
    except BaseException as error:
        reply = Reply(rank, _pickled(error), traceback.format_exc(), failed=True)
        if together:
            # Has those fail that wait for this rank. Ranks that may fail alone keep their group until all have answered.
            _destroy_group()
        return reply
    finally:
        sys.stdout.flush()


def _destroy_group():
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickled(error):
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
