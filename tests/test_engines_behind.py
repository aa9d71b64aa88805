"""Writes that a thread makes: the next call waits for them, a failed one is made again, a forked process has them."""

import functools
import os
import threading
import time
import weakref

import pytest

from speedtransfer.engines.behind import Behind


def test_finish_waits():
    behind, go, done = Behind(), threading.Event(), []
    behind.begin(lambda: (go.wait(10), done.append(1)))
    assert not done
    threading.Timer(0.05, go.set).start()
    behind.finish()
    assert done == [1]
    behind.finish()
    assert done == [1]


def test_the_next_write_waits_for_the_last():
    behind, done = Behind(), []
    for number in range(50):
        behind.begin(lambda number=number: done.append(number))
    behind.finish()
    assert done == list(range(50))


def test_what_failed_is_made_again():
    behind, calls = Behind(), []

    def write():
        calls.append(threading.current_thread())
        if len(calls) < 3:
            raise OSError("no room")

    behind.begin(write)
    with pytest.raises(OSError, match="no room"):
        behind.finish()
    behind.finish()
    assert len(calls) == 3
    assert calls[0] is not calls[1] is threading.current_thread()
    behind.finish()
    assert len(calls) == 3


def test_a_failed_write_is_not_forgotten_by_the_next():
    behind, done = Behind(), []

    def fail():
        raise OSError("no room")

    behind.begin(fail)
    with pytest.raises(OSError, match="no room"):
        behind.begin(lambda: done.append(1))
    assert not done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_what_was_written():
    behind, memory, go = Behind(), bytearray(1), threading.Event()

    def write():
        go.wait(10)
        memory[0] = 7

    behind.begin(write)
    threading.Timer(0.05, go.set).start()
    child = os.fork()
    if child == 0:
        behind.begin(lambda: None)
        behind.finish()
        os._exit(memory[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_nothing_is_kept_once_it_is_written():
    behind, held = Behind(), {1}
    reference = weakref.ref(held)
    behind.begin(functools.partial(len, held))
    del held
    behind._future.result(10)
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None
