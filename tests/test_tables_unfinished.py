"""Writes that others meet: half of one that an interrupt has left, those made after rows were read, those of a thread."""

import contextlib
import threading

import pytest
import torch
from in_child import forks, in_child

import speedtransfer as st
from speedtransfer.engines import HostEngine
from speedtransfer.engines.behind import Behind
from speedtransfer.errors import OptimizerError
from speedtransfer.tables import loading


class Interrupted(HostEngine):
    """An engine into whose first writes an interrupt comes, after one plane."""

    def __init__(self, times, kind):
        super().__init__()
        self.times, self.kind = times, kind

    def scatter(self, planes, index, rows, *args, **kwargs):
        if self.times:
            self.times -= 1
            super().scatter(planes[:1], index, rows[:1])
            raise self.kind
        super().scatter(planes, index, rows, *args, **kwargs)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_write_is_finished(times, kind):
    table = st.Table(5, 2)
    table.add_plane("state")
    table.engine = Interrupted(times, kind)
    ids, version = torch.tensor([1, 3]), table.version
    with pytest.raises(kind):
        table.write(ids, {"weight": torch.ones(2, 2), "state": torch.full((2, 2), 2.0)})
    if times == 3:
        with pytest.raises(kind):
            table.look_up(ids)
    assert torch.equal(table.look_up(ids), torch.ones(2, 2))
    assert torch.equal(table.gather(ids, "state"), torch.full((2, 2), 2.0))
    assert table.version > version
    assert table.engine == "host"


def test_a_write_that_cannot_be_is_not_tried_for_ever():
    table = st.Table(5, 2)
    table.engine = Interrupted(2, ValueError)
    with pytest.raises(ValueError, match=r"^$"):
        table.write(torch.tensor([1]), {"weight": torch.ones(1, 2)})
    assert table.look_up(torch.tensor([0])).sum() == 0


def test_rows_loaded_in_part_are_refused_until_they_are_loaded():
    table, words = st.Table(5, 2), r"emb.weight has been loaded or written in part only.*st.load_checkpoint"
    for changed in (False, True):
        assert table[0].sum() == 0
        with contextlib.suppress(KeyboardInterrupt), loading({table: "emb.weight"}, "st.load_checkpoint") as changes:
            changes += [True] * changed
            raise KeyboardInterrupt
    for use in (
        lambda: table[0],
        lambda: table.look_up(torch.tensor([0])),
        table.torch,
        table.numpy,
        table.wait,
        lambda: table.scatter([0], torch.ones(1, 2)),
        lambda: table.astype(torch.float64),
    ):
        with pytest.raises(OptimizerError, match=words):
            use()
    # Another way to load leaves some of it as it is.
    with loading({table: "emb.weight"}, "load_state_dict"):
        pass
    with pytest.raises(OptimizerError):
        table.wait()
    with pytest.raises(ValueError, match=r"^$"), loading({table: "emb.weight"}, "st.load_checkpoint"):
        raise ValueError
    with pytest.raises(OptimizerError):
        table.wait()
    with loading({table: "emb.weight"}, "st.load_checkpoint"):
        table.scatter([0], torch.ones(1, 2))
    assert table[0].sum() == 2


# --- writes that a thread makes -----------------------------------------------------------------------------------------


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


@forks
def test_a_forked_process_has_what_was_written():
    behind, memory, go = Behind(), bytearray(1), threading.Event()

    def write():
        go.wait(10)
        memory[0] = 7

    behind.begin(write)
    threading.Timer(0.05, go.set).start()
    assert in_child(lambda: (behind.begin(lambda: None), behind.finish(), memory[0])[2]) == 7
