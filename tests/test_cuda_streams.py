"""The order between streams, and captures of CUDA graphs, with the CPU in the part of the device."""

import os
import threading
import warnings

import pytest
import torch
from cases import raising, take_step
from refusals import check_refused, refusals
from test_engines import Event, Stream, cpu_as_cuda

import speedtransfer as st
from speedtransfer.cuda import StreamOrder, graphs, launch, memory
from speedtransfer.errors import DeviceError
from speedtransfer.optim import find_handle

__all__ = ["cpu_as_cuda"]


@pytest.fixture
def capturing(monkeypatch):
    """Say whether the current stream is being captured."""

    def say(now):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now)

    return say


@pytest.fixture
def on(cpu_as_cuda, monkeypatch):
    """Return a function that makes a stream current, and queues nothing on it in some ways of an order."""

    def on(stream, *ways):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        for queueing in ways:
            with queueing():
                pass

    return on


class TestStreamOrder:
    def test_write_after_reads_and_write_waits_for_all(self, on):
        order, one, two, three = StreamOrder(torch.device("cpu")), Stream(1), Stream(2), Stream(3)
        on(three, order.writing)
        for stream in (one, two, one):
            on(stream, order.reading)
        on(three)
        with order.writing():
            assert [event.record_calls for event in three.waits] == [[one, one], [two]]
        on(two)
        with order.writing():  # the reads are behind the write before
            assert [event.record_calls for event in two.waits[1:]] == [[three]]

    def test_a_stream_of_another_library_may_be_gone_and_its_address_taken(self, on):
        order, reader, old, new = StreamOrder(torch.device("cpu")), Stream(2), Stream(8, False), Stream(8, False)
        on(old, order.writing)
        on(new)
        with order.reading():
            assert [event.record_calls for event in new.waits] == [[old]]
        on(old, order.reading)
        assert [event.record_calls for event in old.waits[1:]] == [[new, old]]  # both reads are in the event now
        on(reader)
        with order.writing():
            assert [event.record_calls for event in reader.waits] == [[old], [new, old]]
        on(old, order.reading)
        on(new)
        with order.writing():
            assert [event.record_calls for event in new.waits[1:]] == [[reader], [old]]

    @pytest.mark.parametrize(("where", "what"), [(Stream, "wait_event"), (Event, "record")])
    def test_nothing_stays_locked_where_cuda_fails(self, on, monkeypatch, where, what):
        order = StreamOrder(torch.device("cpu"))
        on(Stream(1), order.writing)
        on(Stream(2))
        with monkeypatch.context() as patch:
            patch.setattr(where, what, raising(RuntimeError("CUDA error")))
            with pytest.raises(RuntimeError, match="CUDA error"), order.reading():
                pass
        with order.writing():
            pass

    def test_wait(self, on):
        order = StreamOrder(torch.device("cpu"))
        order.wait()  # nothing yet
        on(Stream(1), order.writing, order.reading)
        order.wait()
        assert order._written.synchronize_calls == 1

    def test_threads_take_turns(self, on):
        order = StreamOrder(torch.device("cpu"))
        on(Stream(1))
        entered = threading.Event()
        with order.writing():
            thread = threading.Thread(target=lambda: [order.reading().__enter__(), entered.set()])
            thread.start()
            assert not entered.wait(0.05)
        thread.join(10)
        assert entered.is_set()

    def test_one_stream_needs_no_waits(self, on):
        order, stream = StreamOrder(torch.device("cpu")), Stream(1)
        on(stream, order.writing, order.reading, order.reading, order.writing, order.writing)
        assert stream.waits == []


class TestCapture:
    """The current stream is being captured in a CUDA graph, as far as torch says."""

    def test_no_event_of_before_is_waited_for_and_none_is_left(self, on, capturing):
        order, one, two = StreamOrder(torch.device("cpu")), Stream(1), Stream(2)
        on(one, order.writing, order.reading)
        written, reads = order._written, dict(order._reads)
        capturing(True)
        on(two)
        for queueing in (order.reading, order.writing, order.reading):
            with queueing() as stream:
                assert stream is two
        assert two.waits == []
        assert (order._written, order._reads) == (written, reads)
        assert [event.record_calls for event in (written, *reads.values())] == [[one], [one]]
        capturing(False)
        with order.writing():
            assert two.waits == [written, *reads.values()]

    def test_a_wait_after_it_is_for_the_device(self, on, capturing, monkeypatch):
        order, waits = StreamOrder(torch.device("cpu")), []
        monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
        on(Stream(1), order.reading)
        order.wait()
        assert waits == []
        capturing(True)
        with order.reading():
            pass
        with pytest.raises(DeviceError, match="waiting for rows on their way cannot be captured in a CUDA graph"):
            order.wait()
        capturing(False)
        order.wait()
        assert waits == [order.device]


# --- captures that are pretended: what is refused, and what tables keep for replays -------------------------------------

