"""What every test shares. pytest puts this folder on the path, so tests import its helper modules by name."""

import contextlib
import functools
import gc
import importlib
import inspect
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from sweeps import mark_the_rest_as_slow

# What was measured on this machine must not decide which engine a test runs on; set before anything looks, for children too.
_cache = tempfile.TemporaryDirectory(prefix="speedtransfer-test-")
os.environ["SPEEDTRANSFER_CACHE"] = _cache.name

# As OMP_NUM_THREADS=1 of `make test` says to children too: arrays this small run three times slower on two threads.
torch.set_num_threads(1)

# Without a device of these kinds, torch.manual_seed keeps the seed and the stack as text for each: a millisecond a call.
for _accelerator in (torch.cuda, torch.xpu, torch.mtia):
    if not _accelerator.is_available():
        _accelerator.manual_seed_all = lambda seed: None

pytest.register_assert_rewrite("cases", "engine_cases", "table_cases")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config):
    """One more than there are cores, as some tests wait for other processes; four at most, as each takes up to 1 GB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores + 1)


def pytest_sessionstart():
    """Collect no garbage until the tests are there: it would look through all of them again and again."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Import the modules of a whole run in each worker from another one on: what one has compiled, the next ones only read.

    With the bytecode of assertions, which pytest writes, tests are collected in half the time; a new clone has none.
    """
    worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if not worker or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    importlib.import_module("compiled_once").install()
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    first = int(worker.removeprefix("gw")) * len(names) // count
    for name in names[first:] + names[:first]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which collecting it shows
            importlib.import_module(name)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark what is slow, which -m takes out, and order the rest."""
    mark_the_rest_as_slow(items)
    yield
    if count := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
        items[:] = _in_order(items, len(items) // count)


# With groups of processes, as those of the folder `ranks`; and with tests of many seconds.
GROUPS = {"test_cells"}
LONG = {"test_encoding", "test_kernels", "test_docs"}
LONG |= {"test_ticket", "test_vocabulary_state_machine"}


def _in_order(items, share):
    """Return tests in an order of which each worker begins with a `share`, and then takes over from the ends of others'.

    The first worker has the tests of other processes, as the server of these and the groups take seconds to start; the second
    one begins with long tests, which are not to be the last.
    """
    groups, servers, long, others = [], [], [], []
    for item in items:
        if item.path.parent.name == "ranks" or item.path.stem in GROUPS:
            groups.append(item)
        elif "run_script" in vars(item.module):
            servers.append(item)
        else:
            (long if item.path.stem in LONG else others).append(item)
    fill = max(share - len(groups) - len(servers), 0)
    return groups + servers + others[:fill] + long + others[fill:]


def pytest_collection_finish():
    # Not collected, which takes a second: hardly any of it is garbage.
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item, nextitem):
    """Have garbage collections pass over modules and thousands of tests: with these each takes up to 0.4 s."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture
def fresh_signals():
    """SIGINT and SIGTERM as in a program of its own: one that a script runs in the background has SIGINT ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(monkeypatch, capfd):
    """Return a function that runs the command line here and returns exit code, standard output and standard error."""
    from speedtransfer.cli import main

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["speedtransfer", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capfd.readouterr()

    return run


@pytest.fixture
def no_gc():
    """What is freed within the test is freed at once, and by no garbage collection."""
    # The first optimizer of a process imports torch._dynamo, which keeps the frames of its callers in a cycle.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture(scope="session")
def pool():
    """Processes of groups, started by the first test that needs them."""
    from ranks.run import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that `ranks.run.on` has marked on the ranks."""
    if (ranks := getattr(pyfuncitem.obj, "ranks", None)) is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    pyfuncitem.funcargs["pool"].of(ranks[0])(functools.partial(pyfuncitem.obj, **given), **ranks[1])
    return True


@pytest.fixture(scope="session")
def two(pool):
    """Call a function on two ranks; see tests/ranks/run.py."""
    return pool.of(2)


@pytest.fixture(scope="session")
def three(pool):
    return pool.of(3)