IDS = torch.tensor([1, 5, 5, 2])


def trained(idle="lazy", steps=2, **options):
    """Return an embedding that pretends to be one whose rows the device moves, and its optimizer."""
    emb = st.Embedding(10, 4, device="cpu", idle=idle, **options)
    optimizer = torch.optim.AdamW(emb.parameters())
    for _ in range(steps):
        take_step(optimizer, emb(IDS).sum())
    emb.table._engine.takes_padding = True
    return emb, optimizer


# `emb`: one whose rows the device could move, `host`: one whose rows the host moves, `exact`, `int8` and `state`: others.
REFUSED = r"""
check(exact, writes=True)
-> DeviceError: weight with idle='exact', where the host records steps for idle rows,.*use idle='lazy'
check(int8, writes=True) -> DeviceError: training weight with storage_dtype or state_dtype .* random numbers again
check(state, writes=True) -> DeviceError: training weight with storage_dtype or state_dtype
check(host, writes=False) -> DeviceError: whose rows the host moves \(memory='pageable'\), .*use memory='pinned'
launch.is_trusted("this", torch.device("cuda", 0), lambda: True)
-> DeviceError: first use of the kernels for this .* a few steps like it before the capture
launch._compiled("rows.cu", "gather_rows", 77) -> DeviceError: compiling the kernel gather_rows
emb.table.add_plane("more") -> DeviceError: adding planes
"""


def test_refused(capturing):
    def check(emb, writes):
        find_handle(emb.weight).check_capturable(writes=writes)

    kinds = {"exact": {"idle": "exact"}, "int8": {"storage_dtype": torch.int8}, "state": {"state_dtype": torch.uint8}}
    names = {name: trained(**options)[0] for name, options in (kinds | {"emb": {}, "host": {}}).items()}
    names["host"].table._engine.takes_padding = False
    for name in kinds:
        check(names[name], writes=True)
    capturing(True)
    for refusal in refusals(REFUSED):
        check_refused(refusal, check=check, launch=launch, torch=torch, **names)
    check(names["emb"], writes=True)
    for name in ("int8", "state"):
        check(names[name], writes=False)


class TestGradientOfAGraph:
    @pytest.fixture
    def emb(self):
        emb, _ = trained()
        emb(IDS).sum().backward()
        find_handle(emb.weight).pending.capture = 1
        return emb

    def test_no_other_is_added(self, emb):
        before = emb.weight.grad.to_dense()
        with pytest.raises(DeviceError, match=r"writes at each replay, to which no other can be added; call zero_grad"):
            emb(IDS).sum().backward()
        assert torch.equal(emb.weight.grad.to_dense(), before)
        emb.weight.grad = None
        emb(IDS).sum().backward()
        assert torch.equal(emb.weight.grad.to_dense()[5], torch.full((4,), 2.0))

    def test_it_stays_as_it_is(self, emb):
        pending = find_handle(emb.weight).pending
        ids, grad = pending.ids, pending.grad
        assert emb.weight.grad.to_dense().shape == (10, 4)
        with pytest.raises(DeviceError, match=r"cannot become dense; take a dense copy \(weight.grad.to_dense\(\)\)"):
            emb.weight.grad.add_(1)
        assert pending.ids is ids
        assert pending.grad is grad
        # As a sparse step would have it.
        with pytest.raises(DeviceError, match=r"made by a CUDA graph, .* make the embedding with sparse=False"):
            pending.trim()


class TestTableOfAGraph:
    def test_its_version_grows(self, monkeypatch):
        table = st.Table(3, 2, memory="pageable", device="cpu")
        for captured in (False, True):
            table._captured = captured
            before = table.version
            monkeypatch.setitem(graphs._calls, "replay", graphs.num_replays() + 1)
            assert table.version - before == captured

    def test_memory_stays(self):
        for captured in (False, True):
            table = st.Table(3, 2, memory="pageable", device="cpu")
            table._captured = captured
            plane, engine, weight = table.add_plane("more"), table._engine, table.stored("weight")
            table.drop_plane("more")
            table.engine = "reference"
            table.take("weight", torch.zeros(3, 2))
            addresses = [part.data_ptr() for part in table._outlived if isinstance(part, torch.Tensor)]
            assert addresses == ([plane.data_ptr(), weight.data_ptr()] if captured else [])
            assert (engine in table._outlived) is captured


def test_memory_is_freed_after_the_capture(capturing):
    calls = []
    capturing(True)
    for number in range(2):
        memory._free_host(lambda n=number: calls.append(n), 0, os.getpid(), lambda: calls.append("wait"))
    assert calls == []
    capturing(False)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "on_device", lambda index: warnings.catch_warnings())
        memory._free_host(lambda: calls.append(2), 0, os.getpid(), lambda: calls.append("wait"))
    assert calls == ["wait", 2, "wait", 1, "wait", 0]
